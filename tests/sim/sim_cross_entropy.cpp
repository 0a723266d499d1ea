// The cross_entropy kernels on the host: every kernel of the chooser, against the formula in double precision.
#include <array>

#include "cross_entropy_problem.h"

namespace warpsmith::test {
namespace {

constexpr int kSeedsOfNumbers = 2;

// The rows' own incoming gradients, in the forward: of as many as there are rows, which leave lanes of the last
// block without one.
TEST(incoming_gradients_in_the_forward) {
  for (int64_t classes : {24, 37, 1032}) {
    Problem<bfloat16> p({.rows = 6, .classes = classes, .mean_reduction = false});
    p.compute_oracle(true);
    for (size_t r = 0; r < p.target.size(); ++r)  // without the gradient of log_prob
      if (p.target[r] != p.kIgnore)
        p.want_gradient[r * static_cast<size_t>(classes) + static_cast<size_t>(p.target[r])] -=
            static_cast<double>(p.rows_grad[r]);
    under_every_seed([&] {
      p.poison();
      CrossEntropyParams q = p.params(true);
      q.follows_denominator = false, q.grad_loss = p.rows_grad.data(), q.grad_loss_stride = 1;
      expect_ok(cross_entropy_forward_cuda(q, nullptr));
      p.check_gradient(4);
    });
  }
}

// One row length for each number of threads, slots and blocks, in 16-bit elements.
TEST(every_kernel_bfloat16) {
  for (int64_t classes : {8, 16, 128, 1024, 1032, 4104, 24576})
    Problem<bfloat16>({.rows = 3, .classes = classes}).run();
}

TEST(clusters) {
  for (int64_t classes : {28009, 108008}) Problem<bfloat16>({.rows = 1, .classes = classes}).run();
  Problem<float>({.rows = 1, .classes = 30001, .in_place = true}).run();
}

TEST(every_kernel_float) {
  for (int64_t classes : {4, 8, 128, 512, 520, 2048, 8196}) Problem<float>({.rows = 3, .classes = classes}).run();
}

TEST(float16_logits) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (int64_t classes : {64, 1000, 4099}) Problem<float16>({.rows = 3, .classes = classes, .in_place = true}).run();
}

TEST(rows_that_begin_anywhere) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (int64_t classes : {1, 2, 3, 7, 9, 33, 257, 1023, 1025, 5003}) {
    Problem<bfloat16>({.rows = 9, .classes = classes}).run();
    Problem<bfloat16>({.rows = 5, .classes = classes, .padding = 3, .in_place = true}).run();
  }
  Problem<bfloat16>({.rows = 5, .classes = 768, .offset = 1}).run();
  for (int argument = 0; argument < 4; ++argument)
    Problem<bfloat16>({.rows = 5, .classes = 768, .offset = Offsets::only(argument), .weights = argument == 3}).run();
  Problem<bfloat16>({.rows = 5, .classes = 1500, .padding = 36, .offset = 3, .in_place = true}).run();
  Problem<float>({.rows = 5, .classes = 261, .padding = 4, .offset = 3}).run();
}

TEST(options) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (int64_t classes : {37, 2060}) {
    Problem<bfloat16>({.rows = 5, .classes = classes, .weights = true}).run();
    Problem<bfloat16>({.rows = 5, .classes = classes, .in_place = true, .z_loss = 1e-2}).run();
    Problem<float>({.rows = 5, .classes = classes, .smoothing = 0.1}).run();
    Problem<float>({.rows = 5, .classes = classes, .weights = true, .smoothing = 0.2, .z_loss = 1e-3}).run();
    Problem<bfloat16>({.rows = 5, .classes = classes, .softcap = 3, .entropy = true}).run();
    Problem<float>({.rows = 5, .classes = classes, .softcap = 3, .scale = 8}).run();
    Problem<float>({.rows = 5, .classes = classes, .entropy = true, .mean_reduction = false}).run();
    Problem<bfloat16>({.rows = 7, .classes = classes, .skip_ignored = true}).run();
  }
}

