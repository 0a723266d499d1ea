// links: csrc/kernels/optim/optim.cu
// links: csrc/kernels/optim/optim_16bit.cu
// links: csrc/kernels/optim/optim_mixed.cu
// links: csrc/kernels/optim/optim_refined.cu
// links: csrc/kernels/optim/optim_8bit.cu
// Square root and division without a branch, where they give way to those of IEEE 754, and the map of 8-bit codes.
#include <bit>
#include <cmath>
#include <random>
#include <utility>

#include "harness.h"
#include "kernels/optim/code_map.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "kernels/optim/quick_math.h"

namespace warpsmith::test {
namespace {

using optim::QuickMath;

constexpr CodeMap<true> kSignedMap{};
constexpr CodeMap<false> kUnsignedMap{};

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

TEST(quotients) {
  std::mt19937 random(1);
  with_approximations([&] {
    for (int i = 0; i < 300'000; ++i) {
      const float a = of_bits((random() & 0x807fffffu) | (127 - 99 + random() % 160) << 23);
      const float b = of_bits((random() & 0x807fffffu) | (127 - 126 + random() % 252) << 23);
      const float got = QuickMath::quotient(a, b), want = a / b;
      if (std::abs(want) >= 0x1p-126f && std::isfinite(want)) {
        if (got != want) return fail(std::to_string(a) + " / " + std::to_string(b) + " is " + std::to_string(got));
      } else if (std::isinf(want)) {
        expect(std::isnan(got), "an overflow is NaN");
      }
      const float tiny = of_bits(random() & 0x8dffffffu), of_tiny = tiny / b;
      if (std::isfinite(of_tiny) && ulps_apart(QuickMath::quotient(tiny, b), of_tiny) > 2) return fail("tiny / b");
    }
  });
  expect_equal("0 / 3", QuickMath::quotient(0.0f, 3.0f), 0.0f);
  for (const auto& [a, b] : {std::pair{1.0f, 0.0f}, {0.0f, 0.0f}, {1.0f, HUGE_VALF}, {HUGE_VALF, 1.0f}, {NAN, 1.0f}})
    expect(std::isnan(QuickMath::quotient(a, b)), "quotient is NaN");
}

// All borders with their neighbours, both ends of all cells, and numbers of every size.
TEST(codes_are_those_of_a_search) {
  float borders[2][kCodes];
  for (const bool with_sign : {false, true})
    for (int code = 0; code < kCodes; ++code) borders[with_sign][code] = dynamic_border(code, with_sign);
  const auto check = [&](float x) {
    if (!(x <= 1)) return;
    const auto is_same = [&](uint32_t got, float y, bool with_sign) {
      expect_equal("code of " + std::to_string(y), static_cast<int>(got & 0xff),
                   dynamic_code(borders[with_sign], y, with_sign));
    };
    is_same(mapped_code(kUnsignedMap, x), x, false);
    for (const float y : {x, -x}) is_same(mapped_code(kSignedMap, y), y, true);
  };
  for (const bool with_sign : {false, true})
    for (const float border : borders[with_sign])
      for (uint32_t bits = std::bit_cast<uint32_t>(std::abs(border)), i = 0; i < 5; ++i) check(of_bits(bits + i - 2));
  for (uint32_t cell = 0; cell < 0x3f80; ++cell)
    for (const uint32_t low : {0u, 1u, 0xffffu}) check(of_bits(cell << 16 | low));
  check(1.0f);
}

Status run_adamw(Storage storage, OptimTensor record, const void* grad, const OptimGroup& group) {
  std::vector<OptimTensor> records{record};
  records[0].has = 0b011;
  std::vector<int64_t> words = tensor_list_words(records, kOptimTileElems);
  constexpr int64_t kRecordWords = sizeof(OptimTensor) / sizeof(int64_t);
  OptimParams p{};
  p.tensors = reinterpret_cast<OptimTensor*>(words.data());
  p.chunks = reinterpret_cast<const ListChunk*>(words.data() + kRecordWords);
  p.grads = &grad;
  p.tensor_count = p.group_count = 1;
  p.chunk_count = static_cast<int64_t>(words.size()) - kRecordWords;
  p.storage = storage;
  p.most = 0b011;
  p.groups[0] = group;
  return optim_cuda(p, nullptr);
}

OptimGroup half_of_each() {  // of both moments and of what is new; eps 0
  OptimGroup group{};
  group.lr = 0x1p-5, group.values[0] = 0.5, group.values[1] = 0.5;
  return group;
}

// One tensor of bfloat16 AdamW, before its first step.
struct Problem {
  Buffer<bfloat16> param, grad, m, v;
  Buffer<float> step{1};
  explicit Problem(size_t elems, const Offsets& offset)
      : param(elems, offset[0]), grad(elems, offset[1]), m(elems, offset[2]), v(elems, offset[3]) {
    fill_normal(param, 1);
    fill_normal(grad, 2);
    fill_normal(m, 3, 0.05f, 0.5f);
    fill_normal(v, 4, 0.05f, 0.5f);  // positive
    step[0] = 0;
  }

