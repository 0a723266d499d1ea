#include <cstdio>

#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

void check_alignment(const void* pointer, int bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0) return;
  char text[120];
  std::snprintf(text, sizeof text, "cudaErrorMisalignedAddress: misaligned address: %d bytes at %p", bytes, pointer);
  fail(text, site);
}

}  // namespace

void on_load(const void* pointer, int bytes, Site site) {
  check_alignment(pointer, bytes, site);
  (in_shared(pointer) ? machine.counters.shared_bytes_read : machine.counters.global_bytes_read) += bytes;
  maybe_preempt();
}

void on_store(void* pointer, int bytes, Site site) {
  check_alignment(pointer, bytes, site);
  (in_shared(pointer) ? machine.counters.shared_bytes_written : machine.counters.global_bytes_written) += bytes;
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

void count_flops(int64_t flops) { machine.counters.flops += flops; }

void wait_for_previous_kernel() { self().waited_for_previous_kernel = true; }
void launch_dependents() {}

}  // namespace warpsmith::sim
