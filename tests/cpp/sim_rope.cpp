// The rope kernels on the host: against the rotation in double precision.
#include "kernels/rope/rope.h"

#include "harness.h"
#include "kernels/rope/rope_config.h"
#include "rotary_problem.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

// A problem with its inputs, outputs and oracle. T: of q and k, C: of cos and sin.
template <class T, class C> struct Problem {
  RotarySetting s;
  RotaryTables<C> tables;
  Buffer<T> q, k, q_out, k_out;
  std::vector<double> want_q, want_k;
  RopeParams params{};

  explicit Problem(const RotarySetting& setting, uint64_t seed = 1)
      : s(setting),
        tables(setting),
        q(heads_buffer<T>(s, s.q_heads, s.padding, s.offset)),
        k(heads_buffer<T>(s, s.k_heads, s.padding, s.offset)),
        q_out(heads_buffer<T>(s, s.q_heads, 0, 0)),
        k_out(heads_buffer<T>(s, s.k_heads, 0, 0)) {
    fill_normal(q, seed);
    fill_normal(k, seed + 1);
    params = {q.data(),
              k.data(),
              q_out.data(),
              k_out.data(),
              layout_of(s, s.q_heads, s.padding),
              layout_of(s, s.k_heads, s.padding),
              layout_of(s, s.q_heads, 0),
              layout_of(s, s.k_heads, 0),
              tables.angles,
              tables.positions,
              {s.batch, s.tokens, s.head_dim, s.rotary_dim, s.interleaved, s.inverse},
              false,
              kDtype<T>};
    want_q = oracle(q, params.q_in_layout, params.q_out_layout, q_out.size());
    want_k = oracle(k, params.k_in_layout, params.k_out_layout, k_out.size());
  }

  std::vector<double> oracle(const Buffer<T>& x, const RotaryHeads& in, const RotaryHeads& out, size_t count) const {
    std::vector<double> want(count), head(static_cast<size_t>(s.head_dim));
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t h = 0; h < in.heads; ++h) {
          for (int64_t d = 0; d < s.head_dim; ++d)
            head[static_cast<size_t>(d)] = static_cast<double>(to_float(x[element(in, b, t, h, d)]));
          tables.rotate(s, b, t, head);
          for (int64_t d = 0; d < s.head_dim; ++d) want[element(out, b, t, h, d)] = head[static_cast<size_t>(d)];
        }
    return want;
  }

  void check() {
    const Tolerance rounding{.ulps = 0.51, .relative = 1e-6, .absolute = 1e-6};
    expect_close("q", q_out, want_q, rounding);
    expect_close("k", k_out, want_k, rounding);
    same_bits_for_every_seed("q", q_out);
    same_bits_for_every_seed("k", k_out);
  }

  void run() {
    under_every_seed([&] {
      q_out.poison(), k_out.poison();
      expect_ok(rope_cuda(params, nullptr));
      check();
    });
  }

  RopeProblem planned() const {
    return {s.batch * s.tokens, s.q_heads, s.k_heads, s.head_dim, s.rotary_dim, static_cast<int>(sizeof(T))};
  }
};

TEST(every_kernel) {
  for (const bool interleaved : {false, true})
    for (const int64_t rotary_dim : {64, 32, 20}) {
      const RotarySetting s{.rotary_dim = rotary_dim, .interleaved = interleaved};
      Problem<float, float>(s).run();
      Problem<float16, float16>(s).run();
      Problem<float16, float>(s).run();
      Problem<bfloat16, bfloat16>(s).run();
      Problem<bfloat16, float>(s).run();
    }
}

TEST(head_dimensions) {
  for (const int64_t dim : {1, 2, 3, 7, 16, 18, 72, 80, 96, 128, 256, 520})
    for (const bool interleaved : {false, true})
      Problem<bfloat16, bfloat16>({.head_dim = dim, .rotary_dim = dim / 2 * 2, .interleaved = interleaved}).run();
}

TEST(head_counts) {
  for (const int64_t q_heads : {1, 2, 3, 32, 140})
    for (const int64_t k_heads : {0, 1, 8})
      Problem<bfloat16, bfloat16>({.batch = 1, .q_heads = q_heads, .k_heads = k_heads}).run();
}

