#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

void release_all(Barrier& barrier) {
  for (Thread* t : barrier.waiting) make_ready(*t);
  barrier.waiting.clear();
  barrier.arrived = 0;
  barrier.expected = 0;
  barrier.result = barrier.reduction;
}

std::string lines(Site a, Site b) { return "lines " + std::to_string(a.line) + " and " + std::to_string(b.line); }

void arrive_at_block_barrier(Site site) {
  Block& block = *self().block;
  Barrier& barrier = block.barriers[0];
  if (barrier.arrived == 0) barrier.site = site;
  if (barrier.site.line != site.line || barrier.site.file != site.file)
    fail("divergent barrier: threads of one block wait at different __syncthreads (" + lines(barrier.site, site) + ")",
         site);
  if (barrier.expected) fail("__syncthreads while named barrier 0 is in use", site);
  ++machine.counters.barriers;
  order_release(&barrier);
  if (++barrier.arrived >= block.live_threads)
    release_all(barrier);
  else {
    barrier.waiting.push_back(&self());
    block_until_ready({"__syncthreads", -1, site});
  }
  order_acquire(&barrier);
}

}  // namespace

void block_barrier(Site site) { arrive_at_block_barrier(site); }

int block_barrier_or(int value, Site site) {
  Barrier& barrier = self().block->barriers[0];
  if (barrier.arrived == 0) barrier.reduction = 0;
  barrier.reduction |= value;
  arrive_at_block_barrier(site);
  return barrier.result;
}

// `threads` counts those that wait and those that only arrive. PTX ISA 9.7.13.1 "bar".
void named_barrier(int id, int threads, bool wait, Site site) {
  if (id < 0 || id > 15) fail("named barrier " + std::to_string(id) + ": a block has barriers 0 to 15", site);
  if (threads <= 0 || threads % 32) fail("named barrier: the thread count must be a positive multiple of 32", site);
  Barrier& barrier = self().block->barriers[id];
  if (threads > self().block->thread_count)
    fail("named barrier " + std::to_string(id) + " waits for more threads than the block has", site);
  if (barrier.arrived && barrier.expected != threads)
    fail("named barrier " + std::to_string(id) + ": threads disagree on the count (" +
             std::to_string(barrier.expected) + " and " + std::to_string(threads) + ")",
         site);
  barrier.expected = threads;
  ++machine.counters.barriers;
  order_release(&barrier);
  if (++barrier.arrived == threads)
    release_all(barrier);
  else if (wait) {
    barrier.waiting.push_back(&self());
    block_until_ready({"named barrier", id, site});
  }
  if (wait) order_acquire(&barrier);
}

// __syncthreads waits for the threads that have not exited.
void thread_left_barriers(Block& block) {
  --block.live_threads;
  Barrier& barrier = block.barriers[0];
  if (barrier.arrived && !barrier.expected && barrier.arrived >= block.live_threads) release_all(barrier);
}

}  // namespace warpsmith::sim