TEST(large_logits) {
  const SeedsAtMost few(kSeedsOfNumbers);
  Problem<float>({.rows = 3, .classes = 700, .scale = 1, .mean = 1e4f}).run();
  Problem<float>({.rows = 3, .classes = 70, .scale = 1, .mean = -1e4f}).run();
  Problem<bfloat16>({.rows = 3, .classes = 700, .scale = 1e4f}).run();
  Problem<float>({.rows = 3, .classes = 100, .smoothing = 0.1, .scale = 1, .mean = 1e4f}).run();
}

// Where one class has all of the probability, its loss and every gradient are exactly 0, at any magnitude (but see
// set_factor).
template <class T> void run_certain(std::initializer_list<float> magnitudes) {
  for (const int64_t classes : {1, 40, 2200})
    for (const float m : magnitudes) {
      Problem<T> p({.rows = 2, .classes = classes, .mean_reduction = false});
      for (size_t i = 0; i < p.original.size(); ++i)
        p.original[i] = from_float<T>(m - std::max(400.0f, std::abs(m) / 16));
      for (int64_t r = 0; r < 2; ++r) {
        p.target[static_cast<size_t>(r)] = (classes - 1) / 2 * r;
        p.original[static_cast<size_t>(r * classes + p.target[static_cast<size_t>(r)])] = from_float<T>(m);
      }
      under_every_seed([&] {
        p.poison();
        CrossEntropyParams q = p.params(true);
        q.follows_denominator = false;
        expect_ok(cross_entropy_forward_cuda(q, nullptr));
        for (size_t r = 0; r < 2; ++r) {
          expect_equal("loss", p.loss[r], 0.0f);
          expect_equal("row_sum", p.row_sum[r], 1.0f);
        }
        for (size_t i = 0; i < p.separate.size(); ++i) expect_equal("dlogits", to_float(p.separate[i]), 0.0f);
        p.separate.poison();
        q.grad_loss = p.rows_grad.data(), q.grad_loss_stride = 1;
        expect_ok(cross_entropy_backward_cuda(q, nullptr));
        for (size_t i = 0; i < p.separate.size(); ++i) expect_equal("dlogits", std::abs(to_float(p.separate[i])), 0.0f);
      });
    }
}
TEST(certain_rows) {
  const SeedsAtMost few(kSeedsOfNumbers);
  run_certain<bfloat16>({0.3f, -1.7f, -411.0f, 1e4f, 65536.0f, -7e4f, 3e38f});
  run_certain<float16>({0.3f, 37.3f, 1e4f});
  run_certain<float>({37.3f});
}

// One element has nearly all of the row, and what the others add is lost if they are added one by one: the sum of a
// float32 row is right to half an ulp.
TEST(small_terms_beside_a_large_one) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (const int64_t classes : {65, 2500, 30001}) {
    Problem<float> p({.rows = 4, .classes = classes});
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t c = 0; c < classes; ++c)
        p.original[static_cast<size_t>(r * classes + c)] =
            c == r * classes / 4 ? 1.0f : -16.0f - static_cast<float>(c % 7) / 8;
    std::vector<double> want(4, 1.0);
    for (size_t r = 0; r < 4; ++r)
      for (int64_t c = 0; c < classes; ++c) {
        const double d = p.logit(static_cast<int64_t>(r), c) - 1.0;
        want[r] += d == 0 ? 0 : std::exp(d);
      }
    under_every_seed([&] {
      p.poison();
      p.run_denominator();
      expect_ok(cross_entropy_forward_cuda(p.params(true), nullptr));
      expect_close("row_sum", p.row_sum, want, {.ulps = 0.501});
    });
  }
}

