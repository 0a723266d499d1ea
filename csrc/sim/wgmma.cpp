#include <limits>

#include "common/float8_sums.h"
#include "device/swizzle.h"
#include "sim/machine.h"

// Warpgroup matrix instructions. Each warp computes its 16 rows when its four warps' worth of work is due: at the wait
// (late) or at issue (early). Until then the accumulators hold NaN, their values are kept aside, and operands are read
// at the last moment.
namespace warpsmith::sim {
namespace {

struct Descriptor {
  uint32_t start, leading, stride;
  device::Swizzle swizzle;
};

Descriptor decode(uint64_t bits) {
  using device::Swizzle;
  constexpr Swizzle kModes[] = {Swizzle::none, Swizzle::bytes128, Swizzle::bytes64, Swizzle::bytes32};
  return {static_cast<uint32_t>(bits & 0x3fff) << 4, static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4, kModes[bits >> 62]};
}

// Offset in shared memory of byte `at` of an operand's line: a row along M or N whose bytes are along K, or, MN-major,
// a row of K (two-byte elements) whose bytes are along M or N. PTX ISA 9.7.15.5.1 "Shared Memory Matrix Layout".
uint32_t byte_offset(const Descriptor& d, bool mn_major, uint32_t line, uint32_t at) {
  const auto span = static_cast<uint32_t>(device::swizzle_span_bytes(d.swizzle));
  uint32_t offset;
  if (d.swizzle == device::Swizzle::none) {
    // Blocks of 8 lines of 16 bytes; the leading dimension is K in both cases.
    const uint32_t along_lines = mn_major ? d.leading : d.stride, along_bytes = mn_major ? d.stride : d.leading;
    offset = line % 8 * 16 + line / 8 * along_lines + at / 16 * along_bytes + at % 16;
  } else {
    offset = line % 8 * span + line / 8 * d.stride;
    offset += mn_major ? at / span * d.leading + at % span : at;
  }
  return device::swizzled(d.swizzle, d.start + offset);
}

// Reads rows [first, first + rows) of an operand, 32 bytes of K each, in the 16-byte chunks the hardware reads.
void read_operand(uint64_t bits, bool mn_major, Operand type, int first, int rows, float (*out)[32], Site site) {
  const Descriptor d = decode(bits);
  Block& block = *self().block;
  constexpr int kChunkBytes = 16;
  const int element = operand_bytes(type), per_chunk = kChunkBytes / element, depth = 32 / element;
  const int lines = mn_major ? depth : rows, line_bytes = (mn_major ? rows : depth) * element;
  static uint32_t offsets[512];
  size_t count = 0;
  for (int i = 0; i < lines; ++i)
    for (int at = 0; at < line_bytes; at += kChunkBytes) {
      const auto line = static_cast<uint32_t>(mn_major ? i : first + i);
      const auto byte = static_cast<uint32_t>(mn_major ? first * element + at : at);
      const uint32_t offset = byte_offset(d, mn_major, line, byte);
      if (offset + kChunkBytes > block.arena_used)
        fail("wgmma: an operand lies outside the block's shared memory", site);
      offsets[count++] = offset;
    }
  proxy_reads_chunks(block, offsets, count, "wgmma", site);
  count = 0;
  for (int i = 0; i < lines; ++i)
    for (int j = 0; j < line_bytes / element; j += per_chunk) {
      float* first = mn_major ? &out[j][i] : &out[i][j];
      widen(block.arena + offsets[count++], per_chunk, type, first, mn_major ? 32 : 1);
    }
}

struct Tile {
  alignas(64) float a[16][32], b[256][32], bt[32][256], d[16][256];
  float a_powers[16][32], b_powers[32][256];  // of 8-bit floats
};

float smallest_normal(Operand type) { return type == Operand::e4m3 ? 0x1p-6f : 0x1p-14f; }

WARPSMITH_SIM_UNCHECKED void multiply(Tile& t, int columns, int depth, Operand a_type, Operand b_type) {
  for (int n = 0; n < columns; ++n)
    for (int k = 0; k < depth; ++k) t.bt[k][n] = t.b[n][k];
  if (depth == kFloat8Terms) {
    for (int k = 0; k < depth; ++k) {
      for (int row = 0; row < 16; ++row) t.a_powers[row][k] = float8_power(t.a[row][k], smallest_normal(a_type));
      for (int n = 0; n < columns; ++n) t.b_powers[k][n] = float8_power(t.bt[k][n], smallest_normal(b_type));
    }
    for (int row = 0; row < 16; ++row)
      for (int n = 0; n < columns; n += kFloat8Columns)
        add_float8_products(t.d[row] + n, t.a[row], t.a_powers[row], t.bt[0] + n, t.b_powers[0] + n, 256);
    return;
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; n += 8)  // by eight, so that -O2 vectorises
        for (int i = 0; i < 8; ++i) t.d[row][n + i] += t.a[row][k] * t.bt[k][n + i];
}

// A lane's accumulators, from its registers (null: zeros) or to them.
WARPSMITH_SIM_UNCHECKED void take_accumulators(Tile& t, int lane, const float* registers, int count) {
  for (int j = 0; j < count; ++j)
    t.d[lane / 4 + 8 * (j >> 1 & 1)][8 * (j >> 2) + 2 * (lane % 4) + (j & 1)] = registers ? registers[j] : 0.0f;
}
WARPSMITH_SIM_UNCHECKED void give_accumulators(const Tile& t, int lane, float* registers, int count) {
  for (int j = 0; j < count; ++j)
    registers[j] = t.d[lane / 4 + 8 * (j >> 1 & 1)][8 * (j >> 2) + 2 * (lane % 4) + (j & 1)];
}

// One wgmma of one warp; `all` holds every lane's copy of it.
void compute(PendingWgmma* const* all) {
  const WgmmaOperands& o = all[0]->operands;
  const int first_row = self().linear_index / 32 % 4 * 16, depth = 32 / operand_bytes(o.a_type);
  static Tile t;
  if (o.a_registers) {
    for (int lane = 0; lane < 32; ++lane) unpack_fragment(all[lane]->operands.a_registers, 4, o.a_type, lane, t.a);
  } else {
    read_operand(o.a, o.a_mn_major, o.a_type, first_row, 16, t.a, all[0]->site);
  }
  read_operand(o.b, o.b_mn_major, o.b_type, 0, o.n, t.b, all[0]->site);
  for (int lane = 0; lane < 32; ++lane)
    take_accumulators(t, lane, o.accumulate ? all[lane]->operands.d : nullptr, o.n / 2);
  multiply(t, o.n, depth, o.a_type, o.b_type);
  for (int lane = 0; lane < 32; ++lane) give_accumulators(t, lane, all[lane]->operands.d, o.n / 2);
}

// Accumulators of the lane's wgmmas in flight, held aside while the registers show NaN.
void hide(Thread& t, float* d, int registers) {
  for (const HiddenAccumulators& h : t.hidden)
    if (h.d == d) return;
  Untracked scope;
  t.hidden.push_back({d, std::vector<float>(d, d + registers)});
  for (int i = 0; i < registers; ++i) d[i] = std::numeric_limits<float>::quiet_NaN();
}

void reveal(Thread& t) {
  for (HiddenAccumulators& h : t.hidden)
    for (size_t i = 0; i < h.values.size(); ++i) h.d[i] = h.values[i];
}

// Hides again what later groups still accumulate into.
void hide_pending(Thread& t) {
  Untracked scope;
  t.hidden.clear();
  for (auto& group : t.wgmma_groups)
    for (PendingWgmma& w : group)
      if (!w.executed) hide(t, w.operands.d, w.operands.n / 2);
  for (PendingWgmma& w : t.open_wgmmas)
    if (!w.executed) hide(t, w.operands.d, w.operands.n / 2);
}

struct Due {
  Thread* thread;
  int groups;  // oldest groups to execute; -1: the newest open wgmma
};

void execute_due(void* const* arguments, unsigned) {
  Thread* threads[32];
  int groups = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const auto& due = *static_cast<const Due*>(arguments[lane]);
    threads[lane] = due.thread;
    groups = due.groups;
    reveal(*threads[lane]);
  }
  PendingWgmma* all[32];
  for (int g = 0; g < groups; ++g)
    for (size_t i = 0; i < threads[0]->wgmma_groups[static_cast<size_t>(g)].size(); ++i) {
      for (int lane = 0; lane < 32; ++lane) all[lane] = &threads[lane]->wgmma_groups[static_cast<size_t>(g)][i];
      if (!all[0]->executed) compute(all);
      for (PendingWgmma* w : all) w->executed = true;
    }
  if (groups < 0) {
    for (int lane = 0; lane < 32; ++lane) all[lane] = &threads[lane]->open_wgmmas.back();
    compute(all);
    for (PendingWgmma* w : all) w->executed = true;
  }
  for (Thread* t : threads) hide_pending(*t);
}

const char issue_identity = 0, wait_identity = 0, fence_identity = 0, commit_identity = 0, budget_identity = 0;

void check_warpgroup(const char* what, Site site) {
  if (self().block->thread_count % 128) fail(std::string(what) + ": the block is not made of whole warpgroups", site);
}

}  // namespace

