#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

namespace warpsmith::detail {

// A raw op of the op library. Looked up once by the caller (a static), so that a call costs what torch's own ops cost.
template <class Signature> c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The name of a raw op of a row: `Op::kName` with a suffix.
template <class Op> std::string raw_name(const char* suffix) { return std::string("warpsmith::") + Op::kName + suffix; }

// What the derivative of a gradient does: it is refused, never silently zero.
[[noreturn]] inline void refuse_second_derivative(const std::string& op, bool python_has_them = true) {
  throw std::runtime_error(op + ": second derivatives are not available" +
                           (python_has_them ? " in C++; the Python function has them" : ""));
}

// Whether a call must go through an autograd::Function. Forward-mode derivatives take that way too: torch refuses
// them there, where a raw op would drop them.
inline bool has_derivative(const at::Tensor& t) {
  return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(/*level=*/0).defined();
}

// The eps of an RMS norm by torch's rule: without one the machine epsilon of the arithmetic.
inline double epsilon_of(const at::Tensor& x, std::optional<double> eps) {
  if (eps) return *eps;
  const bool wide = x.scalar_type() == at::kDouble;
  return wide ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

}  // namespace warpsmith::detail
