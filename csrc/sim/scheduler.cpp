#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>

#include "sim/machine.h"

namespace warpsmith::sim {

Machine machine;
ThreadView* current_thread = nullptr;

Options& options() { return machine.options; }
Counters& counters() { return machine.counters; }

uint64_t random_bits() {  // xorshift64
  uint64_t& x = machine.random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

Timing async_timing() {
  const uint64_t seed = machine.options.seed;
  return seed == 0 || seed % 3 == 0 ? Timing::late : seed % 3 == 1 ? Timing::early : Timing::random;
}

void make_ready(Thread& thread) {
  thread.state = Thread::State::ready;
  machine.ready.push_back({&thread, thread.favour});
}

namespace {

Thread* next_ready() {
  auto& queue = machine.ready;
  size_t& head = machine.ready_head;
  if (head == queue.size()) return nullptr;
  if (machine.options.seed) {
    const size_t count = queue.size() - head;
    const auto any = [&] { return head + ((random_bits() >> 32) * count >> 32); };  // no division: count < 2^32
    size_t chosen = any();
    // Even seeds let some warps run far ahead of others: the favoured of a few candidates.
    if (machine.options.seed % 2 == 0)
      for (int candidate = 0; candidate < 7; ++candidate)
        if (const size_t other = any(); queue[other].favour > queue[chosen].favour) chosen = other;
    std::swap(queue[head], queue[chosen]);
  }
  Thread* thread = queue[head++].thread;
  if (head >= 4096 && 2 * head >= queue.size()) {  // the queue stays within the capacity reserved at the wave's start
    Untracked scope;
    std::copy(queue.begin() + static_cast<ptrdiff_t>(head), queue.end(), queue.begin());
    queue.resize(queue.size() - head);
    head = 0;
  }
  return thread;
}

// Leaves the running thread, for another one or, when none can run, for the host.
void switch_away() {
  Thread& me = self();
  if (async_timing() == Timing::random && !machine.in_flight.empty() && random_bits() % 8 == 0) run_some_async_work();
  Thread* next = next_ready();
  while (!next && (run_some_async_work() || start_withheld_blocks())) next = next_ready();
  if (next == &me) return;
  ++machine.counters.switches;
  current_thread = next;
  switch_fiber(me.fiber, next ? next->fiber : machine.host);
}

std::string where(const ThreadView& t) {
  char text[120];
  std::snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u)", t.block_view->index.x, t.block_view->index.y,
                t.block_view->index.z, t.index.x, t.index.y, t.index.z);
  return text;
}

std::string line_of(Site site) {
  const std::string path = site.file ? site.file : "?";
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(site.line);
}

void thread_entry() {
  finish_first_switch();
  Thread& me = self();
  me.block->started = true;
  order_acquire(&machine.launch_begins);
  machine.run_thread(machine.kernel_arguments);
  if (const char* unfinished = unfinished_bulk_work(me)) fail(unfinished, {});
  if (const char* unfinished = unfinished_wgmma(me)) fail(unfinished, {});
  if (has_unfinished_copies(me)) fail("thread exits with asynchronous copies that were not waited for", {});
  if (!me.waited_for_previous_kernel)
    fail("launched as a programmatic dependent, but ends without wait_for_previous_kernel()", {});
  check_nobody_waits_for(me);
  me.state = Thread::State::exited;
  me.warp->exited |= 1u << me.lane;
  thread_left_barriers(*me.block);
  thread_left_cluster(*me.block->cluster);
  switch_away();
  std::abort();  // an exited thread never runs again
}

// Every group of threads that waits at the same place, with its first member.
std::string deadlock_report() {
  std::map<std::tuple<std::string, int, std::string>, std::pair<const Thread*, int>> groups;
  for (const Block& block : machine.blocks)
    for (const Thread& t : block.thread)
      if (t.state == Thread::State::waiting) {
        auto& group = groups[{t.wait.what, t.wait.id, line_of(t.wait.site)}];
        if (!group.first) group.first = &t;
        ++group.second;
      }
  std::string report = "deadlock:";
  for (const auto& [key, group] : groups) {
    const auto& [what, id, line] = key;
    report += "\n  " + where(*group.first);
    if (group.second > 1) report += " and " + std::to_string(group.second - 1) + " more";
    report += (group.second > 1 ? " wait at " : " waits at ") + what + (id >= 0 ? " " + std::to_string(id) : "") +
              " (" + line + ")";
    if (what == "mbarrier") report += describe_mbarrier(*group.first->block, id);
  }
  return report;
}

}  // namespace

void block_until_ready(Wait wait) {
  Thread& me = self();
  me.state = Thread::State::waiting;
  me.wait = wait;
  switch_away();
}

void yield(uint64_t favour) {
  machine.ready.push_back({&self(), favour});
  switch_away();
}

void maybe_preempt() {
  if (machine.options.seed && random_bits() % 64 == 0) yield(self().favour);
}

void fail(const std::string& message, Site site) {
  {
    Untracked scope;
    machine.error = where(*current_thread) + ": " + message;
    if (site.file) machine.error += " (" + line_of(site) + ")";
  }
  Untracked::end_all();
  Thread& me = self();
  current_thread = nullptr;
  switch_fiber(me.fiber, machine.host);
  std::abort();  // the frames of a failed launch are abandoned
}

void fail(const char* message, Site site) { fail(std::string(message), site); }

// A cluster's blocks may start at any time from each other: under seed 0 and odd seeds one of them (seed 0: the last)
// starts only when the others cannot go on without it.
void withhold_blocks() {
  const uint64_t seed = machine.options.seed;
  if (seed && seed % 2 == 0) return;
  for (Cluster& cluster : machine.clusters)
    if (const size_t blocks = cluster.blocks.size(); blocks > 1)
      cluster.blocks[seed ? random_bits() % blocks : blocks - 1]->withheld = true;
}

bool start_withheld_blocks() {
  bool any = false;
  for (Block& block : machine.blocks) {
    if (!std::exchange(block.withheld, false)) continue;
    for (Thread& t : block.thread) make_ready(t);
    any = true;
  }
  return any;
}

void run_wave() {
  machine.ready.clear();
  machine.ready_head = 0;
  size_t threads = 0;
  for (const Block& block : machine.blocks) threads += block.thread.size();
  machine.ready.reserve(4096 + 8 * threads);
  machine.stacks_used = std::max(machine.stacks_used, threads);
  size_t number = 0;
  withhold_blocks();
  const size_t rotation = machine.options.seed ? random_bits() % threads : 0;
  for (Block& block : machine.blocks)
    for (Thread& t : block.thread) {
      // Rotated, so that the same thread of consecutive blocks is not one and the same to the thread sanitizer.
      prepare(t.fiber, pooled_stack((number++ + rotation) % threads), thread_entry,
              static_cast<unsigned>(t.linear_index));
      if (!block.withheld) make_ready(t);
    }
  adopt_host_stack(machine.host);
  if (Thread* first = next_ready()) {
    current_thread = first;
    switch_fiber(machine.host, first->fiber);
  }
  if (machine.error.empty()) finish_async_work();
  current_thread = nullptr;
  if (machine.error.empty())
    for (const Block& block : machine.blocks)
      if (block.live_threads > 0) {
        machine.error = deadlock_report();
        break;
      }
  if (!machine.error.empty()) forget_pooled_stacks(threads, &machine.launch_ends);
}

}  // namespace warpsmith::sim
