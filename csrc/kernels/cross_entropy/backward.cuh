#pragma once
#include <cstdint>

#include "kernels/cross_entropy/problem.cuh"
#include "kernels/cross_entropy/row.cuh"

// The backward kernels. They work element by element, without a reduction or a barrier. T: storage type of the logits.
// Arithmetic is float.
namespace warpsmith::cross_entropy {

// x * factor, rounded once more.
template <class T> __device__ __forceinline__ Packed times(const Packed& x, float factor) {
  constexpr int N = Row<T>::N;
  float y[N];
#pragma unroll
  for (int n = 0; n < N; ++n) y[n] = element<T>(x, n) * factor;
  return packed<T>(y);
}

// Computes dlogits from row_max and row_sum. Per row of C classes, reads and writes C * sizeof(T) bytes. Each thread of
// a row also reads the target (8 bytes), row_max and row_sum (4 each). A thread loads kBatch whole vectors before it
// uses the first: with fewer loads in flight the memory is not saturated. General terms leave no registers for that.
template <class T, Terms kTerms> __global__ void __launch_bounds__(512, kTerms == Terms::general ? 1 : 2)
    backward_streaming(CrossEntropyParams p, Options o, int lanes) {
  constexpr int N = Row<T>::N, kBatch = sizeof(T) == 4 ? 3 : 4;  // float32's factors are doubles
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = static_cast<int>(blockDim.x) / lanes;
  const float late = real_at(p.late_scale, 0, 1.f), denominator = real_at(p.denominator, 0, 1.f);
  for (int64_t r = int64_t{blockIdx.x} * groups + threadIdx.x / lanes; r < p.rows; r += int64_t{gridDim.x} * groups) {
    const Problem<T> at(p, r, target_of(p, r));
    const Row<T> out(p.dlogits, r * p.dlogits_stride, at.row.columns);
    const bool in_batches = kTerms != Terms::general && at.label != Label::ignored && out.phase == at.row.phase;
    const int end = at.row.vectors(), end_whole = in_batches ? at.row.end_whole() : 0;
    const int first = lane < at.row.first_whole() ? lane + lanes : lane;
    const Packed* const from = reinterpret_cast<const Packed*>(at.row.base - at.row.phase);
    Packed* const to = reinterpret_cast<Packed*>(out.base - out.phase);
    Packed x[kBatch];
    const auto request = [&](int i) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (i + b * lanes < end_whole) x[b] = device::load(from + i + b * lanes);
    };
    if (in_batches) request(first);
    const float m = device::load(static_cast<const float*>(p.row_max) + r);
    const float s = device::load(static_cast<const float*>(p.row_sum) + r);
    auto g = gradient_of<T, kTerms>(p, o, at, m, s, denominator);
    const float grad_log_prob = real_at(p.grad_log_prob, r, 0.f);
    g.t -= grad_log_prob;
    g.k += (real_at(p.grad_lse, r, 0.f) - grad_log_prob) / s;
    if (kTerms != Terms::plain && p.grad_entropy)
      g.add_entropy(-real_at(p.grad_entropy, r, 0.f) / s, real_at(p.entropy, r, 0.f));
    g.set_factor(g.k, m);
    const auto gradient = [&](int i, const Packed& held) {
      float z[N];
      unpack<T, kTerms>(held, i, at.row, o, z);
      const Packed y = g.of(z, i, at.row, o, p.class_weight);
      return late == 1.f ? y : times<T>(y, late);
    };
    const auto store_one = [&](int i) {
      out.store(at.row.first_column(i), gradient(i, g.zero ? Packed{} : at.row.load(i)));
    };
    if (in_batches) {
      for (int i = first; i < end_whole; request(i)) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
          if (i + b * lanes < end_whole) device::store(to + i + b * lanes, gradient(i + b * lanes, x[b]));
        i += kBatch * lanes;
      }
      if (lane == 0 && at.row.first_whole() > 0) store_one(0);
      if (lane == lanes - 1 && at.row.first_whole() <= end_whole && end_whole < end) store_one(end_whole);
    } else {
      for (int i = lane; i < end; i += lanes) store_one(i);
    }
  }
}

// x *= factor. If factor is 1, only the factor is read.
template <class T> __global__ void __launch_bounds__(512, 1) scale_rows(CrossEntropyScaleParams p, int lanes) {
  const float factor = device::load(static_cast<const float*>(p.factor));
  if (factor == 1.f) return;
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = static_cast<int>(blockDim.x) / lanes;
  for (int64_t r = int64_t{blockIdx.x} * groups + threadIdx.x / lanes; r < p.rows; r += int64_t{gridDim.x} * groups) {
    const Row<T> row(p.x, r * p.stride, static_cast<int>(p.columns));
    for (int i = lane; i < row.vectors(); i += lanes) {
      row.store(row.first_column(i), times<T>(row.load(i), factor));
    }
  }
}

}  // namespace warpsmith::cross_entropy
