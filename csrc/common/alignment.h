#pragma once
#include <cstdint>

#include "common/dtype.h"

// Whether accesses of 16 bytes are possible. Launchers report it to the choosers.
namespace warpsmith {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A null pointer counts as aligned.
inline bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
inline bool on_16_bytes(int64_t elements, Dtype dtype) { return elements * size_bytes(dtype) % 16 == 0; }

// Every row of a matrix; `stride` in elements.
inline bool rows_on_16_bytes(const void* base, int64_t stride, int64_t rows, Dtype dtype) {
  return on_16_bytes(base) && (!base || rows <= 1 || on_16_bytes(stride, dtype));
}

}  // namespace warpsmith
