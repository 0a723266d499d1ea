#pragma once
#include <algorithm>

#include "bindings/support/column_sums.h"
#include "bindings/support/loss.h"
#include "bindings/support/matmul.h"
#include "bindings/support/rows.h"
#include "kernels/linear_loss/linear_loss.h"
#include "kernels/linear_loss/linear_loss_config.h"

// What the linear losses share: their inputs, the loop over chunks of rows, and the sums of gradients over chunks.
namespace warpsmith {

// The checked inputs of a linear loss, as matrices.
struct LinearInputs : LossRows {
  Tensor hidden_any;           // as given: the gradient has this shape
  Tensor hidden;               // [rows, width], adjacent columns
  Tensor weight;               // [classes, width]
  std::optional<Tensor> bias;  // [classes]
  int64_t width;
};

inline LinearInputs linear_inputs(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                  const std::optional<Tensor>& bias, const LossOptions& options = {},
                                  const std::optional<Tensor>& class_weight = std::nullopt) {
  const Dtype dtype = float_dtype(op, "hidden", hidden);
  const Rows rows = as_rows(op, "hidden", hidden);
  check_dtype(op, "weight", weight, dtype);
  if (weight.dim() != 2 || weight.size(1) != rows.columns || weight.size(0) < 1)
    refuse(op, "weight", "shape (V, " + std::to_string(rows.columns) + ") with V >= 1", shape_text(weight));
  check_same_device(op, "weight", weight, hidden);
  const Tensor labels = check_target(op, target, hidden);
  const int64_t classes = weight.size(0);
  if (bias) check_tensor(op, "bias", *bias, dtype, {classes}, hidden);
  // Rows that overlap (expanded tensors) are copied, because matrix products cannot read them.
  const bool apart = rows.stride >= rows.columns;
  const Tensor base = apart ? rows.tensor : as_contiguous(rows.tensor);
  const int64_t stride = std::max<int64_t>(apart ? rows.stride : rows.columns, 1);
  LinearInputs in{{op, dtype, labels, rows.rows, classes, options, {}},
                  hidden,
                  matrix_view(base, 0, rows.rows, rows.columns, stride),
                  weight,
                  bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt,
                  rows.columns};
  in.set_class_weight(class_weight);
  check_options(op, options, dtype);
  return in;
}

inline LinearLossChunks chunks_of(const LinearInputs& in, int64_t max_chunk_bytes) {
  if (max_chunk_bytes < 0) refuse(in.op, "max_chunk_bytes", "an integer >= 1", std::to_string(max_chunk_bytes));
  return choose_linear_loss_chunks(
      {in.rows, in.classes, size_bytes(in.dtype), max_chunk_bytes, runs_kernels(in.hidden)});
}

// Columns beyond the classes, which fill a row up to whole vectors, are zero: matrix products read them together with
// the last classes and write results that nobody uses.
inline Tensor allocate_logits(const LinearInputs& in, int64_t rows, const LinearLossChunks& chunks) {
  const int64_t sizes[2] = {rows, chunks.logits_stride}, rest = chunks.logits_stride - in.classes;
  Tensor logits = allocate(in.op, "logits", sizes, 2, dtype_code(in.hidden), in.hidden);
  if (rows > 0 && rest > 0) {
    Tensor filling = matrix_view(logits, in.classes, rows, rest, chunks.logits_stride);
    torch::stable::zero_(filling);
  }
  return logits;
}

// logits [rows, classes] = scale * (hidden rows from `first` on @ weight^T + bias)
inline void make_logits(const LinearInputs& in, int64_t first, const Tensor& logits, double scale = 1) {
  const int64_t stride = in.hidden.stride(0);
  const Tensor hidden = matrix_view(in.hidden, first * stride, logits.size(0), in.width, stride);
  const Tensor weight = matrix_view(in.weight, 0, in.width, in.classes, in.weight.stride(1), in.weight.stride(0));
  if (in.bias)
    multiply_add(logits, *in.bias, hidden, weight, scale);
  else
    multiply(logits, hidden, weight, scale);
}

// Calls use(p, first, chunk) for each chunk of rows. `first` is the chunk's first row, `chunk` the place of its logits
// [rows, classes], `p` the params of cross_entropy over it. All chunks share one place, one after the other; with
// `all`, a tensor of all rows' logits, each chunk has its own.
template <class Use>
void for_chunks(const LinearInputs& in, const LinearLossChunks& chunks, const std::optional<Tensor>& all, Use&& use) {
  if (in.rows == 0) return;
  const Tensor place = all ? *all : allocate_logits(in, std::min(in.rows, chunks.chunk_rows), chunks);
  const int64_t stride = chunks.logits_stride;
  for (int64_t first = 0; first < in.rows; first += chunks.chunk_rows) {
    const int64_t rows = std::min(chunks.chunk_rows, in.rows - first);
    const Tensor chunk = matrix_view(place, all ? first * stride : 0, rows, in.classes, stride);
    CrossEntropyParams p = in.params(chunk, stride, first, rows);
    p.dlogits_stride = stride;
    use(p, first, chunk);
  }
}

inline void run_forward(const LinearInputs& in, const CrossEntropyParams& p) {
  in.run([&](void* stream) { return cross_entropy_forward_cuda(p, stream); },
         [&](const Parallel& threads) { return cross_entropy_forward_cpu(p, threads); });
}

struct WantedGradients {
  bool hidden = false, weight = false, bias = false;
  bool any() const { return hidden || weight || bias; }
};

inline void check_wanted(const LinearInputs& in, const WantedGradients& wanted) {
  if (wanted.bias && !in.bias) refuse(in.op, "bias", "a tensor when its gradient is wanted", "None");
}

// The gradients of a linear loss; each chunk of dlogits adds its part. The weight gradient is summed in `sum_dtype`, or
// directly into `weight_sum`; the bias gradient in real, groups of chunks first: 50 chunks in one chain of float32 were
// 3.5 times as far off as PyTorch.
class GradientSums {
 public:
  GradientSums(const LinearInputs& in, WantedGradients wanted, int32_t sum_dtype,
               std::optional<Tensor> weight_sum = std::nullopt)
      : in_(in), wanted_(wanted), holds_weight_(weight_sum.has_value()) {
    const int32_t dtype = dtype_code(in.hidden);
    dhidden_ =
        wanted.hidden ? allocate_like(in.op, "gradient of hidden", in.hidden_any) : nothing(in.op, dtype, in.hidden);
    const int64_t sizes[2] = {in.classes, in.width};
    dweight_ = weight_sum      ? *weight_sum
               : wanted.weight ? allocate(in.op, "gradient of weight", sizes, 2, sum_dtype, in.hidden)
                               : nothing(in.op, dtype, in.hidden);
    dbias_ = allocate_vector(in.op, "gradient of bias", wanted.bias ? in.classes : 0, real_code(in.dtype), in.hidden);
    if (in.rows > 0 && in.width > 0) return;
    if (wanted.weight && !holds_weight_) torch::stable::zero_(dweight_);
    if (wanted.hidden) torch::stable::zero_(dhidden_);
    if (wanted.bias && in.rows == 0) torch::stable::zero_(dbias_);
  }

