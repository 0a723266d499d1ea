#pragma once
#include <cstdint>

namespace warpsmith {

enum class Dtype : uint8_t { float32, float16, bfloat16, float64 };

constexpr const char* name(Dtype d) {
  switch (d) {
    case Dtype::float32: return "float32";
    case Dtype::float16: return "float16";
    case Dtype::bfloat16: return "bfloat16";
    case Dtype::float64: return "float64";
  }
  return "unknown";
}

constexpr int size_bytes(Dtype d) {
  switch (d) {
    case Dtype::float16:
    case Dtype::bfloat16: return 2;
    case Dtype::float32: return 4;
    case Dtype::float64: return 8;
  }
  return 0;
}

}  // namespace warpsmith
