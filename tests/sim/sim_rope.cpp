// The kernels of rope and qk_norm_rope on the host, against the formulas in double precision. The rows of rope_ops.h
// give the tests that both have.
#include "rope_problem.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

// ---- both ops

template <RopeOp op, class T, class C, class W = T> void run(const RotarySetting& s, uint64_t seed = 1) {
  Problem<op, T, C, W>(s, seed).run();
}

template <RopeOp op> void every_kernel() {
  for (const bool interleaved : {false, true})
    for (const int64_t rotary_dim : {64, 32, 20}) {
      const RotarySetting s{.rotary_dim = rotary_dim, .interleaved = interleaved};
      run<op, float, float>(s);
      run<op, float16, float16>(s);
      run<op, float16, float, float>(s);
      run<op, bfloat16, bfloat16>(s);
      run<op, bfloat16, bfloat16, float>(s);
      run<op, bfloat16, float>(s);
    }
}

template <RopeOp op> void head_dimensions() {
  for (const int64_t dim : {1, 2, 3, 7, 16, 18, 32, 72, 80, 96, 128, 256, 512, 520})
    for (const bool interleaved : {false, true})
      run<op, bfloat16, bfloat16>(
          {.tokens = 2, .head_dim = dim, .rotary_dim = dim / 2 * 2, .interleaved = interleaved});
}

template <RopeOp op> void head_counts() {
  for (const int64_t q_heads : {1, 2, 3, 32, 70, 140})
    for (const int64_t k_heads : {0, 1, 8})
      run<op, bfloat16, bfloat16>({.batch = 1, .tokens = 2, .q_heads = q_heads, .k_heads = k_heads});
}

template <RopeOp op> void part_of_the_head() {
  for (const int64_t rotary_dim : {0, 2, 16, 48, 80})
    for (const bool interleaved : {false, true})
      run<op, bfloat16, float>({.head_dim = 88, .rotary_dim = rotary_dim, .interleaved = interleaved});
}

template <RopeOp op> void strides_and_alignment() {
  for (const bool head_major : {false, true})
    for (const int64_t padding : {0, 8, 1})
      for (const size_t offset : {0, 1})
        run<op, bfloat16, bfloat16>({.head_major = head_major, .padding = padding, .offset = offset});
  for (int argument = 0; argument < 8; ++argument) run<op, bfloat16, bfloat16>({.offset = Offsets::only(argument)});
}

// Rows of cos and sin for each token, packed sequences, and offsets.
template <RopeOp op> void positions() {
  for (const bool interleaved : {false, true})
    for (const int64_t dim : {64, 18})
      run<op, bfloat16, float>({.head_dim = dim, .rotary_dim = dim, .interleaved = interleaved, .per_token = true});
  RotarySetting packed{.batch = 1, .tokens = 11, .cu_seqlens = {0, 0, 3, 3, 4, 11, 11}};
  run<op, bfloat16, bfloat16>(packed);
  for (const int32_t end : {9, 4, 0}) {  // tokens behind the last sequence have no angles
    packed.cu_seqlens = {0, 0, 0, 0, end, end};
    run<op, bfloat16, bfloat16>(packed);
  }
  packed.cu_seqlens = {0, 0, 3, 3, 4, 11, 11};
  packed.offsets = {9, 1, 9, 4, 0, 9};
  for (const bool wide : {true, false}) {
    packed.wide_offsets = wide;
    run<op, bfloat16, bfloat16>(packed);
    run<op, float, float>({.offsets = {7, 2}, .wide_offsets = wide, .position_offset = 3});
    run<op, float, float>({.head_dim = 20, .rotary_dim = 20, .offsets = {5}, .wide_offsets = wide});
  }
}

// Tokens without a row of cos, or without a sequence: NaN where the kernel rotates (and in gradients that meet it), and
// nothing is read out of bounds.
template <RopeOp op> void positions_beyond_the_table() {
  for (const int64_t dim : {64, 20}) {
    run<op, bfloat16, bfloat16>({.head_dim = 80, .rotary_dim = dim, .offsets = {2, -1}, .rows = 4});
    run<op, float, float>({.head_dim = 80, .rotary_dim = dim, .position_offset = INT64_C(1) << 40, .rows = 4});
    run<op, float, float>({.head_dim = 80, .rotary_dim = dim, .offsets = {INT64_MAX, INT64_MIN}, .rows = 4});
    run<op, float, float>({.batch = 1, .tokens = 9, .rotary_dim = dim, .cu_seqlens = {2, 5, 7}, .rows = 2});
  }
}

