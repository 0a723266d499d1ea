// The C++ functions as ops of a test library, so that Python can hand them tensors and look at values, gradients and
// errors.
#include <torch/library.h>
#include <warpsmith/activation.h>
#include <warpsmith/attention.h>
#include <warpsmith/batch_norm.h>
#include <warpsmith/cross_entropy.h>
#include <warpsmith/group_norm.h>
#include <warpsmith/image.h>
#include <warpsmith/linear.h>
#include <warpsmith/linear_loss.h>
#include <warpsmith/max_pool.h>
#include <warpsmith/norm.h>
#include <warpsmith/optim.h>
#include <warpsmith/quantize.h>
#include <warpsmith/rope.h>
#include <warpsmith/softmax.h>

namespace {

// Whether Python's None arrives as an undefined tensor: what a LibTorch module holds for a parameter that it lacks.
bool none_is_undefined = false;

template <class T> T of_python(T given) {
  if constexpr (std::is_same_v<T, std::optional<at::Tensor>>)
    if (!given && none_is_undefined) return at::Tensor();
  return given;
}
template <class R, class... A> auto exposed(R (*function)(A...)) {
  return [function](std::decay_t<A>... given) { return function(of_python(std::move(given))...); };
}

std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                        const at::Tensor& sin, bool interleaved,
                                        const std::optional<at::Tensor>& cu_seqlens, int64_t position_offset,
                                        const std::optional<at::Tensor>& position_offsets) {
  return warpsmith::rope(q, k, cos, sin, {interleaved, cu_seqlens, position_offset, position_offsets});
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                         int64_t ignore_index, int64_t reduction, double label_smoothing, double z_loss,
                         double softcap) {
  return warpsmith::cross_entropy(
      logits, target, weight,
      {ignore_index, static_cast<warpsmith::Reduction>(reduction), label_smoothing, z_loss, softcap});
}

std::tuple<at::Tensor, at::Tensor> qk_norm_rope(const at::Tensor& q, const at::Tensor& k, const at::Tensor& q_weight,
                                                const at::Tensor& k_weight, const at::Tensor& cos,
                                                const at::Tensor& sin, std::optional<double> eps, bool interleaved,
                                                const std::optional<at::Tensor>& cu_seqlens, int64_t position_offset) {
  return warpsmith::qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, {interleaved, cu_seqlens, position_offset});
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const std::optional<at::Tensor>& k,
                                             const std::optional<at::Tensor>& v, bool causal,
                                             const std::optional<at::Tensor>& bias,
                                             const std::optional<at::Tensor>& sink, double dropout_p,
                                             const std::optional<at::Tensor>& seed, int64_t kv_heads) {
  const warpsmith::AttentionOptions options{.causal = causal,
                                            .softcap = 4.0,
                                            .dropout_p = dropout_p,
                                            .bias = bias,
                                            .sink = sink,
                                            .seed = seed,
                                            .kv_heads = kv_heads};
  return warpsmith::attention(q, k, v, options);
}

std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& cu_seqlens, int64_t max_seqlen) {
  return warpsmith::attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, {.causal = true});
}

void adamw(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
           at::TensorList max_exp_avg_sqs, at::TensorList steps, double lr, double weight_decay, bool maximize,
           const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
           const std::optional<at::Tensor>& lr_tensor) {
  const warpsmith::AdamWOptions options{.lr = lr, .weight_decay = weight_decay, .maximize = maximize};
  warpsmith::adamw(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, options, grad_scale, found_inf,
                   lr_tensor);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& class_weight,
                                int64_t reduction, double label_smoothing, std::optional<int64_t> max_chunk_bytes) {
  warpsmith::LinearCrossEntropyOptions options{.class_weight = class_weight, .label_smoothing = label_smoothing};
  options.reduction = static_cast<warpsmith::Reduction>(reduction);
  options.max_chunk_bytes = max_chunk_bytes;
  return warpsmith::linear_cross_entropy(hidden, weight, target, bias, options);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_log_prob(const at::Tensor& hidden, const at::Tensor& weight,
                                                               const at::Tensor& target,
                                                               const std::optional<at::Tensor>& bias,
                                                               double temperature, bool save_logits) {
  return warpsmith::linear_log_prob(hidden, weight, target, bias,
                                    {.temperature = temperature, .save_logits = save_logits});
}

at::Tensor batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual, bool training,
                      bool relu) {
  return warpsmith::batch_norm(x, running_mean, running_var, weight, bias,
                               {.training = training, .residual = residual, .relu = relu});
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& residual, int64_t activation) {
  return warpsmith::linear(x, weight, bias, static_cast<warpsmith::Activation>(activation), residual);
}

