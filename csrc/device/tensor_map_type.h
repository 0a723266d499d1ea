#pragma once
#include <cstdint>

namespace warpsmith {

// A tensor map as the hardware wants it: 128 opaque bytes, made by make_tensor_map() (device/tensor_map.h).
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace warpsmith
