#include "cpu/attention_tiles.h"
#include "cpu/elementwise.h"

// Forward. A task is a chunk of queries of one head. It loops over the keys tile by tile, with the online softmax of
// Milakov and Gimelshein (2018): running maximum, running sum, and out rescaled whenever the maximum grows.
namespace warpsmith {
namespace cpu {
namespace {

constexpr int64_t kChunkTiles = 4;  // tiles of queries per task; they share its converted rows of k and v

// Free functions, one per arithmetic type, because target_clones reaches neither lambdas nor templates.
#define WARPSMITH_FORWARD_LOOPS(F)                                                                    \
  WARPSMITH_VECTORIZE void largest(const F* __restrict__ s, int64_t keys, F* __restrict__ max) {      \
    for (int64_t n = 0; n < keys; ++n)                                                                \
      for (int m = 0; m < kTile; ++m) max[m] = s[n * kTile + m] > max[m] ? s[n * kTile + m] : max[m]; \
  }                                                                                                   \
  /* s = exp(s - base), and its sums over the keys */                                                 \
  WARPSMITH_VECTORIZE void exponentials(F* __restrict__ s, int64_t keys, const F* __restrict__ base,  \
                                        F* __restrict__ sum) {                                        \
    for (int64_t n = 0; n < keys; ++n)                                                                \
      for (int m = 0; m < kTile; ++m) {                                                               \
        const F e = math::exp_nonpositive(s[n * kTile + m] - base[m]);                                \
        s[n * kTile + m] = e;                                                                         \
        sum[m] += e;                                                                                  \
      }                                                                                               \
  }                                                                                                   \
  WARPSMITH_VECTORIZE void scale_row(F* x, int64_t count, F factor) {                                 \
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;                                               \
  }
WARPSMITH_FORWARD_LOOPS(float)
WARPSMITH_FORWARD_LOOPS(double)
#undef WARPSMITH_FORWARD_LOOPS

// The results of the 32 Philox4x32-7 calls of a block: words[word][call].
WARPSMITH_VECTORIZE void fill_block(uint64_t seed, uint64_t offset, uint32_t row, uint32_t word0, uint32_t* words) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const PhiloxCounter c = attention_dropout_lanes(seed, offset, row, word0, lane);
    for (int w = 0; w < 4; ++w) words[w * 32 + lane] = c.word[w];
  }
}

}  // namespace

void dropout_tile(const AttentionProblem& p, const SequencePair& s, const TileAt& t, uint8_t* bytes) {
  const auto seed = static_cast<uint64_t>(p.dropout.seed[0]), offset = static_cast<uint64_t>(p.dropout.seed[1]);
  const AttentionDropoutCounters counters = attention_dropout_counters(p);
  const int64_t row_block = attention_row_block(counters, p.cu_seqlens_q, s.index);
  uint32_t words[4 * 32];
  for (int64_t m0 = 0; m0 < t.queries; m0 += kAttentionDropoutQueries) {
    const uint32_t row = attention_dropout_row(counters, row_block, (t.q0 + m0) / kAttentionDropoutQueries, t.head);
    for (int64_t n0 = 0; n0 < t.keys; n0 += kAttentionDropoutKeys) {
      fill_block(seed, offset, row, attention_dropout_word0(counters, t.k0 + n0), words);
      for (int call = 0; call < 32; ++call)
        for (int w = 0; w < 4; ++w)
          for (int i = 0; i < 4; ++i)
            bytes[(n0 + w * 8 + call % 4 * 2 + i % 2) * kTile + m0 + call / 4 + i / 2 * 8] =
                static_cast<uint8_t>(words[w * 32 + call] >> (8 * i));
    }
  }
}

