#include "kernels/linear_loss/linear_log_prob.h"

#include <cstdint>
#include <limits>

#include "torch/support/library.h"
#include "torch/support/linear_loss.h"

namespace warpsmith {
namespace {

constexpr const char* kForward = "linear_log_prob";
constexpr const char* kBackward = "linear_log_prob_backward";
constexpr int64_t kNoRowIsIgnored = std::numeric_limits<int64_t>::min();

LinearInputs checked(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                     const std::optional<Tensor>& bias, double temperature) {
  LinearInputs in = linear_inputs(op, hidden, weight, target, bias);
  if (!(temperature > 0) || temperature == std::numeric_limits<double>::infinity())
    refuse(op, "temperature", "a finite number > 0", std::to_string(temperature));
  return in;
}

CrossEntropyParams of_rows(const LinearInputs& in, const Tensor& logits, int64_t first, int64_t rows, int64_t stride) {
  CrossEntropyParams p{};
  p.logits = logits.const_data_ptr();
  p.target = in.target_at(first);
  p.rows = rows;
  p.classes = in.classes;
  p.logits_stride = stride;
  p.ignore_index = kNoRowIsIgnored;
  p.dtype = in.dtype;
  return p;
}

// log_prob, logsumexp and entropy; each row's maximum and sum of exponentials for the backward; and with save_logits
// all logits, rows a whole number of 16-byte vectors apart, else no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight, Tensor target,
                                                                   std::optional<Tensor> bias, double temperature,
                                                                   bool save_logits, int64_t max_chunk_bytes) {
  const LinearInputs in = checked(kForward, hidden, weight, target, bias, temperature);
  if (!in.target.is_cuda()) check_labels(in, kNoRowIsIgnored, false);
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const OnDeviceOf device(in.hidden);

  const Tensor log_prob = allocate_shaped(kForward, "log_prob", target, real_code(in.dtype));
  const Tensor lse = allocate_shaped(kForward, "logsumexp", target, real_code(in.dtype));
  const Tensor entropy = allocate_shaped(kForward, "entropy", target, real_code(in.dtype));
  const Tensor row_max = allocate_shaped(kForward, "largest logit", target, real_code(in.dtype));
  const Tensor row_sum = allocate_shaped(kForward, "sum of exponentials", target, real_code(in.dtype));
  const Tensor logits = allocate_logits(in, save_logits ? in.rows : std::min(in.rows, chunks.chunk_rows), chunks);
  for (int64_t first = 0; first < in.rows; first += chunks.chunk_rows) {
    const int64_t rows = std::min(chunks.chunk_rows, in.rows - first);
    const Tensor chunk =
        matrix_view(logits, save_logits ? first * chunks.logits_stride : 0, rows, in.classes, chunks.logits_stride);
    make_logits(in, first, chunk, 1 / temperature);
    CrossEntropyParams p = of_rows(in, chunk, first, rows, chunks.logits_stride);
    p.log_prob = at(log_prob, first);
    p.lse = at(lse, first);
    p.entropy = at(entropy, first);
    p.row_max = at(row_max, first);
    p.row_sum = at(row_sum, first);
    in.run([&](void* stream) { return cross_entropy_forward_cuda(p, stream); },
           [&](const Parallel& threads) { return cross_entropy_forward_cpu(p, threads); });
  }
  const int64_t none[2] = {0, chunks.logits_stride};
  return {log_prob, lse,     entropy,
          row_max,  row_sum, save_logits ? logits : allocate(kForward, "logits", none, 2, dtype_code(hidden), hidden)};
}

// A gradient of the rows, or none.
std::optional<Tensor> rows_gradient(const LinearInputs& in, const char* name, const std::optional<Tensor>& grad,
                                    const Tensor& target) {
  if (!grad) return std::nullopt;
  check_dtype(in.op, name, *grad, real_dtype(in.dtype));
  check_same_shape(in.op, name, *grad, target);
  check_same_device(in.op, name, *grad, in.hidden);
  return as_contiguous(*grad);
}

// Gradients of log_prob, lse and entropy are those with respect to the logits before the division by temperature: the
// caller has divided them. Gradients that are not wanted come back with zero elements.
std::tuple<Tensor, Tensor, Tensor> backward(std::optional<Tensor> dlog_prob_any, std::optional<Tensor> dlse_any,
                                            std::optional<Tensor> dentropy_any, Tensor hidden, Tensor weight,
                                            Tensor target, std::optional<Tensor> bias, Tensor row_max_any,
                                            Tensor row_sum_any, Tensor entropy_any, Tensor logits, double temperature,
                                            int64_t max_chunk_bytes, bool want_dhidden, bool want_dweight,
                                            bool want_dbias) {
  const LinearInputs in = checked(kBackward, hidden, weight, target, bias, temperature);
  if (want_dbias && !bias) refuse(kBackward, "bias", "a tensor when its gradient is wanted", "None");
  const auto dlog_prob = rows_gradient(in, "dlog_prob", dlog_prob_any, target);
  const auto dlse = rows_gradient(in, "dlse", dlse_any, target);
  const auto dentropy = rows_gradient(in, "dentropy", dentropy_any, target);
  const auto row_max = rows_gradient(in, "row_max", row_max_any, target);
  const auto row_sum = rows_gradient(in, "row_sum", row_sum_any, target);
  const auto entropy = rows_gradient(in, "entropy", entropy_any, target);
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const bool saved = logits.size(0) > 0;
  check_dtype(kBackward, "logits", logits, in.dtype);
  check_shape(kBackward, "logits", logits, {saved ? in.rows : 0, chunks.logits_stride});
  check_same_device(kBackward, "logits", logits, hidden);
  const OnDeviceOf device(in.hidden);

  const WantedGradients wanted{want_dhidden, want_dweight, want_dbias};
  GradientSums sums(in, wanted, weight_sum_dtype(in, std::nullopt, chunks.chunks));
  if (wanted.any() && in.rows > 0) {
    const Tensor buffer = allocate_logits(in, std::min(in.rows, chunks.chunk_rows), chunks);
    Tensor no_loss = allocate_scalar(kBackward, "gradient of no loss", real_code(in.dtype), hidden);
    torch::stable::zero_(no_loss);
    for (int64_t first = 0; first < in.rows; first += chunks.chunk_rows) {
      const int64_t rows = std::min(chunks.chunk_rows, in.rows - first);
      const Tensor dlogits = matrix_view(buffer, 0, rows, in.classes, chunks.logits_stride);
      if (!saved) make_logits(in, first, dlogits, 1 / temperature);
      const Tensor from =
          saved ? matrix_view(logits, first * chunks.logits_stride, rows, in.classes, chunks.logits_stride) : dlogits;
      CrossEntropyParams p = of_rows(in, from, first, rows, chunks.logits_stride);
      p.row_max = at(row_max, first);
      p.row_sum = at(row_sum, first);
      p.entropy = at(entropy, first);
      p.grad_loss = no_loss.const_data_ptr();
      p.grad_log_prob = const_at(dlog_prob, first);
      p.grad_lse = const_at(dlse, first);
      p.grad_entropy = const_at(dentropy, first);
      p.dlogits = dlogits.mutable_data_ptr();
      p.dlogits_stride = chunks.logits_stride;
      in.run([&](void* stream) { return cross_entropy_backward_cuda(p, stream); },
             [&](const Parallel& threads) { return cross_entropy_backward_cpu(p, threads); });
      sums.add(first, dlogits);
    }
  }
  const int32_t own = dtype_code(hidden);
  return {sums.dhidden(), in_dtype(kBackward, "gradient of weight", sums.dweight(), own),
          in_dtype(kBackward, "gradient of bias", sums.dbias(), own)};
}

WARPSMITH_SCHEMAS(m) {
  constexpr const char* kInputs =
      "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, float temperature, bool save_logits, int "
      "max_chunk_bytes) -> (Tensor log_prob, Tensor logsumexp, Tensor entropy, Tensor row_max, Tensor row_sum, Tensor "
      "logits)";
  m.def((std::string("linear_log_prob") + kInputs).c_str());
  m.def((std::string("linear_log_prob_forward") + kInputs).c_str());
  m.def(
      "linear_log_prob_backward(Tensor? dlog_prob, Tensor? dlse, Tensor? dentropy, Tensor hidden, Tensor weight, "
      "Tensor target, Tensor? bias, Tensor row_max, Tensor row_sum, Tensor entropy, Tensor logits, float temperature, "
      "int max_chunk_bytes, "
      "bool want_dhidden, bool want_dweight, bool want_dbias) -> (Tensor dhidden, Tensor dweight, Tensor dbias)");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("linear_log_prob", TORCH_BOX(&forward));
  m.impl("linear_log_prob_forward", TORCH_BOX(&forward));
  m.impl("linear_log_prob_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
