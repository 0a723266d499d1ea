#pragma once
#include <cstdint>

#include "hints.cuh"
#include "kernels/rope/rope.h"
#include "kernels/rope/rotary.cuh"

// Another body for rope, which the sweep times beside the package's: a thread holds one 16-byte vector of each of its
// heads, so that a warp's accesses are contiguous whatever the head dimension; half-split pairs meet by a shuffle. The
// whole head is rotated, its vectors are a power of two from 2 to 32, and its token has angles in adjacent columns.
// The arithmetic of an element is that of rope::rotate_heads, bit for bit.
namespace sweep {

using namespace warpsmith;

// A thread has UQ heads of q and UK of k, blockDim.y apart: no head is chosen at run time. Blocks: vectors of a head x
// heads of k / UK x tokens, a whole number of warps; grid: tokens, batch entries.
template <class T, class C, bool kInterleaved, int UQ, int UK, Hint hint, int kMaxThreads, int kBlocks>
__global__ void __launch_bounds__(kMaxThreads, kBlocks) rotate_vectors(RopeParams p) {
  constexpr int N = 16 / sizeof(T), kAngles = kInterleaved ? N / 2 : N;
  using Vector = rotary::Packed<T, N>;
  const int lanes = blockDim.x, column = threadIdx.x;
  rotary::Token at{blockIdx.y, int64_t{blockIdx.x} * blockDim.z + threadIdx.z, 0, true};
  const bool exists = at.index < p.shape.tokens;
  // Of the block's first token and head of the thread; from there 32 bits reach all of the block's (fits_vectors).
  const auto first = [&](const void* tensor, const RotaryHeads& of) {
    const int64_t block = blockIdx.y * of.batch_stride + int64_t{blockIdx.x} * blockDim.z * of.token_stride;
    const int thread = static_cast<int>(threadIdx.z) * static_cast<int>(of.token_stride) +
                       static_cast<int>(threadIdx.y) * static_cast<int>(of.head_stride) + column * N;
    return static_cast<T*>(const_cast<void*>(tensor)) + block + thread;
  };
  const auto step = [&](const RotaryHeads& of) {
    return static_cast<int>(blockDim.y) * static_cast<int>(of.head_stride);
  };
  const auto vector = [](T* from, int element) { return reinterpret_cast<Vector*>(from + element); };

  Vector x[UQ + UK] = {};
  if (exists) {
    T *const q = first(p.q, p.q_in_layout), *const k = first(p.k, p.k_in_layout);
    const int q_step = step(p.q_in_layout), k_step = step(p.k_in_layout);
#pragma unroll
    for (int u = 0; u < UQ; ++u) x[u] = load<hint>(vector(q, u * q_step));
#pragma unroll
    for (int u = 0; u < UK; ++u) x[UQ + u] = load<hint>(vector(k, u * k_step));
  }
  rotary::PackedAngles<C, kAngles, false> packed;
  if (exists) {
    rotary::find_angles(at, p.shape, p.angles, p.positions);
    const int pair = kInterleaved ? column * kAngles : column % (lanes / 2) * N;
    if (at.valid) packed.load(p.shape, p.angles, at, {pair, pair, true, true});
  }
  const bool first_half = column < lanes / 2;
  const rotary::Angles<kAngles> by = packed.unpacked(p.shape.inverse != (!kInterleaved && first_half));
#pragma unroll
  for (int u = 0; u < UQ + UK; ++u) {
    float own[N];
    rotary::unpack<T>(own, x[u]);
    if constexpr (kInterleaved) {
#pragma unroll
      for (int k = 0; k < N / 2; ++k) {
        const float a = own[2 * k], b = own[2 * k + 1];
        own[2 * k] = a * by.cos[k] - b * by.sin[k];
        own[2 * k + 1] = b * by.cos[k] + a * by.sin[k];
      }
    } else {
      Vector other;
      float partner[N];
#pragma unroll
      for (int i = 0; i < 4; ++i) other.at[i] = __shfl_xor_sync(0xffffffffu, x[u].at[i], lanes / 2);
      rotary::unpack<T>(partner, other);
#pragma unroll
      for (int k = 0; k < N; ++k) own[k] = own[k] * by.cos[k] + partner[k] * by.sin[k];
    }
    x[u] = rotary::rounded<T>(own);
  }
  if (exists) {
    T *const q = first(p.q_out, p.q_out_layout), *const k = first(p.k_out, p.k_out_layout);
    const int q_step = step(p.q_out_layout), k_step = step(p.k_out_layout);
#pragma unroll
    for (int u = 0; u < UQ; ++u) store<hint>(vector(q, u * q_step), x[u]);
#pragma unroll
    for (int u = 0; u < UK; ++u) store<hint>(vector(k, u * k_step), x[UQ + u]);
  }
}

// Threads and blocks, if the body can run the problem so; otherwise a block of 0 threads.
struct VectorGrid {
  dim3 grid, block;
};
inline VectorGrid vector_grid(const RopeParams& p, int vector_elems, int q_heads_a_thread, int k_heads_a_thread,
                              int tokens_of_block) {
  const auto u = [](int64_t n) { return static_cast<unsigned>(n); };
  const int64_t lanes = p.shape.head_dim / vector_elems, heads = p.k_in_layout.heads / k_heads_a_thread;
  bool fits = p.shape.rotary_dim == p.shape.head_dim && p.shape.head_dim % vector_elems == 0 && lanes >= 2 &&
              32 % lanes == 0 && lanes * heads * tokens_of_block % 32 == 0 && p.shape.batch < 65536 &&
              heads * k_heads_a_thread == p.k_in_layout.heads && heads * q_heads_a_thread == p.q_in_layout.heads &&
              p.angles.column_stride == 1;
  for (const RotaryHeads& of : {p.q_in_layout, p.k_in_layout, p.q_out_layout, p.k_out_layout})
    fits = fits && tokens_of_block * of.token_stride + of.heads * of.head_stride < INT32_MAX;
  if (!fits) return {dim3(1), dim3(0)};
  return {dim3(u((p.shape.tokens + tokens_of_block - 1) / tokens_of_block), u(p.shape.batch)),
          dim3(u(lanes), u(heads), u(tokens_of_block))};
}

}  // namespace sweep
