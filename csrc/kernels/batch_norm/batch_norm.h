#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/batch_norm/batch_norm_config.h"
#include "kernels/batch_norm/batch_norm_ops.h"

// Params and entry points of the batch_norm family. A row is all channels of one pixel, adjacent in memory; strides are
// in elements. Sums and statistics are float (double for float64), called `real` below.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(BatchNorm, WARPSMITH_BATCH_NORM_OPS)

// With mean and var those of each column of x (`training`; var divided by rows), or running_mean and running_var:
//   rstd = 1 / sqrt(var + eps),   v = (x - mean) * rstd * weight + bias + residual,   y = v, or max(v, 0) with `relu`
//   new_mean = (1 - momentum) * running_mean + momentum * mean, and new_var likewise of var * rows / (rows - 1)
// With `of_ranks` columns and rows are those of several ranks together, whose `exact` are merged in rank order.
struct BatchNormForwardParams {
  const void* x = nullptr;             // [rows, columns], dtype; rows x_stride apart
  const void* residual = nullptr;      // [rows, columns], dtype; rows residual_stride apart; null: zeros
  const void* weight = nullptr;        // [columns], weight_dtype; null: ones
  const void* bias = nullptr;          // [columns], weight_dtype; null: zeros
  const void* running_mean = nullptr;  // [columns], running_dtype; null together with running_var, only if training
  const void* running_var = nullptr;   // [columns], running_dtype
  void* y = nullptr;                   // [rows, columns], dtype, contiguous; null: statistics alone
  uint8_t* mask = nullptr;  // [rows, columns / batch_norm_vector]: bit k of a vector's byte is 0 where its element k of
                            // y was cut to 0; null: not wanted
  void* mean = nullptr;     // [columns], real
  void* rstd = nullptr;     // [columns], real
  double* exact = nullptr;  // [3, columns]: mean, variance and rows; null: not wanted
  const double* of_ranks = nullptr;  // [ranks, 3, columns]; null: this rank alone
  void* new_mean = nullptr;          // [columns], running_dtype; null: not wanted. May be running_mean
  void* new_var = nullptr;           // [columns], running_dtype; null exactly when new_mean is
  void* partials = nullptr;          // [2, slices, columns], float (double on the CPU), if training
  int64_t rows = 0, columns = 0, x_stride = 0, residual_stride = 0, ranks = 0;
  double momentum = 0, eps = 0;
  bool training = false, relu = false;
  Dtype dtype = Dtype::float32, weight_dtype = Dtype::float32, running_dtype = Dtype::float32;
};

// With g = dy, or 0 where y was cut to 0, and x_hat = (x - mean) * rstd:
//   dresidual = g,   dbias = sum over rows of g,   dweight = sum over rows of g * x_hat
//   dx = rstd * weight * (g - dbias / rows - x_hat * dweight / rows)     (not training: rstd * weight * g)
struct BatchNormBackwardParams {
  const void* dy = nullptr;       // [rows, columns], dtype; rows dy_stride apart
  const void* x = nullptr;        // [rows, columns], dtype; rows x_stride apart
  const void* weight = nullptr;   // [columns], weight_dtype; null: ones
  const void* bias = nullptr;     // [columns], weight_dtype; null: zeros
  const void* mean = nullptr;     // [columns], real
  const void* rstd = nullptr;     // [columns], real
  const uint8_t* mask = nullptr;  // of the forward; null with `relu`: there was no residual, v is computed again
  const double* sums_of_ranks = nullptr;        // [ranks, 2, columns]: their `exact`; null: of the rows here alone
  const double* statistics_of_ranks = nullptr;  // [ranks, 3, columns]: those of the forward, which count the rows
  void* dx = nullptr;                           // [rows, columns], dtype, contiguous; null: not wanted
  void* dresidual = nullptr;                    // [rows, columns], dtype, contiguous; null: not wanted
  void* dweight = nullptr;                      // [columns], weight_dtype; null: not wanted
  void* dbias = nullptr;                        // [columns], weight_dtype; null: not wanted
  double* exact = nullptr;                      // [2, columns]: sums of g and of g * x_hat; null: not wanted
  void* partials = nullptr;  // [2, slices + 1, columns], float (double on the CPU), if needs_sums(); with
                             // sums_of_ranks [2, 1, columns]
  int64_t rows = 0, columns = 0, dy_stride = 0, x_stride = 0, ranks = 0;
  bool training = false, relu = false;
  Dtype dtype = Dtype::float32, weight_dtype = Dtype::float32;

  bool needs_sums() const { return (training && dx && !sums_of_ranks) || dweight || dbias || exact; }
};

Status batch_norm_forward_cuda(const BatchNormForwardParams& params, void* stream);
Status batch_norm_forward_cpu(const BatchNormForwardParams& params, const Parallel& parallel);
Status batch_norm_backward_cuda(const BatchNormBackwardParams& params, void* stream);
Status batch_norm_backward_cpu(const BatchNormBackwardParams& params, const Parallel& parallel);

// Slices of the partial sums on the current device.
Status batch_norm_slices_cuda(const BatchNormForwardParams& params, int64_t* slices);
Status batch_norm_slices_cuda(const BatchNormBackwardParams& params, int64_t* slices);
int64_t batch_norm_slices_cpu(int64_t rows, int64_t columns);

}  // namespace warpsmith
