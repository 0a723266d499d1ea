// The qk_norm_rope kernels on the host: every kernel of the choosers, against the formulas in double precision.
#include "kernels/rope/qk_norm_rope.h"

#include "harness.h"
#include "kernels/rope/qk_norm_rope_config.h"
#include "rotary_problem.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

constexpr double kEps = 1e-5;

// A problem with its inputs, outputs and oracle. T: of q and k, C: of cos and sin, W: of the weights.
template <class T, class C, class W> struct Problem {
  RotarySetting s;
  RotaryTables<C> tables;
  Buffer<W> weight[2], dweight[2];
  Buffer<T> x[2], dy[2], y[2], dx[2];  // of q, of k
  Buffer<float> partials;
  RotaryHeads in[2], out[2];
  std::vector<double> want_y[2], want_dx[2], want_dweight[2];
  QkNormRopeFwdParams forward{};
  QkNormRopeBwdParams backward{};

  explicit Problem(const RotarySetting& setting, uint64_t seed = 1)
      : s(setting),
        tables(setting),
        weight{Buffer<W>(width(), s.offset), Buffer<W>(width(), s.offset)},
        dweight{Buffer<W>(width()), Buffer<W>(width())},
        x{heads_buffer<T>(s, s.q_heads, s.padding, s.offset), heads_buffer<T>(s, s.k_heads, s.padding, s.offset)},
        dy{heads_buffer<T>(s, s.q_heads, s.padding, s.offset), heads_buffer<T>(s, s.k_heads, s.padding, s.offset)},
        y{heads_buffer<T>(s, s.q_heads, 0, 0), heads_buffer<T>(s, s.k_heads, 0, 0)},
        dx{heads_buffer<T>(s, s.q_heads, 0, 0), heads_buffer<T>(s, s.k_heads, 0, 0)},
        partials(0) {
    for (int i = 0; i < 2; ++i) {
      const uint64_t first = seed + static_cast<uint64_t>(10 * i);
      fill_normal(x[i], first), fill_normal(dy[i], first + 1), fill_normal(weight[i], first + 2, 0.3f, 1.0f);
      in[i] = layout_of(s, i ? s.k_heads : s.q_heads, s.padding);
      out[i] = layout_of(s, i ? s.k_heads : s.q_heads, 0);
      compute_oracle(i);
    }
    RotaryShape shape{s.batch, s.tokens, s.head_dim, s.rotary_dim, s.interleaved, false};
    forward = {x[0].data(), x[1].data(), weight[0].data(), weight[1].data(), y[0].data(),   y[1].data(),
               in[0],       in[1],       out[0],           out[1],           tables.angles, tables.positions,
               shape,       kEps,        kDtype<T>,        kDtype<W>};
    shape.inverse = true;
    backward = {dy[0].data(),
                dy[1].data(),
                x[0].data(),
                x[1].data(),
                weight[0].data(),
                weight[1].data(),
                dx[0].data(),
                dx[1].data(),
                dweight[0].data(),
                dweight[1].data(),
                nullptr,
                in[0],
                in[1],
                in[0],
                in[1],
                out[0],
                out[1],
                tables.angles,
                tables.positions,
                shape,
                kEps,
                kDtype<T>,
                kDtype<W>};
  }

  size_t width() const { return static_cast<size_t>(s.head_dim); }

  void compute_oracle(int i) {
    want_y[i].resize(y[i].size());
    want_dx[i].resize(y[i].size());
    want_dweight[i].assign(width(), 0);
    RotarySetting back = s;
    back.inverse = true;
    std::vector<double> head(width()), gradient(width());
    const double n = static_cast<double>(s.head_dim);
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t h = 0; h < in[i].heads; ++h) {
          double squares = 0, dot = 0;
          for (size_t d = 0; d < width(); ++d) {
            const size_t at = element(in[i], b, t, h, static_cast<int64_t>(d));
            head[d] = static_cast<double>(to_float(x[i][at]));
            gradient[d] = static_cast<double>(to_float(dy[i][at]));
            squares += head[d] * head[d];
          }
          const double rstd = 1 / std::sqrt(squares / n + kEps);
          tables.rotate(back, b, t, gradient);
          for (size_t d = 0; d < width(); ++d) {
            const double w = static_cast<double>(to_float(weight[i][d]));
            want_dweight[i][d] += gradient[d] * head[d] * rstd;
            dot += gradient[d] * w * head[d] * rstd;
          }
          for (size_t d = 0; d < width(); ++d)
            want_dx[i][element(out[i], b, t, h, static_cast<int64_t>(d))] =
                rstd * (gradient[d] * static_cast<double>(to_float(weight[i][d])) - head[d] * rstd * dot / n);
          for (size_t d = 0; d < width(); ++d) head[d] *= rstd * static_cast<double>(to_float(weight[i][d]));
          tables.rotate(s, b, t, head);
          for (size_t d = 0; d < width(); ++d) want_y[i][element(out[i], b, t, h, static_cast<int64_t>(d))] = head[d];
        }
  }

  // Half a rounding step of the storage type, and a few of float; sums of terms of size one may cancel.
  static Tolerance rounding(double terms) {
    return {.ulps = 0.51, .relative = 5e-6, .absolute = 2e-6 * std::sqrt(terms)};
  }

  void check_forward() {
    for (int i = 0; i < 2; ++i) {
      expect_close(i ? "k" : "q", y[i], want_y[i], rounding(2));
      same_bits_for_every_seed(i ? "k" : "q", y[i]);
    }
  }

  void check_backward() {
    const double rows = static_cast<double>(s.batch * s.tokens * (s.q_heads + s.k_heads));
    for (int i = 0; i < 2; ++i) {
      if (i ? backward.dk : backward.dq) {
        expect_close(i ? "dk" : "dq", dx[i], want_dx[i], rounding(8));
        same_bits_for_every_seed(i ? "dk" : "dq", dx[i]);
      }
      if (i ? backward.dk_weight : backward.dq_weight) {
        expect_close(i ? "dk_weight" : "dq_weight", dweight[i], want_dweight[i], rounding(8 * rows));
        same_bits_for_every_seed(i ? "dk_weight" : "dq_weight", dweight[i]);
      }
    }
  }

  void poison() {
    for (int i = 0; i < 2; ++i) y[i].poison(), dx[i].poison(), dweight[i].poison();
    partials.poison();
  }

  void make_room(int64_t partial_rows) {
    partials = Buffer<float>(static_cast<size_t>(partial_rows) * 2 * width());
    backward.partials = partials.data();
  }

  void run() {
    int64_t partial_rows = 0;
    expect_ok(qk_norm_rope_partial_rows_cuda(backward, &partial_rows));
    make_room(partial_rows);
    under_every_seed([&] {
      poison();
      expect_ok(qk_norm_rope_forward_cuda(forward, nullptr));
      check_forward();
      expect_ok(qk_norm_rope_backward_cuda(backward, nullptr));
      check_backward();
    });
  }

  QkNormRopeProblem planned() const {
    return {s.batch * s.tokens, s.q_heads, s.k_heads, s.head_dim, s.rotary_dim, static_cast<int>(sizeof(T))};
  }
};

