#pragma once
#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor_list.h"

// The norm of many tensors as of one vector, and their scaling by what clips it.
namespace warpsmith {

enum class NormOrder : uint8_t { one, two, infinity };

// One tensor of the table.
struct NormTensor {
  void* data;  // numel elements of its dtype without gaps, in any order of dimensions; written to only by clip
  int64_t numel;
  int32_t chunk_elems;
  int32_t chunks;
  Dtype dtype;  // float32, float16, bfloat16; on the CPU also float64
};
static_assert(sizeof(NormTensor) == 32);

// Sums are float32 within a chunk (float64 for float64 elements) and float64 over chunks, in a fixed order.
struct GradNormParams {
  const NormTensor* tensors;
  const ListChunk* chunks;  // [chunk_count]
  int64_t chunk_count;
  double* partials;   // [chunk_count], scratch
  double* power_sum;  // one element, written: sum of |x|, sum of x^2, or the largest |x|
  void* norm;         // one element, written: power_sum, or its root
  Dtype norm_dtype;   // float32 or float64
  NormOrder order;
};

// Every element is multiplied by min(1, max_norm / (norm + 1e-6)). Nothing is read or written where that is 1.
struct ClipParams {
  const NormTensor* tensors;
  const ListChunk* chunks;  // [chunk_count]
  int64_t chunk_count;
  const void* norm;  // one element
  Dtype norm_dtype;  // float32 or float64
  double max_norm;
};

Status grad_norm_cuda(const GradNormParams& params, void* stream);
Status grad_norm_cpu(const GradNormParams& params, const Parallel& parallel);
// The two halves of grad_norm, for tensors that lie on several ranks: `partials` from the tensors, and `power_sum` and
// `norm` from the partials. Neither reads nor writes what belongs to the other.
Status grad_norm_partials_cuda(const GradNormParams& params, void* stream);
Status grad_norm_partials_cpu(const GradNormParams& params, const Parallel& parallel);
Status grad_norm_finish_cuda(const GradNormParams& params, void* stream);
Status grad_norm_finish_cpu(const GradNormParams& params);
Status clip_grads_cuda(const ClipParams& params, void* stream);
Status clip_grads_cpu(const ClipParams& params, const Parallel& parallel);

// Elements of a chunk for tensors of these sizes in all: on CUDA the longest, in powers of two, of which every
// multiprocessor gets 16.
constexpr int64_t choose_norm_chunk(int64_t total_elems, int multiprocessors) {
  int64_t chunk = 64 * 1024;
  while (chunk > 4096 && total_elems / chunk < int64_t{16} * multiprocessors) chunk /= 2;
  return chunk;
}
Status norm_chunk_elems_cuda(int64_t total_elems, int32_t* chunk_elems);
int32_t norm_chunk_elems_cpu();

// A NaN stays visible, whichever comes first.
template <class T> WARPSMITH_HOST_DEVICE T largest(T a, T b) { return a > b || a != a ? a : b; }

WARPSMITH_HOST_DEVICE double norm_of(double power_sum, NormOrder order) {
  return order == NormOrder::two ? std::sqrt(power_sum) : power_sum;
}

// In the dtype of the norm, as torch computes it. A NaN stays a NaN.
template <class T> WARPSMITH_HOST_DEVICE T clip_factor(T norm, double max_norm) {
  const T factor = static_cast<T>(max_norm) / (norm + static_cast<T>(1e-6));
  return factor > T(1) ? T(1) : factor;
}

}  // namespace warpsmith
