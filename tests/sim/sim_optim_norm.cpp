// links: csrc/kernels/optim/grad_norm.cu
// Norm, clipping, checks and unscaling of many tensors of any mix of dtypes, against sums in double.
#include <algorithm>
#include <cmath>
#include <memory>

#include "harness.h"
#include "kernels/optim/grad_norm.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

// A tensor of one of three dtypes; the others' buffers are empty.
struct Grad {
  Dtype dtype;
  size_t count;
  Buffer<float> single;
  Buffer<float16> half;
  Buffer<bfloat16> brain;

  Grad(Dtype of, size_t elems, size_t offset)
      : dtype(of),
        count(elems),
        single(of == Dtype::float32 ? elems : 0, offset),
        half(of == Dtype::float16 ? elems : 0, offset),
        brain(of == Dtype::bfloat16 ? elems : 0, offset) {}

  void fill(uint64_t seed) {
    fill_normal(single, seed);
    fill_normal(half, seed);
    fill_normal(brain, seed);
  }
  double at(size_t i) const {
    return static_cast<double>(dtype == Dtype::float32   ? single[i]
                               : dtype == Dtype::float16 ? to_float(half[i])
                                                         : to_float(brain[i]));
  }
  void set(size_t i, float x) {
    if (dtype == Dtype::float32) single[i] = x;
    if (dtype == Dtype::float16) half[i] = from_float<float16>(x);
    if (dtype == Dtype::bfloat16) brain[i] = from_float<bfloat16>(x);
  }
  void* data() {
    return dtype == Dtype::float32   ? static_cast<void*>(single.data())
           : dtype == Dtype::float16 ? static_cast<void*>(half.data())
                                     : brain.data();
  }
};

struct Norms {
  std::vector<std::unique_ptr<Grad>> grads;
  std::vector<int64_t> words;
  int64_t record_words = 0, chunk_count = 0;
  Buffer<double> power_sum{1};
  Buffer<float> norm{1};

  Grad& add(Dtype dtype, size_t elems, size_t offset = 0) {
    grads.push_back(std::make_unique<Grad>(dtype, elems, offset));
    grads.back()->fill(3 * grads.size());
    return *grads.back();
  }

  void build() {
    std::vector<NormTensor> records;
    int64_t total = 0;
    for (const auto& g : grads) {
      records.push_back({g->data(), static_cast<int64_t>(g->count), 0, 0, g->dtype});
      total += static_cast<int64_t>(g->count);
    }
    int32_t chunk_elems = 0;
    expect_ok(norm_chunk_elems_cuda(total, &chunk_elems));
    words = tensor_list_words(records, chunk_elems);
    record_words = static_cast<int64_t>(records.size() * sizeof(NormTensor) / sizeof(int64_t));
    chunk_count = static_cast<int64_t>(words.size()) - record_words;
  }

  const NormTensor* tensors() const { return reinterpret_cast<const NormTensor*>(words.data()); }
  const ListChunk* chunks() const { return reinterpret_cast<const ListChunk*>(words.data() + record_words); }

  Status run(NormOrder order) {
    Buffer<double> partials(static_cast<size_t>(chunk_count));
    return grad_norm_cuda({tensors(), chunks(), chunk_count, partials.data(), power_sum.data(), norm.data(),
                           Dtype::float32, order, nullptr},
                          nullptr);
  }

  Status check_gradients(NormOrder order, double max_norm, const Buffer<float>& scale, Buffer<float>& grad_scale,
                         Buffer<float>& found_inf, Buffer<int64_t>& bad_counts) {
    Buffer<double> partials(static_cast<size_t>(chunk_count));
    return grad_check_cuda({{tensors(), chunks(), chunk_count, partials.data(), power_sum.data(), norm.data(),
                             Dtype::float32, order, scale.data()},
                            scale.data(),
                            max_norm,
                            grad_scale.data(),
                            found_inf.data(),
                            bad_counts.data(),
                            static_cast<int64_t>(bad_counts.size())},
                           nullptr);
  }

  double expected(NormOrder order) const {
    double sum = 0;
    for (const auto& g : grads)
      for (size_t i = 0; i < g->count; ++i) {
        const double x = std::abs(g->at(i));
        sum = order == NormOrder::infinity ? std::max(sum, x) : sum + (order == NormOrder::two ? x * x : x);
      }
    return order == NormOrder::two ? std::sqrt(sum) : sum;
  }

