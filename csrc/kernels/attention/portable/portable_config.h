#pragma once
#include <cstdint>

// The configurations of the portable attention kernels (code of sm_80 and newer).
namespace warpsmith::attention {

// A block owns `rows` rows of the matrix of queries and keys, and loops over its columns in steps. Rows are queries in
// the forward and for dq; rows are keys for dk and dv.
struct PortableTile {
  int element_bytes;
  bool extended;     // with softcap, biases, masks and dropout: more registers, and more code between the products
  int head_dim;      // q, k and v are padded to it
  int rows;          // per block
  int columns;       // per step
  int warp_tiles;    // a warp owns 16 * warp_tiles rows
  int column_parts;  // dk and dv in float: warps that share 16 keys and divide the columns of dk and dv
  int stages;        // steps whose data is in shared memory or in flight

  // 16 bytes of padding put eight neighbouring rows into different banks.
  constexpr int row_bytes() const { return head_dim * element_bytes + 16; }
  constexpr int threads() const { return rows * 2 / warp_tiles * column_parts; }
  constexpr int forward_shared_bytes() const { return (rows + 2 * columns) * row_bytes(); }
  // A stage holds the columns of two tensors. For dk and dv it also holds the lse and delta of each column.
  constexpr int stage_bytes(bool of_keys) const { return 2 * columns * row_bytes() + (of_keys ? 2 * columns * 4 : 0); }
  constexpr int backward_shared_bytes(bool of_keys) const {
    return 2 * rows * row_bytes() + stages * stage_bytes(of_keys);
  }
};

// dk and dv of 16-bit elements. Four warps together make the probabilities and dS of a step, and exchange them in
// shared memory. `rows`, `columns` and `head_dim` as above.
struct PortableKeyTile {
  bool extended;
  int head_dim, rows, columns;
  int warp_tiles;  // a warp makes 16 * warp_tiles rows of dS
  int stages;
  static constexpr int kWarps = 4, kGradientTiles = 2;  // kGradientTiles: 16-key tiles of dk and dv per warp

  constexpr int row_bytes() const { return head_dim * 2 + 16; }
  constexpr int threads() const { return kWarps * 32; }
  constexpr int warp_columns() const { return columns * rows / (16 * warp_tiles) / kWarps; }     // of dS
  constexpr int warp_width() const { return head_dim * rows / (16 * kGradientTiles) / kWarps; }  // of dk and dv
  constexpr int score_bytes() const { return rows * (columns * 2 + 16); }
  constexpr int stage_bytes() const { return 2 * columns * (row_bytes() + 4); }
  constexpr int shared_bytes() const { return 2 * (rows * row_bytes() + score_bytes()) + stages * stage_bytes(); }
};

// dq, dk and dv in one kernel: 16-bit elements, problems that are not extended. `rows` are keys, `columns` queries. The
// warps divide each product anew: probabilities and dS, then dk and dv, then dq.
struct PortableOrderedDqTile {
  int head_dim, rows, columns, warps;
  int query_tiles;  // a warp owns 16 * query_tiles rows of dq
  int stages;
  static constexpr int kRowTiles = 2;  // a warp owns 32 rows of dS, dk and dv

