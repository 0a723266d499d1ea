#pragma once
#include <cstdint>

// What the portable kernels of attention (code of sm_80 and newer) are compiled for.
namespace warpsmith::attention {

// A block owns `rows` rows of the matrix of queries and keys, and goes over its columns in steps. A warp owns 16 rows.
// In the forward and for dq rows are queries, for dk and dv they are keys.
struct PortableTile {
  int element_bytes;
  int head_dim;      // of q, k and v, which are padded to it
  int rows;          // a block's
  int columns;       // a step's
  int column_parts;  // warps that share 16 keys and their products, each with a part of the columns of dk and dv
  int stages;        // steps whose rows are in shared memory or on the way

  // 16 bytes more than the elements: eight neighbouring rows lie in different banks.
  constexpr int row_bytes() const { return head_dim * element_bytes + 16; }
  constexpr int threads() const { return rows * 2; }
  constexpr int threads_of_keys() const { return threads() * column_parts; }
  constexpr int forward_shared_bytes() const { return (rows + 2 * columns) * row_bytes(); }
  // Two tensors of rows; a stage has two of columns, and lse and delta of each column.
  constexpr int stage_bytes() const { return 2 * columns * row_bytes() + 2 * columns * 4; }
  constexpr int backward_shared_bytes() const { return 2 * rows * row_bytes() + stages * stage_bytes(); }
};

// Within the 99 KiB that a block may have on GPUs of compute capability 8.6, 8.9 and 12.0.
constexpr int kPortableSharedBytes = 99 * 1024;

constexpr PortableTile kPortableForward[] = {
    {2, 64, 64, 64, 1, 1}, {2, 128, 64, 64, 1, 1}, {2, 256, 64, 32, 1, 1},
    {4, 64, 64, 32, 1, 1}, {4, 128, 64, 32, 1, 1}, {4, 256, 64, 16, 1, 1},
};
constexpr PortableTile kPortableBackward[] = {
    {2, 64, 64, 32, 1, 2}, {2, 128, 64, 32, 1, 2}, {2, 256, 64, 16, 2, 1},
    {4, 64, 64, 32, 1, 2}, {4, 128, 64, 16, 2, 1}, {4, 256, 32, 16, 4, 1},
};

// The place in either list of the first tile for these elements and head dimensions (the larger of both).
constexpr int portable_tile(int element_bytes, int64_t head_dim) {
  int i = 0;
  while (kPortableForward[i].element_bytes != element_bytes || kPortableForward[i].head_dim < head_dim) ++i;
  return i;
}

constexpr bool portable_tiles_fit() {
  for (const PortableTile& t : kPortableForward)
    if (t.forward_shared_bytes() > kPortableSharedBytes) return false;
  for (const PortableTile& t : kPortableBackward)
    if (t.backward_shared_bytes() > kPortableSharedBytes) return false;
  return true;
}
static_assert(portable_tiles_fit());

}  // namespace warpsmith::attention
