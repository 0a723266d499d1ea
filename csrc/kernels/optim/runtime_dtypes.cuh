#pragma once
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/half.h"
#include "device/vector.h"
#include "kernels/optim/gradient.h"

// Arrays whose dtype, float32, float16 or bfloat16, is known only at run time.
namespace warpsmith::optim {

using device::Vector;

__device__ __forceinline__ int runtime_bytes(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }
__device__ __forceinline__ float widened(uint32_t half, Dtype dtype) {
  return dtype == Dtype::float16 ? device::low_half<float16>(half) : device::low_half<bfloat16>(half);
}
__device__ __forceinline__ uint32_t narrowed(float x, Dtype dtype) {
  return dtype == Dtype::float16 ? device::from_float<float16>(x).bits : device::from_float<bfloat16>(x).bits;
}

// An array from the first element of a chunk on.
struct RuntimeArray {
  void* at;
  Dtype dtype;

  __device__ __forceinline__ static RuntimeArray of(void* begin, Dtype dtype, int64_t elem) {
    return {begin ? static_cast<char*>(begin) + elem * runtime_bytes(dtype) : nullptr, dtype};
  }
};

// N adjacent elements of an array, as stored: a word per float32 element, or per pair of 16-bit elements. Elements are
// converted when they are used: converting in `load` would stall on each array's load.
template <int N> struct RuntimeLanes {
  uint32_t words[N];

  __device__ __forceinline__ void load(const RuntimeArray& from, int i) {
    if constexpr (N == 1) {
      words[0] = from.dtype == Dtype::float32 ? device::load(static_cast<const uint32_t*>(from.at) + i)
                                              : uint32_t{device::load(static_cast<const uint16_t*>(from.at) + i)};
    } else if (from.dtype == Dtype::float32) {
      const auto wide = device::load_vector<N>(static_cast<const uint32_t*>(from.at) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) words[k] = wide.at[k];
    } else {
      const auto* halves = static_cast<const uint16_t*>(from.at) + i;
      const auto pairs = device::load_vector<N / 2>(reinterpret_cast<const uint32_t*>(halves));
#pragma unroll
      for (int k = 0; k < N / 2; ++k) words[k] = pairs.at[k];
    }
  }

  __device__ __forceinline__ void store(const RuntimeArray& to, int i) const {
    if constexpr (N == 1) {
      if (to.dtype == Dtype::float32)
        device::store(static_cast<uint32_t*>(to.at) + i, words[0]);
      else
        device::store(static_cast<uint16_t*>(to.at) + i, static_cast<uint16_t>(words[0]));
    } else if (to.dtype == Dtype::float32) {
      Vector<uint32_t, N> wide;
#pragma unroll
      for (int k = 0; k < N; ++k) wide.at[k] = words[k];
      device::store_vector(static_cast<uint32_t*>(to.at) + i, wide);
    } else {
      Vector<uint32_t, N / 2> pairs;
#pragma unroll
      for (int k = 0; k < N / 2; ++k) pairs.at[k] = words[k];
      device::store_vector(reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(to.at) + i), pairs);
    }
  }

  __device__ __forceinline__ bfloat16 half(int e) const {
    return {static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16))};
  }
  __device__ __forceinline__ void set_half(int e, uint32_t bits) {
    uint32_t& two = words[e / 2];
    two = e % 2 ? (two & 0xffffu) | bits << 16 : (two & 0xffff0000u) | bits;
  }
  __device__ __forceinline__ float value(int e, Dtype dtype) const {
    return dtype == Dtype::float32 ? __uint_as_float(words[e]) : widened(half(e).bits, dtype);
  }
  __device__ __forceinline__ void set(int e, Dtype dtype, float x) {
    if (dtype == Dtype::float32)
      words[e] = __float_as_uint(x);
    else
      set_half(e, narrowed(x, dtype));
  }
};

template <class P> constexpr Dtype kDtypeOf = sizeof(P) == 4                ? Dtype::float32
                                              : std::is_same_v<P, bfloat16> ? Dtype::bfloat16
                                                                            : Dtype::float16;

// The gradient of a chunk. Its dtype is that of the parameter, P, or with kRuntimeDtype known only at run time.
template <class P, bool kRuntimeDtype> using ChunkGradient = std::conditional_t<kRuntimeDtype, RuntimeArray, const P*>;

template <class P, bool kRuntimeDtype>
__device__ __forceinline__ ChunkGradient<P, kRuntimeDtype> chunk_gradient(const void* entry, int64_t begin) {
  if constexpr (kRuntimeDtype) {
    const Gradient gradient = gradient_of(entry, kDtypeOf<P>);
    return RuntimeArray::of(const_cast<void*>(gradient.at), gradient.dtype, begin);
  } else {
    return static_cast<const P*>(entry) + begin;
  }
}

template <class P> __device__ __forceinline__ uintptr_t address_of(const P* grad) {
  return reinterpret_cast<uintptr_t>(grad);
}
__device__ __forceinline__ uintptr_t address_of(const RuntimeArray& grad) {
  return reinterpret_cast<uintptr_t>(grad.at);
}

// load_gradient loads N elements as stored; gradient_value converts one of them.
template <int N, class P> __device__ __forceinline__ Vector<P, N> load_gradient(const P* grad, int i) {
  return device::load_vector<N>(grad + i);
}
template <int N> __device__ __forceinline__ RuntimeLanes<N> load_gradient(const RuntimeArray& grad, int i) {
  RuntimeLanes<N> lanes;
  lanes.load(grad, i);
  return lanes;
}
template <class P, int N> __device__ __forceinline__ float gradient_value(const P*, const Vector<P, N>& lanes, int e) {
  return device::to_float(lanes.at[e]);
}
template <int N>
__device__ __forceinline__ float gradient_value(const RuntimeArray& grad, const RuntimeLanes<N>& lanes, int e) {
  return lanes.value(e, grad.dtype);
}

}  // namespace warpsmith::optim
