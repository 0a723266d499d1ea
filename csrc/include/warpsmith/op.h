#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace warpsmith::detail {

// A raw op of the op library. Looked up once by the caller (a static), so that a call costs what torch's own ops cost.
template <class Signature> c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace warpsmith::detail