// rope: the rotated heads take the place of q and k, of which only rotated elements are written.
template <class T, class C, class W> void run_in_place(Problem<RopeOp::rope, T, C, W>& p) {
  const Buffer<T>&q = p.q, &k = p.k;
  p.params.inplace = true;
  p.params.q = p.q_out.data(), p.params.k = p.k_out.data();
  under_every_seed([&] {
    std::memcpy(p.q_out.data(), q.data(), q.size() * sizeof(T));
    std::memcpy(p.k_out.data(), k.data(), k.size() * sizeof(T));
    expect_ok(rope_cuda(p.params, nullptr));
    p.check();
    const int64_t elements = p.s.batch * p.s.tokens * (p.s.q_heads + p.s.k_heads) * p.s.rotary_dim;
    expect_equal("bytes written", sim::counters().global_bytes_written, elements * static_cast<int64_t>(sizeof(T)));
  });
}

// Every option with every other: in place, or some of the gradients.
template <RopeOp op> void random_problem(Random& random) {
  RotarySetting s = random_setting(random, 30);
  s.inverse = op == RopeOp::rope && random.coin();
  const uint64_t seed = random.bits() % 1000;
  const bool in_place = op == RopeOp::rope && s.padding == 0 && random.coin();
  const int64_t left_out = op == RopeOp::qk_norm_rope && random.coin() ? random.integer(1, 14) : 0;  // never all four
  const auto run = [&]<class T, class C, class W>(T, C, W) {
    Problem<op, T, C, W> p(s, seed);
    if constexpr (op == RopeOp::rope) {
      if (in_place) return run_in_place(p);
    } else {
      if (left_out & 1) p.backward.dq = nullptr;
      if (left_out & 2) p.backward.dk = nullptr;
      if (left_out & 4) p.backward.dq_weight = nullptr;
      if (left_out & 8) p.backward.dk_weight = nullptr;
    }
    p.run();
  };
  switch (random.integer(0, 5)) {
    case 0: return run(bfloat16{}, bfloat16{}, bfloat16{});
    case 1: return run(float{}, float{}, float{});
    case 2: return run(float16{}, float16{}, float16{});
    case 3: return run(bfloat16{}, float{}, float{});
    case 4: return run(float16{}, float{}, float16{});
    default: return run(float16{}, float16{}, float{});
  }
}

