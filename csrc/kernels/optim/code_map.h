#pragma once
#include <bit>
#include <cstdint>

#include "kernels/optim/quantize.h"

// Kernels look up the codes of quantize.h in this table; dynamic_code() searches through the borders instead.
// A cell is the magnitudes in [0, 1] that share their upper bits. Cells are so narrow that each contains at most one
// border.
namespace warpsmith {

template <bool kSigned> struct CodeMap {
  static constexpr int kUpperBits = kSigned ? 6 : 7;               // of the mantissa
  static constexpr uint32_t kFirst = 127 + (kSigned ? -22 : -21);  // the exponent of the first cell: no border below it
  static constexpr int kCellShift = 24 - kUpperBits;  // of a magnitude whose sign was rotated to the lowest bit
  static constexpr uint32_t kFirstCell = kFirst << kUpperBits, kLastCell = 127u << kUpperBits;  // the last: only 1
  static constexpr uint32_t kCells = kLastCell - kFirstCell + 1;

  static constexpr float kBelowOne = dynamic_value(kCodes - 2, kSigned);  // the value of the code below that of 1

  alignas(16) float values[kCodes];
  // A word per cell.
  //   upper kCellShift bits: where in the cell its border lies: the low bits of the border's magnitude, whose lowest
  //                          bit is 0. All ones: no border.
  //   lower 8 bits: the code below the border; if signed, its distance from the code of zero
  uint32_t cells[(kCells + 3) / 4 * 4];

  constexpr CodeMap() : values(), cells() {
    constexpr int kZero = kSigned ? 127 : 0;
    for (int code = 0; code < kCodes; ++code) values[code] = dynamic_value(code, kSigned);
    int code = kSigned ? kZero : 1;  // a second moment above 0 has no code 0
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      const uint32_t begin = (kFirstCell + cell) << (23 - kUpperBits), end = begin + (1u << (23 - kUpperBits));
      while (code < kCodes - 1 && std::bit_cast<uint32_t>(dynamic_border(code, kSigned)) < begin) ++code;
      const uint32_t border = code < kCodes - 1 ? std::bit_cast<uint32_t>(dynamic_border(code, kSigned)) : end;
      const uint32_t inside = border < end ? 2 * (border - begin) : (1u << kCellShift) - 1;
      cells[cell] = inside << (32 - kCellShift) | static_cast<uint32_t>(code - kZero);
    }
  }
};

// The code of x, in the low byte. x lies in [-1, 1] if signed, else in [0, 1].
template <bool kSigned> WARPSMITH_HOST_DEVICE uint32_t mapped_code(const CodeMap<kSigned>& map, float x) {
  using Map = CodeMap<kSigned>;
  if constexpr (kSigned) x = x < -Map::kBelowOne ? -Map::kBelowOne : x;  // -1 has no code
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  // A negative number has the lowest bit 1. So at a border its magnitude is above, which gives it the lower code.
  const uint32_t magnitude = bits << 1 | (kSigned ? bits >> 31 : 0), cell = magnitude >> Map::kCellShift;
  uint32_t code = map.cells[(cell > Map::kFirstCell ? cell : Map::kFirstCell) - Map::kFirstCell];
  if (magnitude << (32 - Map::kCellShift) > code) ++code;
  if constexpr (!kSigned) return magnitude == 0 ? 0 : code;
  const uint32_t sign = bits >> 31 ? ~0u : 0u;
  return 127 + (code ^ sign) - sign;
}

}  // namespace warpsmith
