#include <cstring>

#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

void complete_if_all_arrived(Cluster& cluster) {
  if (cluster.barrier.arrived == 0 || cluster.barrier.arrived < cluster.live_threads) return;
  cluster.barrier.arrived = 0;
  ++cluster.phase;
  for (Thread* t : cluster.barrier.waiting) make_ready(*t);
  cluster.barrier.waiting.clear();
}

}  // namespace

void cluster_arrive(Site site) {
  if (!sm90_code()) return;
  Thread& me = self();
  Cluster& cluster = *me.block->cluster;
  if (me.cluster_arrived) fail("cluster_arrive: called twice without cluster_wait between", site);
  me.cluster_arrived = true;
  me.cluster_phase = cluster.phase;
  ++machine.counters.barriers;
  order_release(&cluster.barrier);
  ++cluster.barrier.arrived;
  complete_if_all_arrived(cluster);
}

void cluster_wait(Site site) {
  if (!sm90_code()) return;
  Thread& me = self();
  Cluster& cluster = *me.block->cluster;
  if (!me.cluster_arrived) fail("cluster_wait: without cluster_arrive before", site);
  while (cluster.phase == me.cluster_phase) {
    cluster.barrier.waiting.push_back(&me);
    block_until_ready({"cluster barrier", -1, site});
  }
  me.cluster_arrived = false;
  order_acquire(&cluster.barrier);
}

// The barrier waits for the threads that have not exited; the shared memory of a block that has is gone.
void thread_left_cluster(Cluster& cluster) {
  Thread& me = self();
  --cluster.live_threads;
  complete_if_all_arrived(cluster);
  if (cluster.blocks.size() == 1 || me.block->live_threads > 0) return;
  Untracked scope;
  if constexpr (!kThreadSanitizer) {
    for (const SharedArray& a : me.block->shared_arrays) std::memset(a.memory, 0xff, a.bytes);
    std::memset(me.block->arena, 0xff, me.block->dynamic_shared_bytes);
  }
  forbid_memory(me.block->arena, kArenaBytes);
}

void* cluster_shared(const void* shared, unsigned rank, Site site) {
  if (!sm90_code()) return const_cast<void*>(shared);
  Block& mine = *self().block;
  if (owner_of_shared(shared) != &mine) fail("cluster_shared: the address is not in this block's shared memory", site);
  if (rank >= mine.cluster_size)
    fail("cluster_shared: rank " + std::to_string(rank) + " of a cluster of " + std::to_string(mine.cluster_size),
         site);
  const Block& target = *mine.cluster->blocks[rank];
  if (!target.started) fail("cluster_shared: that block has not started: a cluster barrier is missing before", site);
  if (target.live_threads == 0)
    fail("cluster_shared: that block has exited: a cluster barrier is missing at its end", site);
  return target.arena + window_offset(shared);
}

}  // namespace warpsmith::sim
