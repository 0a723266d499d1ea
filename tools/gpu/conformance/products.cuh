#pragma once
#include "conformance.h"
#include "wgmma_product.cuh"

// wgmma: small integers, whose products are exact in any order of addition.
namespace warpsmith::conformance {

using device::Major;
using wgmma_product::kDepth;

template <class T, int N, Swizzle kSwizzle, Major AMajor, Major BMajor, bool ARegisters>
void product_case(Inputs& in, Output& out) {
  Array<T> a(64 * kDepth), b(N * kDepth);
  Array<float> d(64 * N);
  for (T& v : a.host) set_small_integer(v, in.integer(-8, 8));
  for (T& v : b.host) set_small_integer(v, in.integer(-8, 8));
  const LaunchConfig config{.block = 128, .dynamic_shared_bytes = (64 + N) * kDepth * 2};
  out.check(launch(wgmma_product::product<T, N, kSwizzle, AMajor, BMajor, ARegisters>, config, nullptr, a.upload(),
                   b.upload(), d.upload()));
  out.add(d);
}

#define WARPSMITH_MAJORS(name, T, N, swizzle)                                                                \
  EXACT("wgmma." name ".k.k", 60, (product_case<T, N, Swizzle::swizzle, Major::k, Major::k, false>));        \
  EXACT("wgmma." name ".k.mn", 60, (product_case<T, N, Swizzle::swizzle, Major::k, Major::mn, false>));      \
  EXACT("wgmma." name ".mn.k", 60, (product_case<T, N, Swizzle::swizzle, Major::mn, Major::k, false>));      \
  EXACT("wgmma." name ".mn.mn", 60, (product_case<T, N, Swizzle::swizzle, Major::mn, Major::mn, false>));    \
  EXACT("wgmma." name ".registers.k", 60, (product_case<T, N, Swizzle::swizzle, Major::k, Major::k, true>)); \
  EXACT("wgmma." name ".registers.mn", 60, (product_case<T, N, Swizzle::swizzle, Major::k, Major::mn, true>))

WARPSMITH_MAJORS("bfloat16.64.swizzle128", bfloat16, 64, bytes128);
WARPSMITH_MAJORS("bfloat16.64.swizzle64", bfloat16, 64, bytes64);
WARPSMITH_MAJORS("bfloat16.64.swizzle32", bfloat16, 64, bytes32);
WARPSMITH_MAJORS("bfloat16.64.none", bfloat16, 64, none);
WARPSMITH_MAJORS("float16.128.swizzle128", float16, 128, bytes128);
EXACT("wgmma.bfloat16.8", 40, (product_case<bfloat16, 8, Swizzle::none, Major::k, Major::k, false>));
EXACT("wgmma.bfloat16.16", 40, (product_case<bfloat16, 16, Swizzle::bytes32, Major::k, Major::mn, false>));
EXACT("wgmma.float16.32", 40, (product_case<float16, 32, Swizzle::bytes64, Major::k, Major::mn, true>));
EXACT("wgmma.bfloat16.96", 40, (product_case<bfloat16, 96, Swizzle::bytes128, Major::k, Major::k, true>));
EXACT("wgmma.bfloat16.80", 40, (product_case<bfloat16, 80, Swizzle::bytes32, Major::k, Major::k, false>));
EXACT("wgmma.float16.80", 40, (product_case<float16, 80, Swizzle::bytes128, Major::k, Major::k, true>));
EXACT("wgmma.float16.144", 40, (product_case<float16, 144, Swizzle::bytes32, Major::mn, Major::mn, false>));
EXACT("wgmma.bfloat16.144", 40, (product_case<bfloat16, 144, Swizzle::bytes64, Major::k, Major::k, true>));
EXACT("wgmma.bfloat16.160", 40, (product_case<bfloat16, 160, Swizzle::bytes64, Major::k, Major::mn, false>));
EXACT("wgmma.float16.160", 40, (product_case<float16, 160, Swizzle::bytes32, Major::k, Major::mn, true>));
EXACT("wgmma.float16.176", 40, (product_case<float16, 176, Swizzle::none, Major::k, Major::k, false>));
EXACT("wgmma.bfloat16.176", 40, (product_case<bfloat16, 176, Swizzle::bytes32, Major::k, Major::mn, true>));
EXACT("wgmma.bfloat16.192", 40, (product_case<bfloat16, 192, Swizzle::bytes128, Major::mn, Major::mn, false>));
EXACT("wgmma.bfloat16.256", 40, (product_case<bfloat16, 256, Swizzle::bytes128, Major::k, Major::k, false>));

}  // namespace warpsmith::conformance
