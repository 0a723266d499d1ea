#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <set>

#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

void check_alignment(const void* pointer, int bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0) return;
  char text[120];
  std::snprintf(text, sizeof text, "cudaErrorMisalignedAddress: misaligned address: %d bytes at %p", bytes, pointer);
  fail(text, site);
}

// Global memory that recent launches stored to through the vocabulary, by 16-byte line: a table that forgets on
// collision.
struct WrittenLine {
  uintptr_t line = 0;
  int64_t launch = 0;
};
constexpr size_t kWrittenLines = 1 << 18;
WrittenLine written[kWrittenLines];

WrittenLine& written_line(uintptr_t line) { return written[line * 0x9e3779b97f4a7c15ull >> (64 - 18)]; }

// A kernel that may start before the previous one has ended must not touch what that one wrote.
void check_previous_kernel(const void* pointer, Site site) {
  const uintptr_t line = reinterpret_cast<uintptr_t>(pointer) / 16;
  const WrittenLine& w = written_line(line);
  if (w.line == line && w.launch == machine.launch_number - 1)
    fail("accesses what the previous kernel wrote before wait_for_previous_kernel()", site);
}

void note_shared_access(const void* pointer, int bytes) {
  if (machine.options.count_bank_conflicts)
    self().shared_accesses.push_back({window_offset(pointer), static_cast<uint32_t>(bytes)});
}

}  // namespace

// Of the running thread, into its own block: what another block does there, csrc/sim finds by the bytes.
void note_ordinary_store(const void* pointer, int bytes) {
  Thread& me = self();
  const auto* p = static_cast<const unsigned char*>(pointer);
  if (static_cast<size_t>(p - me.block->arena) < kArenaBytes)
    me.block->proxy_view.stored(me, p, static_cast<size_t>(bytes));
}

void on_load(const void* pointer, int bytes, Site site) {
  check_alignment(pointer, bytes, site);
  if (in_shared(pointer)) {
    machine.counters.shared_bytes_read += bytes;
    note_shared_access(pointer, bytes);
  } else {
    machine.counters.global_bytes_read += bytes;
    if (!self().waited_for_previous_kernel) check_previous_kernel(pointer, site);
  }
  maybe_preempt();
}

void on_store(void* pointer, int bytes, Site site) {
  check_alignment(pointer, bytes, site);
  if (in_shared(pointer)) {
    machine.counters.shared_bytes_written += bytes;
    note_shared_access(pointer, bytes);
    note_ordinary_store(pointer, bytes);
  } else {
    machine.counters.global_bytes_written += bytes;
    if (!self().waited_for_previous_kernel) check_previous_kernel(pointer, site);
    const uintptr_t line = reinterpret_cast<uintptr_t>(pointer) / 16;
    written_line(line) = {line, machine.launch_number};
  }
  maybe_preempt();
}

void on_atomic(void* pointer, int bytes, Site site) {
  check_alignment(pointer, bytes, site);
  ++machine.counters.atomics;
  machine.spins = 0;
  maybe_preempt();
  Thread& me = self();
  if (me.fenced) order_release(pointer);
  me.last_atomic = pointer;
}

// Message passing as CUDA defines it: a fence before an atomic publishes what the thread did, a fence after an atomic
// makes visible what others published there.
void memory_fence(Site) {
  Thread& me = self();
  if (me.last_atomic) order_acquire(me.last_atomic);
  me.fenced = true;
  maybe_preempt();
}

// The banks serve 128 bytes a pass: 32 lanes of up to 4 bytes, 16 lanes of 8, 8 lanes of 16. Lanes of a warp are
// matched by the number of their access, which is right for code whose lanes take the same path.
void count_bank_conflicts(const Warp& warp) {
  size_t accesses = 0;
  for (int lane = 0; lane < warp.count; ++lane) accesses = std::max(accesses, warp.lanes[lane]->shared_accesses.size());
  for (size_t i = 0; i < accesses; ++i) {
    int lanes_a_pass = 32;
    for (int first = 0; first < warp.count; first += lanes_a_pass) {
      std::set<uint32_t> words[32];
      size_t passes = 1;
      for (int lane = first; lane < std::min(warp.count, first + lanes_a_pass); ++lane) {
        const auto& log = warp.lanes[lane]->shared_accesses;
        if (i >= log.size()) continue;
        if (lane == first) lanes_a_pass = log[i].bytes <= 4 ? 32 : static_cast<int>(128 / log[i].bytes);
        for (uint32_t at = log[i].offset / 4; at <= (log[i].offset + log[i].bytes - 1) / 4; ++at) {
          words[at % 32].insert(at);
          passes = std::max(passes, words[at % 32].size());
        }
      }
      machine.counters.bank_conflicts += static_cast<int64_t>(passes - 1);
    }
  }
}

float approximate(double exact, float input, double relative, double absolute) {
  const uint64_t seed = machine.options.approximation;
  if (seed == 0 || exact == 0 || !std::isfinite(exact)) return static_cast<float>(exact);
  double part = seed % 4 == 1 ? 1 : -1;
  if (seed % 4 == 0 || seed % 4 == 3) {
    uint64_t h = (seed << 32 | std::bit_cast<uint32_t>(input)) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    part = static_cast<double>(h >> 11) * 0x1p-52 - 1;
  }
  // The rounding that follows takes half a last place of the result.
  const double bound = std::max(relative * std::fabs(exact), absolute) - 0x1p-24 * std::fabs(exact);
  return static_cast<float>(exact + part * bound);
}

void count_flops(int64_t flops) { machine.counters.flops += flops; }

void wait_for_previous_kernel() {
  if (sm90_code()) self().waited_for_previous_kernel = true;
}
void launch_dependents() {}

}  // namespace warpsmith::sim
