#pragma once
#include <cstdint>

#include "device/vector.h"

// Cache hints that sweeps compare. On the host they are plain loads and stores.
namespace sweep {

using namespace warpsmith;

// How global memory is asked for: as ever; evict-first loads, stores or both (ld.cs, st.cs); loads that let the L2
// fetch 256 bytes; loads whose lines the L2 gives up first.
enum class Hint { none, load_once, store_once, both_once, fetch_256, give_up_first };

constexpr const char* name(Hint hint) {
  switch (hint) {
    case Hint::none: return "plain";
    case Hint::load_once: return "loads ld.cs";
    case Hint::store_once: return "stores st.cs";
    case Hint::both_once: return "loads ld.cs, stores st.cs";
    case Hint::fetch_256: return "loads L2::256B";
    case Hint::give_up_first: return "loads L2 evict-first";
  }
  return "unknown";
}

// V: 16 bytes.
template <Hint hint, class V> __device__ __forceinline__ V load(const V* from) {
#ifndef WARPSMITH_SIM
  if constexpr (hint == Hint::fetch_256 || hint == Hint::give_up_first) {
    uint4 x;
    if constexpr (hint == Hint::fetch_256) {
      asm volatile("ld.global.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(from));
    } else {
      uint64_t policy;
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(from), "l"(policy));
    }
    V v;
    static_assert(sizeof v == sizeof x);
    __builtin_memcpy(&v, &x, sizeof v);
    return v;
  }
#endif
  constexpr bool kOnce = hint == Hint::load_once || hint == Hint::both_once;
  return device::load<kOnce ? device::Cache::streaming : device::Cache::keep>(from);
}

template <Hint hint, class V> __device__ __forceinline__ void store(V* to, const V& v) {
  constexpr bool kOnce = hint == Hint::store_once || hint == Hint::both_once;
  device::store<kOnce ? device::Cache::streaming : device::Cache::keep>(to, v);
}

}  // namespace sweep