#define ROPE_TESTS(op)                                                                \
  TEST(op##_every_kernel) { every_kernel<RopeOp::op>(); }                             \
  TEST(op##_head_dimensions) { head_dimensions<RopeOp::op>(); }                       \
  TEST(op##_head_counts) { head_counts<RopeOp::op>(); }                               \
  TEST(op##_part_of_the_head) { part_of_the_head<RopeOp::op>(); }                     \
  TEST(op##_strides_and_alignment) { strides_and_alignment<RopeOp::op>(); }           \
  TEST(op##_positions) { positions<RopeOp::op>(); }                                   \
  TEST(op##_positions_beyond_the_table) { positions_beyond_the_table<RopeOp::op>(); } \
  RANDOM_TEST(op##_random_problems) { random_problem<RopeOp::op>(random); }
WARPSMITH_ROPE_OPS(ROPE_TESTS)

// ---- rope

template <class T, class C = T> using Rope = Problem<RopeOp::rope, T, C>;

TEST(rope_by_the_negative_angle) {
  for (const bool interleaved : {false, true}) Rope<float>({.interleaved = interleaved, .inverse = true}).run();
}

// Means nothing, but reads and writes nothing that is not the problem's.
TEST(rope_sequences_out_of_order) {
  Rope<float> p({.batch = 1, .tokens = 9, .cu_seqlens = {5, -3, 100, 4, INT32_MAX, INT32_MIN}, .rows = 2});
  under_every_seed([&] {
    expect_ok(rope_cuda(p.params, nullptr));
    same_bits_for_every_seed("q", p.q_out);
  });
}

TEST(rope_in_place) {
  for (const bool interleaved : {false, true})
    for (const int64_t dim : {64, 32, 20}) {
      Rope<bfloat16> p({.rotary_dim = dim, .interleaved = interleaved});
      run_in_place(p);
    }
}

// 2 elements for each of q and k, and cos and sin of a token once for each of its groups of heads.
TEST(rope_bytes_moved) {
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
        Rope<bfloat16, float> p(s);
        measure(p);
      } else {
        Rope<bfloat16> p(s);
        measure(p);
      }
    }
}

TEST(rope_other_configurations) {
  Rope<bfloat16> p({.tokens = 7, .q_heads = 6, .k_heads = 2});
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

TEST(rope_unknown_dtype_is_refused) {
  Rope<float> p({});
  p.params.dtype = Dtype::float64;
  expect_refused(rope_cuda(p.params, nullptr), "float64");
}

// Tokens 2^30 elements apart, in memory that is never touched but for the heads under test.
TEST(rope_beyond_2_31_elements) {
  constexpr int64_t kStride = int64_t{1} << 30;
  Rope<bfloat16> p({.batch = 1, .tokens = 4, .q_heads = 1, .k_heads = 1});
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

// ---- qk_norm_rope

template <class T, class C = T, class W = T> using Norm = Problem<RopeOp::qk_norm_rope, T, C, W>;

// Every thread has all of its elements, and every group all of its heads.
TEST(qk_norm_rope_whole_heads) {
  for (const int64_t dim : {64, 128}) {
    const RotarySetting s{.q_heads = 8, .k_heads = 4, .head_dim = dim, .rotary_dim = dim};
    Norm<float>(s).run();
    Norm<float16, float>(s).run();
    Norm<bfloat16>(s).run();
    Norm<bfloat16, bfloat16, float>(s).run();
  }
  Norm<bfloat16>({.batch = 1,
                  .tokens = 11,
                  .q_heads = 36,
                  .k_heads = 0,
                  .head_dim = 128,
                  .rotary_dim = 128,
                  .padding = 8,
                  .cu_seqlens = {1, 3, 4, 11}})
      .run();
}

TEST(qk_norm_rope_many_tokens_a_block_and_many_turns) {
  for (const int64_t tokens : {1, 33, 300}) {
    sim::options().properties.multiprocessors = 1;
    Norm<bfloat16>({.batch = 1, .tokens = tokens, .head_dim = 16, .rotary_dim = 16}).run();
    Norm<bfloat16>({.tokens = tokens, .q_heads = 5, .k_heads = 3, .head_dim = 80}).run();
    Norm<float>({.batch = 1, .tokens = tokens, .head_dim = 20, .rotary_dim = 20}).run();
    sim::options().properties.multiprocessors = 132;
  }
}

TEST(qk_norm_rope_some_gradients) {
  for (const int64_t rotary_dim : {64, 20})
    for (int wanted = 0; wanted < 16; ++wanted) {
      Norm<bfloat16> p({.rotary_dim = rotary_dim});
      p.make_room(1000);
      if (!(wanted & 1)) p.backward.dq = nullptr;
      if (!(wanted & 2)) p.backward.dk = nullptr;
      if (!(wanted & 4)) p.backward.dq_weight = nullptr;
      if (!(wanted & 8)) p.backward.dk_weight = nullptr;
      if (!(wanted & 12)) p.backward.partials = nullptr;
      under_every_seed([&] {
        p.poison();
        expect_ok(qk_norm_rope_backward_cuda(p.backward, nullptr));
        p.check_backward();
      });
    }
}

TEST(qk_norm_rope_other_configurations) {
  Norm<bfloat16> p({.tokens = 7, .q_heads = 6, .k_heads = 2});
  for (const int threads : {32, 64, 160}) {
    const QkNormRopeConfig c = qk_norm_rope_forward_config(p.planned(), kQkNormRopeForward[0].heads, threads);
    under_every_seed([&] {
      p.poison();
      expect_ok(qk_norm_rope_forward_cuda_with(c, p.forward, nullptr));
      p.check_forward();
    });
  }
  for (const int heads : {4, 8})
    for (const int threads : {32, 64, 160}) {
      const QkNormRopeConfig c = qk_norm_rope_backward_config(p.planned(), heads, threads);
      p.make_room(qk_norm_rope_partial_rows(c));
      under_every_seed([&] {
        p.poison();
        expect_ok(qk_norm_rope_backward_cuda_with(c, p.backward, nullptr));
        p.check_backward();
      });
    }
  QkNormRopeConfig c = choose_qk_norm_rope_forward(p.planned());
  c.heads_a_thread = 3;
  expect_refused(qk_norm_rope_forward_cuda_with(c, p.forward, nullptr), "3 heads a thread");
  c.blocks = INT64_C(1) << 32;
  expect_refused(qk_norm_rope_forward_cuda_with(c, p.forward, nullptr), "more than a grid may have");
  c = choose_qk_norm_rope_backward(p.planned());
  c.heads_a_thread = 5;
  expect_refused(qk_norm_rope_backward_cuda_with(c, p.backward, nullptr), "5 heads a thread");
  c = choose_qk_norm_rope_backward(p.planned());
  c.stages = 5;
  expect_refused(qk_norm_rope_backward_cuda_with(c, p.backward, nullptr), "5 stages");
}

// Forward 2 elements and backward 3, angles once for each group of heads, weights once a thread, partial sums.
TEST(qk_norm_rope_bytes_moved) {
  const RotarySetting s{.batch = 1, .tokens = 300, .q_heads = 6, .k_heads = 2, .head_dim = 128, .rotary_dim = 128};
  Norm<bfloat16> p(s);
  const QkNormRopeConfig forward = choose_qk_norm_rope_forward(p.planned());
  const QkNormRopeConfig backward = choose_qk_norm_rope_backward(p.planned());
  p.make_room(qk_norm_rope_partial_rows(backward));
  const int64_t once = s.tokens * (s.q_heads + s.k_heads) * s.head_dim * 2, weight = s.head_dim * 2;
  const auto groups = [&](int heads) { return (s.q_heads + heads - 1) / heads + (s.k_heads + heads - 1) / heads; };
  const int64_t forward_groups = s.tokens * groups(forward.heads_a_thread);
  const int64_t backward_groups = groups(backward.heads_a_thread);
  under_every_seed([&] {
    expect_ok(qk_norm_rope_forward_cuda(p.forward, nullptr));
    expect_bytes({.read = once + forward_groups * (weight + s.rotary_dim * 2), .written = once});
    sim::counters() = {};
    expect_ok(qk_norm_rope_backward_cuda(p.backward, nullptr));
    const int64_t partials = backward.blocks * 2 * s.head_dim * 4;
    const int64_t places = backward.blocks * backward.tokens_a_block * backward_groups;
    expect_bytes({.read = 2 * once + places * weight + s.tokens * backward_groups * s.rotary_dim * 2 + partials,
                  .written = once + partials + 2 * weight});
  });
}

TEST(qk_norm_rope_unknown_dtype_is_refused) {
  Norm<float> p({});
  p.forward.dtype = p.backward.dtype = Dtype::float64;
  expect_refused(qk_norm_rope_forward_cuda(p.forward, nullptr), "float64");
  expect_refused(qk_norm_rope_backward_cuda(p.backward, nullptr), "float64");
}

// Tokens 2^30 elements apart, in memory that is never touched but for the heads under test.
TEST(qk_norm_rope_beyond_2_31_elements) {
  constexpr int64_t kStride = int64_t{1} << 30;
  for (const int64_t dim : {64, 20}) {
    Norm<bfloat16> p({.batch = 1, .tokens = 4, .q_heads = 1, .k_heads = 1, .head_dim = dim, .rotary_dim = dim});
    sim::SparseMemory<bfloat16> far(4 * kStride), far_out(4 * kStride);
    const size_t bytes = static_cast<size_t>(dim) * 2;
    for (int64_t t = 0; t < 4; ++t) std::memcpy(far.data() + t * kStride, p.x[0].data() + t * dim, bytes);
    p.forward.q = p.backward.q = far.data();
    p.forward.q_out = p.backward.dq = far_out.data();
    p.forward.q_layout.token_stride = p.forward.q_out_layout.token_stride = kStride;
    p.backward.q_layout.token_stride = p.backward.dq_layout.token_stride = kStride;
    p.make_room(1000);
    const auto bring = [&](Buffer<bfloat16>& to) {
      for (int64_t t = 0; t < 4; ++t) std::memcpy(to.data() + t * dim, far_out.data() + t * kStride, bytes);
    };
    under_every_seed([&] {
      expect_ok(qk_norm_rope_forward_cuda(p.forward, nullptr));
      bring(p.y[0]);
      p.check_forward();
      expect_ok(qk_norm_rope_backward_cuda(p.backward, nullptr));
      bring(p.dx[0]);
      p.check_backward();
    });
  }
}

}  // namespace
}  // namespace warpsmith::test
