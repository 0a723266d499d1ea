#pragma once
#include <cmath>

#include "device/math.h"
#include "kernels/attention/attention_dropout.h"
#include "kernels/attention/online_softmax.cuh"
#include "kernels/attention/portable/portable_product.cuh"
#include "kernels/attention/portable/portable_tiles.cuh"

// Turns products into logits, and makes dropout masks, on the accumulators of a warp. Rows of the accumulators are
// queries, or keys (kKeysAreRows). Each option is a branch that the whole grid takes together, outside the loops over
// elements.
namespace warpsmith::attention {

// The coordinates of a thread's accumulators in the matrix of queries and keys of a sequence: rows `row` and row + 8,
// columns column + 8 n + e.
template <bool kKeysAreRows> struct AccumulatorCoords {
  int row, column;

  // Calls f(n, e, query, key) for every element.
  template <int kColumns, class F> __device__ __forceinline__ void for_elements(F&& f) const {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + e / 2 * 8, c = column + n * 8 + e % 2;
        f(n, e, kKeysAreRows ? c : r, kKeysAreRows ? r : c);
      }
  }
};

// The logits of one sequence and head. In natural units, since the least finite bias times log2(e) would overflow. Only
// with kExtended are there a softcap, biases and masks.
template <bool kExtended> struct Logits {
  float scale;    // of the products; with a softcap, of the argument of tanh
  float softcap;  // 0: none
  float slope;    // 0: none
  int shift;
  bool bias_is_float;
  const void* bias;  // of this sequence and head, as the mask is; null: none
  int64_t bias_q, bias_k;
  const unsigned char* mask;  // null: none
  int64_t mask_q, mask_k;

  __device__ __forceinline__ Logits(const AttentionProblem& p, const SequenceOfTile& s, int head)
      : scale(static_cast<float>(p.softmax_scale)),
        softcap(static_cast<float>(p.softcap)),
        slope(0.0f),
        shift(s.shift),
        bias_is_float(p.bias_dtype == Dtype::float32),
        bias(nullptr),
        bias_q(p.bias_strides.q),
        bias_k(p.bias_strides.k),
        mask(nullptr),
        mask_q(p.mask_strides.q),
        mask_k(p.mask_strides.k) {
    if (kExtended && softcap > 0.0f) scale /= softcap;
    if constexpr (!kExtended) return;
    if (p.alibi_slopes != nullptr) slope = device::load(p.alibi_slopes + s.sequence * p.alibi_batch_stride + head);
    if (p.bias != nullptr)
      bias = static_cast<const char*>(p.bias) +
             (s.sequence * p.bias_strides.batch + head * p.bias_strides.head) * (bias_is_float ? 4 : 2);
    if (p.mask != nullptr)
      mask = static_cast<const unsigned char*>(p.mask) + s.sequence * p.mask_strides.batch + head * p.mask_strides.head;
  }

  // Turns products into logits without biases. With a softcap, calls `softcapped(n, e, derivative of the softcap)`.
  template <int kColumns, class Softcapped>
  __device__ __forceinline__ void scale_products(Accumulators<kColumns>& x, Softcapped&& softcapped) const {
    if (kExtended && softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float y = device::tanh(x[n][e] * scale);
          x[n][e] = y * softcap;
          softcapped(n, e, 1.0f - y * y);
        }
    } else {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = device::rounded_product(x[n][e], scale);
    }
  }

  // Adds the bias. Reads only visible elements, and two neighbours in one load where they are adjacent. In the common
  // case that all rows see all columns, the loads have no condition and are in flight together.
  template <class B, int kColumns, bool kKeysAreRows>
  __device__ __forceinline__ void add_bias(Accumulators<kColumns>& x, const AccumulatorCoords<kKeysAreRows>& at,
                                           bool all, const Columns (&seen)[2]) const {
    const int64_t of_row = kKeysAreRows ? bias_k : bias_q, of_column = kKeysAreRows ? bias_q : bias_k;
    const B* from = static_cast<const B*>(bias) + at.row * of_row + at.column * of_column;
    if (all && of_column == 1 && of_row % 2 == 0 && reinterpret_cast<uintptr_t>(bias) % (2 * sizeof(B)) == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const auto two = device::load_vector<2>(from + 8 * r * of_row + n * 8);
#pragma unroll
          for (int e = 0; e < 2; ++e) x[n][2 * r + e] += device::to_float(two.at[e]);
        }
      return;
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = n * 8 + e % 2;
        if (all || (at.column + column >= seen[e / 2].begin && at.column + column < seen[e / 2].end))
          x[n][e] += device::to_float(device::load(from + e / 2 * 8 * of_row + column * of_column));
      }
  }

  // Adds ALiBi and bias, then sets the logits that the mask or the window hides to -inf. `of_all`: the columns that all
  // rows of the warp see. Only the few steps with other columns compute which columns the rows `row` and row + 8 see.
  template <class T, int kColumns, bool kKeysAreRows>
  __device__ __forceinline__ void finish(Accumulators<kColumns>& x, const AccumulatorCoords<kKeysAreRows>& at,
                                         const Columns& of_all, const AttentionProblem& p,
                                         const SequenceOfTile& s) const {
    const bool all = at.column >= of_all.begin && at.column + kColumns - 7 < of_all.end;
    Columns seen[2] = {of_all, of_all};
    if (kExtended && !all) {
#pragma unroll
      for (int r = 0; r < 2; ++r) seen[r] = columns_of_rows<kKeysAreRows>(p, s, at.row + 8 * r, at.row + 8 * r);
    }
    const auto sees = [&](int n, int e) {
      const int column = at.column + n * 8 + e % 2;
      return column >= seen[e / 2].begin && column < seen[e / 2].end;
    };
    if (kExtended && slope != 0.0f)
      at.template for_elements<kColumns>(
          [&](int n, int e, int query, int key) { x[n][e] -= slope * fabsf(static_cast<float>(query + shift - key)); });
    if (kExtended && bias != nullptr) {
      if (bias_is_float)
        add_bias<float, kColumns>(x, at, all, seen);
      else
        add_bias<T, kColumns>(x, at, all, seen);
    }
    if (kExtended && mask != nullptr)
      at.template for_elements<kColumns>([&](int n, int e, int query, int key) {
        if (sees(n, e) && device::load(mask + query * mask_q + key * mask_k) == 0) x[n][e] = -INFINITY;
      });
    if (all) return;
    const int row = kExtended || kKeysAreRows ? at.row : computed_anew(at.row, at.column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Columns some = columns_of_rows<kKeysAreRows>(p, s, row + 8 * r, row + 8 * r);
      const int first = some.begin - at.column;
      const auto count = static_cast<unsigned>(some.end - some.begin);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (static_cast<unsigned>(n * 8 + e - first) >= count) x[n][2 * r + e] = -INFINITY;
    }
  }
};

