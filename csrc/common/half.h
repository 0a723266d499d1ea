#pragma once
#include <cstdint>

namespace warpsmith {

// 16-bit storage types shared by host and device code: bits only. Arithmetic happens in float; the conversions are
// common/half_host.h on the host (vectorisable) and device/convert.h in kernels.
struct alignas(2) bfloat16 {
  uint16_t bits;
};

struct alignas(2) float16 {
  uint16_t bits;
};

}  // namespace warpsmith