void wgmma_fence(Site site) {
  if (!sm90_code()) return;
  check_warpgroup("wgmma_fence", site);
  warp_operation(kWholeWarp, nullptr, &fence_identity, nullptr, "wgmma_fence", site);
  self().wgmma_fenced = true;
}

void wgmma(const WgmmaOperands& operands, Site site) {
  if (!sm90_code()) return;
  check_warpgroup("wgmma", site);
  Thread& me = self();
  if (operands.n < 8 || operands.n > 256 || operands.n % 8) fail("wgmma: N must be a multiple of 8 up to 256", site);
  if (!me.wgmma_fenced) fail("wgmma: a group of wgmmas begins with wgmma_fence()", site);
  {
    Untracked scope;
    me.open_wgmmas.push_back({operands, site, false});
  }
  if (me.lane == 0) count_flops(int64_t{2} * 16 * (32 / operand_bytes(operands.a_type)) * operands.n);
  const Timing timing = async_timing();
  // The same choice in every lane of a warp.
  const uint64_t place =
      static_cast<uint64_t>(me.linear_index / 32) * 7919 + me.wgmma_groups.size() * 31 + me.open_wgmmas.size();
  const bool now = timing == Timing::early ||
                   (timing == Timing::random && (place * 0x9e3779b97f4a7c15ull + machine.options.seed) >> 40 & 1);
  if (!now) hide(me, operands.d, operands.n / 2);
  Due due{&me, -1};
  // Out-of-order execution within one accumulator would be wrong: early only if nothing is pending.
  const bool pending = !me.hidden.empty();
  warp_operation(kWholeWarp, now && !pending ? execute_due : nullptr, &issue_identity, &due, "wgmma", site);
  if (now && pending) hide(me, operands.d, operands.n / 2);
}