  // dlogits: [rows, classes] with adjacent classes, of the rows from `first` on.
  void add(int64_t first, const Tensor& dlogits) {
    const int64_t rows = dlogits.size(0), stride = in_.hidden.stride(0);
    const bool more = first > 0;
    if (wanted_.hidden && in_.width > 0)
      multiply(matrix_view(dhidden_, first * in_.width, rows, in_.width, in_.width), dlogits, in_.weight);
    if (wanted_.weight && in_.width > 0)
      add_outer_products(in_.op, dweight_, dlogits, matrix_view(in_.hidden, first * stride, rows, in_.width, stride),
                         more || holds_weight_);
    if (wanted_.bias) add_to_bias(dlogits, first + rows == in_.rows);
  }

  const Tensor& dhidden() const { return dhidden_; }
  const Tensor& dweight() const { return dweight_; }
  const Tensor& dbias() const { return dbias_; }

  // Returns the gradients as a backward does: in the dtype of hidden; no weight gradient if the caller owns its sum.
  std::tuple<Tensor, Tensor, Tensor> rounded() const {
    const int32_t own = dtype_code(in_.hidden);
    return {dhidden_,
            holds_weight_ ? nothing(in_.op, own, in_.hidden) : in_dtype(in_.op, "gradient of weight", dweight_, own),
            in_dtype(in_.op, "gradient of bias", dbias_, own)};
  }

 private:
  static constexpr int kGroupChunks = 8;

  void add_to_bias(const Tensor& dlogits, bool last) {
    const int64_t group = chunks_ / kGroupChunks, place = chunks_ % kGroupChunks;
    ++chunks_;
    const Dtype real = in_.dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
    if (group == 0) return add_column_sums(in_.op, dlogits, dbias_, in_.dtype, real, place > 0);
    if (!group_) group_ = allocate_vector(in_.op, "gradient of bias", in_.classes, real_code(in_.dtype), in_.hidden);
    add_column_sums(in_.op, dlogits, *group_, in_.dtype, real, place > 0);
    if (last || place == kGroupChunks - 1)
      add_column_sums(in_.op, matrix_view(*group_, 0, 1, in_.classes, in_.classes), dbias_, real, real, true);
  }

  const LinearInputs& in_;
  WantedGradients wanted_;
  bool holds_weight_;
  Tensor dhidden_, dweight_, dbias_;
  std::optional<Tensor> group_;
  int64_t chunks_ = 0;
};

// The dtype in which the weight gradient is summed. float32 if several 16-bit chunks would each round, unless the
// caller chooses.
inline int32_t weight_sum_dtype(const LinearInputs& in, std::optional<ScalarType> dw_dtype, int64_t chunks) {
  const int32_t own = dtype_code(in.hidden), wide = real_code(in.dtype);
  if (!dw_dtype) return chunks > 1 || in.dtype == Dtype::float16 ? wide : own;
  if (*dw_dtype == in.hidden.scalar_type()) return own;
  if (*dw_dtype != ScalarType::Float || in.dtype == Dtype::float64)
    refuse(in.op, "dw_dtype", same_or_float32_text(in.dtype), dtype_text(*dw_dtype));
  return wide;
}

}  // namespace warpsmith
