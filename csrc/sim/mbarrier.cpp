#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

constexpr int kMaxCount = (1 << 20) - 1;  // of arrivals and of pending bytes, PTX ISA 9.7.13.15.2

Block& block_of(void* barrier, const char* what, Site site) {
  Block* block = owner_of_shared(barrier);
  if (!block || block->cluster != self().block->cluster)
    fail(std::string(what) + ": the barrier is not in shared memory of this cluster", site);
  return *block;
}

// Completes the phase if everything is in.
void advance_phase(MbarrierState& b) {
  if (b.pending_arrivals > 0 || b.pending_bytes != 0) return;
  ++b.phase;
  b.pending_arrivals = b.arrivals;
  for (Thread* t : b.waiting) make_ready(*t);
  b.waiting.clear();
}

}  // namespace

MbarrierState& mbarrier_of(Block& block, uint32_t offset, const char* what, Site site) {
  const auto found = block.mbarriers.find(offset);
  if (found == block.mbarriers.end()) fail(std::string(what) + ": the mbarrier was not initialised", site);
  return found->second;
}

MbarrierState& mbarrier_at(void* barrier, const char* what, Site site) {
  return mbarrier_of(block_of(barrier, what, site), window_offset(barrier), what, site);
}

void mbarrier_init(void* barrier, int arrivals, Site site) {
  if (reinterpret_cast<uintptr_t>(barrier) % 8) fail("mbarrier_init: the barrier must be 8-byte aligned", site);
  if (arrivals < 1 || arrivals > kMaxCount) fail("mbarrier_init: the count of arrivals must be 1 to 2^20 - 1", site);
  Block& block = block_of(barrier, "mbarrier_init", site);
  Untracked scope;
  MbarrierState& b = block.mbarriers[window_offset(barrier)];
  if (!b.waiting.empty()) fail("mbarrier_init: threads wait at this barrier", site);
  b.arrivals = b.pending_arrivals = arrivals;
  b.pending_bytes = 0;
  b.phase = 0;
  block.mbarriers_published = false;
  b.waiting.reserve(static_cast<size_t>(block.thread_count));
}

void mbarrier_init_fence() {
  if (sm90_code()) self().block->mbarriers_published = true;
}

void mbarrier_arrive(void* barrier, int arrivals, int expected_bytes, Site site) {
  MbarrierState& b = mbarrier_at(barrier, "mbarrier_arrive", site);
  order_release(&b);
  if (b.pending_arrivals < arrivals)
    fail("mbarrier_arrive: more arrivals than the phase expects (" + std::to_string(b.arrivals) + ")", site);
  b.pending_bytes += expected_bytes;
  if (expected_bytes < 0 || b.pending_bytes > kMaxCount)
    fail("mbarrier_arrive_expect: more bytes than a phase can count (2^20 - 1)", site);
  b.pending_arrivals -= arrivals;
  advance_phase(b);
  maybe_preempt();
}

void mbarrier_arrive_expect(void* barrier, int bytes, Site site) {
  if (sm90_code()) mbarrier_arrive(barrier, 1, bytes, site);
}

void mbarrier_arrive_remote(void* remote, Site site) {
  if (sm90_code()) mbarrier_arrive(remote, 1, 0, site);
}

void complete_bytes(MbarrierState& b, int64_t bytes, Site site) {
  b.pending_bytes -= bytes;
  if (b.pending_bytes < -kMaxCount) fail("mbarrier: far more bytes arrived than were expected", site);
  advance_phase(b);
}

bool mbarrier_test(void* barrier, unsigned parity, Site site) {
  if (!sm90_code()) {
    spin_pause();
    return false;
  }
  MbarrierState& b = mbarrier_at(barrier, "mbarrier_test", site);
  if ((b.phase & 1) == parity) {
    spin_pause();
    return false;
  }
  order_acquire(&b);
  return true;
}

void mbarrier_wait(void* barrier, unsigned parity, Site site) {
  if (!sm90_code()) fail("mbarrier_wait: never returns: code below sm_90 has no mbarrier_test", site);
  if (parity > 1) fail("mbarrier_wait: the parity is 0 or 1", site);
  MbarrierState& b = mbarrier_at(barrier, "mbarrier_wait", site);
  if (owner_of_shared(barrier) != self().block)
    fail("mbarrier_wait: only this block's own barriers can be waited for", site);
  if (async_timing() == Timing::random && random_bits() % 4 == 0) run_some_async_work();
  maybe_preempt();
  // Parity p names the phase that is complete once the current phase has the other parity.
  while ((b.phase & 1) == parity) {
    b.waiting.push_back(&self());
    block_until_ready({"mbarrier", static_cast<int>(window_offset(barrier)), site});
  }
  order_acquire(&b);
}

std::string describe_mbarrier(const Block& block, int offset) {
  const auto found = block.mbarriers.find(static_cast<uint32_t>(offset));
  if (found == block.mbarriers.end()) return "";
  const MbarrierState& b = found->second;
  return " [phase " + std::to_string(b.phase) + " lacks " + std::to_string(b.pending_arrivals) + " of " +
         std::to_string(b.arrivals) + " arrivals and " + std::to_string(b.pending_bytes) + " bytes]";
}

}  // namespace warpsmith::sim
