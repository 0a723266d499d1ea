#include <algorithm>

#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

uint64_t hash_of(const unsigned char* chunk) {
  uint64_t words[2];
  __builtin_memcpy(words, chunk, 16);
  uint64_t h = (words[0] ^ 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull;
  h ^= h >> 32;
  h = (h ^ words[1]) * 0xc4ceb9fe1a85ec53ull;
  return h ^ h >> 32;
}

// Shared memory is filled with these bytes before a block starts.
bool never_written(const unsigned char* chunk) {
  for (size_t i = 0; i < 16; ++i)
    if (chunk[i] != 0xff) return false;
  return true;
}

}  // namespace

void ProxyView::reset() {
  for (size_t index : touched_) chunks_[index] = {};
  touched_.clear();
  last_fence_ = 0;
}

ProxyView::Chunk& ProxyView::chunk(size_t index) {
  if (chunks_.empty()) {
    Untracked scope;
    chunks_.resize(kArenaBytes / kChunkBytes);
    touched_.reserve(chunks_.size());
  }
  Chunk& c = chunks_[index];
  if (!c.known && c.writer < 0) touched_.push_back(index);
  return c;
}

bool ProxyView::fenced(const Chunk& c, const Block& block) const {
  if (c.writer < 0) return last_fence_ > c.looked;
  return std::max(block.thread[static_cast<size_t>(c.writer)].proxy_fence, self().proxy_fence) > c.stored;
}

void ProxyView::stored(const Thread& by, const unsigned char* p, size_t bytes) {
  const auto offset = static_cast<size_t>(p - by.block->arena);
  for (size_t i = offset / kChunkBytes; i * kChunkBytes < offset + bytes; ++i) {
    Chunk& c = chunk(i);
    c.writer = by.linear_index;
    c.stored = machine.proxy_fences;
  }
}

void ProxyView::wrote(const Block& block, const unsigned char* p, size_t bytes) {
  const auto offset = static_cast<size_t>(p - block.arena);
  for (size_t i = offset / kChunkBytes; i * kChunkBytes < offset + bytes; ++i)
    chunk(i) = {.hash = hash_of(block.arena + i * kChunkBytes), .looked = last_fence_, .known = true};
}

void ProxyView::will_write(const Block& block, const unsigned char* p, size_t bytes) {
  const auto offset = static_cast<size_t>(p - block.arena);
  for (size_t i = offset / kChunkBytes; i * kChunkBytes < offset + bytes; ++i) {
    wrote(block, block.arena + i * kChunkBytes, 1);
    chunks_[i].awaited = true;
  }
}

void ProxyView::overwrites(const Block& block, const unsigned char* p, size_t bytes, const char* what, Site site) {
  const auto offset = static_cast<size_t>(p - block.arena);
  for (size_t i = offset / kChunkBytes; i * kChunkBytes < offset + bytes; ++i) {
    const Chunk& c = chunk(i);
    const unsigned char* now = block.arena + i * kChunkBytes;
    const bool changed = c.writer >= 0 || (c.known ? c.hash != hash_of(now) : !never_written(now));
    if (changed && !fenced(c, block))
      fail(std::string(what) +
               ": overwrites shared memory that ordinary stores wrote without fence_async_shared() behind them",
           site);
  }
}

void ProxyView::reads(const Block& block, const unsigned char* p, size_t bytes, const char* what, Site site) {
  const auto offset = static_cast<size_t>(p - block.arena);
  for (size_t i = offset / kChunkBytes; i * kChunkBytes < offset + bytes; ++i) {
    Chunk& c = chunk(i);
    const unsigned char* now = block.arena + i * kChunkBytes;
    const uint64_t hash = hash_of(now);
    if (c.awaited) fail(std::string(what) + ": reads shared memory before the bulk copy into it has arrived", site);
    if (c.known && c.writer < 0 && c.hash == hash) continue;
    if (!fenced(c, block))
      fail(std::string(what) + (!c.known && c.writer < 0 && never_written(now)
                                    ? ": reads shared memory that nothing wrote"
                                    : ": reads shared memory that ordinary stores wrote without fence_async_shared() "
                                      "behind them"),
           site);
    c = {.hash = hash, .looked = last_fence_, .known = true};
  }
}

}  // namespace warpsmith::sim
