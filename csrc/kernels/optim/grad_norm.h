#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor_list.h"

// The norm of many tensors, taken as one vector; clipping by this norm; and the checks of a loss scaler.
namespace warpsmith {

enum class NormOrder : uint8_t { one, two, infinity };

// One tensor of the table.
struct NormTensor {
  void* data;  // numel elements without gaps, in any order of dimensions; only clip and unscale write
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
  // One element, or null: the factor by which the gradients were multiplied. The kernel divides elements by the power
  // of two below it before it sums, and multiplies back in float64. Neither changes a bit of a normal number, and
  // squares overflow float32 only if those of the unscaled gradients would.
  const float* scale;
  // [chunk_count], or null: sums of the chunks, taken before and without a scale. A chunk whose known sum is finite is
  // not read: `partials` gets the known sum.
  const double* known = nullptr;
};

// Multiplies every element by min(1, max_norm / (norm + 1e-6)). Reads and writes nothing if that is 1.
struct ClipParams {
  const NormTensor* tensors;
  const ListChunk* chunks;  // [chunk_count]
  int64_t chunk_count;
  const void* norm;  // one element
  Dtype norm_dtype;  // float32 or float64
  double max_norm;
};

// The norm of the unscaled gradients, for a loss that was multiplied by `scale`; whether the step must be skipped; and
// the divisor with which an optimizer's kernel unscales and clips at once.
struct GradCheckParams {
  GradNormParams norm;  // norm.norm: of the unscaled gradients; norm.power_sum: of the scaled ones
  const float* scale;   // one element
  double max_norm;      // infinite: no clipping
  float* grad_scale;    // one element, written: scale / clip_factor; exactly scale if nothing is clipped
  float* found_inf;     // one element, written: 1 if the norm is not finite, else 0
  int64_t*
      bad_counts;  // [tensor_count]; written if the norm is not finite: each tensor's elements that are not, unscaled
  int64_t tensor_count;
};

// Multiplies every element by `inv_scale`, in place.
struct UnscaleParams {
  const NormTensor* tensors;
  const ListChunk* chunks;  // [chunk_count]
  int64_t chunk_count;
  const float* inv_scale;  // one element
  float* found_inf;        // one element: 1 is written if a stored result is not finite; else unchanged
  int64_t* bad_counts;     // [tensors]; adds the number of such elements per tensor
};

Status grad_norm_cuda(const GradNormParams& params, void* stream);
Status grad_norm_cpu(const GradNormParams& params, const Parallel& parallel);
// The two halves of grad_norm, for tensors spread over several ranks: `partials` from the tensors, then `power_sum` and
// `norm` from the partials. Neither half accesses what belongs to the other.
Status grad_norm_partials_cuda(const GradNormParams& params, void* stream);
Status grad_norm_partials_cpu(const GradNormParams& params, const Parallel& parallel);
Status grad_norm_finish_cuda(const GradNormParams& params, void* stream);
Status grad_norm_finish_cpu(const GradNormParams& params);
Status clip_grads_cuda(const ClipParams& params, void* stream);
Status clip_grads_cpu(const ClipParams& params, const Parallel& parallel);
Status grad_check_cuda(const GradCheckParams& params, void* stream);
Status grad_check_cpu(const GradCheckParams& params, const Parallel& parallel);
Status unscale_grads_cuda(const UnscaleParams& params, void* stream);
Status unscale_grads_cpu(const UnscaleParams& params, const Parallel& parallel);

// The elements of a chunk. On CUDA the largest power of two that gives every multiprocessor 16 chunks.
constexpr int64_t choose_norm_chunk(int64_t total_elems, int multiprocessors) {
  int64_t chunk = 64 * 1024;
  while (chunk > 4096 && total_elems / chunk < int64_t{16} * multiprocessors) chunk /= 2;
  return chunk;
}
Status norm_chunk_elems_cuda(int64_t total_elems, int32_t* chunk_elems);
int32_t norm_chunk_elems_cpu();

// Keeps a NaN in either argument.
template <class T> WARPSMITH_HOST_DEVICE T largest(T a, T b) { return a > b || a != a ? a : b; }

WARPSMITH_HOST_DEVICE double norm_of(double power_sum, NormOrder order) {
  return order == NormOrder::two ? std::sqrt(power_sum) : power_sum;
}

// The clipping factor, in the dtype of the norm, as torch computes it. Keeps a NaN.
template <class T> WARPSMITH_HOST_DEVICE T clip_factor(T norm, double max_norm) {
  const T factor = static_cast<T>(max_norm) / (norm + static_cast<T>(1e-6));
  return factor > T(1) ? T(1) : factor;
}

// The inverse of the largest power of two that is at most `scale`; 1 if there is none or its inverse is not a normal
// number.
WARPSMITH_HOST_DEVICE float inverse_power_of_two(float scale) {
  if (!(scale >= 0x1p-126f && scale < 0x1p127f)) return 1;
  const uint32_t exponent = std::bit_cast<uint32_t>(scale) >> 23;
  return std::bit_cast<float>((254 - exponent) << 23);
}

// Converts a sum of powers of elements that were multiplied by `factor`, a power of two, to that of the original
// elements.
WARPSMITH_HOST_DEVICE double without_factor(double sum, float factor, NormOrder order) {
  const double undo = 1.0 / static_cast<double>(factor);
  return order == NormOrder::infinity ? sum : order == NormOrder::one ? sum * undo : sum * undo * undo;
}

template <class T> WARPSMITH_HOST_DEVICE bool is_finite(T x) { return x - x == T(0); }

// 1 / scale, rounded once.
template <class T> WARPSMITH_HOST_DEVICE T inverse(float scale) {
  return static_cast<T>(1.0 / static_cast<double>(scale));
}

template <class T> struct CheckedNorm {
  T norm;
  bool finite;
  float grad_scale;
};

// T: the dtype of the norm.
template <class T>
WARPSMITH_HOST_DEVICE CheckedNorm<T> check_norm(double power_sum, NormOrder order, float scale, double max_norm) {
  const T norm = static_cast<T>(norm_of(power_sum, order) / static_cast<double>(scale));
  const bool finite = is_finite(norm);
  const T factor = clip_factor(norm, max_norm);
  const bool clips = finite && factor < T(1);
  return {norm, finite, clips ? static_cast<float>(static_cast<double>(scale) / static_cast<double>(factor)) : scale};
}

}  // namespace warpsmith
