#pragma once
#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor_list.h"

namespace warpsmith {

// One tensor of the table. All its arrays have numel elements of the table's dtype in the same memory order.
struct AdamWTensor {
  void* param;           // read and written
  void* exp_avg;         // read and written
  void* exp_avg_sq;      // read and written
  void* max_exp_avg_sq;  // read and written; null without amsgrad
  float* step;           // one element: steps taken; plus one by a step that is not skipped
  int64_t numel;
  int32_t group;        // whose hyperparameters
  int32_t chunk_elems;  // a multiple of 16 bytes
  int32_t chunks;
  uint32_t chunks_done;  // scratch of the kernel, zero between launches
};
static_assert(sizeof(AdamWTensor) == 64);

struct AdamWGroup {
  const void*
      lr_device;  // one float (double if lr_is_double) on the tensors' device, read by the kernel; null: lr counts
  double lr, beta1, beta2, eps, weight_decay;
  bool lr_is_double, maximize;
};

constexpr int kAdamWMaxGroups = 32;  // by value in the launch: a new learning rate costs no copy

// With t = step + 1, and g = grad / grad_scale (negated by maximize), every tensor whose gradient is not null gets
//   p <- p (1 - lr weight_decay)
//   m <- m + (1 - beta1) (g - m),  v <- beta2 v + (1 - beta2) g^2,  v_max <- max(v_max, v)
//   p <- p - lr / (1 - beta1^t) m / (sqrt(v or v_max) / sqrt(1 - beta2^t) + eps),  step <- t
// and nothing at all changes where found_inf is not zero. Gradients are only read.
struct AdamWParams {
  AdamWTensor* tensors;      // [tensor_count]
  const ListChunk* chunks;   // [chunk_count]
  const void* const* grads;  // [tensor_count], addresses; null: this tensor has no gradient in this step
  const float* grad_scale;   // one element, or null
  const float* found_inf;    // one element, or null
  int64_t tensor_count, chunk_count;
  int32_t first_group, group_count;  // tensors of other groups are left alone
  Dtype dtype;                       // float32; on the CPU also float64
  bool amsgrad;                      // some tensor may have max_exp_avg_sq
  AdamWGroup groups[kAdamWMaxGroups];
};

Status adamw_cuda(const AdamWParams& params, void* stream);
Status adamw_cpu(const AdamWParams& params, const Parallel& parallel);

// Writes words of a table or of a column of addresses; `host` is free again when the call returns, which waits for
// nothing.
Status adamw_upload_cuda(const int64_t* host, int64_t* device, int64_t words, void* stream);

// Elements of a chunk for tensors of these sizes in all. The CUDA answer depends on the current device.
Status adamw_chunk_elems_cuda(int64_t total_elems, int32_t* chunk_elems);
int32_t adamw_chunk_elems_cpu();

// What a step multiplies by, the same for every element of a tensor. Rounded to T once, from double.
template <class T> struct AdamWScalars {
  T grad_factor, decay, weight1, beta2, weight2, step_size, bias2_sqrt, eps;
};

// base^exponent for a whole exponent >= 0 by squaring: a relative error below 1e-14, and the same bits on every
// machine.
WARPSMITH_HOST_DEVICE double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

WARPSMITH_HOST_DEVICE double adamw_bias_correction(double beta, float step) {
  return 1 - power(beta, static_cast<int64_t>(step) + 1);
}

template <class T> WARPSMITH_HOST_DEVICE AdamWScalars<T> adamw_scalars(const AdamWGroup& group, const float* grad_scale,
                                                                       double bias_correction1,
                                                                       double bias_correction2) {
  double lr = group.lr;
  if (group.lr_device)
    lr =
        group.lr_is_double ? *static_cast<const double*>(group.lr_device) : *static_cast<const float*>(group.lr_device);
  const double factor = grad_scale ? 1.0 / static_cast<double>(*grad_scale) : 1.0;
  return {T(group.maximize ? -factor : factor),
          T(1 - lr * group.weight_decay),
          T(1 - group.beta1),
          T(group.beta2),
          T(1 - group.beta2),
          T(lr / bias_correction1),
          T(std::sqrt(bias_correction2)),
          T(group.eps)};
}

// One element. The order of operations is that of torch's fused CPU step; v_max is null without amsgrad.
template <class T>
WARPSMITH_HOST_DEVICE void adamw_element(const AdamWScalars<T>& s, T grad, T& p, T& m, T& v, T* v_max) {
  const T g = grad * s.grad_factor;
  p *= s.decay;
  // Two forms of m + weight1 (g - m), each exact at its end of the range, where beta1 is 1 and 0.
  m = s.weight1 < T(0.5) ? m + s.weight1 * (g - m) : g + (s.weight1 - T(1)) * (g - m);
  v = v * s.beta2 + s.weight2 * g * g;
  T second = v;
  if (v_max) second = *v_max = v > *v_max || v != v ? v : *v_max;  // a NaN stays visible
  p -= s.step_size * m / (std::sqrt(second) / s.bias2_sqrt + s.eps);
}

}  // namespace warpsmith