  OptimTensor record() {
    OptimTensor r{};
    r.param = param.data();
    r.states[0] = m.data();
    r.states[1] = v.data();
    r.step = step.data();
    r.numel = static_cast<int64_t>(param.size());
    return r;
  }
};

// What is no number by the quick way is computed by the other one, whatever its neighbours are and wherever it lies: an
// infinite second moment stops its element, as torch has it, and a divisor of 0 makes an infinity.
TEST(special_elements) {
  constexpr size_t kElems = 64;
  std::vector<uint16_t> bits[3];
  for (const Offsets& offset : {Offsets(0), Offsets::only(1)}) {  // in eights, and one by one
    Problem p(kElems, offset);
    const auto set = [&](size_t i, float grad, float m, float v) {
      p.param[i] = from_float<bfloat16>(1.0f);
      p.grad[i] = from_float<bfloat16>(grad), p.m[i] = from_float<bfloat16>(m), p.v[i] = from_float<bfloat16>(v);
    };
    set(3, 0x1p100f, 0.0f, 0.0f);        // its square is infinite
    set(12, 0.0f, 0x1p-3f, 0.0f);        // divides by 0
    set(21, 0.0f, 0.0f, 0.0f);           // 0 by 0
    set(30, 0.0f, 0x1p-60f, 0x1p-120f);  // a ratio of numbers that are small
    expect_ok(run_adamw(Storage::bfloat16, p.record(), p.grad.data(), half_of_each()));
    expect_equal("of an infinite moment", to_float(p.param[3]), 1.0f);
    expect_equal("divided by 0", to_float(p.param[12]), -HUGE_VALF);
    expect(std::isnan(to_float(p.param[21])), "0 by 0");
    // m 2^-61 / 0.5, v 2^-121 / 0.5: a step of lr
    expect_equal("small", to_float(p.param[30]), to_float(from_float<bfloat16>(1 - 0x1p-5f)));
    for (size_t i = 0; i < kElems; ++i)
      expect(std::isfinite(to_float(p.param[i])) || i == 12 || i == 21, "finite " + std::to_string(i));
    for (const auto& [array, k] : {std::pair{&p.param, 0}, {&p.m, 1}, {&p.v, 2}}) {
      std::vector<uint16_t> now;
      for (size_t i = 0; i < kElems; ++i) now.push_back((*array)[i].bits);
      if (bits[k].empty()) bits[k] = now;
      expect(bits[k] == now, "the same bits at any address");
    }
  }
}

// Blocks of 8-bit states of which the scales are too small or too large for the quick division, infinite, 0 and NaN.
// From zeros: the moments are g / 2 and g^2 / 2, exact up to one rounding.
TEST(special_blocks) {
  constexpr float kSizes[] = {1.0f, 0x1p-50f, 0x1p-70f, 0x1p50f, 0x1p90f, 0.0f, NAN};
  constexpr size_t kBlocks = std::size(kSizes), kElems = kBlocks * kQuantBlock - 3;
  Buffer<float> param(kElems), grad(kElems), scales(2 * kBlocks), step(1);
  Buffer<uint8_t> m(kElems), v(kElems);
  fill_normal(grad, 2);
  step[0] = 0;
  for (size_t i = 0; i < kElems; ++i) {
    param[i] = 1, m[i] = 127, v[i] = 0;
    grad[i] *= i % 7 == 0 && i < 5 * kQuantBlock ? 0x1p-12f : kSizes[i / kQuantBlock];
  }
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0;
  OptimTensor r{};
  r.param = param.data();
  r.extra = scales.data();
  r.states[0] = m.data();
  r.states[1] = v.data();
  r.step = step.data();
  r.numel = kElems;
  expect_ok(run_adamw(Storage::float32_8bit, r, grad.data(), half_of_each()));
  float borders[2][kCodes];
  for (const bool with_sign : {false, true})
    for (int code = 0; code < kCodes; ++code) borders[with_sign][code] = dynamic_border(code, with_sign);
  for (size_t block = 0; block < kBlocks; ++block) {
    const size_t begin = block * kQuantBlock, end = std::min(begin + kQuantBlock, kElems);
    float largest[2] = {};
    for (size_t i = begin; i < end; ++i) {
      largest[0] = larger_or_nan(std::abs(0.5f * grad[i]), largest[0]);
      largest[1] = larger_or_nan(0.5f * grad[i] * grad[i], largest[1]);
    }
    for (size_t s = 0; s < 2; ++s) {
      const float is = scales[s * kBlocks + block];
      expect(is == largest[s] || (std::isnan(is) && std::isnan(largest[s])), "scale of block " + std::to_string(block));
    }
    for (size_t i = begin; i < end; ++i) {
      const float g = grad[i], of_m = scaled(0.5f * g, largest[0]), of_v = scaled(0.5f * g * g, largest[1]);
      const std::string name = " of element " + std::to_string(i);
      expect_equal("code of m" + name, static_cast<int>(m[i]), dynamic_code(borders[1], of_m, true));
      expect_equal("code of v" + name, static_cast<int>(v[i]), dynamic_code(borders[0], of_v, false));
      const float square = 0.5f * g * g;
      if (std::isinf(square))
        expect_equal("stopped" + name, param[i], 1.0f);
      else if (g == 0 || std::isnan(g) || square == 0)
        expect(!std::isfinite(param[i]), "0 by 0, or NaN" + name);
      else if (square > 0x1p-100f)
        expect(std::abs(param[i] - (1 - std::copysign(0x1p-5f, g))) < 1e-6f, "a step of lr" + name);
    }
  }
}

}  // namespace
}  // namespace warpsmith::test
