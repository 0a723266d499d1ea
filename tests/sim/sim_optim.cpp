// What Python's tests do not ask of the optimizers' kernels: quick arithmetic number by number, lists beyond 2^31
// elements, choosers, and what launchers refuse.
#include <bit>
#include <cmath>
#include <utility>

#include "harness.h"
#include "kernels/optim/code_map.h"
#include "kernels/optim/grad_norm.h"
#include "kernels/optim/layerwise.h"
#include "kernels/optim/optim_config.h"
#include "kernels/optim/quick_math.h"
#include "kernels/optim/rank_mean.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

using optim::QuickMath;

int ulps_apart(float a, float b) { return std::abs(std::bit_cast<int32_t>(a) - std::bit_cast<int32_t>(b)); }
float of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

// With approximations as far off as they may be.
template <class Check> void with_approximations(Check&& check) {
  for (const uint64_t approximation : {0, 1, 2, 3}) {
    const uint64_t saved = std::exchange(sim::options().approximation, approximation);
    check();
    sim::options().approximation = saved;
  }
}

TEST(roots) {
  with_approximations([] {
    for (uint32_t bits = 1; bits < 0x7f800000u; bits += 12289) {
      const float x = of_bits(bits), got = QuickMath::root(x), want = std::sqrt(x);
      if (!(x >= 0x1p-101f ? got == want : ulps_apart(got, want) <= 2))
        return fail("root of " + std::to_string(bits) + ": " + std::to_string(ulps_apart(got, want)) + " ulp");
    }
  });
  expect_equal("root of 0", QuickMath::root(0.0f), 0.0f);
  for (const float x : {HUGE_VALF, -1.0f, -0x1p-149f, NAN}) expect(std::isnan(QuickMath::root(x)), "root is NaN");
}

RANDOM_TEST(quotients) {
  with_approximations([&] {
    for (int i = 0; i < 4000; ++i) {
      const auto drawn = [&] { return static_cast<uint32_t>(random.bits()); };
      const float a = of_bits((drawn() & 0x807fffffu) | (127 - 99 + drawn() % 160) << 23);
      const float b = of_bits((drawn() & 0x807fffffu) | (127 - 126 + drawn() % 252) << 23);
      const float got = QuickMath::quotient(a, b), want = a / b;
      if (std::abs(want) >= 0x1p-126f && std::isfinite(want)) {
        if (got != want) return fail(std::to_string(a) + " / " + std::to_string(b) + " is " + std::to_string(got));
      } else if (std::isinf(want)) {
        expect(std::isnan(got), "an overflow is NaN");
      }
      const float tiny = of_bits(drawn() & 0x8dffffffu), of_tiny = tiny / b;
      if (std::isfinite(of_tiny) && ulps_apart(QuickMath::quotient(tiny, b), of_tiny) > 2) return fail("tiny / b");
    }
  });
  expect_equal("0 / 3", QuickMath::quotient(0.0f, 3.0f), 0.0f);
  for (const auto& [a, b] : {std::pair{1.0f, 0.0f}, {0.0f, 0.0f}, {1.0f, HUGE_VALF}, {HUGE_VALF, 1.0f}, {NAN, 1.0f}})
    expect(std::isnan(QuickMath::quotient(a, b)), "quotient is NaN");
}

// All borders with their neighbours, both ends of all cells, and numbers of every size.
template <bool kSigned> void check_codes() {
  constexpr CodeMap<kSigned> kMap{};
  float borders[kCodes];
  for (int code = 0; code < kCodes; ++code) borders[code] = dynamic_border(code, kSigned);
  const auto check = [&](float x) {
    if (x <= 1)
      expect_equal("code of " + std::to_string(x), static_cast<int>(mapped_code(kMap, x) & 0xff),
                   dynamic_code(borders, x, kSigned));
  };
  const auto check_both = [&](float x) {
    if (x > 1) return;
    check(x);
    if (kSigned) check(-x);
  };
  for (const float border : borders)
    for (uint32_t bits = std::bit_cast<uint32_t>(std::abs(border)), i = 0; i < 5; ++i)
      check_both(of_bits(bits + i - 2));
  for (uint32_t cell = 0; cell < 0x3f80; ++cell)
    for (const uint32_t low : {0u, 1u, 0xffffu}) check_both(of_bits(cell << 16 | low));
  check_both(1.0f);
}
TEST(codes_with_a_sign_are_those_of_a_search) { check_codes<true>(); }
TEST(codes_without_a_sign_are_those_of_a_search) { check_codes<false>(); }

// A step of AdamW over one tensor.
struct Step {
  std::vector<int64_t> words;
  const void* grad;
  OptimParams p{};

