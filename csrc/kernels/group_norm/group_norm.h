#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/group_norm/group_norm_config.h"
#include "kernels/group_norm/group_norm_ops.h"

// Params and entry points of the group_norm family. The channels of a pixel are adjacent in memory; strides are in
// elements. Sums and statistics are float (double for float64), called `real` below.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(GroupNorm, WARPSMITH_GROUP_NORM_OPS)

struct GroupNormShape {
  int64_t samples = 0, pixels = 0, channels = 0, groups = 1;
  Dtype dtype = Dtype::float32, weight_dtype = Dtype::float32;
  bool silu = false;
  int64_t rows() const { return samples * pixels; }
  int64_t group() const { return channels / groups; }
};

// With mean and var those of each group of channels of a sample: rstd = 1 / sqrt(var + eps),
//   v = (x - mean) * rstd * weight + bias,   y = v, or v * sigmoid(v) with `silu`
struct GroupNormForwardParams : GroupNormShape {
  const void* x = nullptr;       // [samples * pixels, channels], dtype; rows x_stride apart
  const void* weight = nullptr;  // [channels], weight_dtype; null: ones
  const void* bias = nullptr;    // [channels], weight_dtype; null: zeros
  void* y = nullptr;             // [samples * pixels, channels], dtype, contiguous
  void* mean = nullptr;          // [samples, groups], real
  void* rstd = nullptr;          // [samples, groups], real
  void* sums = nullptr;          // [plan.sums], double; null on the CPU
  int64_t x_stride = 0;
  double eps = 0;
};

// With g = dy, or dy times the derivative of silu at v, x_hat = (x - mean) * rstd, and M values a group:
//   dbias = sum of g,   dweight = sum of g * x_hat, over samples and pixels
//   dx = rstd * (g * weight - (sum of g * weight) / M - x_hat * (sum of g * weight * x_hat) / M), sums over the group
struct GroupNormBackwardParams : GroupNormShape {
  const void* dy = nullptr;      // [samples * pixels, channels], dtype; rows dy_stride apart
  const void* x = nullptr;       // [samples * pixels, channels], dtype; rows x_stride apart
  const void* weight = nullptr;  // [channels], weight_dtype; null: ones
  const void* bias = nullptr;    // [channels], weight_dtype; null: zeros
  const void* mean = nullptr;    // [samples, groups], real
  const void* rstd = nullptr;    // [samples, groups], real
  void* dx = nullptr;            // [samples * pixels, channels], dtype, contiguous; null: not wanted
  void* dweight = nullptr;       // [channels], weight_dtype; null: not wanted
  void* dbias = nullptr;         // [channels], weight_dtype; null: not wanted
  void* partials = nullptr;      // [2, slices, channels], double
  void* sums = nullptr;          // [plan.sums], double; null on the CPU, or where dx is
  int64_t dy_stride = 0, x_stride = 0;
};

// Slices of the partial sums, and sums of the blocks' groups, on the current device.
struct GroupNormPlan {
  int64_t slices = 0, sums = 0;
};

Status group_norm_forward_cuda(const GroupNormForwardParams& params, void* stream);
Status group_norm_forward_cpu(const GroupNormForwardParams& params, const Parallel& parallel);
Status group_norm_backward_cuda(const GroupNormBackwardParams& params, void* stream);
Status group_norm_backward_cpu(const GroupNormBackwardParams& params, const Parallel& parallel);

Status group_norm_plan_cuda(const GroupNormShape& shape, bool backward, GroupNormPlan* plan);
int64_t group_norm_slices_cpu(const GroupNormShape& shape);

}  // namespace warpsmith