  constexpr int row_bytes() const { return head_dim * 2 + 16; }
  constexpr int threads() const { return warps * 32; }
  constexpr int warp_columns() const { return columns * rows / (16 * kRowTiles) / warps; }       // of dS
  constexpr int warp_width() const { return head_dim * rows / (16 * kRowTiles) / warps; }        // of dk and dv
  constexpr int query_width() const { return head_dim * columns / (16 * query_tiles) / warps; }  // of dq
  constexpr int score_bytes() const { return rows * (columns * 2 + 16); }
  constexpr int stage_bytes() const { return 2 * columns * (row_bytes() + 4); }
  constexpr int shared_bytes() const { return 2 * (rows * row_bytes() + score_bytes()) + stages * stage_bytes(); }
};

// The most shared memory of a block on GPUs of compute capability 8.6, 8.9 and 12.0.
constexpr int kPortableSharedBytes = 99 * 1024;
constexpr int kMostSharedBytes = 227 * 1024;  // of a GPU of compute capability 9.0

constexpr PortableTile kPortableForward[] = {
    {2, false, 64, 128, 64, 2, 1, 1}, {2, false, 128, 128, 48, 2, 1, 1}, {2, false, 256, 64, 64, 1, 1, 1},
    {2, true, 64, 128, 32, 2, 1, 1},  {2, true, 128, 128, 32, 2, 1, 1},  {2, true, 256, 64, 32, 1, 1, 1},
    {4, true, 64, 64, 32, 1, 1, 1},   {4, true, 128, 64, 32, 1, 1, 1},   {4, true, 256, 64, 16, 1, 1, 1},
};
constexpr PortableTile kPortableQueries[] = {
    {2, false, 64, 128, 32, 2, 1, 2}, {2, false, 128, 64, 32, 1, 1, 2}, {2, false, 256, 64, 32, 1, 1, 1},
    {2, true, 64, 128, 32, 2, 1, 2},  {2, true, 128, 128, 16, 2, 1, 2}, {2, true, 256, 64, 32, 1, 1, 1},
    {4, true, 64, 64, 32, 1, 1, 2},   {4, true, 128, 64, 16, 1, 1, 1},  {4, true, 256, 32, 16, 1, 1, 1},
};
// dbias. Only extended problems have a bias.
constexpr PortableTile kPortableBias[] = {
    {2, true, 64, 64, 64, 1, 1, 1}, {2, true, 128, 64, 64, 1, 1, 1}, {2, true, 256, 64, 32, 1, 1, 1},
    {4, true, 64, 64, 32, 1, 1, 1}, {4, true, 128, 64, 16, 1, 1, 1}, {4, true, 256, 32, 16, 1, 1, 1},
};
constexpr int kPortablePlain = 3;  // tiles of the other lists without counterpart here
// dk and dv of 16-bit elements, then of float.
constexpr PortableKeyTile kPortableKeys[] = {
    {false, 64, 64, 64, 2, 2}, {false, 128, 64, 32, 2, 2}, {false, 256, 32, 32, 1, 1},
    {true, 64, 64, 64, 2, 2},  {true, 128, 64, 32, 2, 2},  {true, 256, 32, 32, 1, 1},
};
constexpr PortableTile kPortableFloatKeys[] = {
    {4, true, 64, 64, 32, 1, 1, 2}, {4, true, 128, 64, 16, 1, 2, 1}, {4, true, 256, 32, 16, 1, 4, 1}};
constexpr int kPortable16Bit = 6;  // tiles of 16-bit elements, at the start of each list
constexpr int kPortableTiles = static_cast<int>(sizeof(kPortableForward) / sizeof(kPortableForward[0]));

// For each head dimension, the largest tile first; a second stage takes a tenth less time (H200). The small tile of
// head dimension 128 is for GPUs whose shared memory holds no other. It has half the keys, so that dq is added twice as
// often.
constexpr PortableOrderedDqTile kPortableOrderedDq[] = {{64, 128, 64, 8, 1, 2},  {64, 128, 64, 8, 1, 1},
                                                        {128, 128, 64, 8, 2, 2}, {128, 128, 64, 8, 2, 1},
                                                        {128, 64, 64, 4, 2, 1},  {256, 64, 64, 8, 2, 1}};
constexpr int kPortableOrderedDqTiles = static_cast<int>(sizeof(kPortableOrderedDq) / sizeof(kPortableOrderedDq[0]));

// The index in kPortableOrderedDq for this head dimension (the larger of head_dim and head_dim_v) on a GPU whose blocks
// can have so much dynamic shared memory; kPortableOrderedDqTiles: none.
constexpr int portable_ordered_dq_tile(int64_t head_dim, int shared_bytes) {
  constexpr int kStaticBytes = 16;
  int i = 0;
  while (i < kPortableOrderedDqTiles && (kPortableOrderedDq[i].head_dim < head_dim ||
                                         kPortableOrderedDq[i].shared_bytes() + kStaticBytes > shared_bytes))
    ++i;
  return i;
}

// The index of the first tile for these elements and this head dimension (the larger of head_dim and head_dim_v).
constexpr int portable_tile(int element_bytes, bool extended, int64_t head_dim) {
  int i = 0;
  while (kPortableForward[i].element_bytes != element_bytes ||
         kPortableForward[i].extended != (extended || element_bytes == 4) || kPortableForward[i].head_dim < head_dim)
    ++i;
  return i;
}
constexpr int portable_key_rows(int tile) {
  return tile < kPortable16Bit ? kPortableKeys[tile].rows : kPortableFloatKeys[tile - kPortable16Bit].rows;
}

constexpr bool portable_tiles_fit() {
  for (const PortableTile& t : kPortableForward)
    if (t.forward_shared_bytes() > kPortableSharedBytes) return false;
  for (const PortableTile& t : kPortableQueries)
    if (t.backward_shared_bytes(false) > kPortableSharedBytes) return false;
  for (const PortableTile& t : kPortableBias)
    if (t.backward_shared_bytes(false) > kPortableSharedBytes) return false;
  for (const PortableTile& t : kPortableFloatKeys)
    if (t.backward_shared_bytes(true) > kPortableSharedBytes) return false;
  for (const PortableKeyTile& t : kPortableKeys)
    if (t.shared_bytes() > kPortableSharedBytes) return false;
  // Every GPU has a tile of kPortableOrderedDq for head dimensions to 128, and the kernels that it replaces are not
  // built.
  return portable_ordered_dq_tile(64, kPortableSharedBytes) < kPortableOrderedDqTiles &&
         portable_ordered_dq_tile(128, kPortableSharedBytes) < kPortableOrderedDqTiles;
}
static_assert(portable_tiles_fit());

}  // namespace warpsmith::attention