// Read twice: rows that no cluster of a small machine holds.
TEST(rows_too_long_for_the_chip) {
  const int limit = sim::options().properties.max_dynamic_shared_bytes;
  sim::options().properties.max_dynamic_shared_bytes = 6 * 1024;
  for (int64_t classes : {16400, 17001}) {
    Problem<bfloat16>({.rows = 2, .classes = classes}).run();
    Problem<bfloat16>({.rows = 3, .classes = classes, .in_place = true, .smoothing = 0.1, .skip_ignored = true}).run();
  }
  Problem<float>({.rows = 2, .classes = 9000, .softcap = 5, .entropy = true}).run();
  sim::options().properties.max_dynamic_shared_bytes = limit;
}

TEST(without_clusters) {
  on_machine(132, 80, [] { Problem<bfloat16>({.rows = 2, .classes = 50304}).run(); });
}

// Blocks take several rows each.
TEST(persistent_blocks) {
  for (const int64_t classes : {40, 2300, 28008}) {
    Problem<bfloat16> p({.rows = 11, .classes = classes, .in_place = true});
    p.compute_oracle();
    CrossEntropyProblem problem{.rows = 11, .classes = classes};
    problem.code_capability = sim::options().properties.code_capability;
    CrossEntropyConfig c = choose_cross_entropy_forward(problem);
    c.blocks = c.cluster;
    under_every_seed([&] {
      p.poison();
      p.run_denominator();
      expect_ok(cross_entropy_forward_cuda_with(c, p.params(true), nullptr));
      p.check_rows();
      p.check_gradient(1);
    });
  }
}

TEST(bad_labels_and_infinities) {
  for (const int64_t classes : {19, 1200}) {
    Problem<bfloat16> p({.rows = 6, .classes = classes, .scale = 1});
    p.target[0] = classes, p.target[1] = -1, p.target[2] = int64_t{1} << 40, p.target[3] = 5, p.target[4] = 5;
    const bfloat16 minus_infinity = from_float<bfloat16>(-std::numeric_limits<float>::infinity());
    for (int64_t c = 0; c < classes; ++c) {
      if (c % 3 == 1) p.original[static_cast<size_t>(3 * classes + c)] = minus_infinity;
      p.original[static_cast<size_t>(4 * classes + c)] = minus_infinity;
    }
    p.run();
    expect(std::isnan(p.want_loss[0]) && std::isnan(p.want_loss[4]), "the oracle has NaN where it must");
  }
}

// Logits of -inf count for nothing; where one class has all the probability there is no entropy, to the last bit; equal
// logits have the most, also where numbers are far apart.
template <class T> void entropy_of_hard_rows(int64_t classes) {
  Problem<T> p({.rows = 4, .classes = classes, .entropy = true});
  const T nothing = from_float<T>(-std::numeric_limits<float>::infinity());
  for (int64_t c = 0; c < classes; ++c) {
    if (c % 3 == 1) p.original[static_cast<size_t>(c)] = nothing;
    if (c != classes / 2) p.original[static_cast<size_t>(classes + c)] = nothing;
    p.original[static_cast<size_t>(2 * classes + c)] = from_float<T>(-1e4f);
    p.original[static_cast<size_t>(3 * classes + c)] = from_float<T>(c % 2 ? 6e4f : 5e4f);
  }
  p.run();
  expect_equal("entropy", p.entropy[1], 0.0f);
}

TEST(entropy_of_rows_that_are_hard) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (const int64_t classes : {1, 19, 1200}) {
    entropy_of_hard_rows<bfloat16>(classes);
    entropy_of_hard_rows<float16>(classes);
    entropy_of_hard_rows<float>(classes);
  }
}

// A forward that wrote the entropy costs its backward nothing, unless a gradient of the entropy comes in: the same
// kernel and the same bits as for a forward that did not.
TEST(an_entropy_kept_for_nobody) {
  Problem<bfloat16> p({.rows = 100, .classes = 1200, .entropy = true, .scale = 16});  // enough that rounding would show
  CrossEntropyParams q = p.params(false);
  q.follows_denominator = false, q.denominator = nullptr;
  expect_ok(cross_entropy_forward_cuda(q, nullptr));
  q = p.params(true);
  q.denominator = nullptr, q.grad_log_prob = q.grad_lse = q.grad_loss = p.rows_grad.data(), q.grad_loss_stride = 1;
  expect_ok(cross_entropy_backward_cuda(q, nullptr));
  const std::vector<bfloat16> kept(p.separate.data(), p.separate.data() + p.separate.size());
  q.entropy = nullptr;
  expect_ok(cross_entropy_backward_cuda(q, nullptr));
  expect(std::memcmp(kept.data(), p.separate.data(), kept.size() * sizeof(bfloat16)) == 0,
         "the gradient has other bits where the entropy was kept");
}