  void check(NormOrder order) {
    const double want = expected(order);
    under_every_seed([&] {
      power_sum.poison(), norm.poison();
      expect_ok(run(order));
      expect_close("norm", norm, std::vector<double>{want}, {.ulps = order == NormOrder::infinity ? 0.0 : 2.0});
      expect_close("power sum", power_sum, std::vector<double>{order == NormOrder::two ? want * want : want},
                   {.relative = 1e-6});
      same_bits_for_every_seed("norm", norm);
      same_bits_for_every_seed("power sum", power_sum);
    });
  }
};

constexpr int64_t kThreadsOfABlock = 256;
constexpr NormOrder kOrders[] = {NormOrder::one, NormOrder::two, NormOrder::infinity};

TEST(norms_of_mixed_dtypes_sizes_and_alignments) {
  const SeedsAtMost few(3);
  Norms n;
  size_t offset = 0;
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16})
    for (const size_t elems : {0, 1, 7, 8, 9, 4096, 4097, 9000}) n.add(dtype, elems, offset++ % 3);
  n.build();
  for (const NormOrder order : kOrders) n.check(order);
}

// What ranks that own parts of tensors do: each sums the chunks of its parts, and all add the sums of all chunks.
TEST(tensors_cut_where_chunks_begin_have_the_norm_of_whole_ones) {
  const SeedsAtMost few(2);
  constexpr size_t kCut = 64 * 1024, kElems = 2 * kCut + 777;
  Norms whole;
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) whole.add(dtype, kElems);
  whole.add(Dtype::float16, 0);
  whole.build();
  const int64_t chunk_elems = choose_norm_chunk(2 * kElems, 132);
  for (const NormOrder order : kOrders)
    under_every_seed([&] {
      expect_ok(whole.run(order));
      Buffer<double> partials(static_cast<size_t>(whole.chunk_count)), power_sum(1);
      Buffer<float> norm(1);
      int64_t done = 0;
      for (const auto& g : whole.grads)
        for (size_t begin = 0; begin < std::max<size_t>(g->count, 1); begin += kCut) {
          const auto bytes = static_cast<int64_t>(begin) * (g->dtype == Dtype::float32 ? 4 : 2);
          std::vector<NormTensor> record{{static_cast<char*>(g->data()) + bytes,
                                          static_cast<int64_t>(std::min(kCut, g->count - begin)), 0, 0, g->dtype}};
          const std::vector<int64_t> words = tensor_list_words(record, static_cast<int32_t>(chunk_elems));
          const int64_t record_words = sizeof(NormTensor) / sizeof(int64_t);
          const auto chunks = static_cast<int64_t>(words.size()) - record_words;
          expect_ok(grad_norm_partials_cuda({reinterpret_cast<const NormTensor*>(words.data()),
                                             reinterpret_cast<const ListChunk*>(words.data() + record_words), chunks,
                                             partials.data() + done, nullptr, nullptr, Dtype::float32, order, nullptr},
                                            nullptr));
          done += chunks;
        }
      expect_equal<int64_t, int64_t>("chunks", done, whole.chunk_count);
      expect_ok(grad_norm_finish_cuda(
          {nullptr, nullptr, done, partials.data(), power_sum.data(), norm.data(), Dtype::float32, order, nullptr},
          nullptr));
      expect_equal("norm", norm[0], whole.norm[0]);
      expect_equal("power sum", power_sum[0], whole.power_sum[0]);
    });
}

TEST(bytes_of_norm_and_clip_are_the_floor) {
  Norms n;
  n.add(Dtype::float32, 8192);
  n.add(Dtype::bfloat16, 4096);
  n.build();
  expect_equal<int64_t, int64_t>("chunks", n.chunk_count, 3);
  under_every_seed([&] {
    expect_ok(n.run(NormOrder::two));
    expect_bytes({.read = 8192 * 4 + 4096 * 2 + n.chunk_count * 8, .written = n.chunk_count * 8 + 8 + 4});
    sim::counters() = {};
    // One element a block; the factor 1 writes nothing.
    n.norm[0] = 0.5f;
    expect_ok(clip_grads_cuda({n.tensors(), n.chunks(), n.chunk_count, n.norm.data(), Dtype::float32, 1.0}, nullptr));
    expect_bytes({.read = 4 * kThreadsOfABlock * n.chunk_count, .written = 0});
  });
}

