// What no call from Python can ask of the kernels of attention: pure functions of their plans, calls that bindings do
// not make (far results, wrong offsets, pointers that no kernel takes), bank conflicts. Their numbers are held to the
// law by tests/ops/test_attention*.py. links: csrc/kernels/attention/attention.cu links:
// csrc/kernels/attention/portable/attention_portable.cu links: csrc/kernels/attention/hopper/forward_sm90a.cu links:
// csrc/kernels/attention/hopper/backward_sm90a.cu links: csrc/kernels/attention/hopper/backward_wide_sm90a.cu links:
// csrc/kernels/attention/portable/portable_bfloat16.cu links: csrc/kernels/attention/portable/portable_float16.cu
// links: csrc/kernels/attention/portable/portable_float32.cu
#include "device/halves.h"  // before the host's conversions, which harness.h brings

#include "attention_problem.h"
#include "far.h"
#include "kernels/attention/backward_plan.h"
#include "kernels/attention/hopper/attention_sm90.h"
#include "kernels/attention/portable/attention_portable.h"
#include "kernels/attention/sections.h"

namespace warpsmith::test {
namespace {

// While it lives, calls are planned as on a GPU older than Hopper.
class PortableAlone {
 public:
  explicit PortableAlone(bool on = true) { attention_portable_alone(on); }
  ~PortableAlone() { attention_portable_alone(false); }
  PortableAlone(const PortableAlone&) = delete;
  PortableAlone& operator=(const PortableAlone&) = delete;
};

// Forward, then backward from what the forward gave.
template <class T> void run(AttentionData<T>& data) {
  data.poison_results();
  expect_ok(data.run(data.forward()));
  expect_ok(data.run(data.backward()));
}
template <class T> std::string bits_of(AttentionData<T>& data) {
  run(data);
  return data.bits();
}

// ---- instructions on four bytes at once

// Words against every threshold, with many bytes close to it.
template <class Check> void for_words_near_thresholds(Check&& check) {
  Random random(1);
  for (uint32_t threshold = 1; threshold <= 256; ++threshold)
    for (int i = 0; i < 100; ++i) {
      uint32_t word = 0;
      for (int byte = 0; byte < 4; ++byte) {
        const int64_t x = random.coin() ? random.integer(0, 255) : int64_t{threshold} + random.integer(-2, 2);
        word |= static_cast<uint32_t>(std::clamp<int64_t>(x, 0, 255)) << (8 * byte);
      }
      check(word, threshold, [&](int byte) { return (word >> (8 * byte) & 0xff) >= threshold; });
    }
}
TEST(bytes_reach_their_threshold) {
  for_words_near_thresholds([](uint32_t word, uint32_t threshold, auto&& kept) {
    const uint32_t reached = device::bytes_reach(word, device::bytes_threshold(threshold));
    for (int byte = 0; byte < 4; ++byte)
      expect_equal("byte " + std::to_string(byte), (reached >> (8 * byte + 7) & 1) != 0, kept(byte));
  });
}
TEST(gates_of_bytes) {
  for_words_near_thresholds([](uint32_t word, uint32_t threshold, auto&& kept) {
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t gates = device::byte_gates(word, pair, device::byte_threshold(threshold));
      expect_equal("low half", gates & 0xffff, kept(2 * pair) ? 0x3c00u : 0u);
      expect_equal("high half", gates >> 16, kept(2 * pair + 1) ? 0x3c00u : 0u);
    }
  });
}
template <class T> void check_gated() {
  constexpr uint32_t kOpen = 0x3c00;
  for (const float x : {0.0f, 0x1p-14f, 0.75f, 1.0f, 61440.0f})
    for (const uint32_t gates : {0u, kOpen, kOpen << 16, kOpen << 16 | kOpen}) {
      const uint32_t gated = device::multiply_halves<T>(device::pack<T>(x, 1.0f), gates);
      expect_equal("gated", device::low_half<T>(gated), (gates & kOpen) != 0 ? x * device::kGate<T> : 0.0f);
    }
}
TEST(gated_elements) {
  check_gated<float16>();
  check_gated<bfloat16>();
}
TEST(signs_are_spread) {
  expect_equal("1, 5", device::spread_signs(0x00008000, 0x7fff7fff, device::spread_selector(1, 5)), 0x0000ffffu);
  expect_equal("2, 7", device::spread_signs(0x7f7f8080, 0x80000000, device::spread_selector(2, 7)), 0xffff0000u);
  expect_equal("1, 0", device::spread_signs(0x000080ff, 0, device::spread_selector(1, 0)), 0xffffffffu);
}

// ---- plans

void expect_each_tile_once(const attention::Sections& sections) {
  std::vector<int> visits(static_cast<size_t>(sections.heads * sections.row_tiles));
  for (int n = 0; n < sections.heads * sections.row_tiles; ++n) {
    const attention::SectionTile at = attention::section_tile(sections, n);
    expect(at.head >= 0 && at.head < sections.heads && at.row_tile >= 0 && at.row_tile < sections.row_tiles,
           "a tile of no head");
    ++visits[static_cast<size_t>(at.head * sections.row_tiles + at.row_tile)];
  }
  for (const int times : visits) expect_equal("visits of a tile", times, 1);
}
RANDOM_TEST(sections_have_each_tile_once) {
  const int group = static_cast<int>(random.integer(1, 4)), key_heads = static_cast<int>(random.integer(1, 60));
  attention::Sections sections{};
  sections.heads = group * key_heads;
  sections.row_tiles = static_cast<int>(random.integer(1, 9));
  sections.heads_first = random.coin();
  sections.descending = random.coin();
  const attention::SectionHeads chosen = attention::forward_sections(sections.heads, random.integer(0, 80), group);
  sections.together = chosen.together;
  sections.joined = chosen.joined;
  expect_each_tile_once(sections);
  sections.joined = 0;  // the backward's: the last section may be smaller
  sections.together = static_cast<int>(random.integer(1, 80));
  expect_each_tile_once(sections);
}
TEST(a_forward_has_small_sections_and_a_large_last_one) {
  const auto check = [](attention::SectionHeads s, int together, int joined) {
    expect_equal("heads together", s.together, together);
    expect_equal("joined heads", s.joined, joined);
  };
  check(attention::forward_sections(256, 64, 1), 8, 64);     // 16 sequences of 1,024 x 16 heads of 128
  check(attention::forward_sections(768, 128, 1), 16, 128);  // 64 sequences of 1,024 x 12 heads of 64
  check(attention::forward_sections(100, 64, 1), 8, 68);
  check(attention::forward_sections(64, 8, 8), 8, 64);  // one section
  check(attention::forward_sections(16, 0, 1), 1, 1);
}
TEST(long_and_narrow_problems_are_divided_otherwise) {
  const auto plan = [](const AttentionCase& shape, int parts, bool blocks_first) {
    AttentionData<bfloat16> data(shape);
    expect_equal("parts", attention::backward_parts(data.problem()), parts);
    expect_equal("blocks first", attention::visits_blocks_first(data.problem()), blocks_first);
  };
  // As LONG of tests/ops/test_attention_drawn.py has them.
  plan({.queries = 1100, .keys = 10, .heads = 16, .key_heads = 1, .head_dim = 8}, 2, false);
  plan({.queries = 1000, .keys = 16, .heads = 16, .key_heads = 1, .head_dim = 8}, 1, false);
  plan({.queries = 900, .keys = 930, .head_dim = 8, .window_left = 60, .window_right = 20}, 1, true);
}
// The kernels of a call are chosen once: a launch asks neither for its kernels nor for its workspace again.
TEST(a_launch_follows_its_plan) {
  NEEDS_SM90_CODE;
  AttentionData<bfloat16> data({.queries = 70, .keys = 90, .window_right = 0});
  AttentionFwdParams f = data.forward();
  AttentionBwdParams b = data.backward();
  AttentionForwardPlan forward, forward_elsewhere;
  AttentionBackwardPlan backward, backward_elsewhere;
  expect_ok(attention_forward_plan_cuda(f, forward));
  expect_ok(attention_backward_plan_cuda(b, backward));
  const std::string want = bits_of(data);
  data.poison_results();
  {
    const PortableAlone portable;
    expect_ok(attention_forward_plan_cuda(f, forward_elsewhere));
    expect_ok(attention_backward_plan_cuda(b, backward_elsewhere));
    f.workspace = data.workspace_of(forward.workspace_bytes);
    expect_ok(attention_forward_cuda(f, forward, nullptr));
    b.workspace = data.workspace_of(backward.workspace_bytes);
    expect_ok(attention_backward_cuda(b, backward, nullptr));
    expect(data.bits() == want, "other kernels ran than the plan's");
    expect(bits_of(data) != want, "portable kernels give other bits");
  }
  expect(forward.hopper.supported && backward.hopper.supported, "Hopper kernels");
  expect(!forward_elsewhere.hopper.supported && !backward_elsewhere.hopper.supported, "portable kernels");
  expect(backward.workspace_bytes != backward_elsewhere.workspace_bytes, "a workspace of another size");
}

// Whether a Hopper kernel takes the call, or why none does. Reasons that no pointer, stride or number has are asked of
// the planner in Python.
Status on_hopper(const AttentionFwdParams& p) {
  const auto choice = attention_forward_plan_sm90(p).hopper;
  return choice.supported ? Status() : Status::unsupported(choice.why);
}
Status on_hopper(const AttentionBwdParams& p) {
  const auto choice = attention_backward_plan_sm90(p).hopper;
  return choice.supported ? Status() : Status::unsupported(choice.why);
}
TEST(what_hopper_kernels_lack_is_refused) {
  NEEDS_SM90_CODE;
  const auto refused = [](const AttentionCase& shape, const char* why, auto&& change) {
    AttentionData<bfloat16> data(shape);
    AttentionFwdParams f = data.forward();
    AttentionBwdParams b = data.backward();
    change(f.problem), change(b.problem);
    expect_refused(on_hopper(f), why);
    expect_refused(on_hopper(b), why);
  };
  const auto as_it_is = [](AttentionProblem&) {};
  const char* unpaired = "a bias or mask whose keys are no aligned pairs";
  refused({.queries = 64, .keys = 65, .bias = "0011"}, unpaired, as_it_is);
  refused({.queries = 64, .keys = 64, .mask = "0010"}, unpaired, as_it_is);
  refused({.queries = 64, .keys = 64, .bias = "0011"}, unpaired, [](auto& p) { p.bias_strides.q = 33; });
  refused({.queries = 64, .keys = 64, .bias = "0011"}, unpaired,
          [](auto& p) { p.bias = static_cast<const bfloat16*>(p.bias) + 1; });
  refused({.queries = 64, .keys = 64, .bias = "0011"}, "a float32 bias",
          [](auto& p) { p.bias_dtype = Dtype::float32; });
  refused({.queries = 64, .keys = 64, .alibi = true}, "a softmax_scale below 2^-64",
          [](auto& p) { p.softmax_scale = 0x1p-70; });
  AttentionData<bfloat16> capped({.queries = 64, .keys = 64, .softcap = 2.0});
  expect_refused(on_hopper(capped.backward()), "softcap");
}
TEST(bias_gradients_that_the_portable_kernel_makes) {
  NEEDS_SM90_CODE;
  const auto on_hopper = [](const AttentionCase& shape, int64_t elements_further = 0) {
    AttentionData<bfloat16> data(shape);
    AttentionBwdParams p = data.backward();
    p.dbias = data.dbias.data() + elements_further;
    return attention_backward_plan_sm90(p).hopper_dbias;
  };
  const AttentionCase usual{.queries = 64, .keys = 64, .bias = "0011"};
  expect(on_hopper(usual), "rows in pieces of 16 bytes");
  expect(!on_hopper(usual, 2), "an address that is no multiple of 16 bytes");
  expect(!on_hopper({.queries = 64, .keys = 68, .bias = "0011"}), "a row of 136 bytes");
  expect(!on_hopper({.queries = 64, .keys = 64, .bias = "0001"}), "broadcast over queries");
  expect(!on_hopper({.queries = 64, .keys = 64, .head_dim = 136, .bias = "0011"}), "a head dimension above 128");
}
TEST(code_below_sm90_is_refused) {
  on_machine(132, 80, [] {
    for (const int64_t dim : {64, 256}) {
      AttentionData<bfloat16> data({.queries = 64, .keys = 64, .head_dim = dim});
      expect_refused(on_hopper(data.forward()), "runs no code of sm_90a");
      expect_refused(on_hopper(data.backward()), "runs no code of sm_90a");
    }
    AttentionData<bfloat16> biased({.queries = 64, .keys = 64, .bias = "0011"});
    expect_refused(on_hopper(biased.backward()), "runs no code of sm_90a");
    expect(!attention_backward_plan_sm90(biased.backward()).hopper_dbias, "code of sm_80");
  });
}
TEST(what_no_kernel_takes) {
  AttentionData<bfloat16> data({.queries = 20, .keys = 20, .head_dim = 16});
  const auto forward = [&](const char* why, auto&& change) {
    AttentionFwdParams p = data.forward();
    change(p);
    expect_refused(attention_forward_supported_portable(p), why);
  };
  const auto backward = [&](const char* why, auto&& change) {
    AttentionBwdParams p = data.backward();
    change(p);
    expect_refused(attention_backward_supported_portable(p), why);
  };
  forward("no portable kernel for float64", [](auto& p) { p.problem.dtype = Dtype::float64; });
  forward("no multiples of 16 bytes", [](auto& p) { p.k = static_cast<const bfloat16*>(p.k) + 1; });
  forward("no multiples of 16 bytes", [](auto& p) { p.out_strides.seq += 1; });
  forward("more than 2^31 - 1 tiles", [](auto& p) { p.problem.batch = int64_t{1} << 31; });
  backward("no multiples of 16 bytes", [](auto& p) { p.dv = static_cast<bfloat16*>(p.dv) + 4; });
  backward("sequences of 2^28 tokens or more", [](auto& p) { p.problem.seqlen_k = int64_t{1} << 28; });
}

// ---- tensors that no call from Python has

// A tensor of heads whose tokens lie 2^27 elements apart: the values of one that lies together.
template <class T> struct FarHeads {
  HeadBuffer<T>& near;
  int64_t tokens;
  AttentionStrides strides;
  sim::SparseMemory<T> memory;

  FarHeads(HeadBuffer<T>& from, int64_t batch, int64_t length)
      : near(from),
        tokens(batch * length),
        strides{length << 27, int64_t{1} << 27, from.dim},
        memory(static_cast<size_t>(tokens << 27)) {
    for_tokens([&](T* here, T* there) { std::copy_n(here, near.strides.seq, there); });
  }
  void fetch() {
    for_tokens([&](T* here, T* there) { std::copy_n(there, near.strides.seq, here); });
  }

 private:
  template <class F> void for_tokens(F&& f) {
    for (int64_t i = 0; i < tokens; ++i) f(near.data.data() + i * near.strides.seq, memory.data() + (i << 27));
  }
};
// Beyond 2^31 elements along tokens and sequences, results too: the bits of tensors that lie together.
template <class T> void check_far(int64_t dim) {
  AttentionData<T> data({.batch = 2, .queries = 18, .keys = 17, .heads = 2, .key_heads = 2, .head_dim = dim});
  const std::string want = bits_of(data);
  FarHeads q(data.q, 2, 18), k(data.k, 2, 17), v(data.v, 2, 17), out(data.out, 2, 18), dout(data.dout, 2, 18);
  FarHeads dq(data.dq, 2, 18), dk(data.dk, 2, 17), dv(data.dv, 2, 17);
  data.poison_results();
  AttentionFwdParams f = data.forward();
  f.q = q.memory.data(), f.k = k.memory.data(), f.v = v.memory.data(), f.out = out.memory.data();
  f.q_strides = q.strides, f.k_strides = k.strides, f.v_strides = v.strides, f.out_strides = out.strides;
  expect_ok(data.run(f));
  AttentionBwdParams b = data.backward();
  b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.dout = dout.memory.data();
  b.dq = dq.memory.data(), b.dk = dk.memory.data(), b.dv = dv.memory.data();
  b.q_strides = q.strides, b.k_strides = k.strides, b.v_strides = v.strides, b.out_strides = out.strides;
  b.dout_strides = dout.strides, b.dq_strides = dq.strides, b.dk_strides = dk.strides, b.dv_strides = dv.strides;
  expect_ok(data.run(b));
  for (FarHeads<T>* x : {&out, &dq, &dk, &dv}) x->fetch();
  expect(data.bits() == want, "other bits where tokens lie far apart");
}
TEST(offsets_beyond_32_bits) {
  for (const int64_t dim : {64, 128, 256}) check_far<bfloat16>(dim);
  check_far<float>(16);
  const PortableAlone portable;
  for (const int64_t dim : {16, 256}) check_far<float16>(dim);
}

// One query, key and head of each of 70,000 sequences, of which the last 20 run: the bits of those alone.
TEST(more_sequences_than_a_grid_has_rows) {
  const PortableAlone portable;
  constexpr int64_t kAll = 70000, kRun = 20;
  AttentionData<float16> data({.batch = kRun, .head_dim = 8}), all({.batch = kAll, .head_dim = 8});
  const auto last = [&](auto& x, const auto& few) { return x.data() + (x.size() - few.size()); };
  const auto to_all = [&](auto& few, auto& x) { std::copy_n(few.data(), few.size(), last(x, few)); };
  to_all(data.q.data, all.q.data), to_all(data.k.data, all.k.data), to_all(data.v.data, all.v.data);
  to_all(data.dout.data, all.dout.data), to_all(data.dlse, all.dlse);
  run(data);
  {
    const FarMachine machine(kRun);
    run(all);
  }
  const auto same = [&](const char* name, auto& few, auto& x) {
    expect(std::memcmp(few.data(), last(x, few), few.size() * sizeof(few[0])) == 0, name);
  };
  same("out", data.out.data, all.out.data), same("lse", data.lse, all.lse), same("dq", data.dq.data, all.dq.data);
  same("dk", data.dk.data, all.dk.data), same("dv", data.dv.data, all.dv.data);
}

// Offsets that fall, lie outside of the tensors or make sequences too long lead to no access out of bounds, which the
// address sanitizer would see. No token here belongs to two sequences: it would be written twice.
TEST(offsets_of_sequences_that_are_wrong) {
  const std::pair<std::vector<int32_t>, std::vector<int32_t>> offsets[] = {
      {{30, -7, 90, 21}, {40, 90, -7, 61}},
      {{-2000000000, 2000000000, 30, 51}, {100, 2000000000, 2000000000, 0}},
      {{70, 0, 61, 300}, {0, -5, 61, 30}}};
  for (const auto& [of_q, of_k] : offsets)
    for (const int64_t dim : {16, 64, 128, 256}) {
      AttentionCase shape{
          .heads = 2, .head_dim = dim, .sink = true, .lengths_q = {20, 21, 20}, .lengths_k = {20, 21, 20}};
      if (dim == 16) shape.bias = "0011", shape.dropout = 0.5;  // portable kernels
      AttentionData<bfloat16> data(shape);
      std::copy(of_q.begin(), of_q.end(), data.cu_q.data());
      std::copy(of_k.begin(), of_k.end(), data.cu_k.data());
      run(data);
    }
}

// ---- schedules

// The same bits under every schedule, all of them numbers.
template <class T> void check_schedules(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  under_every_seed([&] {
    run(data);
    data.for_results([](const char* name, const void* x, size_t bytes) { same_bits_for_every_seed(name, x, bytes); });
    for (const HeadBuffer<T>* x : {&data.out, &data.dq, &data.dk, &data.dv})
      for (size_t i = 0; i < x->data.size(); ++i) expect(!std::isnan(static_cast<double>(to_float(x->data[i]))), "NaN");
  });
}
// Shared memory is read and written in as few passes as its banks allow. Not by the backwards with a bias.
TEST(no_bank_conflicts) {
  const auto check = [](const AttentionCase& shape, auto type) {
    check_schedules<decltype(type)>(shape);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
  };
  SeedsAtMost few(2);
  for (const bool alone : {false, true}) {
    const PortableAlone portable(alone);
    for (const int64_t dim : {64, 128, 256}) {
      check({.queries = 150, .keys = 300, .heads = 2, .key_heads = 1, .head_dim = dim, .window_right = 0}, bfloat16{});
      check({.queries = 70, .keys = 90, .heads = 2, .key_heads = 2, .head_dim = dim - 24, .dropout = 0.3}, float16{});
    }
    check({.sink = true, .lengths_q = {70, 0, 3}, .lengths_k = {70, 10, 7}, .spare_tokens = 5}, bfloat16{});
  }
  check({.queries = 70, .keys = 50, .head_dim = 16, .softcap = 2, .bias = "0011", .mask = "1001", .alibi = true},
        float{});
  check({.queries = 40, .keys = 50, .head_dim = 128, .window_right = 0}, float{});
}

}  // namespace
}  // namespace warpsmith::test