TEST(part_of_the_head) {
  for (const int64_t rotary_dim : {0, 2, 16, 48, 80})
    for (const bool interleaved : {false, true})
      Problem<bfloat16, float>({.head_dim = 88, .rotary_dim = rotary_dim, .interleaved = interleaved}).run();
}

TEST(by_the_negative_angle) {
  for (const bool interleaved : {false, true})
    Problem<float, float>({.interleaved = interleaved, .inverse = true}).run();
}

TEST(strides_and_alignment) {
  for (const bool head_major : {false, true})
    for (const int64_t padding : {0, 8, 1})
      for (const size_t offset : {0, 1})
        Problem<bfloat16, bfloat16>({.head_major = head_major, .padding = padding, .offset = offset}).run();
}

TEST(rows_for_each_token) {
  for (const bool interleaved : {false, true})
    for (const int64_t dim : {64, 18})
      Problem<bfloat16, float>({.head_dim = dim, .rotary_dim = dim, .interleaved = interleaved, .per_token = true})
          .run();
}

TEST(packed_sequences) {
  RotarySetting s{.batch = 1, .tokens = 11, .cu_seqlens = {0, 0, 3, 3, 4, 11, 11}};
  Problem<bfloat16, bfloat16>(s).run();
  s.offsets = {9, 1, 9, 4, 0, 9};
  for (const bool wide : {true, false}) {
    s.wide_offsets = wide;
    Problem<bfloat16, bfloat16>(s).run();
  }
}

TEST(offsets) {
  for (const bool wide : {true, false}) {
    Problem<float, float>({.offsets = {7, 2}, .wide_offsets = wide, .position_offset = 3}).run();
    Problem<float, float>({.offsets = {5}, .wide_offsets = wide}).run();
  }
}

// Tokens without a row of cos, or without a sequence: NaN where the kernel rotates, and nothing read out of bounds.
TEST(positions_beyond_the_table) {
  for (const int64_t dim : {64, 20}) {
    Problem<bfloat16, bfloat16>({.head_dim = 80, .rotary_dim = dim, .offsets = {2, -1}, .rows = 4}).run();
    Problem<float, float>({.head_dim = 80, .rotary_dim = dim, .position_offset = INT64_C(1) << 40, .rows = 4}).run();
    Problem<float, float>({.head_dim = 80, .rotary_dim = dim, .offsets = {INT64_MAX, INT64_MIN}, .rows = 4}).run();
    Problem<float, float>({.batch = 1, .tokens = 9, .rotary_dim = dim, .cu_seqlens = {2, 5, 7}, .rows = 2}).run();
  }
}

// Means nothing, but reads and writes nothing that is not the problem's.
TEST(sequences_out_of_order) {
  Problem<float, float> p({.batch = 1, .tokens = 9, .cu_seqlens = {5, -3, 100, 4, INT32_MAX, INT32_MIN}, .rows = 2});
  under_every_seed([&] {
    expect_ok(rope_cuda(p.params, nullptr));
    same_bits_for_every_seed("q", p.q_out);
  });
}

TEST(in_place) {
  for (const bool interleaved : {false, true})
    for (const int64_t dim : {64, 32, 20}) {
      Problem<bfloat16, bfloat16> p({.rotary_dim = dim, .interleaved = interleaved});
      const Buffer<bfloat16>&q = p.q, &k = p.k;
      p.params.inplace = true;
      p.params.q = p.q_out.data(), p.params.k = p.k_out.data();
      under_every_seed([&] {
        std::memcpy(p.q_out.data(), q.data(), q.size() * 2);
        std::memcpy(p.k_out.data(), k.data(), k.size() * 2);
        expect_ok(rope_cuda(p.params, nullptr));
        p.check();
        const int64_t heads = p.s.batch * p.s.tokens * (p.s.q_heads + p.s.k_heads);
        expect(sim::counters().global_bytes_written == heads * dim * 2, "writes more than the rotated elements");
      });
    }
}

