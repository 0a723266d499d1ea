#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/visit_dtype.h"
#include "cpu/attention_loops.h"
#include "cpu/attention_product.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_dropout.h"

// What the forward and the backward of attention share on the CPU: the place of a sequence, and the logits of a tile.
namespace warpsmith::cpu {

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The least number of tasks of `flops` each per thread. Waking a thread costs as much as about 10^6 of them.
inline int64_t task_grain(int64_t flops) { return 1 + (int64_t{1} << 21) / std::max<int64_t>(1, flops); }

template <class T> const T* at(const void* base, int64_t elements) { return static_cast<const T*>(base) + elements; }
template <class T> T* at(void* base, int64_t elements) { return static_cast<T*>(base) + elements; }

// One sequence: its tokens in q and in k, and the shift of its diagonal.
struct SequencePair {
  int64_t index;
  AttentionSequence q, k;
  int64_t shift;
  bool packed;

  SequencePair(const AttentionProblem& p, int64_t b)
      : index(b), q{0, p.seqlen_q}, k{0, p.seqlen_k}, packed(p.cu_seqlens_q != nullptr) {
    if (packed) {
      q = attention_sequence(p.cu_seqlens_q, b, p.total_q, p.seqlen_q);
      k = attention_sequence(p.cu_seqlens_k, b, p.total_k, p.seqlen_k);
    }
    shift = p.align_bottom_right ? k.length - q.length : 0;
  }

  // The offset of head h of token s.
  int64_t of_q(const AttentionStrides& strides, int64_t s, int64_t h) const { return of(strides, q.start, s, h); }
  int64_t of_k(const AttentionStrides& strides, int64_t s, int64_t h) const { return of(strides, k.start, s, h); }
  // The offset of head h in lse and delta.
  int64_t of_lse(const AttentionProblem& p, int64_t h) const {
    return packed ? h * p.total_q + q.start : (index * p.heads_q + h) * p.seqlen_q;
  }
  // The offset of key head h in tensors of shape [heads_k, total_k] or [batch, heads_k, seqlen_k].
  int64_t of_keys(const AttentionProblem& p, int64_t h) const {
    return packed ? h * p.total_k + k.start : (index * p.heads_k + h) * p.seqlen_k;
  }

