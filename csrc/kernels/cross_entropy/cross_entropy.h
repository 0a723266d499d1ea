#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/cross_entropy/cross_entropy_ops.h"

namespace warpsmith {

WARPSMITH_DEFINE_OPS(CrossEntropy, WARPSMITH_CROSS_ENTROPY_OPS)

#define WARPSMITH_ROW(name) name,
enum class Reduction : int64_t { WARPSMITH_REDUCTIONS(WARPSMITH_ROW) };
#undef WARPSMITH_ROW

// Cross-entropy and its relatives over rows of logits. With z[r, j] = cap(logits[r, j]), where
// cap(u) = softcap * tanh(u / softcap) (u itself for softcap 0), t = target[r], w = class_weight, e = label_smoothing,
// C = classes:
//   lse[r]      = log sum_j exp(z[r, j]),   p[r, j] = exp(z[r, j] - lse[r])
//   log_prob[r] = z[r, t] - lse[r],         entropy[r] = -sum_j p[r, j] * log p[r, j]
//   loss[r]     = (1 - e) * w[t] * (lse[r] - z[r, t]) + e / C * sum_j w[j] * (lse[r] - z[r, j]) + z_loss * lse[r]^2
// A row whose target is ignore_index has loss and log_prob 0 and a gradient of exact zeros; its lse, entropy and argmax
// are those of its logits, or with skip_ignored 0, and then the row is not read. A target outside [0, classes) gives
// NaN in loss, log_prob and the row's gradient; nothing is read out of bounds.
// "real" is float, double for float64 logits. Strides are in elements, classes are adjacent.
struct CrossEntropyParams {
  const void* logits;        // [rows, classes], dtype; rows logits_stride apart
  const int64_t* target;     // [rows]
  const void* class_weight;  // [classes], real; null: ones

  // Written by the forward, each where it is not null.
  void* loss;       // [rows], real
  void* log_prob;   // [rows], real
  void* lse;        // [rows], real
  void* entropy;    // [rows], real
  int64_t* argmax;  // [rows], the first of the largest logits; 0 where all are -inf or NaN

  // What the backward needs of a row: its largest z, and the sum of the exponentials relative to that. lse would do,
  // but for |z| in the thousands its rounding shows in the gradient.
  void* row_max;  // [rows], real
  void* row_sum;  // [rows], real

  // The gradient, with respect to the logits, of the sum over rows of
  //   loss[r] * grad_loss[r] / denominator + log_prob[r] * grad_log_prob[r] + lse[r] * grad_lse[r]
  //     + entropy[r] * grad_entropy[r].
  // The forward writes it where dlogits is not null, and knows the first term alone. The backward reads row_max,
  // row_sum, and entropy for grad_entropy; it multiplies the rounded gradient by late_scale, as
  // cross_entropy_scale would: a gradient has the same bits whether it was computed early or late.
  void* dlogits;              // [rows, classes], dtype; rows dlogits_stride apart; may be logits, at its stride
  const void* grad_loss;      // real; element r * grad_loss_stride; null: ones
  const void* denominator;    // [1], real, on the device; null: 1
  const void* grad_log_prob;  // [rows], real; null: zeros
  const void* grad_lse;       // [rows], real; null: zeros
  const void* grad_entropy;   // [rows], real; null: zeros
  const void* late_scale;     // [1], real, on the device; null: 1. The backward's alone

  int64_t rows, classes, logits_stride, dlogits_stride, grad_loss_stride;  // grad_loss_stride: 1, or 0 for one scalar
  int64_t ignore_index;
  double softcap, label_smoothing, z_loss;
  const void* class_weight_total;  // [1], real: sum of class_weight; read with class_weight and label_smoothing
  bool skip_ignored;
  bool follows_denominator;  // the stream's previous kernel is cross_entropy_denominator_cuda, which may still run
  Dtype dtype;
};

// Row results, and dlogits in the same pass over the logits (a row stays on the chip where it fits).
Status cross_entropy_forward_cuda(const CrossEntropyParams& params, void* stream);
Status cross_entropy_forward_cpu(const CrossEntropyParams& params, const Parallel& parallel);

// With a configuration of the caller's choice (tuning and tests).
struct CrossEntropyConfig;
Status cross_entropy_forward_cuda_with(const CrossEntropyConfig& config, const CrossEntropyParams& params,
                                       void* stream);

// dlogits alone, element by element, no reduction.
Status cross_entropy_backward_cuda(const CrossEntropyParams& params, void* stream);
Status cross_entropy_backward_cpu(const CrossEntropyParams& params, const Parallel& parallel);

// What a mean divides by, known before any logit is read: the sum over the rows that are not ignored of
// class_weight[t], or their number. A target out of range counts as 1, or with class_weight as NaN. Fixed order.
struct CrossEntropyDenominatorParams {
  const int64_t* target;     // [rows]
  const void* class_weight;  // [classes], real; null: ones
  void* denominator;         // [1], real; null: not wanted
  void* class_weight_total;  // [1], real; null: not wanted
  void* partials;            // [kCrossEntropyPartials], real
  int64_t rows, classes, ignore_index;
  Dtype dtype;  // of the logits: says what real is
};
inline constexpr int64_t kCrossEntropyPartials = 4096;

Status cross_entropy_denominator_cuda(const CrossEntropyDenominatorParams& params, void* stream);
Status cross_entropy_denominator_cpu(const CrossEntropyDenominatorParams& params, const Parallel& parallel);

// The loss of all rows from the losses of each, and the share of the rows that count whose argmax is their target.
struct CrossEntropyReduceParams {
  const void* loss;         // [rows], real
  const void* denominator;  // [1], real; null: 1
  const int64_t* target;    // [rows]; read for accuracy alone
  const int64_t* argmax;    // [rows]; null: no accuracy
  void* total;              // [1], real: sum of loss / denominator; null: not wanted
  void* accuracy;           // [1], real; null: not wanted. NaN when every row is ignored
  void* partials;           // [kCrossEntropyPartials], real
  int64_t rows, ignore_index;
  bool follows_forward;  // the stream's previous kernel is cross_entropy_forward_cuda, which may still run
  Dtype dtype;           // of the logits
};

Status cross_entropy_reduce_cuda(const CrossEntropyReduceParams& params, void* stream);
Status cross_entropy_reduce_cpu(const CrossEntropyReduceParams& params, const Parallel& parallel);

// x *= factor in place, unless factor is 1: then nothing but the factor is read, which stays on its device.
struct CrossEntropyScaleParams {
  void* x;             // [rows, columns], dtype; rows stride apart
  const void* factor;  // [1], real
  int64_t rows, columns, stride;
  Dtype dtype;
};

Status cross_entropy_scale_cuda(const CrossEntropyScaleParams& params, void* stream);
Status cross_entropy_scale_cpu(const CrossEntropyScaleParams& params, const Parallel& parallel);

// The first row whose target is neither a class nor ignore_index; -1: none.
int64_t cross_entropy_first_bad_target_cpu(const int64_t* target, int64_t rows, int64_t classes, int64_t ignore_index);

}  // namespace warpsmith