namespace {

// The state of one chunk of queries, kept from one tile of keys to the next.
template <class T> class ForwardChunk {
  using F = Arithmetic<T>;

 public:
  explicit ForwardChunk(const AttentionFwdParams& params)
      : p_(params),
        logits_(params.problem),
        out_stride_(round_up(params.problem.head_dim_v, kProductColumns)),
        q_(static_cast<size_t>(kChunkTiles * params.problem.head_dim * kTile)),
        out_(static_cast<size_t>(kChunkTiles * kTile * out_stride_)),
        max_(kChunkTiles * kTile),
        sum_(kChunkTiles * kTile),
        s_(kTile * kTile) {
    if (params.problem.dropout.seed) kept_bytes_.resize(kTile * kTile);
  }

  void run(const SequencePair& s, int64_t head, int64_t q_begin, int64_t q_end) {
    const AttentionProblem& p = p_.problem;
    const int64_t kv_head = head / (p.heads_q / p.heads_k);
    start(s, head, q_begin, q_end);
    const AttentionKeys keys = attention_keys(p, q_begin, q_end - 1, s.shift, s.k.length);
    for (int64_t k0 = keys.begin / kTile * kTile; k0 < keys.end; k0 += kTile) {
      const int64_t count = std::min(kTile, s.k.length - k0);
      const RowsOf<F> k =
          rows_of<T>(p_.k, s.of_k(p_.k_strides, k0, kv_head), p_.k_strides.seq, count, p.head_dim, k_room_);
      const RowsOf<F> v =
          rows_of<T>(p_.v, s.of_k(p_.v_strides, k0, kv_head), p_.v_strides.seq, count, p.head_dim_v, v_room_);
      for (int64_t q0 = q_begin; q0 < q_end; q0 += kTile) {
        const TileAt t{head, q0, std::min(kTile, q_end - q0), k0, count};
        if (sees_a_key(p, s, t)) add(s, t, (q0 - q_begin) / kTile, k, v);
      }
    }
    finish(s, head, q_begin, q_end);
  }

 private:
  static constexpr F kInfinity = std::numeric_limits<F>::infinity();

  F* q_of(int64_t tile) { return q_.data() + tile * p_.problem.head_dim * kTile; }

  void start(const SequencePair& s, int64_t head, int64_t q_begin, int64_t q_end) {
    const AttentionProblem& p = p_.problem;
    for (int64_t q0 = q_begin, tile = 0; q0 < q_end; q0 += kTile, ++tile)
      transpose(at<T>(p_.q, s.of_q(p_.q_strides, q0, head)), p_.q_strides.seq, std::min(kTile, q_end - q0), p.head_dim,
                q_of(tile));
    std::fill(out_.begin(), out_.end(), F(0));
    // The sink counts as a first key without a value.
    const F sink = p.sink ? sink_of<F>(p, head) : -kInfinity;
    std::fill(max_.begin(), max_.end(), sink);
    std::fill(sum_.begin(), sum_.end(), sink == -kInfinity ? F(0) : F(1));
  }

  // Adds one tile of keys to one tile of queries.
  void add(const SequencePair& s, const TileAt& t, int64_t tile, const RowsOf<F>& k, const RowsOf<F>& v) {
    const AttentionProblem& p = p_.problem;
    const int64_t lanes = round_up(t.queries, kProductColumns);
    product({k.data, k.stride, 1, q_of(tile), kTile, s_.data(), kTile, t.keys, lanes, p.head_dim, false});
    logits_.apply(s_.data(), s, t);
    F* max = max_.data() + tile * kTile;
    F* sum = sum_.data() + tile * kTile;
    F* out = out_.data() + tile * kTile * out_stride_;
    F tile_max[kTile], base[kTile];
    std::fill_n(tile_max, kTile, -kInfinity);
    largest(s_.data(), t.keys, tile_max);
    for (int64_t m = 0; m < t.queries; ++m) {
      const F grown = std::max(tile_max[m], max[m]);
      // A row that has seen no key has no maximum: then the exponentials are of the logits themselves, -inf. One with a
      // logit of +inf becomes NaN.
      base[m] = grown == -kInfinity ? F(0) : grown;
      if (grown > max[m]) {
        const F factor = std::exp(max[m] - grown);
        sum[m] *= factor;
        if (max[m] > -kInfinity) scale_row(out + m * out_stride_, p.head_dim_v, factor);
        max[m] = grown;
      }
    }
    std::fill(base + t.queries, base + kTile, F(0));
    exponentials(s_.data(), t.keys, base, sum);
    if (p.dropout.seed) {
      dropout_tile(p, s, t, kept_bytes_.data());
      drop(s_.data(), kept_bytes_.data(), t.keys, p.dropout.threshold, static_cast<F>(p.dropout.scale));
    }
    product({s_.data(), 1, kTile, v.data, v.stride, out, out_stride_, t.queries, out_stride_, t.keys, true});
  }

  void finish(const SequencePair& s, int64_t head, int64_t q_begin, int64_t q_end) {
    F* lse = p_.lse ? at<F>(p_.lse, s.of_lse(p_.problem, head)) : nullptr;
    F* rest = p_.lse_rest ? at<F>(p_.lse_rest, s.of_lse(p_.problem, head)) : nullptr;
    for (int64_t q = q_begin; q < q_end; ++q) {
      const int64_t row = q - q_begin;
      const F sum = sum_[row], max = max_[row];
      T* out = at<T>(p_.out, s.of_q(p_.out_strides, q, head));
      const F factor = max == kInfinity ? std::numeric_limits<F>::quiet_NaN() : sum == F(0) ? F(0) : F(1) / sum;
      narrow(out_.data() + row * out_stride_, out, p_.problem.head_dim_v, factor);
      const bool finite = std::isfinite(max);
      const F log_sum = finite ? std::log(sum) : F(0), whole = max + log_sum;
      if (lse) lse[q] = std::isnan(sum) && max == -kInfinity ? sum : whole;
      if (rest) rest[q] = finite ? (max - whole) + log_sum : F(0);
    }
  }

  const AttentionFwdParams& p_;
  Logits<F> logits_;
  int64_t out_stride_;
  std::vector<F> q_, out_, max_, sum_, s_, k_room_, v_room_;
  std::vector<uint8_t> kept_bytes_;  // dropout: a byte per weight
};

// Writes out = 0 and lse = -inf for the tokens after the last packed sequence.
template <class T> void clear_rest(const AttentionFwdParams& params) {
  using F = Arithmetic<T>;
  const AttentionProblem& p = params.problem;
  const SequencePair last(p, p.batch - 1);
  for (int64_t t = last.q.start + last.q.length; t < p.total_q; ++t)
    for (int64_t h = 0; h < p.heads_q; ++h) {
      std::fill_n(at<T>(params.out, t * params.out_strides.seq + h * params.out_strides.head), p.head_dim_v, T{});
      if (params.lse) *at<F>(params.lse, h * p.total_q + t) = -std::numeric_limits<F>::infinity();
      if (params.lse_rest) *at<F>(params.lse_rest, h * p.total_q + t) = F(0);
    }
}

}  // namespace
}  // namespace cpu

Status attention_forward_cpu(const AttentionFwdParams& params, const Parallel& parallel) {
  using namespace cpu;
  const AttentionProblem& p = params.problem;
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    constexpr int64_t kChunk = kChunkTiles * kTile;
    const int64_t chunks = (p.seqlen_q + kChunk - 1) / kChunk;
    const int64_t flops = 2 * std::min(kChunk, p.seqlen_q) * p.seqlen_k * (p.head_dim + p.head_dim_v);
    parallel(p.batch * p.heads_q * chunks, task_grain(flops), [&](int64_t begin, int64_t end) {
      ForwardChunk<T> work(params);
      for (int64_t i = begin; i < end; ++i) {
        // The last chunks come first: with a causal mask they take longest.
        const int64_t q0 = (chunks - 1 - i % chunks) * kChunk, head = i / chunks % p.heads_q;
        const SequencePair s(p, i / chunks / p.heads_q);
        if (q0 < s.q.length) work.run(s, head, q0, std::min(q0 + kChunk, s.q.length));
      }
    });
    if (p.cu_seqlens_q && p.batch > 0) clear_rest<T>(params);
  });
}

}  // namespace warpsmith