TEST(every_kernel) {
  for (const bool interleaved : {false, true})
    for (const int64_t rotary_dim : {64, 32, 20}) {
      const RotarySetting s{.rotary_dim = rotary_dim, .interleaved = interleaved};
      Problem<float, float, float>(s).run();
      Problem<float16, float16, float16>(s).run();
      Problem<float16, float, float>(s).run();
      Problem<bfloat16, bfloat16, bfloat16>(s).run();
      Problem<bfloat16, bfloat16, float>(s).run();
      Problem<bfloat16, float, bfloat16>(s).run();
    }
}

// Every thread has all of its elements, and every group all of its heads.
TEST(whole_heads) {
  for (const int64_t dim : {64, 128}) {
    const RotarySetting s{.q_heads = 8, .k_heads = 4, .head_dim = dim, .rotary_dim = dim};
    Problem<float, float, float>(s).run();
    Problem<float16, float, float16>(s).run();
    Problem<bfloat16, bfloat16, bfloat16>(s).run();
    Problem<bfloat16, bfloat16, float>(s).run();
  }
  Problem<bfloat16, bfloat16, bfloat16>({.batch = 1,
                                         .tokens = 11,
                                         .q_heads = 36,
                                         .k_heads = 0,
                                         .head_dim = 128,
                                         .rotary_dim = 128,
                                         .padding = 8,
                                         .cu_seqlens = {1, 3, 4, 11}})
      .run();
}

TEST(head_dimensions) {
  for (const int64_t dim : {1, 2, 3, 7, 16, 18, 32, 72, 80, 96, 128, 256, 512, 520})
    for (const bool interleaved : {false, true})
      Problem<bfloat16, bfloat16, bfloat16>(
          {.tokens = 2, .head_dim = dim, .rotary_dim = dim / 2 * 2, .interleaved = interleaved})
          .run();
}

TEST(head_counts) {
  for (const int64_t q_heads : {1, 3, 32, 70})
    for (const int64_t k_heads : {0, 1, 8})
      Problem<bfloat16, bfloat16, bfloat16>({.batch = 1, .tokens = 2, .q_heads = q_heads, .k_heads = k_heads}).run();
}

