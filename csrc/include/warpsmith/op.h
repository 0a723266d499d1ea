#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// How the public functions call the raw ops of the library, and how a raw op and its backward become one
// differentiable function: by the names in their schemas.
//
// Bad input to a public function throws an error that names op, argument, what was expected and what was given.
namespace warpsmith::detail {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Whether an optional argument is there. An undefined tensor is none, as in torch.
inline bool is_given(const OptionalTensor& t) { return t && t->defined(); }

// A raw op of the op library. Looked up once by the caller (a static), so that a call costs what torch's own ops cost.
template <class Signature> c10::TypedOperatorHandle<Signature> find_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Signature>();
}

// Calls a raw op, below autograd. Returns its outputs, all tensors.
inline variable_list call_raw(const c10::OperatorHandle& op, Stack arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(arguments);
  variable_list outputs;
  for (c10::IValue& value : arguments) outputs.push_back(std::move(value).toTensor());
  return outputs;
}

// What a backward has.
struct Backward {
  AutogradContext* ctx;
  Stack arguments;           // of the forward; a tensor that was not saved has left its dtype
  variable_list outputs;     // of the forward; undefined where not saved
  variable_list grads;       // of the outputs; undefined where there is none
  std::vector<bool> wanted;  // for each argument of the forward
};

struct Op;

// What an op's schemas do not say.
struct OpRule {
  std::string name;
  std::string forward = name + "_forward", backward = name + "_backward", direct = name + "_inference";
  // Computes the gradients of Op::inputs; without it, raw_gradients.
  variable_list (*gradients)(const Op&, Backward&) = nullptr;
  std::vector<std::string> inputs = {};  // that have a gradient, beyond those that the raw backward returns
  std::vector<std::string> saved = {};   // arguments and outputs of the forward, beyond those that it reads
  size_t outputs = 1;                    // that have a gradient, at least
  std::map<std::string, c10::IValue> constants = {};  // arguments of the raw backward
  bool early_gradient = false;  // the forward's last output is a gradient, kept for the first backward
  bool python_has_second_derivatives = true;
};

// A raw op, its backward (which may be missing), and where each argument of the backward comes from:
//
//   want_d<argument>  whether the gradient of that argument of the forward is wanted
//   <argument>        an argument of the forward
//   <output>          an output of the forward
//   d<output>         the gradient of an output
//   <argument>_dtype  the dtype of an argument of the forward that is not saved
struct Op {
  enum class From { wanted, argument, dtype, output, gradient, constant };
  struct Source {
    From from;
    size_t index = 0;
    c10::IValue constant = {};
  };

  OpRule rule;
  c10::OperatorHandle forward, direct;  // direct: where no gradient is needed
  std::optional<c10::OperatorHandle> backward, backward_inplace;
  std::vector<Source> sources;  // of each argument of the backward
  std::vector<size_t> inputs, saved_arguments, saved_outputs;
  size_t outputs;  // that a caller sees: up to the last with a gradient

  explicit Op(OpRule rule_)
      : rule(std::move(rule_)),
        forward(c10::Dispatcher::singleton().findSchemaOrThrow(("warpsmith::" + rule.forward).c_str(), "")),
        direct(find(rule.direct).value_or(forward)),
        backward(find(rule.backward)),
        backward_inplace(find(rule.backward + "_")),
        outputs(rule.outputs) {
    const auto& arguments = forward.schema().arguments();
    if (backward) {
      for (const auto& argument : backward->schema().arguments()) sources.push_back(source_of(argument.name()));
      for (const auto& gradient : backward->schema().returns()) {
        const auto input = position(arguments, gradient.name().substr(1));
        if (!input) break;  // behind the gradients
        inputs.push_back(*input);
      }
    }
    for (const std::string& name : rule.inputs) inputs.push_back(position(arguments, name).value());
    for (const std::string& name : rule.saved) sources_saved(source_of(name));
    for (const Source& source : sources) {
      sources_saved(source);
      if (source.from == From::gradient) outputs = std::max(outputs, source.index + 1);
    }
  }

 private:
  static std::optional<c10::OperatorHandle> find(const std::string& name) {
    return c10::Dispatcher::singleton().findSchema({"warpsmith::" + name, ""});
  }

  static std::optional<size_t> position(const std::vector<c10::Argument>& list, const std::string& name) {
    for (size_t i = 0; i < list.size(); ++i)
      if (list[i].name() == name) return i;
    return std::nullopt;
  }

