#include <algorithm>
#include <cmath>

#include "common/vectorize.h"
#include "cpu/optim_loops.h"

// 8-bit states (kernels/optim/quantize.h). A tensor without scales has float32 states.
namespace warpsmith::cpu::optim {
namespace {

// The values of all codes and the borders between them, for states with or without sign.
struct Map {
  float values[kCodes], borders[kCodes];
  bool is_signed;

  explicit Map(bool with_sign) : is_signed(with_sign) {
    for (int code = 0; code < kCodes; ++code) {
      values[code] = dynamic_value(code, with_sign);
      borders[code] = dynamic_border(code, with_sign);
    }
  }
};

const Map& map_of(bool is_signed) {
  static const Map with_sign(true), without_sign(false);
  return is_signed ? with_sign : without_sign;
}

WARPSMITH_VECTORIZE void decode(const Map& map, const uint8_t* __restrict__ codes, float scale, float* __restrict__ to,
                                int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = map.values[codes[i]] * scale;
}

// Writes the codes of one block of `count` elements and returns its scale.
WARPSMITH_VECTORIZE float encode(const Map& map, const float* __restrict__ from, uint8_t* __restrict__ codes,
                                 int64_t count) {
  float scale = 0;
  for (int64_t i = 0; i < count; ++i) scale = larger_or_nan(scale, std::abs(from[i]));
  for (int64_t i = 0; i < count; ++i)
    codes[i] = static_cast<uint8_t>(dynamic_code(map.borders, scaled(from[i], scale), map.is_signed));
  return scale;
}

template <class F, class P> void update_chunk(const typename F::template Scalars<float>& scalars, const OptimTensor& t,
                                              const Gradient& grad, int64_t begin, int64_t count) {
  float g[kQuantBlock] = {}, p[kQuantBlock] = {}, x[kOptimMaxStates][kQuantBlock] = {};
  float* scales = static_cast<float*>(t.extra);
  const int64_t blocks = quant_blocks(t.numel);
  for (int64_t at = begin; at < begin + count; at += kQuantBlock) {
    const int64_t elems = std::min<int64_t>(kQuantBlock, begin + count - at);
    P* param = static_cast<P*>(t.param) + at;
    const auto each_state = [&](auto&& visit) {
      for (int s = 0; s < kOptimMaxStates; ++s)
        if ((t.has >> s) & 1) visit(s, map_of(!((F::kNotNegative >> s) & 1)));
    };
    const auto codes = [&](int s) { return static_cast<uint8_t*>(t.states[s]) + at; };
    const auto scale = [&](int s) { return scales + s * blocks + at / kQuantBlock; };
    widen(grad, at, g, elems);
    widen(param, p, elems);
    each_state([&](int s, const Map& map) {
      if (scales)
        decode(map, codes(s), *scale(s), x[s], elems);
      else
        widen(static_cast<const float*>(t.states[s]) + at, x[s], elems);
    });
    update(static_cast<F*>(nullptr), scalars, Piece<float>{whole_blocks(elems), g, p, {x[0], x[1], x[2]}, t.has});
    narrow(p, param, elems);
    each_state([&](int s, const Map& map) {
      if (scales)
        *scale(s) = encode(map, x[s], codes(s), elems);
      else
        narrow(x[s], static_cast<float*>(t.states[s]) + at, elems);
    });
  }
}

template <class P> void step_as(const OptimParams& p, const Parallel& parallel) {
  visit_optimizer(p.optimizer, [&]<class F>() {
    for_chunks(p, parallel, [&](const OptimTensor& t, const Gradient& grad, int64_t first, int64_t count) {
      update_chunk<F, P>(scalars_of<F, float>(p, t), t, grad, first, count);
    });
  });
}

}  // namespace

void step_8bit(const OptimParams& p, const Parallel& parallel) {
  switch (p.storage) {
    case Storage::bfloat16_8bit: return step_as<bfloat16>(p, parallel);
    case Storage::float16_8bit: return step_as<float16>(p, parallel);
    default: return step_as<float>(p, parallel);
  }
}

}  // namespace warpsmith::cpu::optim