TEST(nan_and_infinity_stay_visible) {
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16})
    for (const size_t place : {size_t{0}, size_t{4095}, size_t{8999}})
      for (const NormOrder order : kOrders) {
        Norms n;
        n.add(Dtype::float32, 100);
        n.add(dtype, 9000).set(place, NAN);
        n.build();
        expect_ok(n.run(order));
        expect(std::isnan(n.norm[0]), "a NaN is dropped");
        n.grads[1]->set(place, -INFINITY);
        expect_ok(n.run(order));
        expect_equal("norm", n.norm[0], INFINITY);
      }
}

TEST(clipping_scales_all_elements) {
  const SeedsAtMost few(3);
  for (const double max_norm : {0.0, 0.5, 1e6}) {
    Norms n;
    for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16})
      for (const size_t offset : {0, 1}) n.add(dtype, 9001, offset);
    n.add(Dtype::float32, 0);
    n.build();
    const auto norm = static_cast<float>(n.expected(NormOrder::two));
    const double factor = std::min(1.0, max_norm / (double{norm} + 1e-6));
    std::vector<std::vector<double>> want;
    for (const auto& g : n.grads) {
      auto& w = want.emplace_back();
      for (size_t i = 0; i < g->count; ++i) w.push_back(g->at(i) * factor);
    }
    under_every_seed([&] {
      for (size_t i = 0; i < n.grads.size(); ++i) n.grads[i]->fill(3 * (i + 1));
      n.norm[0] = norm;
      expect_ok(
          clip_grads_cuda({n.tensors(), n.chunks(), n.chunk_count, n.norm.data(), Dtype::float32, max_norm}, nullptr));
      for (size_t i = 0; i < n.grads.size(); ++i) {
        const Tolerance one{.ulps = 1.5};
        const std::string name = "tensor " + std::to_string(i);
        const Grad& g = *n.grads[i];
        if (g.dtype == Dtype::float32) expect_close(name, g.single, want[i], one);
        if (g.dtype == Dtype::float16) expect_close(name, g.half, want[i], one);
        if (g.dtype == Dtype::bfloat16) expect_close(name, g.brain, want[i], one);
      }
    });
  }
}

// What a scaler's buffers hold before a launch.
struct Found {
  Buffer<float> scale{1}, grad_scale{1}, found_inf{1};
  Buffer<int64_t> bad_counts;

  Found(size_t tensors, float s) : bad_counts(tensors) {
    scale[0] = s;
    reset();
  }
  void reset() {
    grad_scale.poison();
    found_inf[0] = 0;
    for (size_t i = 0; i < bad_counts.size(); ++i) bad_counts[i] = 0;
  }
  int64_t bad() const {
    int64_t sum = 0;
    for (size_t i = 0; i < bad_counts.size(); ++i) sum += bad_counts[i];
    return sum;
  }
};

TEST(a_check_gives_the_unscaled_norm_and_the_divisor) {
  const SeedsAtMost few(3);
  Norms n;
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16})
    for (const size_t offset : {0, 1}) n.add(dtype, 5001, offset);
  n.build();
  for (const NormOrder order : kOrders)
    for (const float scale : {1024.0f, 3000.0f})
      for (const double max_norm : {0.0, 1e-3, 1e6, HUGE_VAL}) {
        Found f(n.grads.size(), scale);
        const double norm = n.expected(order) / static_cast<double>(scale);
        const double factor = std::min(1.0, max_norm / (norm + 1e-6));
        under_every_seed([&] {
          f.reset();
          f.found_inf.poison();
          expect_ok(n.check_gradients(order, max_norm, f.scale, f.grad_scale, f.found_inf, f.bad_counts));
          expect_close("norm", n.norm, std::vector<double>{norm}, {.ulps = 2});
          if (factor == 1)
            expect_equal("divisor", f.grad_scale[0], scale);
          else
            expect_close("divisor", f.grad_scale, std::vector<double>{static_cast<double>(scale) / factor},
                         {.relative = 1e-6});
          expect_equal("found_inf", f.found_inf[0], 0.0f);
          expect_equal<int64_t, int64_t>("bad values", f.bad(), 0);
          same_bits_for_every_seed("norm", n.norm);
          same_bits_for_every_seed("divisor", f.grad_scale);
        });
      }
}