// The sink of a head of q; -inf: none.
template <class T> __device__ __forceinline__ float sink_of(const AttentionProblem& p, int head) {
  if (p.sink == nullptr) return -INFINITY;
  if (p.sink_dtype == Dtype::float32) return device::load(static_cast<const float*>(p.sink) + head);
  return device::to_float(device::load(static_cast<const T*>(p.sink) + head));
}

// The dropout state of one sequence and head. Construct it before the loop over steps: inside, each step would wait for
// its loads.
struct DropoutOfHead {
  uint64_t seed = 0, offset = 0;
  uint32_t first_row = 0;  // counter word 1 of the first row block
  AttentionDropoutCounters counters{};

  __device__ __forceinline__ DropoutOfHead(const AttentionProblem& p, const SequenceOfTile& s, int head_of_q) {
    if (p.dropout.seed == nullptr) return;
    seed = static_cast<uint64_t>(device::load(p.dropout.seed));
    offset = static_cast<uint64_t>(device::load(p.dropout.seed + 1));
    counters = attention_dropout_counters(p);
    first_row =
        attention_dropout_row(counters, attention_row_block(counters, p.cu_seqlens_q, s.sequence), 0, head_of_q);
  }

  // Calls kept(n, e, whether the element is kept) for every element of a warp's 16 x kColumns block. The block begins
  // at multiples of 16, of kColumns where columns are keys. Called by the whole warp.
  template <int kColumns, bool kKeysAreRows, class Kept>
  __device__ __forceinline__ void apply(uint32_t threshold, int row_of_warp, int first_column, int lane,
                                        Kept&& kept) const {
    if constexpr (!kKeysAreRows) {
      constexpr bool kWholeCalls = kColumns % kAttentionDropoutKeys == 0;
      const uint32_t word1 = first_row + static_cast<uint32_t>(row_of_warp / kAttentionDropoutQueries) * counters.heads;
      PhiloxCounter own;
#pragma unroll
      for (int block = 0; block < kColumns / 16; ++block) {
        const int column = first_column / 16 + block;
        const bool last = (kWholeCalls ? block : column) % 2 != 0;  // the last 16 keys of a call
        if (!kWholeCalls || block % 2 == 0)
          own = attention_dropout_lanes(seed, offset, word1,
                                        attention_dropout_word0(counters, column / 2 * kAttentionDropoutKeys),
                                        static_cast<uint32_t>(lane));
        const uint32_t words[2] = {last ? own.word[2] : own.word[0], last ? own.word[3] : own.word[1]};
#pragma unroll
        for (int i = 0; i < 8; ++i) kept(2 * block + i / 4, i % 4, (words[i / 4] >> (8 * (i % 4)) & 0xff) >= threshold);
      }
    } else {
      // The queries 2 t and 2 t + 1 belong to two calls. The lanes of keys g and g ^ 1 make one call each, of which the
      // warp's 16 keys have two words, and swap two bytes of each word.
      const int g = lane / 4, t = lane % 4;
      const bool odd = g % 2 != 0, last = row_of_warp / 16 % 2 != 0;
      const auto word0 = attention_dropout_word0(counters, row_of_warp / kAttentionDropoutKeys * kAttentionDropoutKeys),
                 call = static_cast<uint32_t>(8 * t + (odd ? 4 : 0) + g / 2);
#pragma unroll
      for (int block = 0; block < kColumns / 16; ++block) {
        const uint32_t word1 =
            first_row + static_cast<uint32_t>(first_column / kAttentionDropoutQueries + block) * counters.heads;
        const PhiloxCounter both = attention_dropout_lanes(seed, offset, word1, word0, call);
        const uint32_t of_keys = last ? both.word[2] : both.word[0], of_next = last ? both.word[3] : both.word[1];
        // Bytes: key g and query, query + 8; key g + 8 and query, query + 8.
        const uint32_t own = __byte_perm(of_keys, of_next, odd ? 0x7531 : 0x6420);
        const uint32_t given = __shfl_xor_sync(0xffffffffu, __byte_perm(of_keys, of_next, odd ? 0x6420 : 0x7531), 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32_t word = (i % 2 != 0) == odd ? own : given;
          kept(2 * block + i / 4, i % 4, (word >> (8 * (i % 4 / 2 * 2 + i / 4)) & 0xff) >= threshold);
        }
      }
    }
  }
};

}  // namespace warpsmith::attention