  Step(std::vector<OptimTensor> records, const void* gradient, int32_t chunk_elems) : grad(gradient) {
    words = tensor_list_words(records, chunk_elems);
    constexpr int64_t kRecordWords = sizeof(OptimTensor) / sizeof(int64_t);
    p.tensors = reinterpret_cast<OptimTensor*>(words.data());
    p.chunks = reinterpret_cast<const ListChunk*>(words.data() + kRecordWords);
    p.grads = &grad;
    p.tensor_count = p.group_count = 1;
    p.chunk_count = static_cast<int64_t>(words.size()) - kRecordWords;
    p.most = records[0].has;
    p.groups[0].lr = 0.5;
    p.groups[0].values[AdamW::beta1] = 0.9, p.groups[0].values[AdamW::beta2] = 0.999;
    p.groups[0].values[AdamW::eps] = 1e-8;
  }
};

OptimTensor record_of(void* param, void* m, void* v, void* v_max, float* step, int64_t elems) {
  OptimTensor r{};
  r.param = param;
  r.states[0] = m, r.states[1] = v, r.states[2] = v_max;
  r.step = step;
  r.numel = elems;
  r.has = v_max ? 0b111 : 0b011;
  return r;
}

TEST(bytes_are_the_floor) {
  constexpr int64_t kElems = 3 * kOptimTileElems;
  Buffer<float> param(kElems), grad(kElems), m(kElems), v(kElems), step(1);
  for (Buffer<float>* b : {&param, &grad, &m, &v}) fill_normal(*b, 1, 0.05f, 0.5f);  // positive
  step[0] = 6;
  Step s({record_of(param.data(), m.data(), v.data(), nullptr, step.data(), kElems)}, grad.data(), kOptimTileElems);
  under_every_seed([&] {
    sim::counters() = {};
    expect_ok(optim_cuda(s.p, nullptr));
    expect_bytes({.read = 16 * kElems, .written = 12 * kElems});
  });
}

// Only the last block runs, and memory that nothing touches does not exist.
constexpr int64_t kFar = (int64_t{1} << 31) + 5000;
template <class Launch> void last_block(int64_t chunks, Launch&& launch) {
  sim::options().block_filter = [=](uint3 block) { return block.x + 1 == chunks; };
  expect_ok(launch());
  sim::options().block_filter = nullptr;
}

TEST(a_step_of_more_than_2_to_the_31_elements) {
  sim::SparseMemory<float> param(kFar), grad(kFar), m(kFar), v(kFar), v_max(kFar);
  float step = 0;
  Step s({record_of(param.data(), m.data(), v.data(), v_max.data(), &step, kFar)}, grad.data(),
         longest_optim_chunk(Storage::float32));
  grad[kFar - 1] = 1.0f;
  last_block(s.p.chunk_count, [&] { return optim_cuda(s.p, nullptr); });
  expect(std::abs(param[kFar - 1] + 0.5f) < 1e-6f, "the last element");
  expect_equal("the element before", param[kFar - 2], 0.0f);
  expect_equal("an element 2^31 before", param[kFar - 1 - (int64_t{1} << 31)], 0.0f);
  expect(std::abs(m[kFar - 1] - 0.1f) < 1e-6f, "the first moment");
  expect(std::abs(v[kFar - 1] - 0.001f) < 1e-6f && v_max[kFar - 1] == v[kFar - 1], "the second moments");
}

TEST(a_clipped_tensor_of_more_than_2_to_the_31_elements) {
  sim::SparseMemory<float> x(kFar);
  std::vector<NormTensor> records{{x.data(), kFar, 0, 0, Dtype::float32}};
  std::vector<int64_t> words = tensor_list_words(records, static_cast<int32_t>(choose_norm_chunk(kFar, 132)));
  constexpr int64_t kRecordWords = sizeof(NormTensor) / sizeof(int64_t);
  const auto chunks = static_cast<int64_t>(words.size()) - kRecordWords;
  x[kFar - 1] = 3.0f;
  float norm = 6.0f;
  const ClipParams p{reinterpret_cast<const NormTensor*>(words.data()),
                     reinterpret_cast<const ListChunk*>(words.data() + kRecordWords),
                     chunks,
                     &norm,
                     Dtype::float32,
                     3.0};
  last_block(chunks, [&] { return clip_grads_cuda(p, nullptr); });
  expect(std::abs(x[kFar - 1] - 1.5f) < 1e-5f, "the last element");
}

TEST(parts_of_ranks_more_than_2_to_the_31_elements_apart) {
  constexpr int64_t kStride = (int64_t{1} << 31) + 8;
  sim::SparseMemory<bfloat16> parts(static_cast<size_t>(kStride) + 16);
  Buffer<bfloat16> out(16);
  for (size_t i = 0; i < 16; ++i) parts[static_cast<size_t>(kStride) + i] = from_float<bfloat16>(static_cast<float>(i));
  RankMeanParams p{};
  p.parts = parts.data(), p.count = 16, p.stride = kStride, p.ranks = 2, p.dtype = Dtype::bfloat16;
  p.outs[p.out_count++] = {out.data(), Dtype::bfloat16};
  expect_ok(rank_mean_cuda(p, nullptr));
  for (size_t i = 0; i < 16; ++i) expect_equal("element", to_float(out[i]), static_cast<float>(i) / 2);
}

