#pragma once
#include <cstdint>

#include "device/async_copy.h"
#include "device/math.h"
#include "device/programmatic_launch.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/rope/qk_norm_heads.cuh"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rotary.cuh"

// The backward of qk_norm_rope. Moves 3 * sizeof(T) bytes per element. Beside that: angles as in the forward, and one
// row of partial sums per block (2 * head_dim floats), written and read once.
namespace warpsmith::qk_norm_rope {

// A thread's position in one tensor of heads. It walks over the heads of its group, token after token.
struct Walk {
  const char* at;  // the thread's first element of the current head
  int64_t step;    // bytes from head to head

  template <class T>
  __device__ __forceinline__ void aim(const void* base, const RotaryHeads& layout, const rotary::Token& t, int head) {
    at = reinterpret_cast<const char*>(static_cast<const T*>(base) + head_at(layout, t, head));
    step = layout.head_stride * static_cast<int64_t>(sizeof(T));
  }
};

// Persistent blocks step through the tokens side by side. A thread keeps its columns of a head, and q or k, for the
// whole launch.
//
// Asynchronous copies bring the next heads of x and dy into shared memory. Each thread has its own slots, so there is
// no barrier. The ring has one stage for each of U heads, so every slot has a constant address. At the end shared
// memory holds the block's sums (4 bytes per column and group of lanes, never more than the ring).
//
// I: an element of kQkNormRopeBackward.
template <class T, class C, class I> __global__ void __launch_bounds__(I::value.threads, I::value.blocks)
    backward_ring(QkNormRopeBwdParams p, QkNormRopeConfig c, float eps, float scale_of_sum) {
  constexpr int N = 16 / sizeof(T);  // elements per memory access
  constexpr int U = I::value.heads, kLanes = I::value.lanes(sizeof(T)), kThreads = I::value.threads;
  constexpr bool kInterleaved = I::value.interleaved;
  WARPSMITH_DYNAMIC_SHARED(shared);
  const int slot = slot_of(c), rest = threadIdx.x - slot * c.threads_a_token;
  const int lane = rest & ((kLanes > 0 ? kLanes : c.lanes) - 1);
  const int64_t tokens = p.shape.batch * p.shape.tokens, step = int64_t{gridDim.x} * c.tokens_a_block;
  Group group = group_of(rest >> c.lane_bits, p.q_layout.heads, p.k_layout.heads, c.heads_a_thread);
  if (slot >= c.tokens_a_block || lane >= c.columns) group.count = 0;
  const rotary::Columns of = rotary::columns_of<N>(p.shape, c.rotating, c.columns, lane);
  const auto sum_over_head = [&](float v) {
    if constexpr (kLanes > 0)
      return device::group_sum<kLanes>(v);
    else
      return device::group_sum(v, c.lanes);
  };

  // The ring: [stage][x first, x second, dy first, dy second][thread].
  rotary::Packed<T, N>* const slots = reinterpret_cast<rotary::Packed<T, N>*>(shared) + threadIdx.x;
  const auto at_slot = [&](int stage, int which) { return slots + (stage * 4 + which) * kThreads; };
#pragma unroll
  for (int u = 0; u < U; ++u)  // zeros in the slots that no copy fills
#pragma unroll
    for (int which = 0; which < 4; ++which)
      if (group.count == 0 || (which % 2 == 1 && !of.has_second)) *at_slot(u, which) = {};

  // The next token to copy: its angles, and where its heads are.
  constexpr bool kAnglesAhead = sizeof(C) == 2;  // float angles would not fit in registers
  rotary::Token asked = rotary::place_of(p.shape, int64_t{blockIdx.x} * c.tokens_a_block + slot);
  rotary::PackedAngles<C, N, kInterleaved> asked_angles;
  Walk x = {}, dy = {};
  int asked_heads = 0;  // heads of the group that are not copied yet
  const auto load_angles = [&] {
    asked_angles = {};
    if (asked.valid) asked_angles.load(p.shape, p.angles, asked, of);
  };
  const auto aim = [&] {
    asked_heads = asked.batch < p.shape.batch && asked.index < p.shape.tokens ? group.count : 0;
    if (asked_heads == 0) return;
    x.aim<T>(group.of_k ? p.k : p.q, group.of_k ? p.k_layout : p.q_layout, asked, group.first);
    dy.aim<T>(group.of_k ? p.dk_out : p.dq_out, group.of_k ? p.dk_out_layout : p.dq_out_layout, asked, group.first);
    if (!of.rotates) return;
    rotary::find_angles(asked, p.shape, p.angles, p.positions);
    if (kAnglesAhead) load_angles();
  };
  const auto request = [&](int stage) {
    if (asked_heads > 0) {
      --asked_heads;
      device::copy_async<16>(at_slot(stage, 0), x.at + of.first * sizeof(T));
      device::copy_async<16>(at_slot(stage, 2), dy.at + of.first * sizeof(T));
      if (of.has_second) {
        device::copy_async<16>(at_slot(stage, 1), x.at + of.second * sizeof(T));
        device::copy_async<16>(at_slot(stage, 3), dy.at + of.second * sizeof(T));
      }
      x.at += x.step, dy.at += dy.step;
    }
    device::copy_async_commit();
  };
  aim();
#pragma unroll
  for (int u = 0; u < U - 1; ++u) request(u);

  float first_weight[N] = {}, second_weight[N] = {}, first_gradient[N] = {}, second_gradient[N] = {};
  if (group.count > 0) {
    const void* weight = group.of_k ? p.k_weight : p.q_weight;
    load_weight<T>(first_weight, weight, p.weight_dtype, of.first);
    if (of.has_second) load_weight<T>(second_weight, weight, p.weight_dtype, of.second);
  }
  void* const gradient = group.of_k ? p.dk : p.dq;
  for (int64_t base = int64_t{blockIdx.x} * c.tokens_a_block; base < tokens; base += step) {
    int heads = base + slot < tokens ? group.count : 0;  // heads left to compute
    if (!kAnglesAhead && of.rotates && heads > 0) load_angles();
    const rotary::PackedAngles<C, N, kInterleaved> angles = asked_angles;
    Walk dx = {};
    if (gradient && heads > 0) dx.aim<T>(gradient, group.of_k ? p.dk_layout : p.dq_layout, asked, group.first);
    for (int h = 0; h < c.heads_a_thread; h += U)
#pragma unroll
      for (int u = 0; u < U; ++u, --heads) {
        request((u + U - 1) % U);
        if (u == 0 && h + U >= c.heads_a_thread) {
          asked.index += step;
          while (asked.index >= p.shape.tokens && asked.batch < p.shape.batch)
            asked.index -= p.shape.tokens, ++asked.batch;
          aim();
        }
        device::copy_async_wait<U - 1>();
        float xa[N], xb[N], ga[N], gb[N];
        rotary::unpack<T>(xa, device::load(at_slot(u, 0)));
        rotary::unpack<T>(xb, device::load(at_slot(u, 1)));
        rotary::unpack<T>(ga, device::load(at_slot(u, 2)));
        rotary::unpack<T>(gb, device::load(at_slot(u, 3)));
        const float rstd = device::rsqrt(sum_over_head(dot(xa, xa) + dot(xb, xb)) * scale_of_sum + eps);
        if (of.rotates) rotary::rotate<kInterleaved>(ga, gb, angles.unpacked(true));
        scale(ga, rstd);
        scale(gb, rstd);
        if (heads > 0) {
#pragma unroll
          for (int k = 0; k < N; ++k) first_gradient[k] += ga[k] * xa[k];
#pragma unroll
          for (int k = 0; k < N; ++k) second_gradient[k] += gb[k] * xb[k];
        }
        scale(ga, first_weight);
        scale(gb, second_weight);
        // rstd * x_hat * mean(g * x_hat) as a multiple of x
        const float of_x = sum_over_head(dot(ga, xa) + dot(gb, xb)) * scale_of_sum * rstd * rstd;
        if (heads <= 0 || !gradient) continue;
#pragma unroll
        for (int k = 0; k < N; ++k) ga[k] -= xa[k] * of_x;
#pragma unroll
        for (int k = 0; k < N; ++k) gb[k] -= xb[k] * of_x;
        char* const to = const_cast<char*>(dx.at);
        device::store(packed_at<T, N>(static_cast<void*>(to), of.first), rotary::rounded<T>(ga));
        if (of.has_second) device::store(packed_at<T, N>(static_cast<void*>(to), of.second), rotary::rounded<T>(gb));
        dx.at += dx.step;
      }
  }
  device::copy_async_wait<0>();
  device::launch_dependents();
  if (!p.partials) return;

  const int dim = static_cast<int>(p.shape.head_dim), groups = c.threads_a_token >> c.lane_bits;
  float* sums = reinterpret_cast<float*>(shared);  // [tokens of the block, groups, head_dim]
  __syncthreads();
  if (slot < c.tokens_a_block && lane < c.columns) {
    float* mine = sums + (slot * groups + (rest >> c.lane_bits)) * dim;
#pragma unroll
    for (int k = 0; k < N; ++k) mine[of.first + k] = first_gradient[k];
    if (of.has_second)
#pragma unroll
      for (int k = 0; k < N; ++k) mine[of.second + k] = second_gradient[k];
  }
  __syncthreads();
  const int q_groups = (static_cast<int>(p.q_layout.heads) + c.heads_a_thread - 1) / c.heads_a_thread;
  float* partial = static_cast<float*>(p.partials) + int64_t{blockIdx.x} * 2 * dim;
  for (int i = threadIdx.x; i < 2 * dim; i += blockDim.x) {
    const bool of_k = i >= dim;
    float sum = 0;
    for (int s = 0; s < c.tokens_a_block; ++s)
      for (int g = of_k ? q_groups : 0; g < (of_k ? groups : q_groups); ++g)
        sum += sums[(s * groups + g) * dim + (of_k ? i - dim : i)];
    device::store(partial + i, sum);
  }
}

// Any length and alignment. A warp takes one head after another and reads it and its gradient up to three times. It
// adds weight gradients to its own row of `partials`; each column belongs to one thread.
template <class T, class C> __global__ void __launch_bounds__(rope_detail::kMaxThreads)
    backward_looped(QkNormRopeBwdParams p, QkNormRopeConfig c) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int64_t dim = p.shape.head_dim, warp = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  const int64_t rows = p.shape.batch * p.shape.tokens * (p.q_layout.heads + p.k_layout.heads);
  float* partials = p.partials ? static_cast<float*>(p.partials) + warp * 2 * dim : nullptr;
  if (partials)
    for (int column = lane; column < c.columns; column += 32) {
      const rotary::Columns of = rotary::columns_of<1>(p.shape, c.rotating, c.columns, column);
      for (int64_t half = 0; half < 2; ++half) {
        partials[half * dim + of.first] = 0.f;
        if (of.has_second) partials[half * dim + of.second] = 0.f;
      }
    }
  for (int64_t row = warp; row < rows; row += int64_t{gridDim.x} * warps) {
    const Row r = row_of(row, p.shape, p.angles, p.positions, p.q_layout.heads, p.k_layout.heads);
    const T* x = static_cast<const T*>(r.of_k ? p.k : p.q) + head_at(r.of_k ? p.k_layout : p.q_layout, r.token, r.head);
    const T* dy = static_cast<const T*>(r.of_k ? p.dk_out : p.dq_out) +
                  head_at(r.of_k ? p.dk_out_layout : p.dq_out_layout, r.token, r.head);
    T* dx = static_cast<T*>(r.of_k ? p.dk : p.dq);
    if (dx) dx += head_at(r.of_k ? p.dk_layout : p.dq_layout, r.token, r.head);
    const void* weight = r.of_k ? p.k_weight : p.q_weight;
    float* partial = partials && r.of_k ? partials + dim : partials;
    const float rstd = rstd_of(x, dim, p.eps);
    // Fills x_hat (xa, xb) and the gradient rotated back (ra, rb) for the pair of a column.
    const auto read = [&](const rotary::Columns& of, float (&xa)[1], float (&xb)[1], float (&ra)[1], float (&rb)[1]) {
      xa[0] = device::to_float(device::load(x + of.first)) * rstd;
      ra[0] = device::to_float(device::load(dy + of.first));
      xb[0] = of.has_second ? device::to_float(device::load(x + of.second)) * rstd : 0.f;
      rb[0] = of.has_second ? device::to_float(device::load(dy + of.second)) : 0.f;
      if (of.rotates) rotary::rotate<false>(ra, rb, angles_of<C>(p.shape, p.angles, r.token, of));
    };
    float xa[1], xb[1], ra[1], rb[1], sum = 0;
    const auto weighted = [&](float v, int column) { return v * weight_at<T>(weight, p.weight_dtype, column); };
    for (int column = lane; column < c.columns; column += 32) {
      const rotary::Columns of = rotary::columns_of<1>(p.shape, c.rotating, c.columns, column);
      read(of, xa, xb, ra, rb);
      sum += weighted(ra[0], of.first) * xa[0];
      if (of.has_second) sum += weighted(rb[0], of.second) * xb[0];
    }
    const float mean = device::warp_sum(sum) / static_cast<float>(dim);
    for (int column = lane; column < c.columns; column += 32) {
      const rotary::Columns of = rotary::columns_of<1>(p.shape, c.rotating, c.columns, column);
      read(of, xa, xb, ra, rb);
      if (partial) partial[of.first] += ra[0] * xa[0];
      if (partial && of.has_second) partial[of.second] += rb[0] * xb[0];
      if (!dx) continue;
      device::store(dx + of.first, device::from_float<T>(rstd * (weighted(ra[0], of.first) - xa[0] * mean)));
      if (of.has_second)
        device::store(dx + of.second, device::from_float<T>(rstd * (weighted(rb[0], of.second) - xb[0] * mean)));
    }
  }
  device::launch_dependents();
}

