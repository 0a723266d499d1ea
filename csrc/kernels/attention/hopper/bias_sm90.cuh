#pragma once
#include <cmath>

#include "device/convert.h"
#include "device/transpose_matrix.h"
#include "device/vector.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_config.h"

// A bias tensor or a boolean mask, and ALiBi, on the accumulators of the Hopper kernels. ALiBi is added to scores that
// are not yet multiplied by softmax_scale, so slopes are divided by it. A bias tensor turns scores into logits: scores
// are multiplied by softmax_scale as the bias is added, since a large bias divided by it would overflow.
namespace warpsmith::attention {

constexpr double kLeastBiasedScale = 0x1p-64;  // least softmax_scale: its inverse times a slope must fit in float

struct BiasParams {
  const void* bias;           // of the dtype of q; null: none
  const unsigned char* mask;  // null: none. Never together with a bias
  AttentionBiasStrides bias_strides, mask_strides;
  const float* slopes;  // null: none
  int64_t slopes_batch;
  float to_scores;  // 1 / softmax_scale
  float scale;      // softmax_scale
  int rows;         // of a box of the bias: 1 if it is broadcast over queries
};

// Whether the kernels may load the elements of keys 2 i and 2 i + 1 as one aligned pair. Rows must also be less than
// 2^31 elements apart.
inline bool has_pairs_of_keys(const void* base, int element_bytes, const AttentionBiasStrides& s, int64_t keys) {
  return reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(2 * element_bytes) == 0 && keys % 2 == 0 &&
         s.k == 1 && s.q % 2 == 0 && s.q < int64_t{1} << 31 && s.head % 2 == 0 && s.batch % 2 == 0;
}

// Whether TMA can read the bias: addresses and strides are multiples of 16 bytes.
inline bool fits_bias_map(const void* base, const AttentionBiasStrides& s) {
  const auto fits = [](int64_t stride) { return stride >= 0 && stride % 8 == 0 && stride < int64_t{1} << 39; };
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && s.k == 1 && fits(s.q) && fits(s.head) && fits(s.batch);
}

inline BiasParams bias_params(const AttentionProblem& p) {
  return {p.bias,
          static_cast<const unsigned char*>(p.mask),
          p.bias_strides,
          p.mask_strides,
          p.alibi_slopes,
          p.alibi_batch_stride,
          p.softmax_scale >= kLeastBiasedScale ? static_cast<float>(1.0 / p.softmax_scale) : 0.0f,
          static_cast<float>(p.softmax_scale),
          p.bias_strides.q == 0 ? 1 : 64};
}

// Whether a mask hides nothing from the warp: most blocks of a padding mask. `pairs`: two bytes each. False as well
// where bytes of True have no bit in common.
template <int kCount> __device__ __forceinline__ bool all_visible(const uint32_t (&pairs)[kCount][4]) {
  uint32_t common = 0xffff;
#pragma unroll
  for (const auto& four : pairs) common &= four[0] & four[1] & four[2] & four[3];
  return __all_sync(0xffffffffu, (common & 0xff) != 0 && common > 0xff);
}

// Adds biases to the scores of a block of keys. A thread has the rows `query` and query + 8, and in each row the keys
// key + 8 n and key + 8 n + 1. Rows beyond the last query read the biases of the last query; the kernel does not store
// these rows.
template <class T, int kBlockKeys, Biases kBiases> struct QueryBiases {
  static constexpr int kPairs = kBlockKeys / 8, kPairsAtOnce = kPairs / 2;
  using Scores = float[kBlockKeys / 2];
  using Packed = uint32_t[kBlockKeys / 16][4];  // pairs, ordered as OnlineSoftmax's; or two bytes of the mask

  const BiasParams& p;
  int sequence, head, query, queries, key, keys, shift;

  // The address of the thread's first key in row r.
  template <class E>
  __device__ __forceinline__ const E* row(const void* base, const AttentionBiasStrides& of, int r) const {
    return static_cast<const E*>(base) + sequence * of.batch + head * of.head + min(query + 8 * r, queries - 1) * of.q +
           key;
  }

  // Loads a block whose keys all exist. A Pair holds two elements of type E.
  template <class Pair, class E>
  __device__ __forceinline__ void load(Packed& to, const void* base, const AttentionBiasStrides& of) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const E* from = row<E>(base, of, r);
#pragma unroll
      for (int n = 0; n < kPairs; ++n)
        to[n / 2][n % 2 * 2 + r] = device::load(reinterpret_cast<const Pair*>(from + 8 * n));
    }
  }
  __device__ __forceinline__ void load(Packed& to) const {
    if constexpr (kBiases == Biases::pairs)
      load<uint32_t, T>(to, p.bias, p.bias_strides);
    else if constexpr (kBiases == Biases::mask)
      load<uint16_t, unsigned char>(to, p.mask, p.mask_strides);
  }
  // `pairs`: from load(), or from shared memory.
  __device__ __forceinline__ void add(Scores& s, const Packed& pairs) const {
    add_alibi(s);
    if constexpr (kBiases == Biases::tensor || kBiases == Biases::pairs) {
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; i += 2) add_pair(s, i, pairs[i / 8][i / 2 % 4], p.scale);
    } else if constexpr (kBiases == Biases::mask) {
      if (all_visible(pairs)) return;
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; i += 2) hide_pair(s, i, pairs[i / 8][i / 2 % 4]);
    }
  }
  // Loads and adds the biases of a block at an edge of the mask. Reads no key at or beyond `keys`. Loads half a row at
  // a time: there are no registers for all biases.
  __device__ __forceinline__ void add_edge(Scores& s) const {
    add_alibi(s);
    if constexpr (kBiases == Biases::pairs)
      for_edge_pairs<uint32_t, T>(p.bias, p.bias_strides, [&](int i, uint32_t two) { add_pair(s, i, two, p.scale); });
    else if constexpr (kBiases == Biases::mask)
      for_edge_pairs<uint16_t, unsigned char>(p.mask, p.mask_strides,
                                              [&](int i, uint32_t visible) { hide_pair(s, i, visible); });
  }
  template <class Pair, class E, class Use>
  __device__ __forceinline__ void for_edge_pairs(const void* base, const AttentionBiasStrides& of, Use&& use) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const E* from = row<E>(base, of, r);
