#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/cross_entropy/cross_entropy_ops.h"

namespace warpsmith {

#define WARPSMITH_ROW(name) name,
enum class Reduction : int64_t { WARPSMITH_REDUCTIONS(WARPSMITH_ROW) };
#undef WARPSMITH_ROW

// Cross-entropy and its relatives over rows of logits. With z[r, j] = cap(logits[r, j]), where
// cap(u) = softcap * tanh(u / softcap) (u itself for softcap 0), t = target[r], w = class_weight, e = label_smoothing,
// C = classes:
//   lse[r]      = log sum_j exp(z[r, j]),   p[r, j] = exp(z[r, j] - lse[r])
//   log_prob[r] = z[r, t] - lse[r],         entropy[r] = -sum_j p[r, j] * log p[r, j]
//   loss[r]     = (1 - e) * w[t] * (lse[r] - z[r, t]) + e / C * sum_j w[j] * (lse[r] - z[r, j]) + z_loss * lse[r]^2
// A row whose target is ignore_index has loss 0, log_prob 0 and a gradient of exact zeros. Its lse, entropy and argmax
// are those of its logits; with skip_ignored they are 0 and the row is not read. A target outside [0, classes) gives
// NaN in loss, log_prob and the row's gradient; nothing is read out of bounds.
// "real" is float, or double for float64 logits. Strides are in elements. The classes of a row are adjacent.
struct CrossEntropyParams {
  const void* logits;        // [rows, classes], dtype; rows logits_stride apart
  const int64_t* target;     // [rows]
  const void* class_weight;  // [classes], real; null: ones

  // Written by the forward; null: not wanted.
  void* loss;       // [rows], real
  void* log_prob;   // [rows], real
  void* lse;        // [rows], real
  void* entropy;    // [rows], real
  int64_t* argmax;  // [rows], index of the first largest logit; 0 if all are -inf or NaN

  // What the backward needs of a row: its largest z, and the sum of exponentials relative to it. lse would be enough in
  // exact arithmetic, but for |z| in the thousands its rounding shows in the gradient.
  void* row_max;  // [rows], real
  void* row_sum;  // [rows], real

  // The gradient, with respect to the logits, of the sum over rows of
  //   loss[r] * grad_loss[r] / denominator + log_prob[r] * grad_log_prob[r] + lse[r] * grad_lse[r]
  //     + entropy[r] * grad_entropy[r].
  // The forward writes it if dlogits is not null; it knows only the first term. The backward reads row_max and row_sum,
  // and entropy if grad_entropy is given; it multiplies the rounded gradient by late_scale, as cross_entropy_scale
  // would. So a gradient has the same bits whether it was computed early or late.
  void* dlogits;              // [rows, classes], dtype; rows dlogits_stride apart; may be logits, at its stride
  const void* grad_loss;      // real; element r * grad_loss_stride; null: ones
  const void* denominator;    // [1], real, on the device; null: 1
  const void* grad_log_prob;  // [rows], real; null: zeros
  const void* grad_lse;       // [rows], real; null: zeros
  const void* grad_entropy;   // [rows], real; null: zeros
  const void* late_scale;     // [1], real, on the device; null: 1. Only in the backward

  int64_t rows, classes, logits_stride, dlogits_stride, grad_loss_stride;  // grad_loss_stride: 1, or 0 for one scalar
  int64_t ignore_index;
  double softcap, label_smoothing, z_loss;
  const void* class_weight_total;  // [1], real: sum of class_weight; read with class_weight and label_smoothing
  bool skip_ignored;
  bool follows_denominator;  // the stream's previous kernel is cross_entropy_denominator_cuda, which may still run
  Dtype dtype;
};

// Writes the row results, and dlogits in the same pass over the logits (a row that fits stays on the chip).
Status cross_entropy_forward_cuda(const CrossEntropyParams& params, void* stream);
Status cross_entropy_forward_cpu(const CrossEntropyParams& params, const Parallel& parallel);

// The same with a given configuration, for tuning and tests.
struct CrossEntropyConfig;
Status cross_entropy_forward_cuda_with(const CrossEntropyConfig& config, const CrossEntropyParams& params,
                                       void* stream);

// Writes dlogits alone, element by element, without a reduction.
Status cross_entropy_backward_cuda(const CrossEntropyParams& params, void* stream);
Status cross_entropy_backward_cpu(const CrossEntropyParams& params, const Parallel& parallel);

// What a mean divides by, known before any logit is read: the sum of class_weight[t] over the rows that are not
// ignored, or the number of these rows. A target out of range counts as 1, with class_weight as NaN. Summed in a fixed
// order.
struct CrossEntropyDenominatorParams {
  const int64_t* target;     // [rows]
  const void* class_weight;  // [classes], real; null: ones
  void* denominator;         // [1], real; null: not wanted
  void* class_weight_total;  // [1], real; null: not wanted
  void* partials;            // [kCrossEntropyPartials], real
  int64_t rows, classes, ignore_index;
  Dtype dtype;  // dtype of the logits: decides what real is
};
inline constexpr int64_t kCrossEntropyPartials = 4096;

Status cross_entropy_denominator_cuda(const CrossEntropyDenominatorParams& params, void* stream);
Status cross_entropy_denominator_cpu(const CrossEntropyDenominatorParams& params, const Parallel& parallel);

// Sums the losses of all rows. Also computes the accuracy: the share of counted rows whose argmax is their target.
struct CrossEntropyReduceParams {
  const void* loss;         // [rows], real
  const void* denominator;  // [1], real; null: 1
  const int64_t* target;    // [rows]; read only for accuracy
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

// x *= factor in place. If factor is 1, only the factor is read. The factor stays on its device.
struct CrossEntropyScaleParams {
  void* x;             // [rows, columns], dtype; rows stride apart
  const void* factor;  // [1], real
  int64_t rows, columns, stride;
  Dtype dtype;
};

Status cross_entropy_scale_cuda(const CrossEntropyScaleParams& params, void* stream);
Status cross_entropy_scale_cpu(const CrossEntropyScaleParams& params, const Parallel& parallel);

// Index of the first row whose target is neither a class nor ignore_index; -1: none.
int64_t cross_entropy_first_bad_target_cpu(const int64_t* target, int64_t rows, int64_t classes, int64_t ignore_index);

}  // namespace warpsmith
