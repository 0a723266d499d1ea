#pragma once
#include <type_traits>

#include "conformance.h"
#include "device/float8.h"
#include "float8_product.cuh"

// 8-bit floats: conversions and wgmma. Products are of small integers, exact in any order and with the few bits
// that the tensor cores keep.
namespace warpsmith::conformance {

constexpr int kFloat8Count = 256;

// Any bit pattern, the whole range of both formats, halves and quarters of their last places, and both sides of their
// largest values.
inline float float8_edge(Inputs& in) {
  constexpr float kSpecial[] = {448.0f,   463.9f,   464.0f,  464.1f,   479.0f,     480.0f,   57344.0f, 61439.0f,
                                61440.0f, 65536.0f, 0x1p-9f, 0x1p-10f, 0x1.8p-10f, 0x1p-16f, 0x1p-17f, 0x1.8p-17f};
  const uint64_t r = in.bits();
  const float sign = r >> 60 & 1 ? -1.0f : 1.0f;
  switch (r % 5) {
    case 0: return in.edge();
    case 1: return sign * kSpecial[(r >> 8) % (sizeof kSpecial / sizeof kSpecial[0])];
    case 2: return sign * static_cast<float>(r >> 8 & 0xff) * std::ldexp(1.0f, static_cast<int>(r >> 16 & 31) - 20);
    default: return in.uniform() * std::ldexp(1.0f, static_cast<int>(r >> 16 & 63) - 40);
  }
}

template <class T> __global__ void widen_float8(const T* x, float* y) {
  y[threadIdx.x] = device::to_float(x[threadIdx.x]);
}
template <class T> __global__ void narrow_float8(const float* x, T* y) {
  y[threadIdx.x] = device::from_float<T>(x[threadIdx.x]);
}
template <class T> __global__ void pack_float8(const float* x, uint32_t* y) {
  const auto at = [&](int i) { return x[(threadIdx.x + i) % kFloat8Count]; };
  y[threadIdx.x] = device::pack<T>(at(0), at(1), at(2), at(3));
}
template <class T> void widen_float8_case(Inputs&, Output& out) {
  Array<T> x(kFloat8Count);
  Array<float> y(kFloat8Count);
  for (int i = 0; i < kFloat8Count; ++i) x.host[static_cast<size_t>(i)].bits = static_cast<uint8_t>(i);
  out.check(launch(widen_float8<T>, {.block = kFloat8Count}, nullptr, x.upload(), y.upload()));
  out.add_floats(y);
}
template <class T> void narrow_float8_case(Inputs& in, Output& out) {
  Array<float> x(kFloat8Count);
  Array<T> y(kFloat8Count);
  for (float& v : x.host) v = float8_edge(in);
  out.check(launch(narrow_float8<T>, {.block = kFloat8Count}, nullptr, x.upload(), y.upload()));
  out.add(y);
}
template <class T> void pack_float8_case(Inputs& in, Output& out) {
  Array<float> x(kFloat8Count);
  Array<uint32_t> y(kFloat8Count);
  for (float& v : x.host) v = float8_edge(in);
  out.check(launch(pack_float8<T>, {.block = kFloat8Count}, nullptr, x.upload(), y.upload()));
  out.add(y);
}
// -4 to 4 in either format.
template <class T> uint8_t small_float8(int v) {
  const uint8_t sign = v < 0 ? 0x80 : 0;
  constexpr uint8_t kE4m3[] = {0, 0x38, 0x40, 0x44, 0x48}, kE5m2[] = {0, 0x3c, 0x40, 0x42, 0x44};
  return sign | (std::is_same_v<T, float8_e4m3> ? kE4m3 : kE5m2)[v < 0 ? -v : v];
}

template <class A, class B, int N, Swizzle kSwizzle, bool ARegisters>
void float8_product_case(Inputs& in, Output& out) {
  using float8_product::kDepth;
  Array<A> a(64 * kDepth);
  Array<B> b(N * kDepth);
  Array<float> d(64 * N);
  for (A& v : a.host) v.bits = small_float8<A>(in.integer(-4, 4));
  for (B& v : b.host) v.bits = small_float8<B>(in.integer(-4, 4));
  const LaunchConfig config{.block = 128, .dynamic_shared_bytes = (64 + N) * kDepth};
  out.check(launch(float8_product::product<A, B, N, kSwizzle, ARegisters>, config, nullptr, a.upload(), b.upload(),
                   d.upload()));
  out.add(d);
}

using e4m3 = float8_e4m3;
using e5m2 = float8_e5m2;
EXACT("to_float.float8_e4m3", 1, widen_float8_case<e4m3>);
EXACT("to_float.float8_e5m2", 1, widen_float8_case<e5m2>);
EXACT("from_float.float8_e4m3", 200, narrow_float8_case<e4m3>);
EXACT("from_float.float8_e5m2", 200, narrow_float8_case<e5m2>);
EXACT("pack.float8_e4m3", 60, pack_float8_case<e4m3>);
EXACT("pack.float8_e5m2", 60, pack_float8_case<e5m2>);
EXACT("wgmma.float8_e4m3.e4m3.64.swizzle128", 40, (float8_product_case<e4m3, e4m3, 64, Swizzle::bytes128, false>));
EXACT("wgmma.float8_e4m3.e5m2.64.swizzle64", 40, (float8_product_case<e4m3, e5m2, 64, Swizzle::bytes64, false>));
EXACT("wgmma.float8_e5m2.e4m3.64.swizzle32", 40, (float8_product_case<e5m2, e4m3, 64, Swizzle::bytes32, false>));
EXACT("wgmma.float8_e5m2.e5m2.64.none", 40, (float8_product_case<e5m2, e5m2, 64, Swizzle::none, false>));
EXACT("wgmma.float8_e4m3.e4m3.64.registers", 40, (float8_product_case<e4m3, e4m3, 64, Swizzle::bytes128, true>));
EXACT("wgmma.float8_e5m2.e4m3.64.registers", 40, (float8_product_case<e5m2, e4m3, 64, Swizzle::bytes64, true>));
EXACT("wgmma.float8_e4m3.8", 20, (float8_product_case<e4m3, e4m3, 8, Swizzle::none, false>));
EXACT("wgmma.float8_e4m3.16", 20, (float8_product_case<e4m3, e4m3, 16, Swizzle::bytes32, false>));
EXACT("wgmma.float8_e4m3.32", 20, (float8_product_case<e4m3, e4m3, 32, Swizzle::bytes64, true>));
EXACT("wgmma.float8_e4m3.96", 20, (float8_product_case<e4m3, e4m3, 96, Swizzle::bytes128, true>));
EXACT("wgmma.float8_e4m3.128", 20, (float8_product_case<e4m3, e4m3, 128, Swizzle::bytes128, false>));
EXACT("wgmma.float8_e4m3.192", 20, (float8_product_case<e4m3, e4m3, 192, Swizzle::bytes128, false>));
EXACT("wgmma.float8_e4m3.256", 20, (float8_product_case<e4m3, e4m3, 256, Swizzle::bytes128, false>));

}  // namespace warpsmith::conformance
