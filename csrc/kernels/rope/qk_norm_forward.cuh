#pragma once
#include <cstdint>

#include "device/math.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/rope/qk_norm_heads.cuh"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rotary.cuh"

// The forward of qk_norm_rope. T: storage type of the activations. Statistics and sums are float, in a fixed order.
// Moves 2 * sizeof(T) bytes per element; each group of heads also reads its token's cos and sin from a cache.
namespace warpsmith::qk_norm_rope {

// A thread holds two vectors of U heads of one token. All threads of a warp take part in the sums over heads. kWhole:
// the number of lanes is known at compile time; then every element is rotated, every group has U heads and the weights
// are T. I: an element of kQkNormRopeForward.
template <class T, class C, class I> __global__ void __launch_bounds__(I::value.threads, I::value.blocks)
    forward_registers(QkNormRopeFwdParams p, QkNormRopeConfig c, float eps, float scale_of_sum) {
  constexpr int N = 16 / sizeof(T);  // elements per memory access
  constexpr int U = I::value.heads, kLanes = I::value.lanes(sizeof(T));
  constexpr bool kInterleaved = I::value.interleaved, kWhole = kLanes > 0;
  const int slot = slot_of(c), rest = blockIdx.y * blockDim.x + threadIdx.x - slot * c.threads_a_token;
  const int lane = rest & ((kWhole ? kLanes : c.lanes) - 1);
  const int64_t token = int64_t{blockIdx.x} * c.tokens_a_block + slot;
  Group group = group_of(rest >> c.lane_bits, p.q_layout.heads, p.k_layout.heads, U);
  if (slot >= c.tokens_a_block || token >= p.shape.batch * p.shape.tokens || (!kWhole && lane >= c.columns))
    group.count = 0;
  const bool works = group.count > 0;
  const auto has_head = [&](int u) { return kWhole || u < group.count; };

  const rotary::Columns of = kWhole ? rotary::Columns{lane * N, (lane + kLanes) * N, true, true}
                                    : rotary::columns_of<N>(p.shape, c.rotating, c.columns, lane);
  rotary::Packed<T, N> x[U][2] = {};
  rotary::PackedAngles<C, N, kInterleaved> packed;
  LaterWeight<T, N, kWhole> first_packed, second_packed;
  rotary::Token at{};
  if (works) {
    at = rotary::find_token(p.shape, p.angles, p.positions, token);
    const RotaryHeads& layout = group.of_k ? p.k_layout : p.q_layout;
    const void* in = group.of_k ? p.k : p.q;
    const int64_t from = head_at(layout, at, group.first) + of.first;
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (has_head(u)) {
        const auto* head = packed_at<T, N>(in, from + u * layout.head_stride);
        x[u][0] = device::load(head);
        if (of.has_second) x[u][1] = device::load(packed_at<T, N>(head, of.second - of.first));
      }
    if (of.rotates && at.valid) packed.load(p.shape, p.angles, at, of);
    const void* weight = group.of_k ? p.k_weight : p.q_weight;
    first_packed.load(weight, p.weight_dtype, of.first);
    if (of.has_second) second_packed.load(weight, p.weight_dtype, of.second);
  }
  float rstd[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    float a[N], b[N];
    rotary::unpack<T>(a, x[u][0]);
    rotary::unpack<T>(b, x[u][1]);
    rstd[u] = dot(a, a) + dot(b, b);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if constexpr (kWhole)
      rstd[u] = device::group_sum<kLanes>(rstd[u]);
    else
      rstd[u] = device::group_sum(rstd[u], c.lanes);
    rstd[u] = device::rsqrt(rstd[u] * scale_of_sum + eps);
  }
  if (!works) return;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int half = 0; half < 2; ++half) device::forget(x[u][half]);

  const rotary::Angles<N> by = packed.unpacked(p.shape.inverse);
  float first_weight[N], second_weight[N];
  first_packed.unpack(first_weight);
  second_packed.unpack(second_weight);
  const RotaryHeads& layout = group.of_k ? p.k_out_layout : p.q_out_layout;
  void* out = group.of_k ? p.k_out : p.q_out;
  const int64_t to = head_at(layout, at, group.first) + of.first;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (!has_head(u)) break;
    float a[N], b[N];
    rotary::unpack<T>(a, x[u][0]);
    rotary::unpack<T>(b, x[u][1]);
    scale(a, rstd[u]);
    scale(b, rstd[u]);
    scale(a, first_weight);
    scale(b, second_weight);
    if (of.rotates) rotary::rotate<kInterleaved>(a, b, by);
    auto* head = packed_at<T, N>(out, to + u * layout.head_stride);
    device::store(head, rotary::rounded<T>(a));
    if (of.has_second)
      device::store(packed_at<T, N>(static_cast<void*>(head), of.second - of.first), rotary::rounded<T>(b));
  }
}

// Any length and alignment. A warp takes one head after another and reads each twice.
template <class T, class C> __global__ void __launch_bounds__(rope_detail::kMaxThreads)
    forward_looped(QkNormRopeFwdParams p, QkNormRopeConfig c) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int64_t rows = p.shape.batch * p.shape.tokens * (p.q_layout.heads + p.k_layout.heads);
  for (int64_t row = int64_t{blockIdx.x} * warps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * warps) {
    const Row r = row_of(row, p.shape, p.angles, p.positions, p.q_layout.heads, p.k_layout.heads);
    const T* x = static_cast<const T*>(r.of_k ? p.k : p.q) + head_at(r.of_k ? p.k_layout : p.q_layout, r.token, r.head);
    T* y = static_cast<T*>(r.of_k ? p.k_out : p.q_out) +
           head_at(r.of_k ? p.k_out_layout : p.q_out_layout, r.token, r.head);
    const void* weight = r.of_k ? p.k_weight : p.q_weight;
    const float rstd = rstd_of(x, p.shape.head_dim, p.eps);
    for (int column = lane; column < c.columns; column += 32) {
      const rotary::Columns of = rotary::columns_of<1>(p.shape, c.rotating, c.columns, column);
      float a[1], b[1] = {};
      a[0] = device::to_float(device::load(x + of.first)) * rstd * weight_at<T>(weight, p.weight_dtype, of.first);
      if (of.has_second)
        b[0] = device::to_float(device::load(x + of.second)) * rstd * weight_at<T>(weight, p.weight_dtype, of.second);
      if (of.rotates) rotary::rotate<false>(a, b, angles_of<C>(p.shape, p.angles, r.token, of));
      device::store(y + of.first, device::from_float<T>(a[0]));
      if (of.has_second) device::store(y + of.second, device::from_float<T>(b[0]));
    }
  }
}

}  // namespace warpsmith::qk_norm_rope
