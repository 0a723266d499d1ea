#include <bit>
#include <cstring>

#include "sim/machine.h"

namespace warpsmith::sim {

void warp_operation(unsigned mask, WarpOperation compute, const void* identity, void* arguments, const char* what,
                    Site site) {
  Thread& me = self();
  Warp& warp = *me.warp;
  const auto refuse = [&](const std::string& why) { fail(what + (": " + why), site); };
  if (!(mask >> me.lane & 1)) refuse("the calling lane is not in its own mask");
  const unsigned existing = warp.count == 32 ? kWholeWarp : (1u << warp.count) - 1;
  if (mask & ~existing) {
    if (mask != kWholeWarp) refuse("the mask names lanes that do not exist");
    mask = existing;
  }
  ++machine.counters.warp_operations;
  me.operation = identity;
  me.arguments = arguments;
  me.mask = mask;
  me.wait = {what, -1, site};
  me.state = Thread::State::waiting;
  warp.arrived |= 1u << me.lane;
  if (mask & warp.exited) refuse("the mask names a lane that has exited");
  const bool all_here = (mask & ~warp.arrived) == 0;
  // Until all are here, one that came before stands for all that did.
  const unsigned before = mask & warp.arrived & ~(1u << me.lane);
  for (unsigned left = all_here ? before : std::bit_floor(before); left; left &= left - 1) {
    const Thread& other = *warp.lanes[std::countr_zero(left)];
    if (other.operation != identity || other.wait.site.line != site.line || other.wait.site.file != site.file)
      refuse("lanes of one mask are at different operations (lines " + std::to_string(other.wait.site.line) + " and " +
             std::to_string(site.line) + ")");
    if (other.mask != mask) refuse("lanes pass different masks");
  }
  if (!all_here) {
    block_until_ready(me.wait);
    return;
  }
  void* all[32] = {};
  for (unsigned left = mask; left; left &= left - 1) {
    const int lane = std::countr_zero(left);
    all[lane] = warp.lanes[lane]->arguments;
  }
  if (compute) compute(all, mask);
  warp.arrived &= ~mask;
  for (unsigned left = mask; left; left &= left - 1) {
    Thread& other = *warp.lanes[std::countr_zero(left)];
    if (&other != &me) make_ready(other);
  }
  me.state = Thread::State::ready;
}

void check_nobody_waits_for(const Thread& leaving) {
  for (unsigned left = leaving.warp->arrived; left; left &= left - 1) {
    const Thread& other = *leaving.warp->lanes[std::countr_zero(left)];
    if (other.mask >> leaving.lane & 1)
      fail(std::string(other.wait.what) + ": the mask of lane " + std::to_string(other.lane) +
               " names a lane that has exited: this one",
           other.wait.site);
  }
}

namespace {

struct Shuffle {
  unsigned char value[16], result[16];
  int bytes, source;
};

void shuffle_all(void* const* arguments, unsigned mask) {
  for (unsigned left = mask; left; left &= left - 1) {
    auto& a = *static_cast<Shuffle*>(arguments[std::countr_zero(left)]);
    if (a.source < 0)
      std::memcpy(a.result, a.value, sizeof a.value);
    else if (const auto* from = static_cast<const Shuffle*>(arguments[a.source]))
      std::memcpy(a.result, from->value, sizeof a.value);
    else
      std::memset(a.result, 0xff, sizeof a.result);  // undefined: the source lane takes no part
  }
}

struct Vote {
  bool predicate;
  unsigned result;
};

void vote_all(void* const* arguments, unsigned mask) {
  unsigned ballot = 0;
  for (unsigned left = mask; left; left &= left - 1) {
    const int lane = std::countr_zero(left);
    ballot |= static_cast<unsigned>(static_cast<const Vote*>(arguments[lane])->predicate) << lane;
  }
  for (unsigned left = mask; left; left &= left - 1)
    static_cast<Vote*>(arguments[std::countr_zero(left)])->result = ballot;
}

struct Reduction {
  unsigned value;
  int operation;
};

void reduce_all(void* const* arguments, unsigned mask) {
  unsigned result = 0;
  bool first = true;
  for (unsigned left = mask; left; left &= left - 1) {
    const auto& a = *static_cast<const Reduction*>(arguments[std::countr_zero(left)]);
    if (first)
      result = a.value;
    else
      switch (a.operation) {
        case 0: result += a.value; break;
        case 1: result = std::max(result, a.value); break;
        default: result |= a.value; break;
      }
    first = false;
  }
  for (unsigned left = mask; left; left &= left - 1)
    static_cast<Reduction*>(arguments[std::countr_zero(left)])->value = result;
}

// Identities: two different operations never complete together.
const char barrier_identity = 0, vote_identity = 0, reduce_identity[3] = {};
const char shuffle_identity = 0;

}  // namespace

void warp_barrier(unsigned mask, Site site) {
  Warp& warp = *self().warp;
  order_release(&warp);
  warp_operation(mask, nullptr, &barrier_identity, nullptr, "__syncwarp", site);
  order_acquire(&warp);
}

void warp_shuffle(unsigned mask, void* value, int bytes, int source_lane, Site site) {
  if (bytes > 16) fail("shuffle: values of at most 16 bytes", site);
  Shuffle s;
  std::memcpy(s.value, value, static_cast<size_t>(bytes));
  s.bytes = bytes;
  s.source = source_lane;
  warp_operation(mask, shuffle_all, &shuffle_identity, &s, "shuffle", site);
  std::memcpy(value, s.result, static_cast<size_t>(bytes));
}

unsigned warp_ballot(unsigned mask, bool predicate, Site site) {
  Vote v{predicate, 0};
  warp_operation(mask, vote_all, &vote_identity, &v, "vote", site);
  return v.result;
}

unsigned warp_reduce(unsigned mask, unsigned value, int operation, Site site) {
  Reduction r{value, operation};
  warp_operation(mask, reduce_all, &reduce_identity[operation], &r, "warp reduction", site);
  return r.value;
}

}  // namespace warpsmith::sim