// 2 elements for each of q and k, and cos and sin of a token once for each of its groups of heads.
TEST(bytes_moved) {
  for (const bool wide : {false, true})
    for (const auto& [head_dim, rotary_dim] : {std::pair<int64_t, int64_t>{128, 128}, {128, 64}, {64, 64}}) {
      const RotarySetting s{.tokens = 5, .q_heads = 5, .k_heads = 2, .head_dim = head_dim, .rotary_dim = rotary_dim};
      const int64_t tokens = s.batch * s.tokens, moved = tokens * (s.q_heads + s.k_heads) * s.head_dim * 2;
      const int64_t heads = head_dim == 64 ? 1 : 2;  // of a group
      const int64_t groups = (s.q_heads + heads - 1) / heads + (s.k_heads + heads - 1) / heads;
      const auto measure = [&](auto& p) {
        under_every_seed([&] {
          expect_ok(rope_cuda(p.params, nullptr));
          expect_bytes({.read = moved + tokens * groups * rotary_dim * (wide ? 4 : 2), .written = moved});
        });
      };
      if (wide) {
        Problem<bfloat16, float> p(s);
        measure(p);
      } else {
        Problem<bfloat16, bfloat16> p(s);
        measure(p);
      }
    }
}

TEST(other_configurations) {
  Problem<bfloat16, bfloat16> p({.tokens = 7, .q_heads = 6, .k_heads = 2});
  for (const int heads : {1, 2, 4})
    for (const int threads : {4, 16, 32, 64, 128}) {
      const RopeConfig c = rope_config_of(p.planned(), heads, threads);
      under_every_seed([&] {
        p.q_out.poison(), p.k_out.poison();
        expect_ok(rope_cuda_with(c, p.params, nullptr));
        p.check();
      });
    }
  RopeConfig c = choose_rope(p.planned());
  c.heads_a_thread = 3;
  expect_refused(rope_cuda_with(c, p.params, nullptr), "3 heads a thread");
  c = rope_config_of(p.planned(), 1, 64);
  c.vector_elems = 1;
  expect_refused(rope_cuda_with(c, p.params, nullptr), "1 heads a thread and vectors of 1");
  c = choose_rope(p.planned());
  c.blocks_x = INT64_C(1) << 32;
  expect_refused(rope_cuda_with(c, p.params, nullptr), "more than a grid may have");
}

TEST(unknown_dtype_is_refused) {
  Problem<float, float> p({});
  p.params.dtype = Dtype::float64;
  expect_refused(rope_cuda(p.params, nullptr), "float64");
}

// Tokens 2^30 elements apart, in memory that is never touched but for the heads under test.
TEST(beyond_2_31_elements) {
  constexpr int64_t kStride = int64_t{1} << 30;
  Problem<bfloat16, bfloat16> p({.batch = 1, .tokens = 4, .q_heads = 1, .k_heads = 1});
  sim::SparseMemory<bfloat16> far(4 * kStride), far_out(4 * kStride);
  for (int64_t t = 0; t < 4; ++t) std::memcpy(far.data() + t * kStride, p.q.data() + t * 64, 128);
  p.params.q = far.data(), p.params.q_out = far_out.data();
  p.params.q_in_layout.token_stride = p.params.q_out_layout.token_stride = kStride;
  under_every_seed([&] {
    expect_ok(rope_cuda(p.params, nullptr));
    for (int64_t t = 0; t < 4; ++t) std::memcpy(p.q_out.data() + t * 64, far_out.data() + t * kStride, 128);
    p.check();
  });
}

RANDOM_TEST(random_problems) {
  RotarySetting s = random_setting(random, 40);
  s.inverse = random.coin();
  const uint64_t seed = random.bits() % 1000;
  switch (random.integer(0, 4)) {
    case 0: return Problem<bfloat16, bfloat16>(s, seed).run();
    case 1: return Problem<float, float>(s, seed).run();
    case 2: return Problem<float16, float16>(s, seed).run();
    case 3: return Problem<bfloat16, float>(s, seed).run();
    default: return Problem<float16, float>(s, seed).run();
  }
}

}  // namespace
}  // namespace warpsmith::test