constexpr int kSumThreads = 128;

// Sums both weight gradients over the partial rows, in a fixed order: a warp sums two columns, each lane every 32nd
// row.
template <class T> __global__ void __launch_bounds__(kSumThreads)
    sum_partials(QkNormRopeBwdParams p, int64_t partial_rows) {
  device::wait_for_previous_kernel();
  const int64_t dim = p.shape.head_dim, pair = int64_t{blockIdx.x} * (kSumThreads / 32) + threadIdx.x / 32;
  if (pair >= dim) return;
  const float* from = static_cast<const float*>(p.partials) + 2 * pair;
  const int lane = threadIdx.x % 32;
  constexpr int kTogether = 9;  // loads in flight, 32 rows each: covers the rows of two blocks per multiprocessor
  float sums[2] = {};
  for (int64_t first = lane; first < partial_rows; first += 32 * kTogether) {
    device::Vector<float, 2> two[kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
      if (first + 32 * k < partial_rows) two[k] = device::load_vector<2>(from + (first + 32 * k) * 2 * dim);
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] += two[k].at[i];
  }
#pragma unroll
  for (float& sum : sums) sum = device::warp_sum(sum);
  if (lane != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t column = 2 * pair + i, at = column < dim ? column : column - dim;
    void* to = column < dim ? p.dq_weight : p.dk_weight;
    if (!to) continue;
    if (p.weight_dtype == Dtype::float32)
      device::store(static_cast<float*>(to) + at, sums[i]);
    else
      device::store(static_cast<T*>(to) + at, device::from_float<T>(sums[i]));
  }
}

}  // namespace warpsmith::qk_norm_rope