#pragma unroll
      for (int n = 0; n < kPairs; n += kPairsAtOnce) {
        Pair two[kPairsAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kPairsAtOnce; ++i)
          if (key + 8 * (n + i) < keys) two[i] = device::load(reinterpret_cast<const Pair*>(from + 8 * (n + i)));
#pragma unroll
        for (int i = 0; i < kPairsAtOnce; ++i) use(4 * (n + i) + 2 * r, two[i]);
      }
    }
  }

  static __device__ __forceinline__ void add_pair(Scores& s, int i, uint32_t two, float scale) {
    s[i] = fmaf(s[i], scale, device::low_half<T>(two));
    s[i + 1] = fmaf(s[i + 1], scale, device::high_half<T>(two));
  }
  static __device__ __forceinline__ void hide_pair(Scores& s, int i, uint32_t visible) {
    if ((visible & 0xff) == 0) s[i] = -INFINITY;
    if ((visible & 0xff00) == 0) s[i + 1] = -INFINITY;
  }
  __device__ __forceinline__ void add_alibi(Scores& s) const {
    if (kBiases != Biases::alibi && p.slopes == nullptr) return;
    const float slope = device::load(p.slopes + sequence * p.slopes_batch + head) * -p.to_scores;
    // Rows 8 apart have the distances of keys 8 apart in common, so half of them are computed.
    const auto distance = static_cast<float>(query + shift - key);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i)
      s[i] = fmaf(fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), slope, s[i]);
  }
};

// Adds biases to a step's transposed scores, whose rows are keys. A thread has the keys `key` and key + 8, and the
// queries 2 (lane % 4) + 8 n and the next. Neighbours in memory are keys, so matrices of 8 queries x 8 keys are loaded
// as they lie, a pair of keys a thread, and transposed in registers. Reads no key and no query that does not exist.
template <class T, int kBlock, Biases kBiases> struct KeyBiases {
  using Pairs = uint32_t[kBlock / 16][4];  // ordered as packed probabilities

  const BiasParams& p;
  int sequence, head, first_query, queries, first_key, keys;  // first_key: of the warp's 16

  template <class Pair, class E>
  __device__ __forceinline__ void load(Pairs& to, const void* base, const AttentionBiasStrides& of, int lane) const {
    const int query = first_query + lane / 4, key = first_key + lane % 4 * 2;
    const E* from = static_cast<const E*>(base) + sequence * of.batch + head * of.head + key;
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Pair two = 0;
        if (query + 8 * n < queries && key + 8 * r < keys)
          two = device::load(
              reinterpret_cast<const Pair*>(from + int64_t{query + 8 * n} * static_cast<int>(of.q) + 8 * r));
        to[n / 2][n % 2 * 2 + r] = two;
      }
  }
  __device__ __forceinline__ void load(Pairs& to, int lane) const {
    if constexpr (kBiases == Biases::tensor)
      load<uint32_t, T>(to, p.bias, p.bias_strides, lane);
    else if constexpr (kBiases == Biases::mask)
      load<uint16_t, unsigned char>(to, p.mask, p.mask_strides, lane);
  }
  __device__ __forceinline__ void add(float (&s)[kBlock / 2], const Pairs& pairs, int shift, int lane) const {
    if (kBiases == Biases::alibi || p.slopes != nullptr)
      add_alibi(s, first_query + lane % 4 * 2 + shift - first_key - lane / 4);
    if constexpr (kBiases == Biases::tensor) {
#pragma unroll
      for (int i = 0; i < kBlock / 2; i += 2) {
        const uint32_t two = device::transpose_matrix(pairs[i / 8][i / 2 % 4]);
        s[i] = fmaf(s[i], p.scale, device::low_half<T>(two));
        s[i + 1] = fmaf(s[i + 1], p.scale, device::high_half<T>(two));
      }
    } else if constexpr (kBiases == Biases::mask) {
      if (all_visible(pairs)) return;
#pragma unroll
      for (int i = 0; i < kBlock / 2; i += 2) {
        const uint32_t bytes = pairs[i / 8][i / 2 % 4];
        const uint32_t two = device::transpose_matrix((bytes & 0xff) | (bytes & 0xff00) << 8);
        if ((two & 0xffffu) == 0) s[i] = -INFINITY;
        if (two < 0x10000u) s[i + 1] = -INFINITY;
      }
    }
  }
  // `distance`: of the thread's first query from its first key.
  __device__ __forceinline__ void add_alibi(float (&s)[kBlock / 2], int distance) const {
    const float slope = device::load(p.slopes + sequence * p.slopes_batch + head) * -p.to_scores;
    const auto first = static_cast<float>(distance);
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i)
      s[i] = fmaf(fabsf(first + static_cast<float>(i / 4 * 8 + i % 2 - i / 2 % 2 * 8)), slope, s[i]);
  }
};

}  // namespace warpsmith::attention