  Source source_of(const std::string& name) const {
    const auto &arguments = forward.schema().arguments(), &returns = forward.schema().returns();
    if (const auto constant = rule.constants.find(name); constant != rule.constants.end())
      return {From::constant, 0, constant->second};
    if (name.starts_with("want_d")) return {From::wanted, position(arguments, name.substr(6)).value()};
    if (const auto i = position(arguments, name)) return {From::argument, *i};
    if (const auto i = position(returns, name)) return {From::output, *i};
    if (name.ends_with("_dtype"))
      if (const auto i = position(arguments, name.substr(0, name.size() - 6))) return {From::dtype, *i};
    if (const auto i = position(returns, name.substr(1))) return {From::gradient, *i};
    if (name == "dlse") return source_of("dlogsumexp");
    throw std::logic_error(rule.backward + ": " + name + ": expected a name of " + rule.forward + ", got another");
  }

  void sources_saved(const Source& source) {
    if (source.from == From::argument) saved_arguments.push_back(source.index);
    if (source.from == From::output) saved_outputs.push_back(source.index);
  }
};

// Tensors that a function of the graph depends on: separate arguments, because torch sees no tensors inside a list.
using Slots = std::array<OptionalTensor, 12>;

// Whether a call must go through an autograd::Function. Forward-mode derivatives take that way too: torch refuses
// them there, where a raw op would drop them.
inline bool has_derivative(const at::Tensor& t) {
  return t.defined() && ((at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(/*level=*/0).defined());
}

[[noreturn]] inline void refuse_second_derivative(const Op& op) {
  throw std::runtime_error(op.rule.name + ": second derivatives are not available" +
                           (op.rule.python_has_second_derivatives ? " in C++; the Python function has them" : ""));
}

// Ops are static, so the graph keeps their address.
inline const Op& op_of(AutogradContext* ctx) { return *reinterpret_cast<const Op*>(ctx->saved_data["op"].toInt()); }
inline void keep_op(AutogradContext* ctx, const Op& op) { ctx->saved_data["op"] = reinterpret_cast<int64_t>(&op); }

// Under create_graph: gradients whose own derivative, for the tensors they were computed from, is refused instead of
// silently zero.
struct RefuseDerivative : torch::autograd::Function<RefuseDerivative> {
  template <class... Slot>
  static variable_list forward(AutogradContext* ctx, const Op& op, const variable_list& gradients, const Slot&...) {
    keep_op(ctx, op);
    return gradients;
  }

  static variable_list backward(AutogradContext* ctx, variable_list) { refuse_second_derivative(op_of(ctx)); }
};

// Fills the arguments of the raw backward (or of another raw op with the same ones) and calls it.
inline variable_list raw_gradients(const Op& op, const Backward& b, const c10::OperatorHandle& raw) {
  Stack stack;
  Slots slots;
  size_t used = 0;
  for (const Op::Source& source : op.sources) {
    const size_t i = source.index;
    c10::IValue value = source.constant;
    if (source.from == Op::From::wanted) value = static_cast<bool>(b.wanted[i]);
    if (source.from == Op::From::argument || source.from == Op::From::dtype) value = b.arguments[i];
    if (source.from == Op::From::output) value = b.outputs[i];
    if (source.from == Op::From::gradient) {
      const bool optional = raw.schema().arguments()[stack.size()].type()->kind() == c10::TypeKind::OptionalType;
      if (b.grads[i].defined())
        value = b.grads[i];
      else if (!optional)
        value = at::zeros(b.ctx->saved_data["shape"].toIntVector(),
                          b.grads[i == 0].options().dtype(b.ctx->saved_data["dtype"].toScalarType()));
    }
    if (value.isTensor() && value.toTensor().requires_grad()) slots.at(used++) = value.toTensor();
    stack.push_back(std::move(value));
  }
  variable_list gradients = call_raw(raw, std::move(stack));
  if (!at::GradMode::is_enabled()) return gradients;
  for (at::Tensor& gradient : gradients)
    if (!gradient.defined()) gradient = at::empty(0);  // a Function gives no undefined tensors
  return std::apply([&](const auto&... slot) { return RefuseDerivative::apply(op, gradients, slot...); }, slots);
}

inline variable_list raw_gradients(const Op& op, const Backward& b) { return raw_gradients(op, b, *op.backward); }

// The differentiable function of an op.
struct Differentiable : torch::autograd::Function<Differentiable> {
  template <class... Slot>
  static variable_list forward(AutogradContext* ctx, const Op& op, Stack arguments, const Slot&...) {
    variable_list outputs = call_raw(op.forward, arguments), saved;
    for (const size_t i : op.saved_arguments)
      saved.push_back(arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor());
    for (const size_t i : op.saved_outputs) saved.push_back(outputs[i]);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    for (c10::IValue& argument : arguments)
      if (argument.isTensor()) argument = argument.toTensor().scalar_type();
    keep_op(ctx, op);
    ctx->saved_data["arguments"] = c10::ivalue::Tuple::create(std::move(arguments));
    ctx->saved_data["shape"] = outputs[0].sizes();
    ctx->saved_data["dtype"] = outputs[0].scalar_type();
    if (op.rule.early_gradient) ctx->saved_data["early_gradient"] = outputs.back();
    outputs.resize(op.outputs);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(2 + std::tuple_size_v<Slots>);  // one for each argument of forward
    bool any = false;
    for (const at::Tensor& grad : grads) any |= grad.defined();
    if (!any) return result;
    const Op& op = op_of(ctx);
    Backward b{ctx, ctx->saved_data["arguments"].toTupleRef().elements(),
               variable_list(op.forward.schema().returns().size()), std::move(grads),
               std::vector<bool>(op.forward.schema().arguments().size())};
    // Edges are numbered over the tensors that are there.
    size_t edge = 0, next = 0;
    for (const size_t i : op.inputs)
      if (!b.arguments[i].isNone()) b.wanted[i] = ctx->needs_input_grad(edge++);
    const variable_list saved = ctx->get_saved_variables();
    for (const size_t i : op.saved_arguments)
      if (const at::Tensor& t = saved[next++]; t.defined()) b.arguments[i] = t;
    for (const size_t i : op.saved_outputs) b.outputs[i] = saved[next++];
    variable_list gradients = op.rule.gradients ? op.rule.gradients(op, b) : raw_gradients(op, b);
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (b.wanted[op.inputs[i]]) result[2 + i] = std::move(gradients[i]);
    return result;
  }
};

// Whether an input of the op has a derivative.
inline bool differentiable(const Op& op, const Stack& arguments) {
  return std::any_of(op.inputs.begin(), op.inputs.end(),
                     [&](size_t i) { return arguments[i].isTensor() && has_derivative(arguments[i].toTensor()); });
}

// Calls an op with the arguments of its schema, of which the last may be left out if they have a default; its outputs
// have gradients if an input has.
inline variable_list call(const Op& op, Stack arguments) {
  const auto& declared = op.forward.schema().arguments();
  for (size_t i = arguments.size(); i < declared.size(); ++i) arguments.push_back(declared[i].default_value().value());
  for (c10::IValue& argument : arguments)
    if (argument.isTensor() && !argument.toTensor().defined()) argument = {};
  if (!differentiable(op, arguments)) return call_raw(op.direct, std::move(arguments));
  Slots slots;
  for (size_t i = 0; i < op.inputs.size(); ++i) slots.at(i) = arguments[op.inputs[i]].toOptional<at::Tensor>();
  return std::apply([&](const auto&... slot) { return Differentiable::apply(op, std::move(arguments), slot...); },
                    slots);
}

inline std::pair<at::Tensor, at::Tensor> pair(const variable_list& outputs) { return {outputs[0], outputs[1]}; }

// Refuses a gradient for a tensor that has none.
inline void refuse_gradient(const char* op, const char* argument, const OptionalTensor& t) {
  TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !t || !t->requires_grad(), op, ": ", argument,
                    ": expected a tensor that requires no gradient, got one that does");
}

// The eps of an RMS norm by torch's rule: without one the machine epsilon of the arithmetic.
inline double epsilon_of(const at::Tensor& x, std::optional<double> eps) {
  if (eps) return *eps;
  const bool wide = x.scalar_type() == at::kDouble;
  return wide ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

// The seed of a call with dropout: the caller's, or one drawn from torch's generator as the Python function does.
inline OptionalTensor dropout_seed(const at::Tensor& x, double p, bool training, const OptionalTensor& seed) {
  if (!training || p == 0) return std::nullopt;
  if (is_given(seed) || !(p > 0 && p <= 1)) return seed;  // the op refuses what is no probability
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, at::device(x.device()).dtype(at::kLong));
}

}  // namespace warpsmith::detail