TEST(part_of_the_head) {
  for (const int64_t rotary_dim : {0, 2, 16, 48, 80})
    for (const bool interleaved : {false, true})
      Problem<bfloat16, float, bfloat16>({.head_dim = 88, .rotary_dim = rotary_dim, .interleaved = interleaved}).run();
}

TEST(strides_and_alignment) {
  for (const bool head_major : {false, true})
    for (const int64_t padding : {0, 8, 1})
      for (const size_t offset : {0, 1})
        Problem<bfloat16, bfloat16, bfloat16>({.head_major = head_major, .padding = padding, .offset = offset}).run();
}

TEST(positions) {
  Problem<bfloat16, float, float>({.per_token = true}).run();
  Problem<bfloat16, float, float>({.interleaved = true, .per_token = true}).run();
  Problem<bfloat16, bfloat16, float>({.batch = 1, .tokens = 11, .cu_seqlens = {0, 0, 3, 4, 11}}).run();
  Problem<float, float, float>({.head_dim = 20, .rotary_dim = 20, .offsets = {7, 2}, .wide_offsets = false}).run();
}

// NaN where the kernel rotates forward; backward, wherever a head's gradient meets it.
TEST(positions_beyond_the_table) {
  for (const int64_t rotary_dim : {64, 20}) {
    Problem<bfloat16, bfloat16, float> p({.head_dim = 80, .rotary_dim = rotary_dim, .offsets = {2, -1}, .rows = 4});
    p.run();
  }
}

TEST(many_tokens_a_block_and_many_turns) {
  for (const int64_t tokens : {1, 33, 300}) {
    sim::options().properties.multiprocessors = 1;
    Problem<bfloat16, bfloat16, bfloat16>({.batch = 1, .tokens = tokens, .head_dim = 16, .rotary_dim = 16}).run();
    Problem<bfloat16, bfloat16, bfloat16>({.tokens = tokens, .q_heads = 5, .k_heads = 3, .head_dim = 80}).run();
    Problem<float, float, float>({.batch = 1, .tokens = tokens, .head_dim = 20, .rotary_dim = 20}).run();
    sim::options().properties.multiprocessors = 132;
  }
}

TEST(some_gradients) {
  for (const int64_t rotary_dim : {64, 20})
    for (int wanted = 0; wanted < 16; ++wanted) {
      Problem<bfloat16, bfloat16, bfloat16> p({.rotary_dim = rotary_dim});
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

TEST(other_configurations) {
  Problem<bfloat16, bfloat16, bfloat16> p({.tokens = 7, .q_heads = 6, .k_heads = 2});
  for (const int threads : {32, 64, 160}) {
    const QkNormRopeConfig c = qk_norm_rope_forward_config(p.planned(), kQkNormRopeHeadsAThread, threads);
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
TEST(bytes_moved) {
  const RotarySetting s{.batch = 1, .tokens = 300, .q_heads = 6, .k_heads = 2, .head_dim = 128, .rotary_dim = 128};
  Problem<bfloat16, bfloat16, bfloat16> p(s);
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

TEST(unknown_dtype_is_refused) {
  Problem<float, float, float> p({});
  p.forward.dtype = p.backward.dtype = Dtype::float64;
  expect_refused(qk_norm_rope_forward_cuda(p.forward, nullptr), "float64");
  expect_refused(qk_norm_rope_backward_cuda(p.backward, nullptr), "float64");
}

// Tokens 2^30 elements apart, in memory that is never touched but for the heads under test.
TEST(beyond_2_31_elements) {
  constexpr int64_t kStride = int64_t{1} << 30;
  for (const int64_t dim : {64, 20}) {
    Problem<bfloat16, bfloat16, bfloat16> p(
        {.batch = 1, .tokens = 4, .q_heads = 1, .k_heads = 1, .head_dim = dim, .rotary_dim = dim});
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

RANDOM_TEST(random_problems) {
  const RotarySetting s = random_setting(random, 30);
  const uint64_t seed = random.bits() % 1000;
  switch (random.integer(0, 4)) {
    case 0: return Problem<bfloat16, bfloat16, bfloat16>(s, seed).run();
    case 1: return Problem<float, float, float>(s, seed).run();
    case 2: return Problem<float16, float16, float16>(s, seed).run();
    case 3: return Problem<bfloat16, float, float>(s, seed).run();
    default: return Problem<float16, float16, float>(s, seed).run();
  }
}

}  // namespace
}  // namespace warpsmith::test
