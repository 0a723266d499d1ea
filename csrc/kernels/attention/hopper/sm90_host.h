#pragma once
#include <algorithm>
#include <type_traits>

#include "common/code_capability.h"
#include "device/launch.h"
#include "device/tensor_map.h"
#include "kernels/attention/attention_config.h"
#include "kernels/attention/head_tensor.h"
#include "kernels/attention/hopper/bias_sm90.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/scheduler.cuh"

// Converts the params of attention to the arguments of the Hopper kernels: the problem for the choosers, tensor maps,
// the window.
namespace warpsmith::attention {

constexpr int kMapColumns = 64;  // 16-bit columns of a box: 128 bytes, the span of the swizzle

// The stride of a dimension in a tensor map.
inline int64_t map_stride_bytes(int64_t stride, int64_t size) { return size == 1 ? 16 : 2 * stride; }

// Whether TMA can read the tensor: addresses and strides are multiples of 16 bytes, and no dimension is broadcast
// (stride 0). The binding passes copies of other tensors.
inline bool fits_tensor_map(const HeadTensor& t) {
  const auto fits = [](int64_t stride, int64_t size) {
    return size == 1 || (stride > 0 && stride % 8 == 0 && stride < int64_t{1} << 39);
  };
  return reinterpret_cast<uintptr_t>(t.base) % 16 == 0 && fits(t.strides.seq, t.length) &&
         fits(t.strides.head, t.heads) && fits(t.strides.batch, t.batch) &&
         (!t.packed || map_stride_bytes(t.strides.seq, t.length) < int64_t{1} << 33);
}

// A tensor map over (head dim, length, heads, batch) whose box is `rows` rows of 64 columns.
//
// Packed: element (d, i, h, end, kMapRows) of the map is row end + i - kMapRows of the tensor: 2^30 steps of the last
// dimension, each a row short of 2^34 bytes, are 2^64 less 2^30 rows, and addresses wrap around at 2^64 (as in Triton's
// ragged descriptors, triton/tools/ragged_tma.py). A sequence of n rows that ends before row `end` is then at
// i = kMapRows - n and after. Its boxes cannot reach another sequence, where a NaN would spread by products with 0. The
// base is the tensor: an H200 reads it for a box that lies outside altogether.
inline Status head_map(TensorMap& map, const HeadTensor& t, Dtype dtype, int rows) {
  const int64_t row = map_stride_bytes(t.strides.seq, t.length);
  return make_tensor_map(
      map, {.base = t.base,
            .dtype = dtype,
            .rank = t.packed ? 5 : 4,
            .sizes = {t.head_dim, t.packed ? kMapRows : t.length, t.heads, t.packed ? t.length + 1 : t.batch,
                      int64_t{kMapRows} + 1},
            .strides_bytes = {0, row, map_stride_bytes(t.strides.head, t.heads),
                              t.packed ? row : map_stride_bytes(t.strides.batch, t.batch), (int64_t{1} << 34) - row},
            .box = {kMapColumns, rows, 1, 1, 1},
            .swizzle = device::Swizzle::bytes128});
}

// A tensor map over (keys, queries, heads, batch) of the bias. Dimensions that it is broadcast along have size 1.
inline Status bias_map(TensorMap& map, const AttentionProblem& p, int rows) {
  const AttentionBiasStrides& s = p.bias_strides;
  const auto size = [](int64_t stride, int64_t all) { return stride == 0 ? int64_t{1} : all; };
  const auto bytes = [](int64_t stride) { return stride == 0 ? int64_t{16} : 2 * stride; };
  return make_tensor_map(map,
                         {.base = p.bias,
                          .dtype = p.bias_dtype,
                          .rank = 4,
                          .sizes = {p.seqlen_k, size(s.q, p.seqlen_q), size(s.head, p.heads_q), size(s.batch, p.batch)},
                          .strides_bytes = {0, bytes(s.q), bytes(s.head), bytes(s.batch)},
                          .box = {kMapColumns, rows, 1, 1},
                          .swizzle = device::Swizzle::bytes128});
}

inline Window window_of(const AttentionProblem& p) {
  const auto side = [](int64_t w) {
    return w < 0 || w >= Window::kUnbounded ? Window::kUnbounded : static_cast<int>(w);
  };
  return {side(p.window_left), side(p.window_right), p.align_bottom_right};
}

// The sizes and the window of a problem, in the params of a kernel.
template <class Params> void set_problem(Params& p, const AttentionProblem& a) {
  const auto set = [](auto& to, int64_t value) { to = static_cast<std::remove_reference_t<decltype(to)>>(value); };
  p.window = window_of(a);
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.cu_seqlens_k = a.cu_seqlens_k;
  set(p.batch, a.batch);
  set(p.heads, a.heads_q);
  set(p.queries, a.seqlen_q);
  set(p.keys, a.seqlen_k);
  set(p.total_q, a.total_q);
  set(p.total_k, a.total_k);
  if constexpr (requires { p.head_dim_v; }) set(p.head_dim_v, a.head_dim_v);
  if constexpr (requires { p.heads_per_key_head; }) set(p.heads_per_key_head, a.heads_q / a.heads_k);
}

// What the choosers look at. X: the params of a forward or a backward.
template <class X> AttentionKernelProblem kernel_problem(const X& x) {
  const AttentionProblem& p = x.problem;
  AttentionKernelProblem k;
  k.seqlen_q = p.seqlen_q;
  k.seqlen_k = p.seqlen_k;
  k.head_dim = static_cast<int>(p.head_dim);
  k.head_dim_v = static_cast<int>(p.head_dim_v);
  k.element_bytes = size_bytes(p.dtype);
  k.causal = p.window_right >= 0;
  k.softcap = p.softcap > 0;
  k.mask = p.mask != nullptr;
  k.bias = p.bias != nullptr;
  k.alibi = p.alibi_slopes != nullptr;
  k.bias_of_dtype = p.bias == nullptr || p.bias_dtype == p.dtype;
  k.pairs_of_keys = (p.bias == nullptr || has_pairs_of_keys(p.bias, 2, p.bias_strides, p.seqlen_k)) &&
                    (p.mask == nullptr || has_pairs_of_keys(p.mask, 1, p.mask_strides, p.seqlen_k));
  k.bias_map = p.bias != nullptr && fits_bias_map(p.bias, p.bias_strides);
  k.scale_has_inverse = p.softmax_scale >= kLeastBiasedScale;
  k.dropout = p.dropout.seed != nullptr;
  k.positive_scale = p.softmax_scale > 0;
  k.aligned = all_fit(x, fits_tensor_map);
  k.sm90a_code = runs_sm90a_code();
  return k;
}

}  // namespace warpsmith::attention
