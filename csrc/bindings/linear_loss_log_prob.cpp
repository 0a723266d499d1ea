#include "bindings/support/library.h"
#include "bindings/support/linear_loss.h"

namespace warpsmith {
namespace {

constexpr const char *kForward = "linear_log_prob", *kBackward = "linear_log_prob_backward";

LinearInputs checked(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                     const std::optional<Tensor>& bias, double temperature) {
  LinearInputs in = linear_inputs(op, hidden, weight, target, bias);
  if (!(temperature > 0 && std::isfinite(temperature)))
    refuse(op, "temperature", "a finite number > 0", std::to_string(temperature));
  check_divisor(op, "temperature", temperature, in.dtype);
  return in;
}

// Returns log_prob, logsumexp and entropy, and each row's maximum and sum of exponentials for the backward. With
// save_logits also all logits, with rows of whole 16-byte vectors; otherwise that output has no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(Tensor hidden, Tensor weight, Tensor target,
                                                                   std::optional<Tensor> bias, double temperature,
                                                                   bool save_logits, int64_t max_chunk_bytes) {
  const LinearInputs in = checked(kForward, hidden, weight, target, bias, temperature);
  in.check_labels();
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const OnDeviceOf device(in.hidden);

  const int32_t real = real_code(in.dtype);
  const Tensor log_prob = allocate_shaped(kForward, "log_prob", target, real);
  const Tensor lse = allocate_shaped(kForward, "logsumexp", target, real);
  const Tensor entropy = allocate_shaped(kForward, "entropy", target, real);
  const Tensor row_max = allocate_shaped(kForward, "largest logit", target, real);
  const Tensor row_sum = allocate_shaped(kForward, "sum of exponentials", target, real);
  const Tensor logits = allocate_logits(in, save_logits ? in.rows : 0, chunks);
  const auto saved = save_logits ? std::optional(logits) : std::nullopt;
  for_chunks(in, chunks, saved, [&](CrossEntropyParams& p, int64_t first, const Tensor& chunk) {
    make_logits(in, first, chunk, 1 / temperature);
    p.log_prob = at(log_prob, first);
    p.lse = at(lse, first);
    p.entropy = at(entropy, first);
    p.row_max = at(row_max, first);
    p.row_sum = at(row_sum, first);
    run_forward(in, p);
  });
  return {log_prob, lse, entropy, row_max, row_sum, logits};
}

// An optional gradient or saved result of the rows, checked.
std::optional<Tensor> of_rows(const LinearInputs& in, const char* name, const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  check_dtype(in.op, name, *t, real_dtype(in.dtype));
  check_same_shape(in.op, name, *t, in.target);
  check_same_device(in.op, name, *t, in.hidden);
  return as_contiguous(*t);
}

// Gradients of log_prob, lse and entropy are with respect to the logits before the division by temperature; the caller
// has divided them. Gradients that are not wanted have zero elements.
std::tuple<Tensor, Tensor, Tensor> backward(std::optional<Tensor> dlog_prob_any, std::optional<Tensor> dlse_any,
                                            std::optional<Tensor> dentropy_any, Tensor hidden, Tensor weight,
                                            Tensor target, std::optional<Tensor> bias, Tensor row_max_any,
                                            Tensor row_sum_any, Tensor entropy_any, Tensor logits, double temperature,
                                            int64_t max_chunk_bytes, bool want_dhidden, bool want_dweight,
                                            bool want_dbias) {
  const LinearInputs in = checked(kBackward, hidden, weight, target, bias, temperature);
  const WantedGradients wanted{want_dhidden, want_dweight, want_dbias};
  check_wanted(in, wanted);
  const auto dlog_prob = of_rows(in, "dlog_prob", dlog_prob_any), dlse = of_rows(in, "dlse", dlse_any),
             dentropy = of_rows(in, "dentropy", dentropy_any), row_max = of_rows(in, "row_max", row_max_any),
             row_sum = of_rows(in, "row_sum", row_sum_any), entropy = of_rows(in, "entropy", entropy_any);
  const LinearLossChunks chunks = chunks_of(in, max_chunk_bytes);
  const bool saved = logits.dim() > 0 && logits.size(0) > 0;
  check_tensor(kBackward, "logits", logits, in.dtype, {saved ? in.rows : 0, chunks.logits_stride}, hidden);
  logits = as_contiguous(logits, kBackward);
  const OnDeviceOf device(in.hidden);

  GradientSums sums(in, wanted, weight_sum_dtype(in, std::nullopt, chunks.chunks));
  if (!wanted.any()) return sums.rounded();
  Tensor no_loss = allocate_scalar(kBackward, "gradient of no loss", real_code(in.dtype), hidden);
  torch::stable::zero_(no_loss);
  for_chunks(in, chunks, std::nullopt, [&](CrossEntropyParams& p, int64_t first, const Tensor& dlogits) {
    if (saved)
      p.logits = const_at(logits, first * chunks.logits_stride);
    else
      make_logits(in, first, dlogits, 1 / temperature);
    p.row_max = at(row_max, first);
    p.row_sum = at(row_sum, first);
    p.entropy = at(entropy, first);
    p.grad_loss = no_loss.const_data_ptr();
    p.grad_log_prob = const_at(dlog_prob, first);
    p.grad_lse = const_at(dlse, first);
    p.grad_entropy = const_at(dentropy, first);
    p.dlogits = dlogits.mutable_data_ptr();
    in.run([&](void* stream) { return cross_entropy_backward_cuda(p, stream); },
           [&](const Parallel& threads) { return cross_entropy_backward_cpu(p, threads); });
    sums.add(first, dlogits);
  });
  return sums.rounded();
}

WARPSMITH_OPS(m) {
  m.add_forward(
      "linear_log_prob",
      "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, float temperature, bool save_logits, int "
      "max_chunk_bytes) -> (Tensor log_prob, Tensor logsumexp, Tensor entropy, Tensor row_max, Tensor row_sum, "
      "Tensor logits)",
      TORCH_BOX(&forward));
  m.add(
      "linear_log_prob_backward(Tensor? dlog_prob, Tensor? dlse, Tensor? dentropy, Tensor hidden, Tensor weight, "
      "Tensor target, Tensor? bias, Tensor row_max, Tensor row_sum, Tensor entropy, Tensor logits, float temperature, "
      "int max_chunk_bytes, bool want_dhidden, bool want_dweight, bool want_dbias) -> (Tensor dhidden, Tensor dweight, "
      "Tensor dbias)",
      TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
