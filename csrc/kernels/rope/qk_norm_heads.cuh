#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/math.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rotary.cuh"

// The heads of q and k side by side: which heads a thread or a warp takes, where they are in memory, and the weights of
// their columns.
namespace warpsmith::qk_norm_rope {

using rotary::packed_at;

// A group of consecutive heads, all of q or all of k.
struct Group {
  bool of_k;
  int first, count;  // heads; count is 0 if the group is beyond both tensors
};

__device__ __forceinline__ Group group_of(int group, int64_t q_heads, int64_t k_heads, int heads_a_group) {
  const int q = static_cast<int>(q_heads), k = static_cast<int>(k_heads);
  const int q_groups = (q + heads_a_group - 1) / heads_a_group;
  const bool of_k = group >= q_groups;
  const int first = (of_k ? group - q_groups : group) * heads_a_group;
  return {of_k, first, min(max((of_k ? k : q) - first, 0), heads_a_group)};
}

__device__ __forceinline__ int64_t head_at(const RotaryHeads& layout, const rotary::Token& t, int64_t head) {
  return t.batch * layout.batch_stride + t.index * layout.token_stride + head * layout.head_stride;
}

// Loads N elements of a weight, which is float32 or T.
template <class T, int N>
__device__ __forceinline__ void load_weight(float (&to)[N], const void* weight, Dtype dtype, int column) {
  if (dtype == Dtype::float32)
    rotary::load_floats(to, static_cast<const float*>(weight) + column);
  else
    rotary::load_floats(to, static_cast<const T*>(weight) + column);
}

// A weight that is loaded first and converted later, so that its load overlaps with others. kOwn: its dtype is T.
template <class T, int N, bool kOwn> struct LaterWeight {
  float at[N] = {};
  __device__ __forceinline__ void load(const void* weight, Dtype dtype, int column) {
    load_weight<T>(at, weight, dtype, column);
  }
  __device__ __forceinline__ void unpack(float (&to)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = at[k];
  }
};
template <class T, int N> struct LaterWeight<T, N, true> {
  rotary::Packed<T, N> at = {};
  __device__ __forceinline__ void load(const void* weight, Dtype, int column) {
    at = device::load(packed_at<T, N>(weight, column));
  }
  __device__ __forceinline__ void unpack(float (&to)[N]) const { rotary::unpack<T>(to, at); }
};

template <int N> __device__ __forceinline__ float dot(const float (&a)[N], const float (&b)[N]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) sum += a[k] * b[k];
  return sum;
}

template <int N> __device__ __forceinline__ void scale(float (&x)[N], float by) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= by;
}

template <int N> __device__ __forceinline__ void scale(float (&x)[N], const float (&by)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= by[k];
}

// Index of the thread's token in the block.
__device__ __forceinline__ int slot_of(const QkNormRopeConfig& c) {
  return static_cast<int>((threadIdx.x * static_cast<uint32_t>(c.slot_factor)) >> qk_norm_rope_detail::kSlotShift);
}

// One head of one token, for the element-by-element kernels.
struct Row {
  bool of_k;
  int64_t head;
  rotary::Token token;
};

__device__ __forceinline__ Row row_of(int64_t row, const RotaryShape& shape, const RotaryAngles& angles,
                                      const RotaryPositions& positions, int64_t q_heads, int64_t k_heads) {
  const int64_t heads = q_heads + k_heads, token = row / heads, head = row - token * heads;
  return {head >= q_heads, head >= q_heads ? head - q_heads : head,
          rotary::find_token(shape, angles, positions, token)};
}

template <class T> __device__ __forceinline__ float rstd_of(const T* x, int64_t head_dim, double eps) {
  float sum = 0;
  for (int64_t d = threadIdx.x % 32; d < head_dim; d += 32) {
    const float v = device::to_float(device::load(x + d));
    sum += v * v;
  }
  return device::rsqrt(device::warp_sum(sum) / static_cast<float>(head_dim) + static_cast<float>(eps));
}

template <class C>
__device__ __forceinline__ rotary::Angles<1> angles_of(const RotaryShape& shape, const RotaryAngles& a,
                                                       const rotary::Token& token, const rotary::Columns& of) {
  rotary::PackedAngles<C, 1, false> packed;
  if (token.valid) packed.load(shape, a, token, of);
  return packed.unpacked(shape.inverse);
}

template <class T> __device__ __forceinline__ float weight_at(const void* weight, Dtype dtype, int column) {
  float w[1];
  load_weight<T>(w, weight, dtype, column);
  return w[0];
}

}  // namespace warpsmith::qk_norm_rope
