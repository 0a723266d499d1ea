#include <utility>

#include "sim/machine.h"

// cp.async. The copy happens at the wait (late), at issue (early) or at either by seed; until it has happened the
// destination holds NaN bytes, so that a missing or too weak wait is visible.
namespace warpsmith::sim {
namespace {

void execute(AsyncCopy& c) {
  self().block->proxy_view.stored(self(), c.to, static_cast<size_t>(c.bytes));  // cp.async is of the generic proxy
  if (std::exchange(c.done, true)) return;
  note_read(c.from, static_cast<size_t>(c.valid_bytes));
  note_write(c.to, static_cast<size_t>(c.bytes));
  Untracked scope;
  for (int i = 0; i < c.valid_bytes; ++i) c.to[i] = c.from[i];
  for (int i = c.valid_bytes; i < c.bytes; ++i) c.to[i] = 0;
}

}  // namespace

void copy_async(void* shared, const void* global, int bytes, int valid_bytes, Site site) {
  const auto alignment = static_cast<unsigned>(bytes);
  // PTX excepts no address of which nothing is read.
  if (reinterpret_cast<uintptr_t>(shared) % alignment || reinterpret_cast<uintptr_t>(global) % alignment)
    fail("cudaErrorMisalignedAddress: misaligned address: copy_async of " + std::to_string(bytes) + " bytes", site);
  if (owner_of_shared(shared) != self().block)
    fail("copy_async: the destination is not in this block's shared memory", site);
  if (in_shared(global)) fail("copy_async: the source is not in global memory", site);
  machine.counters.global_bytes_read += valid_bytes;
  machine.counters.shared_bytes_written += bytes;
  AsyncCopy copy{static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), bytes, valid_bytes,
                 false};
  const Timing timing = async_timing();
  Thread& me = self();
  if (timing == Timing::early || (timing == Timing::random && random_bits() % 2)) {
    execute(copy);
  } else {
    note_write(shared, static_cast<size_t>(bytes));
    for (int i = 0; i < bytes; ++i) copy.to[i] = 0xff;
  }
  {
    Untracked scope;
    me.open_copies.push_back(copy);
  }
  maybe_preempt();
}

void copy_async_commit() {
  Thread& me = self();
  Untracked scope;
  me.copy_groups.push_back(std::move(me.open_copies));
  me.open_copies.clear();
}

void copy_async_wait(int groups_in_flight, Site) {
  auto& groups = self().copy_groups;
  const int complete = static_cast<int>(groups.size()) - groups_in_flight;
  if (complete <= 0) return;
  for (int i = 0; i < complete; ++i)
    for (AsyncCopy& c : groups[static_cast<size_t>(i)]) execute(c);
  Untracked scope;
  groups.erase(groups.begin(), groups.begin() + complete);
}

bool has_unfinished_copies(const Thread& thread) {
  if (!thread.open_copies.empty()) return true;
  for (const auto& group : thread.copy_groups)
    if (!group.empty()) return true;
  return false;
}

}  // namespace warpsmith::sim