// A gradient computed in the forward and one computed in the backward, with what a forward without gradient has kept:
// the same bits of them and of every row's results.
TEST(early_and_late_gradients) {
  const auto run = []<class T>(T, int64_t classes) {
    Problem<T> p({.rows = 8, .classes = classes, .scale = 1});
    p.run_denominator();
    const auto bits_of = [](const auto& buffer) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(buffer.data());
      return std::vector<unsigned char>(bytes, bytes + buffer.size() * sizeof(buffer[0]));
    };
    const auto all = [&] {
      return std::array{bits_of(p.loss), bits_of(p.lse), bits_of(p.row_sum), bits_of(p.separate)};
    };
    expect_ok(cross_entropy_forward_cuda(p.params(true), nullptr));
    const auto early = all();
    p.poison();
    p.run_denominator();
    expect_ok(cross_entropy_forward_cuda(p.params(false), nullptr));
    CrossEntropyParams q = p.params(true);
    q.follows_denominator = false;
    expect_ok(cross_entropy_backward_cuda(q, nullptr));
    expect(early == all(), "a late gradient of " + std::to_string(classes) + " classes has other bits");
  };
  for (const int64_t classes : {500, 8192, 32000, 50304}) run(bfloat16(), classes);
  run(float16(), 50257);
  run(float(), 30001);
}

TEST(every_row_ignored) {
  const SeedsAtMost few(kSeedsOfNumbers);
  Problem<bfloat16> p({.rows = 3, .classes = 90, .skip_ignored = true});
  for (size_t r = 0; r < 3; ++r) p.target[r] = Problem<bfloat16>::kIgnore;
  p.run();
  expect(std::isnan(p.total[0]) && std::isnan(p.accuracy[0]), "0 / 0 is NaN");
}

TEST(many_rows_in_two_stages) {
  Problem<float> p({.rows = 20000, .classes = 2});
  p.compute_oracle();
  under_every_seed([&] {
    p.poison();
    p.run_denominator();
    expect_close("denominator", p.denominator, std::vector<double>{p.want_denominator}, {.relative = 1e-6});
    for (size_t r = 0; r < p.target.size(); ++r) p.loss[r] = 0.5f, p.argmax[r] = p.target[r];
    p.run_reduce();
    expect_close("total", p.total, std::vector<double>{10000 / p.want_denominator}, {.relative = 1e-6});
    expect_equal("accuracy", p.accuracy[0], 1.0f);
  });
}

TEST(scaling) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (const int64_t columns : {5, 700}) {
    Problem<bfloat16> p({.rows = 3, .classes = columns, .padding = 3, .offset = 1});
    for (const float factor : {1.0f, 0.5f})
      under_every_seed([&] {
        p.restore();
        p.total[0] = factor;
        expect_ok(cross_entropy_scale_cuda({p.logits.data(), p.total.data(), 3, columns, p.stride(), Dtype::bfloat16},
                                           nullptr));
        for (int64_t r = 0; r < 3; ++r)
          for (int64_t c = 0; c < p.stride(); ++c) {
            const size_t at = static_cast<size_t>(r * p.stride() + c);
            const float f = c < columns ? factor : 1.0f;
            expect_equal("x", to_float(p.logits[at]), to_float(from_float<bfloat16>(to_float(p.original[at]) * f)));
          }
        if (factor == 1.0f) expect(sim::counters().global_bytes_written == 0, "nothing is written for a factor of 1");
      });
  }
}