// A power of two changes no bit of the norm, and the squares of scaled gradients may be larger than float32.
TEST(a_scale_of_two_to_the_n_changes_no_bit_of_the_norm) {
  const SeedsAtMost few(2);
  for (const NormOrder order : kOrders) {
    float plain = 0;
    for (const float scale : {1.0f, 0x1p-90f, 0x1p16f, 0x1p90f}) {
      Norms n;
      Grad& g = n.add(Dtype::float32, 9001);
      for (size_t i = 0; i < g.count; ++i) g.set(i, static_cast<float>(g.at(i)) * scale);
      n.build();
      Found f(1, scale);
      under_every_seed([&] {
        f.reset();
        expect_ok(n.check_gradients(order, 1.0, f.scale, f.grad_scale, f.found_inf, f.bad_counts));
        expect_equal("found_inf", f.found_inf[0], 0.0f);
        if (scale == 1.0f) plain = n.norm[0];
        expect_equal("norm", n.norm[0], plain);
      });
    }
  }
  for (const float scale : {0.0f, 1e-45f, 0x1p127f, -2.0f, HUGE_VALF, NAN})
    expect_equal("no power of two", inverse_power_of_two(scale), 1.0f);
  expect_equal("the largest", inverse_power_of_two(0x1.8p126f), 0x1p-126f);
  expect_equal("the smallest", inverse_power_of_two(0x1p-126f), 0x1p126f);
}

TEST(a_check_reads_finite_gradients_once) {
  Norms n;
  n.add(Dtype::float32, 8192);
  n.add(Dtype::bfloat16, 4096);
  n.build();
  Found f(2, 2.0f);
  under_every_seed([&] {
    expect_ok(n.check_gradients(NormOrder::two, 1.0, f.scale, f.grad_scale, f.found_inf, f.bad_counts));
    // Beside the sums: the scale, also for every thread of the sums, and found_inf for those that return at once.
    expect_bytes({.read = 8192 * 4 + 4096 * 2 + n.chunk_count * 8 + 4 * 512 + 8 * kThreadsOfABlock * n.chunk_count,
                  .written = n.chunk_count * 8 + 8 + 4 + 4 + 4});
  });
}

// What a reduction has summed is not read again, but for chunks whose squares are too large without the scale.
TEST(known_sums_give_the_bits_of_a_check_that_reads) {
  const SeedsAtMost few(2);
  for (const float scale : {1.0f, 3000.0f, 0x1p16f})
    for (const float planted : {1.0f, 0x1p70f, INFINITY}) {
      Norms n;
      n.add(Dtype::float32, 9001, 1);
      n.add(Dtype::bfloat16, 4097);
      n.add(Dtype::float16, 0);
      n.grads[1]->set(4096, planted);
      n.build();
      Found f(3, scale), want(3, scale);
      expect_ok(n.check_gradients(NormOrder::two, 1.0, want.scale, want.grad_scale, want.found_inf, want.bad_counts));
      const float norm = n.norm[0];
      const double power_sum = n.power_sum[0];
      Buffer<double> known(static_cast<size_t>(n.chunk_count)), partials(static_cast<size_t>(n.chunk_count));
      GradNormParams sums{n.tensors(),   n.chunks(),     n.chunk_count,  known.data(), n.power_sum.data(),
                          n.norm.data(), Dtype::float32, NormOrder::two, nullptr};
      expect_ok(grad_norm_partials_cuda(sums, nullptr));
      sums.partials = partials.data();
      sums.scale = f.scale.data();
      sums.known = known.data();
      under_every_seed([&] {
        f.reset(), partials.poison(), n.norm.poison(), n.power_sum.poison();
        expect_ok(grad_check_cuda(
            {sums, f.scale.data(), 1.0, f.grad_scale.data(), f.found_inf.data(), f.bad_counts.data(), 3}, nullptr));
        expect_equal("norm", n.norm[0], norm);
        expect_equal("power sum", n.power_sum[0], power_sum);
        expect_equal("divisor", f.grad_scale[0], want.grad_scale[0]);
        expect_equal("found_inf", f.found_inf[0], want.found_inf[0]);
        expect_equal("skipped", f.found_inf[0],
                     planted > 0x1p60f && (scale == 1.0f || planted > 0x1p80f) ? 1.0f : 0.0f);
        for (size_t i = 0; i < 3; ++i) expect_equal("bad values", f.bad_counts[i], want.bad_counts[i]);
        // Each thread of a chunk reads its known sum, then found_inf; those of the finish read the scale.
        if (planted == 1.0f)
          expect_bytes({.read = (8 + 4) * kThreadsOfABlock * n.chunk_count + n.chunk_count * 8 + 4 * 512,
                        .written = n.chunk_count * 8 + 8 + 4 + 4 + 4});
      });
    }
}

