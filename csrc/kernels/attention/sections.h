#pragma once
#include <cstdint>

#include "common/host_device.h"

// The order of the tiles of sequences of equal length: by (section, row tile, head). A section is a group of heads
// whose keys and values fit together into the L2 cache.
//
// In a large section all blocks read from memory at its start, and hardly later. In a small one at the end, most blocks
// wait for the few that began a long tile late. So the forward's last section takes as many heads as fit, and the
// others take an eighth of that.
namespace warpsmith::attention {

struct Sections {
  int heads;         // of all sequences
  int row_tiles;     // of a head
  int together;      // heads of a section
  int joined;        // the last heads, which are one larger section; 0: none. The others are whole sections
  bool heads_first;  // neighbouring numbers are different heads
  bool descending;   // with heads_first: the last row tile, the longest if causal, comes first
};

struct SectionTile {
  int head, row_tile;
};

// Tile n of heads * row_tiles.
WARPSMITH_HOST_DEVICE SectionTile section_tile(const Sections& p, int n) {
  const auto least = [](int a, int b) { return a < b ? a : b; };
  const int first_joined = p.heads - p.joined;
  const int first_head = least(n / (p.together * p.row_tiles) * p.together, first_joined);
  const int within = n - first_head * p.row_tiles;
  if (!p.heads_first) return {first_head + within / p.row_tiles, within % p.row_tiles};
  const int heads = first_head < first_joined ? least(p.together, first_joined - first_head) : p.joined;
  const int row_tile = within / heads;
  return {first_head + within % heads, p.descending ? p.row_tiles - 1 - row_tile : row_tile};
}

struct SectionHeads {
  int together, joined;  // as in Sections
};

// The forward's sections. `fit`: heads of keys whose keys and values fit into the cache, each read by `group` of
// `heads` heads.
inline SectionHeads forward_sections(int64_t heads, int64_t fit, int64_t group) {
  int64_t key_heads = 1;  // a power of two
  while (2 * key_heads <= fit && 2 * key_heads * group <= heads) key_heads *= 2;
  const int64_t last = key_heads * group, together = (key_heads < 8 ? 1 : key_heads / 8) * group;
  return {static_cast<int>(together), static_cast<int>(heads - (heads - last) / together * together)};
}

}  // namespace warpsmith::attention
