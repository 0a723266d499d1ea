#pragma once
#include <cstdint>

#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "kernels/cross_entropy/row.cuh"

// Sums over rows of small terms: labels, losses. One block if that is fast enough, otherwise partial sums and a second
// launch. The order depends only on the number of rows.
namespace warpsmith::cross_entropy {

constexpr int kTotalThreads = 1024;

// A source computes the terms of row i and receives their totals.
struct Denominator {
  static constexpr int kTerms = 1;
  CrossEntropyDenominatorParams p;
  __device__ __forceinline__ void add(int64_t i, float (&sum)[kTerms]) const {
    const int64_t target = device::load(p.target + i);
    const Label label = label_of(target, p.classes, p.ignore_index);
    if (label == Label::counts) sum[0] += real_at(p.class_weight, target, 1.f);
    if (label == Label::bad) sum[0] += p.class_weight ? __uint_as_float(0x7fc00000u) : 1.f;
  }
  __device__ __forceinline__ void take(const float (&sum)[kTerms]) const {
    device::store(static_cast<float*>(p.denominator), sum[0]);
  }
};

struct ClassWeightTotal {
  static constexpr int kTerms = 1;
  CrossEntropyDenominatorParams p;
  __device__ __forceinline__ void add(int64_t i, float (&sum)[kTerms]) const {
    sum[0] += real_at(p.class_weight, i, 0.f);
  }
  __device__ __forceinline__ void take(const float (&sum)[kTerms]) const {
    device::store(static_cast<float*>(p.class_weight_total), sum[0]);
  }
};

struct Losses {
  static constexpr int kTerms = 3;
  CrossEntropyReduceParams p;
  __device__ __forceinline__ void add(int64_t i, float (&sum)[kTerms]) const {
    if (p.total) sum[0] += device::load(static_cast<const float*>(p.loss) + i);
    if (!p.argmax) return;
    const int64_t target = device::load(p.target + i);
    if (target == p.ignore_index) return;
    sum[1] += target == device::load(p.argmax + i) ? 1.f : 0.f;
    sum[2] += 1.f;
  }
  __device__ __forceinline__ void take(const float (&sum)[kTerms]) const {
    if (p.total) device::store(static_cast<float*>(p.total), sum[0] / real_at(p.denominator, 0, 1.f));
    if (p.accuracy) device::store(static_cast<float*>(p.accuracy), sum[1] / sum[2]);
  }
};

// Blocks of the first stage: one while its threads have few rows each.
constexpr int64_t total_blocks(int64_t count) {
  constexpr int64_t kRowsOfBlock = 8 * kTotalThreads, kMostBlocks = kCrossEntropyPartials / 4;
  const int64_t blocks = (count + kRowsOfBlock - 1) / kRowsOfBlock;
  return blocks < 1 ? 1 : blocks < kMostBlocks ? blocks : kMostBlocks;
}

template <class Source> __global__ void __launch_bounds__(kTotalThreads)
    total(Source source, float* partials, int64_t count) {
  constexpr int K = Source::kTerms;
  WARPSMITH_SHARED(float, scratch, K* kTotalThreads / 32);
  device::launch_dependents();
  device::wait_for_previous_kernel();
  float sum[K] = {};
  for (int64_t i = int64_t{blockIdx.x} * kTotalThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kTotalThreads)
    source.add(i, sum);
  device::block_reduce<kTotalThreads>(sum, scratch, device::Sum());
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1)
    source.take(sum);
  else
    for (int k = 0; k < K; ++k) device::store(partials + int64_t{blockIdx.x} * K + k, sum[k]);
}

// The second stage, one block.
template <class Source> __global__ void __launch_bounds__(kTotalThreads)
    total_of_partials(Source source, const float* partials, int64_t count) {
  constexpr int K = Source::kTerms;
  WARPSMITH_SHARED(float, scratch, K* kTotalThreads / 32);
  device::launch_dependents();
  device::wait_for_previous_kernel();
  float sum[K] = {};
  for (int64_t i = threadIdx.x; i < count; i += kTotalThreads)
    for (int k = 0; k < K; ++k) sum[k] += device::load(partials + i * K + k);
  device::block_reduce<kTotalThreads>(sum, scratch, device::Sum());
  if (threadIdx.x == 0) source.take(sum);
}

}  // namespace warpsmith::cross_entropy
