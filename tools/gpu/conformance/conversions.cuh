#pragma once
#include "conformance.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/philox.h"
#include "device/stochastic_rounding.h"

// Conversions, approximate functions, random numbers.
namespace warpsmith::conformance {

constexpr int kCount = 256;

template <class T> __global__ void widen(const T* x, float* y) { y[threadIdx.x] = device::to_float(x[threadIdx.x]); }
template <class T> __global__ void narrow(const float* x, T* y) {
  y[threadIdx.x] = device::from_float<T>(x[threadIdx.x]);
}
template <class T> __global__ void pack_pairs(const float* x, uint32_t* y) {
  y[threadIdx.x] = device::pack<T>(x[threadIdx.x], x[(threadIdx.x + 1) % kCount]);
}
template <class T> __global__ void max_pairs(const uint32_t* x, uint32_t* y) {
  y[threadIdx.x] = device::max_halves<T>(x[threadIdx.x], x[(threadIdx.x + 1) % kCount]);
}
static __global__ void round_randomly(const float* x, const uint32_t* bits, bfloat16* y) {
  y[threadIdx.x] = device::round_stochastic(x[threadIdx.x], bits[threadIdx.x]);
}
static __global__ void random_words(const uint32_t* counter, uint64_t key, uint32_t* out) {
  const device::PhiloxCounter r = device::philox({{counter[0], counter[1], counter[2], threadIdx.x}}, key);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = r.word[i];
}

template <class T> void widen_case(Inputs& in, Output& out) {
  Array<T> x(kCount);
  Array<float> y(kCount);
  for (T& v : x.host) v.bits = static_cast<uint16_t>(in.bits());
  out.check(launch(widen<T>, {.block = kCount}, nullptr, x.upload(), y.upload()));
  out.add_floats(y);
}
template <class T> void narrow_case(Inputs& in, Output& out) {
  Array<float> x(kCount);
  Array<T> y(kCount);
  for (float& v : x.host) v = in.edge();
  out.check(launch(narrow<T>, {.block = kCount}, nullptr, x.upload(), y.upload()));
  out.add(y);
}
template <class T> void pack_case(Inputs& in, Output& out) {
  Array<float> x(kCount);
  Array<uint32_t> y(kCount);
  for (float& v : x.host) v = in.edge();
  out.check(launch(pack_pairs<T>, {.block = kCount}, nullptr, x.upload(), y.upload()));
  out.add(y);
}
template <class T> void max_case(Inputs& in, Output& out) {
  Array<uint32_t> x(kCount), y(kCount);
  const uint32_t special[] = {0, 0x8000, 0x7fff, 0xffff, 0x7c00, 0xfc00, 0x7f80, 0xff80};  // zeros, NaN, infinities
  const auto half = [&] { return in.integer(0, 1) ? in.bits() & 0xffff : special[in.integer(0, 7)]; };
  for (uint32_t& v : x.host) v = static_cast<uint32_t>(half() | half() << 16);
  out.check(launch(max_pairs<T>, {.block = kCount}, nullptr, x.upload(), y.upload()));
  out.add(y);
}
inline void stochastic_case(Inputs& in, Output& out) {
  Array<float> x(kCount);
  Array<uint32_t> bits(kCount);
  Array<bfloat16> y(kCount);
  for (float& v : x.host) v = in.edge();
  for (uint32_t& v : bits.host) v = static_cast<uint32_t>(in.bits());
  out.check(launch(round_randomly, {.block = kCount}, nullptr, x.upload(), bits.upload(), y.upload()));
  out.add(y);
}
inline void philox_case(Inputs& in, Output& out) {
  Array<uint32_t> counter(3), y(4 * kCount);
  for (uint32_t& v : counter.host) v = static_cast<uint32_t>(in.bits());
  out.check(launch(random_words, {.block = kCount}, nullptr, counter.upload(), in.bits(), y.upload()));
  out.add(y);
}

struct Exp2 {
  __device__ static float apply(float x) { return device::exp2(x); }
};
struct Log2 {
  __device__ static float apply(float x) { return device::log2(x); }
};
struct Reciprocal {
  __device__ static float apply(float x) { return device::reciprocal(x); }
};
struct Rsqrt {
  __device__ static float apply(float x) { return device::rsqrt(x); }
};
template <class F> __global__ void apply_function(const float* x, float* y) {
  y[threadIdx.x] = F::apply(x[threadIdx.x]);
}
template <class F> void function_case(Inputs& in, Output& out) {
  Array<float> x(32), y(32);
  for (float& v : x.host) v = in.edge();
  out.check(launch(apply_function<F>, {.block = 32}, nullptr, x.upload(), y.upload()));
  out.add_approximate(y);
}

EXACT("to_float.float16", 200, widen_case<float16>);
EXACT("to_float.bfloat16", 200, widen_case<bfloat16>);
EXACT("from_float.float16", 300, narrow_case<float16>);
EXACT("from_float.bfloat16", 300, narrow_case<bfloat16>);
EXACT("pack.float16", 200, pack_case<float16>);
EXACT("pack.bfloat16", 200, pack_case<bfloat16>);
EXACT("max_halves.float16", 200, max_case<float16>);
EXACT("max_halves.bfloat16", 200, max_case<bfloat16>);
EXACT("round_stochastic", 200, stochastic_case);
EXACT("philox", 200, philox_case);
// The bounds of device/math.h.
APPROXIMATE("exp2", 100, 0x1p-22, 0, function_case<Exp2>);
APPROXIMATE("log2", 100, 0x1p-22, 0x1p-22, function_case<Log2>);
APPROXIMATE("reciprocal", 100, 0x1p-22, 0, function_case<Reciprocal>);
APPROXIMATE("rsqrt", 100, 0x1p-22, 0, function_case<Rsqrt>);

}  // namespace warpsmith::conformance
