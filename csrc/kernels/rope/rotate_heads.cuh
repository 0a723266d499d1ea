#pragma once
#include <cstdint>

#include "device/vector.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rotary.cuh"

// The kernel of rope, for both directions. Reads and writes each element of q and k once: 2 * sizeof(T) bytes per
// element (in place: per rotated element).
//
// Beside that: each group of heads reads its token's cos and sin from the L1 or L2 cache, 2 * sizeof(C) bytes per pair.
// With packed sequences or offsets every thread reads 4 or 8 bytes per step of its search.
namespace warpsmith::rope {

// The heads of one group, of one token.
struct Heads {
  const void* in;  // address of the first head
  void* out;
  int64_t in_step, out_step;  // elements from head to head
  int count;
};

template <class T> __device__ __forceinline__ Heads heads_of(const RopeParams& p, const rotary::Token& t, int group,
                                                             int q_groups, int heads_a_thread) {
  const bool k = group >= q_groups;
  const RotaryHeads &in = k ? p.k_in_layout : p.q_in_layout, &out = k ? p.k_out_layout : p.q_out_layout;
  const int first = (k ? group - q_groups : group) * heads_a_thread;
  const int64_t from = t.batch * in.batch_stride + t.index * in.token_stride + first * in.head_stride;
  const int64_t to = t.batch * out.batch_stride + t.index * out.token_stride + first * out.head_stride;
  return {static_cast<const T*>(k ? p.k : p.q) + from, static_cast<T*>(k ? p.k_out : p.q_out) + to, in.head_stride,
          out.head_stride, static_cast<int>(in.heads) - first};
}

// A thread holds two vectors of U heads of one token. The block's three dimensions are columns, groups of heads, and
// tokens, so the only division is by the number of tokens. No barrier and no shared memory: threads without work
// return. I: an element of kRopeInstances.
template <class T, class C, class I> __global__ void __launch_bounds__(rope_detail::kMaxThreads, I::value.blocks)
    rotate_heads(RopeParams p, RopeConfig c) {
  constexpr int N = I::value.vectors ? 16 / sizeof(T) : 1;  // elements per memory access
  constexpr int U = I::value.heads_a_thread;
  constexpr bool kInterleaved = I::value.interleaved;
  const int column = blockIdx.z * blockDim.x + threadIdx.x, group = blockIdx.y * blockDim.y + threadIdx.y;
  const int q_groups = (static_cast<int>(p.q_in_layout.heads) + U - 1) / U;
  const int groups = q_groups + (static_cast<int>(p.k_in_layout.heads) + U - 1) / U;
  const int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  if (column >= c.columns || group >= groups || token >= p.shape.batch * p.shape.tokens) return;

  const rotary::Token at = rotary::find_token(p.shape, p.angles, p.positions, token);
  const rotary::Columns of = rotary::columns_of<N>(p.shape, c.rotating, c.columns, column);
  const Heads h = heads_of<T>(p, at, group, q_groups, U);
  rotary::Packed<T, N> x[U][2] = {};
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (u < h.count) {
      x[u][0] = device::load(rotary::packed_at<T, N>(h.in, u * h.in_step + of.first));
      if (of.has_second) x[u][1] = device::load(rotary::packed_at<T, N>(h.in, u * h.in_step + of.second));
    }
  // Loaded after the heads: if the compiler moves an angle to another register at once, no other load waits for it.
  rotary::PackedAngles<C, N, kInterleaved> packed;
  if (of.rotates && at.valid) packed.load(p.shape, p.angles, at, of);
  if (of.rotates) {
    const rotary::Angles<N> by = packed.unpacked(p.shape.inverse);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float a[N], b[N];
      rotary::unpack<T>(a, x[u][0]);
      rotary::unpack<T>(b, x[u][1]);
      rotary::rotate<kInterleaved>(a, b, by);
      x[u][0] = rotary::rounded<T>(a);
      x[u][1] = rotary::rounded<T>(b);
    }
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (u < h.count) {
      device::store(rotary::packed_at<T, N>(h.out, u * h.out_step + of.first), x[u][0]);
      if (of.has_second) device::store(rotary::packed_at<T, N>(h.out, u * h.out_step + of.second), x[u][1]);
    }
}

}  // namespace warpsmith::rope
