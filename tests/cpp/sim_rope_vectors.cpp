// The sweep's other body for rope on the host: the bits of the package's kernel, from the same bytes.
// links: csrc/kernels/rope/rope.cu
#include "../../tools/gpu/sweep/rope_vectors.cuh"
#include "common/launch.h"
#include "harness.h"
#include "rotary_problem.h"

namespace warpsmith::test {
namespace {

template <class T, class C> struct Problem {
  RotarySetting s;
  RotaryTables<C> tables;
  Buffer<T> q, k, q_out, k_out, want_q, want_k;
  RopeParams params{};

  explicit Problem(const RotarySetting& setting)
      : s(setting),
        tables(setting),
        q(heads_buffer<T>(s, s.q_heads, s.padding, 0)),
        k(heads_buffer<T>(s, s.k_heads, s.padding, 0)),
        q_out(heads_buffer<T>(s, s.q_heads, 0, 0)),
        k_out(heads_buffer<T>(s, s.k_heads, 0, 0)),
        want_q(q_out.size()),
        want_k(k_out.size()) {
    fill_normal(q, 1);
    fill_normal(k, 2);
    params = {q.data(),
              k.data(),
              want_q.data(),
              want_k.data(),
              layout_of(s, s.q_heads, s.padding),
              layout_of(s, s.k_heads, s.padding),
              layout_of(s, s.q_heads, 0),
              layout_of(s, s.k_heads, 0),
              tables.angles,
              tables.positions,
              {s.batch, s.tokens, s.head_dim, s.rotary_dim, s.interleaved, s.inverse},
              false,
              kDtype<T>};
    expect_ok(rope_cuda(params, nullptr));
    params.q_out = q_out.data(), params.k_out = k_out.data();
  }

  template <bool kInterleaved, int UQ, int UK, sweep::Hint hint> void run(int tokens_of_block) {
    const sweep::VectorGrid g = sweep::vector_grid(params, 16 / sizeof(T), UQ, UK, tokens_of_block);
    expect(g.block.x > 0, "the body runs this problem");
    LaunchConfig config;
    config.grid = g.grid, config.block = g.block;
    under_every_seed([&] {
      q_out.poison(), k_out.poison();
      expect_ok(launch(sweep::rotate_vectors<T, C, kInterleaved, UQ, UK, hint, 256, 2>, config, nullptr, params));
      expect(std::memcmp(q_out.data(), want_q.data(), q_out.size() * sizeof(T)) == 0, "q has other bits");
      expect(std::memcmp(k_out.data(), want_k.data(), k_out.size() * sizeof(T)) == 0, "k has other bits");
    });
  }
};

template <class T, class C, int UQ, int UK> void run(RotarySetting s) {
  for (const int tokens_of_block : {2, 4})
    for (const bool inverse : {false, true}) {
      s.inverse = inverse;
      Problem<T, C> halves(s);
      halves.template run<false, UQ, UK, sweep::Hint::none>(tokens_of_block);
      halves.template run<false, UQ, UK, sweep::Hint::store_once>(tokens_of_block);
      s.interleaved = true;
      Problem<T, C> interleaved(s);
      interleaved.template run<true, UQ, UK, sweep::Hint::load_once>(tokens_of_block);
      s.interleaved = false;
    }
}

TEST(the_bits_of_the_kernel) {
  for (const int64_t dim : {64, 128}) {
    const RotarySetting s{.tokens = 5, .q_heads = 8, .k_heads = 2, .head_dim = dim, .rotary_dim = dim};
    run<bfloat16, bfloat16, 4, 1>(s);
    run<bfloat16, float, 4, 1>(s);
    run<float16, float16, 8, 2>({.tokens = 5, .q_heads = 16, .k_heads = 4, .head_dim = dim, .rotary_dim = dim});
    run<float, float, 4, 1>(s);
  }
  run<bfloat16, bfloat16, 1, 1>(
      {.tokens = 3, .q_heads = 4, .k_heads = 4, .head_dim = 64, .rotary_dim = 64, .padding = 8});
}

TEST(positions) {
  run<bfloat16, bfloat16, 2, 2>({.batch = 1,
                                 .tokens = 11,
                                 .q_heads = 4,
                                 .k_heads = 4,
                                 .head_dim = 128,
                                 .rotary_dim = 128,
                                 .cu_seqlens = {0, 0, 3, 3, 4, 11, 11}});
  run<bfloat16, bfloat16, 2, 2>({.tokens = 4,
                                 .q_heads = 4,
                                 .k_heads = 4,
                                 .head_dim = 128,
                                 .rotary_dim = 128,
                                 .offsets = {7, -2},
                                 .position_offset = 1,
                                 .rows = 6});
}

TEST(in_place) {
  Problem<bfloat16, bfloat16> p({.tokens = 6, .q_heads = 8, .k_heads = 2, .head_dim = 128, .rotary_dim = 128});
  p.params.q = p.q_out.data(), p.params.k = p.k_out.data(), p.params.inplace = true;
  const sweep::VectorGrid g = sweep::vector_grid(p.params, 8, 4, 1, 1);
  LaunchConfig config;
  config.grid = g.grid, config.block = g.block;
  under_every_seed([&] {
    std::memcpy(p.q_out.data(), p.q.data(), p.q.size() * 2);
    std::memcpy(p.k_out.data(), p.k.data(), p.k.size() * 2);
    expect_ok(launch(sweep::rotate_vectors<bfloat16, bfloat16, false, 4, 1, sweep::Hint::none, 256, 2>, config, nullptr,
                     p.params));
    expect(std::memcmp(p.q_out.data(), p.want_q.data(), p.q.size() * 2) == 0, "q has other bits");
    expect(std::memcmp(p.k_out.data(), p.want_k.data(), p.k.size() * 2) == 0, "k has other bits");
  });
}

RANDOM_TEST(random_problems) {
  RotarySetting s{.batch = random.integer(1, 3), .tokens = random.integer(1, 9)};
  s.head_dim = s.rotary_dim = int64_t{64} << random.integer(0, 1);
  s.k_heads = 4, s.q_heads = 16;
  s.head_major = random.coin(), s.padding = 8 * random.integer(0, 1);
  s.position_offset = random.integer(0, 5);
  random.coin() ? run<bfloat16, bfloat16, 4, 1>(s) : run<float16, float, 8, 2>(s);
}

// A token's cos and sin once for each of its threads, beside the floor.
TEST(bytes_moved) {
  Problem<bfloat16, bfloat16> p({.tokens = 6, .q_heads = 8, .k_heads = 2, .head_dim = 128, .rotary_dim = 128});
  const sweep::VectorGrid g = sweep::vector_grid(p.params, 8, 4, 1, 2);
  LaunchConfig config;
  config.grid = g.grid, config.block = g.block;
  const int64_t tokens = p.s.batch * p.s.tokens, moved = tokens * 10 * 128 * 2;
  under_every_seed([&] {
    expect_ok(launch(sweep::rotate_vectors<bfloat16, bfloat16, false, 4, 1, sweep::Hint::none, 256, 2>, config, nullptr,
                     p.params));
    expect_bytes({.read = moved + tokens * 2 * 16 * 32, .written = moved});
  });
}

TEST(what_it_does_not_run) {
  const RotarySetting fits{.tokens = 2, .q_heads = 8, .k_heads = 2, .head_dim = 128, .rotary_dim = 128};
  const auto threads = [&](const RotarySetting& s, int q_heads, int k_heads) {
    return sweep::vector_grid(Problem<bfloat16, bfloat16>(s).params, 8, q_heads, k_heads, 1).block.x;
  };
  expect_equal("threads", threads(fits, 4, 1), 16u);
  expect_equal("threads", threads(fits, 3, 1), 0u);
  RotarySetting s = fits;
  s.rotary_dim = 64;
  expect_equal("threads", threads(s, 4, 1), 0u);
  s = fits, s.head_dim = s.rotary_dim = 96;
  expect_equal("threads", threads(s, 4, 1), 0u);
  s = fits, s.k_heads = 1;
  expect_equal("threads", threads(s, 8, 1), 0u);
}

}  // namespace
}  // namespace warpsmith::test