at::Tensor mlp(const at::Tensor& x, const at::Tensor& w1, const std::optional<at::Tensor>& b1, const at::Tensor& w2,
               const std::optional<at::Tensor>& b2, int64_t activation) {
  return warpsmith::mlp(x, w1, b1, w2, b2, static_cast<warpsmith::Activation>(activation));
}

at::Tensor scaled_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t scaling, bool e5m2, bool high) {
  warpsmith::ScaledLinearOptions options{.grad_e5m2 = e5m2, .wgrad_high = high};
  options.scaling = static_cast<warpsmith::ScaledLinearOptions::Scaling>(scaling);
  return warpsmith::scaled_linear(x, weight, bias, options);
}

at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                        const std::optional<at::Tensor>& gate_bias, const std::optional<at::Tensor>& up_bias,
                        int64_t activation) {
  return warpsmith::gated_linear(x, gate_weight, up_weight, gate_bias, up_bias,
                                 static_cast<warpsmith::Activation>(activation));
}

at::Tensor matmul_symmetric(const at::Tensor& x) { return warpsmith::matmul_symmetric(x); }

// A bare undefined tensor is none in an optional return.
std::optional<at::Tensor> if_defined(const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; }

at::Tensor normalize_image(const at::Tensor& x, const std::vector<double>& mean, const std::vector<double>& std,
                           const std::optional<at::Tensor>& flip) {
  return warpsmith::normalize_image(x, {mean[0], mean[1], mean[2]}, {std[0], std[1], std[2]}, {.flip = flip});
}

at::Tensor max_pool2d(const at::Tensor& x, const std::vector<int64_t>& kernel_size, const std::vector<int64_t>& stride,
                      const std::vector<int64_t>& padding, bool ceil_mode) {
  return warpsmith::max_pool2d(x, kernel_size, {.stride = stride, .padding = padding, .ceil_mode = ceil_mode});
}

using Quantized = std::tuple<std::optional<at::Tensor>, std::optional<at::Tensor>, std::optional<at::Tensor>,
                             std::optional<at::Tensor>, at::Tensor, std::optional<at::Tensor>>;

Quantized quantize_fp8(const at::Tensor& x, const std::optional<at::Tensor>& scale, int64_t scaling, int64_t transpose,
                       at::ScalarType dtype, bool power_of_two, bool column_sums) {
  const auto t = warpsmith::quantize_fp8(x, static_cast<warpsmith::Fp8Scaling>(scaling),
                                         {.dtype = dtype,
                                          .scale = scale,
                                          .transpose = static_cast<warpsmith::Fp8Transpose>(transpose),
                                          .power_of_two = power_of_two,
                                          .column_sums = column_sums});
  return {if_defined(t.data), if_defined(t.scale),      if_defined(t.transposed), if_defined(t.transposed_scale),
          t.counts,           if_defined(t.column_sums)};
}

}  // namespace

TORCH_LIBRARY(warpsmith_cpp_api, m) {
  m.def("none_is_undefined(bool on) -> ()", [](bool on) { none_is_undefined = on; });
  m.def(
      "attention(Tensor q, Tensor? k, Tensor? v, bool causal, Tensor? bias, Tensor? sink, float dropout_p, Tensor? "
      "seed, int kv_heads) -> (Tensor, Tensor)",
      exposed(&attention));
  m.def("attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int max_seqlen) -> (Tensor, Tensor)",
        exposed(&attention_varlen));
  m.def(
      "batch_norm(Tensor x, Tensor? running_mean, Tensor? running_var, Tensor? weight, Tensor? bias, Tensor? residual, "
      "bool training, bool relu) -> Tensor",
      exposed(&batch_norm));
  m.def("group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, bool silu) -> Tensor",
        exposed(&warpsmith::group_norm));
  m.def("max_pool2d(Tensor x, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode) -> Tensor",
        exposed(&max_pool2d));
#define WARPSMITH_ROW(op, log) m.def(#op "(Tensor x, bool wide) -> Tensor", exposed(&warpsmith::op));
  WARPSMITH_SOFTMAX_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.def("rms_norm(Tensor x, Tensor? weight, float? eps, float weight_offset) -> Tensor", exposed(&warpsmith::rms_norm));
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", exposed(&warpsmith::layer_norm));
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float? eps, float weight_offset) -> (Tensor, Tensor)",
        exposed(&warpsmith::add_rms_norm));
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
        exposed(&warpsmith::add_layer_norm));
  m.def(
      "dropout_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float p, float? eps, bool training, float "
      "weight_offset, Tensor? seed) -> (Tensor, Tensor)",
      exposed(&warpsmith::dropout_add_rms_norm));
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float p, float eps, bool "
      "training, Tensor? seed) -> (Tensor, Tensor)",
      exposed(&warpsmith::dropout_add_layer_norm));
  m.def("dropout_add(Tensor x, Tensor residual, float p, bool training, Tensor? seed) -> Tensor",
        exposed(&warpsmith::dropout_add));
  // The activations, gated ones with a flag by tanh.
