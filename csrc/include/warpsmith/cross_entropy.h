#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "warpsmith/detail/cross_entropy_ops.h"
#include "warpsmith/op.h"

namespace warpsmith {

// What becomes of the losses of rows, numbered as torch does: none, mean, sum.
#define WARPSMITH_ROW(name) name,
enum class Reduction : int64_t { WARPSMITH_REDUCTIONS(WARPSMITH_ROW) };
#undef WARPSMITH_ROW

// Options of cross_entropy, as the Python function has them.
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0, z_loss = 0, softcap = 0;
};

namespace detail {

using CrossEntropyRows = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Float16 would lose small gradients before a loss scale comes in, and with reduction none each row has its own scale.
inline bool cross_entropy_gradient_is_early(const at::Tensor& logits, const CrossEntropyOptions& o) {
  return o.reduction != Reduction::none && logits.scalar_type() != at::kHalf;
}

inline at::Tensor cross_entropy_backward(const at::Tensor& dloss, const torch::autograd::variable_list& saved,
                                         const CrossEntropyOptions& o) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                 const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, int64_t, double, double, double);
  static const auto op = find_op<Signature>("warpsmith::cross_entropy_backward");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto weight = saved[2].defined() ? std::optional<at::Tensor>(saved[2]) : std::nullopt;
  return op.call(dloss, saved[0], saved[1], weight, saved[3], saved[4], saved[5],
                 cross_entropy_gradient_is_early(saved[0], o), o.ignore_index, o.label_smoothing, o.z_loss, o.softcap);
}

// The gradient as a function of its own, for create_graph alone: its derivative is refused, never silently zero.
struct CrossEntropyBackward : torch::autograd::Function<CrossEntropyBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& dloss, const at::Tensor& logits,
                            const torch::autograd::variable_list& saved, const CrossEntropyOptions& o) {
    (void)logits;  // an input, so that the result depends on it
    return cross_entropy_backward(dloss, saved, o);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    refuse_second_derivative("cross_entropy", /*python_has_them=*/false);
  }
};

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& target,
                            const std::optional<at::Tensor>& class_weight, const CrossEntropyOptions& o) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor loss, denominator, row_max, row_sum, gradient;
    if (cross_entropy_gradient_is_early(logits, o)) {
      using Signature =
          std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
              const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t, int64_t, double, double,
              double, bool);
      static const auto op = find_op<Signature>("warpsmith::cross_entropy_with_gradient");
      std::tie(loss, std::ignore, std::ignore, std::ignore, denominator, row_max, row_sum, gradient) =
          op.call(logits, target, class_weight, o.ignore_index, static_cast<int64_t>(o.reduction), o.label_smoothing,
                  o.z_loss, o.softcap,
                  /*stats=*/false);
    } else {
      std::tie(loss, std::ignore, std::ignore, std::ignore, denominator, row_max, row_sum) =
          rows(logits, target, class_weight, o);
    }
    ctx->save_for_backward({logits, target, class_weight.value_or(at::Tensor()), row_max, row_sum, denominator});
    if (gradient.defined()) ctx->saved_data["gradient"] = gradient;
    ctx->saved_data["integers"] = std::vector<int64_t>{o.ignore_index, static_cast<int64_t>(o.reduction)};
    ctx->saved_data["numbers"] = std::vector<double>{o.label_smoothing, o.z_loss, o.softcap};
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result(4);  // one for each input of forward
    const at::Tensor& dloss = grads[0];
    if (!dloss.defined()) return result;
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    const auto integers = ctx->saved_data["integers"].toIntVector();
    const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    const CrossEntropyOptions o{integers[0], static_cast<Reduction>(integers[1]), numbers[0], numbers[1], numbers[2]};
    const auto early = ctx->saved_data.find("gradient");
    if (at::GradMode::is_enabled()) {
      result[0] = CrossEntropyBackward::apply(dloss, saved[0], saved, o);
    } else if (early != ctx->saved_data.end()) {
      using Signature = void(const at::Tensor&, const at::Tensor&);
      static const auto op = find_op<Signature>("warpsmith::cross_entropy_scale_");
      result[0] = early->second.toTensor();
      ctx->saved_data.erase(early);  // handed out once; a second backward computes it anew, to the same bits
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.call(result[0], dloss);
    } else {
      result[0] = cross_entropy_backward(dloss, saved, o);
    }
    return result;
  }

  static CrossEntropyRows rows(const at::Tensor& logits, const at::Tensor& target,
                               const std::optional<at::Tensor>& class_weight, const CrossEntropyOptions& o) {
    using Signature = CrossEntropyRows(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t,
                                       int64_t, double, double, double, bool);
    static const auto op = find_op<Signature>("warpsmith::cross_entropy_forward");
    return op.call(logits, target, class_weight, o.ignore_index, static_cast<int64_t>(o.reduction), o.label_smoothing,
                   o.z_loss, o.softcap,
                   /*stats=*/false);
  }
};

}  // namespace detail

// Cross-entropy of logits (..., V), classes last, and int64 targets (...), with a gradient for the logits that is
// computed in the same pass; warpsmith.cross_entropy in Python has the formula and says what the options mean.
//
// The loss is float32 (float64 for float64 logits), whatever the dtype of the logits. class_weight: (V,), float32
// (float64), without gradient. Sums have a fixed order: equal inputs give equal bits.
//
// Input that does not fit throws an error that names op, argument, what was expected and what came.
inline at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                const std::optional<at::Tensor>& class_weight = std::nullopt,
                                const CrossEntropyOptions& options = {}) {
  if (detail::has_derivative(logits)) return detail::CrossEntropy::apply(logits, target, class_weight, options);
  return std::get<0>(detail::CrossEntropy::rows(logits, target, class_weight, options));
}

}  // namespace warpsmith
