#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "sim/machine.h"

// Each resident block owns one arena of a single reserved range, so "is this shared memory, and whose" is two
// comparisons. Dynamic shared memory is at offset 0 and static arrays follow with gaps, all of exact size and filled
// with NaN bytes.
namespace warpsmith::sim {
namespace {

unsigned char* region() {
  static unsigned char* const start = [] {
    void* p = mmap(nullptr, kArenaBytes * kMaxResidentBlocks, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      std::perror("sim: no address space for shared memory");
      std::abort();
    }
    const auto address = (reinterpret_cast<uintptr_t>(p) + 1023) / 1024 * 1024;
    return reinterpret_cast<unsigned char*>(address);
  }();
  return start;
}

void fill_with_nan(unsigned char* p, size_t bytes) {
  Untracked scope;
  std::memset(p, 0xff, bytes);
}

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Bytes of each arena that some block has used, from its begin on: the rest is as it was mapped.
std::vector<size_t>& touched_bytes() {
  static std::vector<size_t> bytes(kMaxResidentBlocks, kArenaBytes);
  return bytes;
}

}  // namespace

bool in_shared(const void* pointer) {
  return static_cast<size_t>(static_cast<const unsigned char*>(pointer) - region()) < kArenaBytes * kMaxResidentBlocks;
}

Block* owner_of_shared(const void* pointer) {
  for (Block& block : machine.blocks)
    if (static_cast<size_t>(static_cast<const unsigned char*>(pointer) - block.arena) < kArenaBytes) return &block;
  return nullptr;
}

uint32_t window_offset(const void* pointer) {
  return static_cast<uint32_t>(static_cast<size_t>(static_cast<const unsigned char*>(pointer) - region()) %
                               kArenaBytes);
}

void begin_shared(Block& block, size_t number, size_t dynamic_bytes) {
  block.arena = region() + number * kArenaBytes;
  block.arena_number = number;
  block.shared_arrays.clear();
  size_t& touched = touched_bytes()[number];
  if constexpr (kThreadSanitizer) {
    // A fresh mapping: accesses of an earlier block to the same addresses are forgotten.
    Untracked scope;
    if (touched)
      mmap(block.arena, round_up(touched, kPageBytes), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  forbid_memory(block.arena, round_up(touched, 16));
  touched = dynamic_bytes;
  allow_memory(block.arena, dynamic_bytes);
  fill_with_nan(block.arena, dynamic_bytes);
  block.dynamic_shared = block.arena;
  block.shared_bytes = block.dynamic_shared_bytes = dynamic_bytes;
  block.arena_used = dynamic_bytes;
}

void* shared_array(const void* key, size_t bytes, size_t alignment, Site site) {
  Block& block = *self().block;
  for (const SharedArray& a : block.shared_arrays)
    if (a.key == key) return a.memory;
  Untracked scope;
  block.shared_bytes += bytes;
  if (block.shared_bytes > machine.shared_limit_bytes)
    fail("cudaErrorInvalidValue: the kernel uses " + std::to_string(block.shared_bytes) +
             " bytes of static and dynamic shared memory, this launch may have " +
             std::to_string(machine.shared_limit_bytes),
         site);
  // An array is aligned to its element and no better, and is followed by a gap that the address sanitizer guards.
  size_t offset = round_up(block.arena_used + 32, alignment < 16 ? 16 : alignment);
  if (alignment <= 8) offset += 8;
  unsigned char* memory = block.arena + offset;
  allow_memory(memory, bytes);
  fill_with_nan(memory, bytes);
  block.arena_used = touched_bytes()[block.arena_number] = offset + bytes;
  block.shared_arrays.push_back({key, memory, bytes});
  return memory;
}

uint32_t shared_address(const void* pointer, Site site) {
  if (owner_of_shared(pointer) != self().block) fail("the address is not in this block's shared memory", site);
  return window_offset(pointer);
}

}  // namespace warpsmith::sim