#define WARPSMITH_GATED_plain(op) warpsmith::op(gate, up, inplace_backward)
#define WARPSMITH_GATED_tanh(op) warpsmith::op(gate, up, /*tanh=*/true, inplace_backward)
#define WARPSMITH_ROW(op, function, flag)                                                                 \
  m.def(#op "(Tensor gate, Tensor? up, bool inplace_backward) -> Tensor",                                 \
        exposed(+[](const at::Tensor& gate, const std::optional<at::Tensor>& up, bool inplace_backward) { \
          return WARPSMITH_GATED_##flag(op);                                                              \
        }));
  WARPSMITH_GATED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
#define WARPSMITH_ROW(op, function, flag)        \
  m.def(#op "(Tensor x, Tensor bias) -> Tensor", \
        [](const at::Tensor& x, const at::Tensor& bias) { return warpsmith::op(x, bias); });
  WARPSMITH_BIASED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
#define WARPSMITH_ROW(op, function, flag) m.def(#op "(Tensor x) -> Tensor", &warpsmith::op);
  WARPSMITH_UNARY_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation) -> Tensor", exposed(&linear));
  m.def("mlp(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, int activation) -> Tensor", exposed(&mlp));
  m.def(
      "gated_linear(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, int "
      "activation) "
      "-> Tensor",
      exposed(&gated_linear));
  m.def("scaled_linear(Tensor x, Tensor weight, Tensor? bias, int scaling, bool e5m2, bool high) -> Tensor",
        exposed(&scaled_linear));
  m.def("matmul_symmetric(Tensor x) -> Tensor", exposed(&matmul_symmetric));
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int "
      "reduction, float label_smoothing, int? max_chunk_bytes) -> Tensor",
      exposed(&linear_cross_entropy));
  m.def(
      "linear_log_prob(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, float temperature, bool save_logits) "
      "-> (Tensor, Tensor, Tensor)",
      exposed(&linear_log_prob));
  m.def(
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, Tensor? cu_seqlens, int position_offset, "
      "Tensor? position_offsets) -> (Tensor, Tensor)",
      exposed(&rope));
  m.def(
      "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, int reduction, float "
      "label_smoothing, float z_loss, float softcap) -> Tensor",
      exposed(&cross_entropy));
  m.def(
      "quantize_fp8(Tensor x, Tensor? scale, int scaling, int transpose, ScalarType dtype, bool power_of_two, bool "
      "column_sums) -> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor, Tensor?)",
      exposed(&quantize_fp8));
  m.def("normalize_image(Tensor x, float[] mean, float[] std, Tensor? flip) -> Tensor", exposed(&normalize_image));
  m.def("dequantize_fp8(Tensor data, Tensor scale, ScalarType dtype) -> Tensor", exposed(&warpsmith::dequantize_fp8));
  m.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float? eps, bool "
      "interleaved, Tensor? cu_seqlens, int position_offset) -> (Tensor, Tensor)",
      exposed(&qk_norm_rope));
  m.def(
      "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] "
      "max_exp_avg_sqs, Tensor(e!)[] steps, float lr, float weight_decay, bool maximize, Tensor? grad_scale, Tensor? "
      "found_inf, Tensor? lr_tensor) -> ()",
      exposed(&adamw));
}
