#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

namespace warpsmith::detail {

// A raw op of the op library. Looked up once by the caller (a static), so that a call costs what torch's own ops cost.
template <class Signature> c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether a call must go through an autograd::Function. Forward-mode derivatives take that way too: torch refuses
// them there, where a raw op would drop them.
inline bool has_derivative(const at::Tensor& t) {
  return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(/*level=*/0).defined();
}

}  // namespace warpsmith::detail
