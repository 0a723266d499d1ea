#pragma once
#include "bindings/support/tensor.h"
#include "common/dropout.h"

namespace warpsmith {

// The dropout of a call: `seed` as python/warpsmith/_core/dropout.py draws it, or none for no dropout. The tensor must
// outlive the kernel's launch, as every argument does.
inline Dropout check_dropout(const char* op, const std::optional<Tensor>& seed, double p, const Tensor& like) {
  if (!(p >= 0 && p <= 1)) refuse(op, "p", "a number in [0, 1]", std::to_string(p));
  if (!seed) return make_dropout(nullptr, p);
  if (seed->scalar_type() != ScalarType::Long) refuse(op, "seed", "int64", dtype_text(seed->scalar_type()));
  check_shape(op, "seed", *seed, {2});
  check_same_device(op, "seed", *seed, like);
  if (seed->strides()[0] != 1) refuse(op, "seed", "adjacent elements", "a stride");
  return make_dropout(static_cast<const int64_t*>(seed->const_data_ptr()), p);
}

}  // namespace warpsmith