TEST(bad_values_are_counted_tensor_by_tensor) {
  const SeedsAtMost few(3);
  for (const bool unscales : {false, true})
    for (const NormOrder order : kOrders) {
      Norms n;
      for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) n.add(dtype, 9001, 1);
      n.add(Dtype::float32, 10);
      n.build();
      Found f(4, 0.5f);
      const Buffer<float>& scale = f.scale;
      under_every_seed([&] {
        for (size_t i = 0; i < 4; ++i) n.grads[i]->fill(i + 1);
        for (const size_t place : {0, 4095, 4096, 9000}) n.grads[1]->set(place, NAN);
        n.grads[2]->set(8191, -INFINITY);
        n.grads[2]->set(17, 60000.0f);  // twice that is not finite once it is stored in float16
        n.grads[3]->set(9, 3e38f);      // nor this in float32
        f.reset();
        if (unscales) {
          f.grad_scale[0] = 1 / scale[0];
          expect_ok(unscale_grads_cuda(
              {n.tensors(), n.chunks(), n.chunk_count, f.grad_scale.data(), f.found_inf.data(), f.bad_counts.data()},
              nullptr));
        } else {
          f.found_inf.poison(), f.bad_counts.poison();  // a check writes both
          expect_ok(n.check_gradients(order, 1.0, scale, f.grad_scale, f.found_inf, f.bad_counts));
        }
        expect_equal("found_inf", f.found_inf[0], 1.0f);
        const int64_t want[] = {0, 4, unscales ? 2 : 1, 1};
        for (size_t i = 0; i < 4; ++i) expect_equal("bad values of " + std::to_string(i), f.bad_counts[i], want[i]);
      });
    }
}

TEST(unscaling_multiplies_all_elements) {
  const SeedsAtMost few(3);
  for (const float inverse : {0x1p-10f, 1 / 3000.0f}) {
    Norms n;
    for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16})
      for (const size_t offset : {0, 1}) n.add(dtype, 9001, offset);
    n.add(Dtype::float32, 0);
    n.build();
    Found f(n.grads.size(), inverse);
    std::vector<std::vector<double>> want;
    for (const auto& g : n.grads) {
      auto& w = want.emplace_back();
      for (size_t i = 0; i < g->count; ++i) w.push_back(g->at(i) * static_cast<double>(inverse));
    }
    under_every_seed([&] {
      for (size_t i = 0; i < n.grads.size(); ++i) n.grads[i]->fill(3 * (i + 1));
      expect_ok(unscale_grads_cuda(
          {n.tensors(), n.chunks(), n.chunk_count, f.scale.data(), f.found_inf.data(), f.bad_counts.data()}, nullptr));
      for (size_t i = 0; i < n.grads.size(); ++i) {
        const Tolerance rounding{.ulps = 0.51};
        const std::string name = "tensor " + std::to_string(i);
        const Grad& g = *n.grads[i];
        if (g.dtype == Dtype::float32) expect_close(name, g.single, want[i], rounding);
        if (g.dtype == Dtype::float16) expect_close(name, g.half, want[i], rounding);
        if (g.dtype == Dtype::bfloat16) expect_close(name, g.brain, want[i], rounding);
      }
      expect_equal("found_inf", f.found_inf[0], 0.0f);
      expect_equal<int64_t, int64_t>("bad values", f.bad(), 0);
    });
  }
}

