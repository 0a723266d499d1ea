#pragma once
#include <cstdint>

namespace warpsmith {

// 8-bit storage types of the OCP 8-bit floating point specification: bits only. Arithmetic happens in float; the
// conversions are device/float8.h. e4m3 (torch.float8_e4m3fn): up to 448, no infinity, NaN is 0x7f and 0xff.
struct float8_e4m3 {
  uint8_t bits;
};

// e5m2 (torch.float8_e5m2): up to 57344, infinity is 0x7c, NaN above it.
struct float8_e5m2 {
  uint8_t bits;
};

}  // namespace warpsmith
