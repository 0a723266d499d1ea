#include "sim/machine.h"

namespace warpsmith::sim {
void ProxyView::reset() {
  for (size_t index : touched_) granules_[index] = {};
  touched_.clear();
  fences_ = 0;
}

ProxyView::Granule& ProxyView::granule(size_t index) {
  if (granules_.empty()) granules_.resize(kArenaBytes / kGranuleBytes);
  Granule& g = granules_[index];
  if (!g.known) touched_.push_back(index);
  return g;
}

// A granule may reach into the guarded gap behind an array.
__attribute__((no_sanitize("address"))) static uint64_t granule_hash(const unsigned char* p) {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  const auto* words = reinterpret_cast<const uint64_t*>(p);
  for (int i = 0; i < 16; ++i) {
    h = (h ^ words[i]) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

void ProxyView::wrote(const Block& block, const unsigned char* p, size_t bytes) {
  const auto offset = static_cast<size_t>(p - block.arena);
  for (size_t i = offset / kGranuleBytes; i * kGranuleBytes < offset + bytes; ++i) {
    Granule& g = granule(i);
    g = {granule_hash(block.arena + i * kGranuleBytes), fences_, true};
  }
}

void ProxyView::reads(const Block& block, const unsigned char* p, size_t bytes, const char* what, Site site) {
  const auto offset = static_cast<size_t>(p - block.arena);
  for (size_t i = offset / kGranuleBytes; i * kGranuleBytes < offset + bytes; ++i) {
    Granule& g = granule(i);
    const uint64_t hash = granule_hash(block.arena + i * kGranuleBytes);
    if (g.known && g.hash == hash) continue;
    if (fences_ == g.fences)
      fail(std::string(what) +
               ": reads shared memory that ordinary stores wrote without fence_async_shared() behind them",
           site);
    g = {hash, fences_, true};
  }
}

}  // namespace warpsmith::sim