TEST(a_tensor_of_more_than_2_to_the_31_elements) {
  constexpr int64_t kElems = (int64_t{1} << 31) + 5000;
  sim::SparseMemory<float> x(kElems);
  std::vector<NormTensor> records{{x.data(), kElems, 0, 0, Dtype::float32}};
  std::vector<int64_t> words = tensor_list_words(records, static_cast<int32_t>(choose_norm_chunk(kElems, 132)));
  const int64_t record_words = sizeof(NormTensor) / sizeof(int64_t);
  const auto chunk_count = static_cast<int64_t>(words.size()) - record_words;
  x[kElems - 1] = 3.0f;
  float norm = 6.0f;
  sim::options().block_filter = [&](uint3 block) { return block.x + 1 == chunk_count; };
  expect_ok(clip_grads_cuda(
      {reinterpret_cast<const NormTensor*>(words.data()),
       reinterpret_cast<const ListChunk*>(words.data() + record_words), chunk_count, &norm, Dtype::float32, 3.0},
      nullptr));
  sim::options().block_filter = nullptr;
  expect(std::abs(x[kElems - 1] - 1.5f) < 1e-5f, "the last element");
}

TEST(float64_is_refused_on_cuda) {
  Norms n;
  n.add(Dtype::float32, 10);
  n.build();
  Buffer<double> norm(1);
  expect_refused(clip_grads_cuda({n.tensors(), n.chunks(), n.chunk_count, norm.data(), Dtype::float64, 1.0}, nullptr),
                 "float64");
  const GradNormParams params{n.tensors(), n.chunks(),     n.chunk_count,  norm.data(), norm.data(),
                              norm.data(), Dtype::float64, NormOrder::two, nullptr};
  expect_refused(grad_norm_cuda(params, nullptr), "float64");
  expect_refused(grad_check_cuda({params, nullptr, 1.0, nullptr, nullptr, nullptr, 0}, nullptr), "float64");
}

TEST(the_chooser_of_chunks) {
  expect_equal<int64_t, int64_t>("small", choose_norm_chunk(1000, 132), 4096);
  expect_equal<int64_t, int64_t>("2,000 tensors of 4,096", choose_norm_chunk(8'192'000, 132), 4096);
  expect_equal<int64_t, int64_t>("large", choose_norm_chunk(1'000'000'000, 132), 65536);
}

RANDOM_TEST(random_norms_and_clips) {
  Norms n;
  const int64_t count = random.integer(1, 8);
  for (int64_t i = 0; i < count; ++i)
    n.add(random.choice({Dtype::float32, Dtype::bfloat16, Dtype::float16}), static_cast<size_t>(random.size(0, 20000)),
          static_cast<size_t>(random.integer(0, 8)));
  n.build();
  const NormOrder order = random.choice({NormOrder::two, NormOrder::one, NormOrder::infinity});
  n.check(order);
  const double max_norm = random.choice({1.0, 0.0, 1e3});
  const auto norm = static_cast<float>(n.expected(order));
  const double factor = std::min(1.0, max_norm / (double{norm} + 1e-6));
  std::vector<std::vector<double>> before;
  for (const auto& g : n.grads) {
    auto& values = before.emplace_back();
    for (size_t i = 0; i < g->count; ++i) values.push_back(g->at(i));
  }
  n.norm[0] = norm;
  expect_ok(
      clip_grads_cuda({n.tensors(), n.chunks(), n.chunk_count, n.norm.data(), Dtype::float32, max_norm}, nullptr));
  for (size_t t = 0; t < n.grads.size(); ++t)
    for (size_t i = 0; i < n.grads[t]->count; ++i) {
      const double want = before[t][i] * factor;
      const double step = n.grads[t]->dtype == Dtype::bfloat16  ? 0x1p-8
                          : n.grads[t]->dtype == Dtype::float16 ? 0x1p-11
                                                                : 0x1p-23;
      if (std::abs(n.grads[t]->at(i) - want) > 1.01 * step * std::abs(want) + 0x1p-25)
        return fail("element " + std::to_string(i) + " of tensor " + std::to_string(t));
    }
}

}  // namespace
}  // namespace warpsmith::test
