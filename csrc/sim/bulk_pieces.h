#pragma once
#include <cstring>

#include "device/convert.h"
#include "sim/machine.h"

// What a bulk copy moves: its box in pieces of at most 16 bytes, where each lies, and how it is copied or added.
namespace warpsmith::sim {

inline void copy_chunk(unsigned char* to, const unsigned char* from, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = from[i];
}

inline void add_chunk(unsigned char* to, const unsigned char* from, int bytes, Dtype dtype) {
  const auto apply = [&]<class T>(T) {
    for (int i = 0; i < bytes; i += static_cast<int>(sizeof(T))) {
      T a, b;
      std::memcpy(&a, to + i, sizeof(T));
      std::memcpy(&b, from + i, sizeof(T));
      const T sum = device::from_float<T>(device::to_float(a) + device::to_float(b));
      std::memcpy(to + i, &sum, sizeof(T));
    }
  };
  if (dtype == Dtype::float32)
    apply(float{});
  else if (dtype == Dtype::float16)
    apply(float16{});
  else
    apply(bfloat16{});
}

// Calls f(shared offset, global address or null outside the tensor, bytes) for pieces of at most 16 bytes of a copy's
// box.
template <class F> void for_each_piece(const BulkOperation& op, F&& f) {
  if (!op.tensor) {
    for (int i = 0; i < op.bytes; i += 16) f(static_cast<uint32_t>(i), op.global + i, 16);
    return;
  }
  const TensorMapContent m = content_of(op.map, op.site);
  const int element = size_bytes(m.dtype), per_piece = 16 / element;
  int64_t index[5] = {};
  uint32_t offset = 0;
  for (bool more = true; more;) {
    bool row_inside = true;
    auto address = reinterpret_cast<uintptr_t>(m.base);  // may wrap around, as the hardware's does
    for (int d = 1; d < m.rank; ++d) {
      const int64_t at = op.coordinates[d] + index[d];
      row_inside = row_inside && at >= 0 && at < m.sizes[d];
      address += static_cast<uint64_t>(at) * static_cast<uint64_t>(m.strides_bytes[d - 1]);
    }
    auto* const row = reinterpret_cast<unsigned char*>(address);
    for (int i = 0; i <= m.box_minus_one[0]; i += per_piece, offset += 16) {
      const int64_t first = int64_t{op.coordinates[0]} + i;
      if (row_inside && first >= 0 && first + per_piece <= m.sizes[0])
        f(offset, row + first * element, 16);
      else
        for (int k = 0; k < per_piece; ++k) {
          const bool inside = row_inside && first + k >= 0 && first + k < m.sizes[0];
          f(offset + static_cast<uint32_t>(k * element), inside ? row + (first + k) * element : nullptr, element);
        }
    }
    more = false;
    for (int d = 1; d < m.rank && !more; ++d) {
      more = ++index[d] <= m.box_minus_one[d];
      if (!more) index[d] = 0;
    }
  }
}

inline uint32_t permuted(const BulkOperation& op, uint32_t offset) {
  return op.tensor ? device::swizzled(content_of(op.map, op.site).swizzle, offset) : offset;
}

}  // namespace warpsmith::sim
