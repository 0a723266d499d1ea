#pragma once
#include <cstdint>

#include "device/platform.h"

// How 16-byte chunks are permuted in shared memory so that matrix operands read without bank conflicts. The permutation
// is a function of the address: of an atom of 8 rows of `span` bytes, chunk c of row r lies at chunk c ^ (r % (span /
// 16)) (for 128 bytes; shorter spans share one 128-byte line between rows). PTX ISA 5.5.6 "Swizzling modes".
namespace warpsmith::device {

enum class Swizzle : uint8_t { none, bytes32, bytes64, bytes128 };

__host__ __device__ constexpr int swizzle_span_bytes(Swizzle s) {
  return s == Swizzle::bytes128 ? 128 : s == Swizzle::bytes64 ? 64 : s == Swizzle::bytes32 ? 32 : 16;
}

// Alignment a swizzled buffer needs: one period of the pattern.
__host__ __device__ constexpr int swizzle_alignment_bytes(Swizzle s) {
  return s == Swizzle::none ? 128 : 8 * swizzle_span_bytes(s);
}

// Offset of a byte, relative to a buffer aligned to swizzle_alignment_bytes.
__host__ __device__ constexpr uint32_t swizzled(Swizzle s, uint32_t offset) {
  switch (s) {
    case Swizzle::none: return offset;
    case Swizzle::bytes32: return offset ^ (offset >> 3 & 0x10);
    case Swizzle::bytes64: return offset ^ (offset >> 3 & 0x30);
    case Swizzle::bytes128: return offset ^ (offset >> 3 & 0x70);
  }
  return offset;
}

}  // namespace warpsmith::device