// The floor is every logit once and every gradient once; beside it a thread of a row reads its label, and once the
// denominator. Without a gradient nothing is written but the results.
TEST(bytes_moved) {
  const SeedsAtMost few(kSeedsOfNumbers);
  for (const int64_t classes : {1032, 50304}) {
    Problem<bfloat16> p({.rows = 3, .classes = classes});
    for (size_t r = 0; r < 3; ++r) p.target[r] = 7;
    const int64_t row = classes * 2, results = 5 * 4 + 8;
    for (const bool gradient : {true, false}) {
      const CrossEntropyConfig c = choose_cross_entropy_forward({.rows = 3, .classes = classes, .gradient = gradient});
      const int64_t labels = int64_t{c.cluster} * c.lanes * 8;
      under_every_seed([&] {
        p.poison();
        p.denominator[0] = 3;
        expect_ok(cross_entropy_forward_cuda(p.params(gradient), nullptr));
        expect_bytes(
            {.read = 3 * (row + labels) + c.blocks * c.threads * 4, .written = 3 * (results + (gradient ? row : 0))});
      });
    }
    under_every_seed([&] {
      CrossEntropyParams b = p.params(true);
      b.grad_loss = p.rows_grad.data(), b.grad_loss_stride = 1, b.denominator = nullptr;
      expect_ok(cross_entropy_backward_cuda(b, nullptr));
      const int64_t lanes = choose_cross_entropy_backward({.rows = 3, .classes = classes}).lanes;
      expect_bytes({.read = 3 * (row + lanes * (8 + 4 + 4 + 4)), .written = 3 * row});
    });
  }
}

TEST(unknown_dtype_is_refused) {
  Problem<float> p({.rows = 1, .classes = 4});
  CrossEntropyParams q = p.params(true);
  q.dtype = Dtype::float64;
  expect_refused(cross_entropy_forward_cuda(q, nullptr), "float64");
  q.dtype = Dtype::float32, q.classes = int64_t{1} << 31;
  expect_refused(cross_entropy_forward_cuda(q, nullptr), "classes: expected at most 2147483584, got 2147483648");
}

// Rows 2^31 elements apart, in memory that is never touched but for them.
TEST(beyond_2_31_elements) {
  const SeedsAtMost few(kSeedsOfNumbers);
  Problem<bfloat16>({.rows = 3, .classes = 1200}).run_rows_far_apart();
}

// The last rows of contiguous tensors of more than 2^31 elements, by every kernel.
TEST(far_rows) {
  const SeedsAtMost one(1);
  for (const int64_t classes : {40, 1200, 60'000, 200'000})
    Problem<bfloat16>({.rows = 3, .classes = classes, .mean_reduction = false}).run_far_rows();
}

template <class T> void run_random(Random& random) {
  Shape s{.rows = random.size(1, 12), .classes = random.size(1, 2600)};
  s.padding = random.choice<int64_t>({0, 8, 1});
  s.offset = Offsets::draw(random, 4);
  s.in_place = random.coin();
  s.weights = random.coin();
  s.smoothing = random.choice<double>({0, 0, 0.1});
  s.z_loss = random.choice<double>({0, 1e-3});
  s.softcap = random.choice<double>({0, 0, 4});
  s.entropy = random.integer(0, 3) == 3;
  s.skip_ignored = random.coin();
  s.mean_reduction = random.coin();
  Problem<T> p(s, random.bits() % 1000);
  bool counted = false;
  for (size_t r = 0; r < p.target.size(); ++r)
    counted |= p.target[r] >= 0 && (!s.weights || p.weight[static_cast<size_t>(p.target[r])] > 0);
  if (!counted) p.target[0] = 0, p.weight[0] = 1;
  p.run();
}

RANDOM_TEST(random_problems) {
  switch (random.integer(0, 2)) {
    case 0: return run_random<bfloat16>(random);
    case 1: return run_random<float>(random);
    default: return run_random<float16>(random);
  }
}

}  // namespace
}  // namespace warpsmith::test