TEST(the_choosers) {
  const auto chunk_of = [](int64_t total, Storage storage = Storage::float32) {
    return choose_optim(total, 132, storage).chunk_elems;
  };
  for (int storage = 0; storage < kStorages; ++storage)
    for (int64_t total : {int64_t{0}, int64_t{1}, int64_t{8'192'000}, int64_t{1} << 33}) {
      const int chunk = chunk_of(total, static_cast<Storage>(storage));
      expect(chunk % kOptimTileElems == 0 && chunk <= kOptimMaxChunkElems, "chunk of " + std::to_string(chunk));
    }
  expect_equal("small", chunk_of(1000), kOptimTileElems);
  expect_equal("2,000 tensors of 4,096", chunk_of(8'192'000), 4096);
  expect_equal("three chunks for every resident block", chunk_of(3 * 4 * 132 * 4096), 4096);
  expect_equal("one element less", chunk_of(3 * 4 * 132 * 4096 - 1), 2048);
  expect_equal("large", chunk_of(1'000'000'000), 4096);
  expect_equal("masters", chunk_of(1'000'000'000, Storage::bfloat16_master), 8192);
  expect_equal("16 bits", chunk_of(1'000'000'000, Storage::bfloat16), 16384);
  expect_equal("8 bits", chunk_of(1'000'000'000, Storage::bfloat16_8bit), kOptimMaxChunkElems);
  expect_equal<int64_t, int64_t>("small norm", choose_norm_chunk(1000, 132), 4096);
  expect_equal<int64_t, int64_t>("norm of 2,000 tensors of 4,096", choose_norm_chunk(8'192'000, 132), 4096);
  expect_equal<int64_t, int64_t>("large norm", choose_norm_chunk(1'000'000'000, 132), 65536);
}

TEST(inverse_powers_of_two) {
  for (const float scale : {0.0f, 1e-45f, 0x1p127f, -2.0f, HUGE_VALF, NAN})
    expect_equal("no power of two", inverse_power_of_two(scale), 1.0f);
  expect_equal("the largest", inverse_power_of_two(0x1.8p126f), 0x1p-126f);
  expect_equal("the smallest", inverse_power_of_two(0x1p-126f), 0x1p126f);
}

TEST(what_launchers_refuse) {
  Buffer<float> x(1);
  Step s({record_of(x.data(), x.data(), x.data(), nullptr, x.data(), 1)}, x.data(), kOptimTileElems);
  const auto with = [&](Optimizer optimizer, Storage storage, uint32_t most = 0b011) {
    s.p.optimizer = optimizer, s.p.storage = storage, s.p.most = most;
    return s.p;
  };
  expect_refused(optim_cuda(with(Optimizer::adamw, Storage::float64), nullptr), "no CUDA kernel for float64");
  expect_refused(optim_cuda(with(Optimizer::lion, Storage::float32), nullptr), "states that the optimizer does not");
  expect_refused(optim_cuda(with(Optimizer::rmsprop, Storage::float32_8bit), nullptr), "8-bit states of this");
  expect_refused(optim_cuda(with(Optimizer::lion, Storage::float32_8bit), nullptr), "8-bit states other than");
  const auto layerwise = [&](Optimizer optimizer, Storage storage) {
    return layerwise_cuda({with(optimizer, storage), nullptr, nullptr}, nullptr);
  };
  expect_refused(layerwise(Optimizer::lamb, Storage::bfloat16), "a storage other than float32 and masters");
  expect_refused(layerwise(Optimizer::lamb, Storage::float64), "float64");
  expect_refused(layerwise(Optimizer::sgd, Storage::float32), "an optimizer that is not layerwise");
  GradNormParams norm{};
  norm.norm_dtype = Dtype::float64, norm.chunk_count = 1;
  expect_refused(grad_norm_cuda(norm, nullptr), "float64");
  expect_refused(grad_check_cuda({norm, nullptr, 1.0, nullptr, nullptr, nullptr, 0}, nullptr), "float64");
  expect_refused(clip_grads_cuda({nullptr, nullptr, 1, nullptr, Dtype::float64, 1.0}, nullptr), "float64");
  RankMeanParams mean{};
  mean.count = mean.ranks = mean.out_count = 1, mean.dtype = mean.outs[0].dtype = Dtype::float64;
  expect_refused(rank_mean_cuda(mean, nullptr), "float64");
}

}  // namespace
}  // namespace warpsmith::test