 private:
  int64_t of(const AttentionStrides& strides, int64_t start, int64_t s, int64_t h) const {
    return (packed ? 0 : index * strides.batch) + (start + s) * strides.seq + h * strides.head;
  }
};

// The sink of a query head. The problem must have a sink.
template <class F> F sink_of(const AttentionProblem& p, int64_t head) {
  F sink = 0;
  (void)visit_cpu_dtype(p.sink_dtype, [&]<class E>() { sink = static_cast<F>(to_float(*at<E>(p.sink, head))); });
  return sink;
}

// A tile of one head: queries [q0, q0 + queries) and keys [k0, k0 + keys), each at most kTile.
struct TileAt {
  int64_t head, q0, queries, k0, keys;
};

inline bool sees_a_key(const AttentionProblem& p, const SequencePair& s, const TileAt& t) {
  const AttentionKeys keys = attention_keys(p, t.q0, t.q0 + t.queries - 1, s.shift, s.k.length);
  return keys.begin < t.k0 + t.keys && keys.end > t.k0;
}

inline bool sees_all_keys(const AttentionProblem& p, const SequencePair& s, const TileAt& t) {
  const int64_t last = t.q0 + t.queries - 1;
  return (p.window_left < 0 || t.k0 - (last + s.shift) >= -p.window_left) &&
         (p.window_right < 0 || t.k0 + t.keys - 1 - (t.q0 + s.shift) <= p.window_right);
}

// Calls convert(tile[n][m], element (q0 + m, k0 + n)). Lanes beyond the queries keep their values.
template <class E, class F, class Convert> void gather_tile(const void* base, const AttentionBiasStrides& strides,
                                                            const SequencePair& s, const TileAt& t, F* tile,
                                                            Convert&& convert) {
  const E* first = at<E>(base, s.index * strides.batch + t.head * strides.head + t.q0 * strides.q + t.k0 * strides.k);
  for (int64_t m = 0; m < t.queries; ++m)
    for (int64_t n = 0; n < t.keys; ++n) convert(tile[n * kTile + m], first[m * strides.q + n * strides.k]);
}

// Writes the dropout bytes of a tile, bytes[n][m]. q0 is a multiple of 16 and k0 of 32.
void dropout_tile(const AttentionProblem& p, const SequencePair& s, const TileAt& t, uint8_t* bytes);

// Makes the logits of a tile: everything between the product q k^T and the exponential.
template <class F> class Logits {
 public:
  explicit Logits(const AttentionProblem& problem) : p_(problem) {
    if (p_.bias) bias_.resize(kTile * kTile);
    if (p_.softcap > 0) slope_.resize(kTile * kTile);
  }

  // Turns products into logits; hidden ones become -inf. The products are rounded here: were they scaled where the
  // maximum is subtracted, one rounding of both together would not take the maximum to 0.
  void apply(F* s, const SequencePair& sequence, const TileAt& t) {
    const bool all = sees_all_keys(p_, sequence, t);
    const F scale = static_cast<F>(p_.softmax_scale);
    if (p_.softcap > 0)
      cap_logits(s, slope_.data(), t.keys, scale, static_cast<F>(p_.softcap));
    else
      scale_logits(s, t.keys, scale);
    if (p_.alibi_slopes)
      add_alibi(s, t.keys, static_cast<F>(p_.alibi_slopes[sequence.index * p_.alibi_batch_stride + t.head]),
                static_cast<F>(t.k0 - t.q0 - sequence.shift));
    if (p_.bias) add_bias(s, sequence, t);
    if (!all) hide_beyond_window(s, sequence, t);
    if (p_.mask)
      gather_tile<uint8_t>(p_.mask, p_.mask_strides, sequence, t, s,
                           [](F& logit, uint8_t visible) { logit = visible ? logit : kHidden; });
  }

  // After apply(): the derivative of the capped logits with respect to the logits before the cap, for the same tile.
  // null: 1.
  const F* slope() const { return p_.softcap > 0 ? slope_.data() : nullptr; }

 private:
  static constexpr F kHidden = -std::numeric_limits<F>::infinity();

  void add_bias(F* s, const SequencePair& sequence, const TileAt& t) {
    const auto gather = [&](auto type) {
      using E = decltype(type);
      gather_tile<E>(p_.bias, p_.bias_strides, sequence, t, bias_.data(),
                     [](F& bias, E element) { bias = static_cast<F>(to_float(element)); });
    };
    switch (p_.bias_dtype) {
      case Dtype::float32: gather(float{}); break;
      case Dtype::float64: gather(double{}); break;
      case Dtype::float16: gather(float16{}); break;
      case Dtype::bfloat16: gather(bfloat16{}); break;
    }
    add_tile(s, bias_.data(), t.keys);
  }

  void hide_beyond_window(F* s, const SequencePair& sequence, const TileAt& t) const {
    for (int64_t n = 0; n < t.keys; ++n) {  // the queries that see a key are contiguous
      const int64_t from_diagonal = t.k0 + n - sequence.shift - t.q0;
      const int64_t first = p_.window_right < 0 ? 0 : std::clamp<int64_t>(from_diagonal - p_.window_right, 0, kTile);
      const int64_t end =
          p_.window_left < 0 ? kTile : std::clamp<int64_t>(from_diagonal + p_.window_left + 1, 0, kTile);
      std::fill(s + n * kTile, s + n * kTile + first, kHidden);
      std::fill(s + n * kTile + std::max(first, end), s + (n + 1) * kTile, kHidden);
    }
  }

  const AttentionProblem& p_;
  std::vector<F> bias_, slope_;
};

// `rows` rows of a tensor as F, with `columns` rounded up to kProductColumns. Points into the tensor if it is F and
// needs no padding, otherwise to a copy in `room`.
template <class F> struct RowsOf {
  const F* data;
  int64_t stride;
};

template <class T, class F> RowsOf<F> rows_of(const void* base, int64_t first, int64_t stride, int64_t rows,
                                              int64_t columns, std::vector<F>& room) {
  const T* x = at<T>(base, first);
  if constexpr (sizeof(T) == sizeof(F))
    if (columns % kProductColumns == 0) return {reinterpret_cast<const F*>(x), stride};
  const int64_t padded = round_up(columns, kProductColumns);
  room.resize(static_cast<size_t>(rows * padded));  // new elements are 0, and the padding is never written
  for (int64_t r = 0; r < rows; ++r) widen(x + r * stride, room.data() + r * padded, columns);
  return {room.data(), padded};
}

}  // namespace warpsmith::cpu