void wgmma_commit(Site site) {
  if (!sm90_code()) return;
  Thread& me = self();
  warp_operation(kWholeWarp, nullptr, &commit_identity, nullptr, "wgmma_commit", site);
  Untracked scope;
  me.wgmma_groups.push_back(std::move(me.open_wgmmas));
  me.open_wgmmas.clear();
  me.wgmma_fenced = false;
}

void wgmma_wait(int groups_in_flight, Site site) {
  if (!sm90_code()) return;
  check_warpgroup("wgmma_wait", site);
  Thread& me = self();
  const int complete = std::max(0, static_cast<int>(me.wgmma_groups.size()) - groups_in_flight);
  Due due{&me, complete};
  warp_operation(kWholeWarp, execute_due, &wait_identity, &due, "wgmma_wait", site);
  order_acquire(&me.block->operand_reads);
  Untracked scope;
  me.wgmma_groups.erase(me.wgmma_groups.begin(), me.wgmma_groups.begin() + complete);
}

const char* unfinished_wgmma(const Thread& thread) {
  if (!thread.open_wgmmas.empty()) return "thread exits with wgmmas that were not committed";
  if (!thread.wgmma_groups.empty()) return "thread exits with wgmmas in flight: wgmma_wait() is missing";
  return nullptr;
}

// ---- register budgets: a block of a kernel with setmaxnreg has the multiprocessor's 64 Ki registers for itself
// -----------------

void begin_registers(Block& block) {
  const int at_start = std::min(248, 65536 / std::max(1, block.thread_count) / 8 * 8);
  block.warpgroup_registers.assign(static_cast<size_t>(block.thread_count + 127) / 128, at_start);
  block.waiting_for_registers.clear();
}

void set_register_budget(int registers, bool increase, Site site) {
  if (!sm90_code()) return;
  check_warpgroup("setmaxnreg", site);
  Thread& me = self();
  Block& block = *me.block;
  warp_operation(kWholeWarp, nullptr, &budget_identity, nullptr, "setmaxnreg", site);
  int& mine = block.warpgroup_registers[static_cast<size_t>(me.linear_index / 128)];
  if (mine == registers) return;  // another thread of the warpgroup came first
  if (increase != (registers > mine))
    fail(increase ? "increase_registers to fewer" : "decrease_registers to more", site);
  const auto total_with_mine = [&] {
    int total = registers - mine;
    for (int r : block.warpgroup_registers) total += r;
    return total * 128;
  };
  while (increase && mine != registers && total_with_mine() > 65536) {
    {
      Untracked scope;
      block.waiting_for_registers.push_back(&me);
    }
    block_until_ready({"setmaxnreg", -1, site});
  }
  mine = registers;
  for (Thread* t : block.waiting_for_registers) make_ready(*t);
  block.waiting_for_registers.clear();
}

}  // namespace warpsmith::sim
