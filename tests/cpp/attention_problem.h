#pragma once
#include <algorithm>
#include <limits>
#include <numeric>

#include "harness.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_dropout.h"

// Problems of attention for tests on the host: inputs, params, and what forward and backward must give, in double
// precision.
namespace warpsmith::test {

struct AttentionCase {
  int64_t batch = 1, queries = 1, keys = 1, heads = 1, key_heads = 1, head_dim = 64, head_dim_v = 0;  // 0: as head_dim
  int64_t window_left = -1, window_right = -1;
  bool bottom_right = true;
  double softcap = 0;
  bool sink = false;
  bool heads_first = false;                             // (batch, heads, length, dim) in memory
  std::vector<int64_t> lengths_q = {}, lengths_k = {};  // packed sequences
  int64_t spare_tokens = 0;                             // packed: behind the last sequence
  float logit_growth = 0;                               // factor on keys from the last (1) to the first
  double softmax_scale = 0;                             // 0: 1 / sqrt(head_dim)
  std::string bias = "", mask = "";                     // "1001": of shape (batch, 1, 1, keys); "": none
  bool bias_is_float = false;                           // else of the dtype, as the sink is
  int alibi = 0;                                        // dimensions of the slopes
  double dropout = 0;
  bool narrow_sink = false;  // of the dtype

  bool packed() const { return !lengths_q.empty(); }
  int64_t dim_v() const { return head_dim_v ? head_dim_v : head_dim; }
};

// A tensor of heads in memory, with a stride of its own for each dimension.
template <class T> struct HeadBuffer {
  AttentionStrides strides;
  int64_t dim;
  Buffer<T> data;

  HeadBuffer(int64_t batch, int64_t length, int64_t heads, int64_t head_dim, bool heads_first)
      : strides(heads_first ? AttentionStrides{heads * length * head_dim, head_dim, length * head_dim}
                            : AttentionStrides{length * heads * head_dim, heads * head_dim, head_dim}),
        dim(head_dim),
        data(static_cast<size_t>(batch * length * heads * head_dim)) {}
  size_t at(int64_t b, int64_t s, int64_t h, int64_t d) const {
    return static_cast<size_t>(b * strides.batch + s * strides.seq + h * strides.head + d);
  }
};

// A tensor that is broadcast to [batch, heads, queries, keys].
struct BroadcastShape {
  int64_t count = 1;
  AttentionBiasStrides strides{};

  BroadcastShape(const std::string& kept, const int64_t (&sizes)[4]) {
    int64_t* of[4] = {&strides.batch, &strides.head, &strides.q, &strides.k};
    for (size_t i = 4; i-- > 0 && !kept.empty();)
      if (kept[i] == '1' && sizes[i] > 1) *of[i] = count, count *= sizes[i];
  }
  size_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return static_cast<size_t>(b * strides.batch + h * strides.head + i * strides.q + j * strides.k);
  }
};

template <class T> struct AttentionData {
  AttentionCase shape;
  int64_t batch_memory, length_q, length_k;  // as tensors lie in memory
  HeadBuffer<T> q, k, v, out, dout, dq, dk, dv;
  Buffer<float> lse, dlse, sink, dsink, slopes;
  Buffer<T> narrow_sink, narrow_dsink;
  BroadcastShape bias_shape, mask_shape;
  Buffer<float> bias, dbias;
  Buffer<T> narrow_bias, narrow_dbias;
  Buffer<unsigned char> mask;
  Buffer<int64_t> seed;
  Buffer<int32_t> cu_q, cu_k;
  Buffer<unsigned char> workspace;
  std::vector<double> want_out, want_lse, want_dq, want_dk, want_dv, want_dsink, want_dbias;
  // Sums of squares of what is added up in each element: rounding errors of the terms grow like their square root.
  std::vector<double> squares_dq, squares_dk, squares_dv, squares_dbias, squares_dsink;

  explicit AttentionData(const AttentionCase& c, uint64_t data_seed = 1)
      : shape(c),
        batch_memory(c.packed() ? 1 : c.batch),
        length_q(c.packed() ? sum(c.lengths_q) + c.spare_tokens : c.queries),
        length_k(c.packed() ? sum(c.lengths_k) + c.spare_tokens : c.keys),
        q(batch_memory, length_q, c.heads, c.head_dim, c.heads_first),
        k(batch_memory, length_k, c.key_heads, c.head_dim, c.heads_first),
        v(batch_memory, length_k, c.key_heads, c.dim_v(), c.heads_first),
        out(batch_memory, length_q, c.heads, c.dim_v(), c.heads_first),
        dout(batch_memory, length_q, c.heads, c.dim_v(), c.heads_first),
        dq(batch_memory, length_q, c.heads, c.head_dim, c.heads_first),
        dk(batch_memory, length_k, c.key_heads, c.head_dim, c.heads_first),
        dv(batch_memory, length_k, c.key_heads, c.dim_v(), c.heads_first),
        lse(static_cast<size_t>(batch_memory * c.heads * length_q)),
        dlse(lse.size()),
        sink(static_cast<size_t>(c.heads)),
        dsink(static_cast<size_t>(c.heads)),
        slopes(static_cast<size_t>(c.alibi == 2 ? sequences() * c.heads : c.heads)),
        narrow_sink(sink.size()),
        narrow_dsink(sink.size()),
        bias_shape(c.bias, {sequences(), c.heads, longest(c.lengths_q, c.queries), longest(c.lengths_k, c.keys)}),
        mask_shape(c.mask, {sequences(), c.heads, longest(c.lengths_q, c.queries), longest(c.lengths_k, c.keys)}),
        bias(static_cast<size_t>(bias_shape.count)),
        dbias(bias.size()),
        narrow_bias(bias.size()),
        narrow_dbias(bias.size()),
        mask(static_cast<size_t>(mask_shape.count)),
        seed(2),
        cu_q(c.lengths_q.size() + 1),
        cu_k(c.lengths_k.size() + 1),
        workspace(0) {
    fill_normal(q.data, data_seed);
    fill_normal(k.data, data_seed + 1);
    fill_normal(v.data, data_seed + 2);
    fill_normal(dout.data, data_seed + 3);
    fill_normal(sink, data_seed + 4);
    fill_normal(bias, data_seed + 5);
    fill_normal(slopes, data_seed + 6, 0.05f);
    const auto narrow = [](Buffer<T>& to, Buffer<float>& from, bool both) {
      for (size_t i = 0; i < from.size(); ++i) {
        to[i] = from_float<T>(from[i]);
        if (both) from[i] = static_cast<float>(to_float(to[i]));
      }
    };
    narrow(narrow_bias, bias, !c.bias_is_float);
    narrow(narrow_sink, sink, c.narrow_sink);
    Random random(data_seed + 7);
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = random.bits() % 4 != 0;
    seed[0] = static_cast<int64_t>(random.bits()), seed[1] = static_cast<int64_t>(random.bits());
    cu_q[0] = cu_k[0] = 0;
    for (size_t i = 0; i < c.lengths_q.size(); ++i) {
      cu_q[i + 1] = cu_q[i] + static_cast<int32_t>(c.lengths_q[i]);
      cu_k[i + 1] = cu_k[i] + static_cast<int32_t>(c.lengths_k[i]);
    }
    if (c.logit_growth > 0)  // keys are visited from the last to the first: maxima grow block by block
      for (int64_t j = 0; j < length_k; ++j)
        for (int64_t h = 0; h < c.key_heads; ++h)
          for (int64_t d = 0; d < c.head_dim; ++d) {
            T& x = k.data[k.at(0, j, h, d)];
            const float place = 1.0f - static_cast<float>(j) / static_cast<float>(length_k);
            x = from_float<T>(to_float(x) * std::pow(c.logit_growth, place));
          }
  }

  static int64_t sum(const std::vector<int64_t>& x) { return std::accumulate(x.begin(), x.end(), int64_t{0}); }
  static int64_t longest(const std::vector<int64_t>& lengths, int64_t otherwise) {
    return lengths.empty() ? otherwise : *std::max_element(lengths.begin(), lengths.end());
  }
  int64_t sequences() const { return shape.packed() ? static_cast<int64_t>(shape.lengths_q.size()) : shape.batch; }
  double scale() const {
    return shape.softmax_scale != 0 ? shape.softmax_scale : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  }

  AttentionProblem problem() {
    AttentionProblem p{};
    const AttentionCase& c = shape;
    p.batch = sequences();
    p.heads_q = c.heads;
    p.heads_k = c.key_heads;
    p.seqlen_q = longest(c.lengths_q, c.queries);
    p.seqlen_k = longest(c.lengths_k, c.keys);
    p.head_dim = c.head_dim;
    p.head_dim_v = c.dim_v();
    p.cu_seqlens_q = c.packed() ? cu_q.data() : nullptr;
    p.cu_seqlens_k = c.packed() ? cu_k.data() : nullptr;
    p.total_q = batch_memory * length_q;
    p.total_k = batch_memory * length_k;
    p.softmax_scale = scale();
    p.softcap = c.softcap;
    p.window_left = c.window_left;
    p.window_right = c.window_right;
    p.align_bottom_right = c.bottom_right;
    p.dtype = std::is_same_v<T, bfloat16>  ? Dtype::bfloat16
              : std::is_same_v<T, float16> ? Dtype::float16
                                           : Dtype::float32;
    if (c.sink) p.sink = c.narrow_sink ? static_cast<const void*>(narrow_sink.data()) : sink.data();
    p.sink_dtype = c.narrow_sink ? p.dtype : Dtype::float32;
    if (!c.bias.empty()) p.bias = c.bias_is_float ? static_cast<const void*>(bias.data()) : narrow_bias.data();
    p.bias_dtype = c.bias_is_float ? Dtype::float32 : p.dtype;
    p.bias_strides = bias_shape.strides;
    if (!c.mask.empty()) p.mask = mask.data();
    p.mask_strides = mask_shape.strides;
    if (c.alibi > 0) p.alibi_slopes = slopes.data();
    p.alibi_batch_stride = c.alibi == 2 ? c.heads : 0;
    p.dropout = make_dropout(c.dropout > 0 ? seed.data() : nullptr, c.dropout);
    return p;
  }
  AttentionFwdParams forward() {
    return {problem(), q.data.data(), k.data.data(), v.data.data(), out.data.data(), lse.data(),
            q.strides, k.strides,     v.strides,     out.strides,   nullptr};
  }
  AttentionBwdParams backward() {
    AttentionBwdParams p{};
    p.problem = problem();
    p.dout = dout.data.data(), p.dlse = dlse.data();
    p.q = q.data.data(), p.k = k.data.data(), p.v = v.data.data(), p.out = out.data.data(), p.lse = lse.data();
    p.dq = dq.data.data(), p.dk = dk.data.data(), p.dv = dv.data.data();
    if (shape.sink) p.dsink = shape.narrow_sink ? static_cast<void*>(narrow_dsink.data()) : dsink.data();
    if (!shape.bias.empty()) p.dbias = shape.bias_is_float ? static_cast<void*>(dbias.data()) : narrow_dbias.data();
    p.dbias_strides = bias_shape.strides;
    p.dout_strides = dout.strides, p.q_strides = q.strides, p.k_strides = k.strides, p.v_strides = v.strides;
    p.out_strides = out.strides, p.dq_strides = dq.strides, p.dk_strides = dk.strides, p.dv_strides = dv.strides;
    p.deterministic = true;
    return p;
  }
  void poison_outputs() {
    out.data.poison();
    lse.poison();
    workspace.poison();
  }
  void poison_gradients() {
    dq.data.poison(), dk.data.poison(), dv.data.poison(), dsink.poison();
    narrow_dsink.poison(), dbias.poison(), narrow_dbias.poison();
    workspace.poison();
  }

  // What out, lse and, if `gradients`, their derivatives must be. Also fills in out, lse and dlse as inputs of a
  // backward.
  void solve(bool gradients, bool with_dlse = true) {
    const AttentionCase& c = shape;
    const auto wide = [](const Buffer<T>& x) {
      std::vector<double> y(x.size());
      for (size_t i = 0; i < x.size(); ++i) y[i] = static_cast<double>(to_float(x[i]));
      return y;
    };
    const std::vector<double> wq = wide(q.data), wk = wide(k.data), wv = wide(v.data), wg = wide(dout.data);
    want_out.assign(out.data.size(), 0.0), want_lse.assign(lse.size(), -std::numeric_limits<double>::infinity());
    want_dq.assign(dq.data.size(), 0.0), want_dk.assign(dk.data.size(), 0.0), want_dv.assign(dv.data.size(), 0.0);
    squares_dq = want_dq, squares_dk = want_dk, squares_dv = want_dv;
    want_dsink.assign(static_cast<size_t>(c.heads), 0.0), squares_dsink = want_dsink;
    want_dbias.assign(bias.size(), 0.0), squares_dbias = want_dbias;
    if (gradients) fill_normal(dlse, 77, with_dlse ? 0.3f : 0.0f);
    for (int64_t b = 0; b < sequences(); ++b)
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t lq = c.packed() ? c.lengths_q[static_cast<size_t>(b)] : c.queries;
        const int64_t lk = c.packed() ? c.lengths_k[static_cast<size_t>(b)] : c.keys;
        const int64_t q0 = c.packed() ? cu_q[static_cast<size_t>(b)] : 0,
                      k0 = c.packed() ? cu_k[static_cast<size_t>(b)] : 0;
        const int64_t mb = c.packed() ? 0 : b, hk = h / (c.heads / c.key_heads), shift = c.bottom_right ? lk - lq : 0;
        for (int64_t i = 0; i < lq; ++i) solve_row(b, mb, h, hk, q0, k0, i, lk, shift, gradients, wq, wk, wv, wg);
      }
  }

 private:
  void without_keys(size_t row_v, size_t stat, bool gradients) {
    if (!gradients) return;
    lse[stat] = -std::numeric_limits<float>::infinity();
    for (int64_t d = 0; d < shape.dim_v(); ++d) out.data[row_v + static_cast<size_t>(d)] = T{};
  }

  // By how much the weight of a key is multiplied.
  double kept(int64_t b, int64_t h, int64_t i, int64_t j) {
    if (shape.dropout <= 0) return 1;
    const AttentionProblem p = problem();
    const int64_t row_block = attention_row_block(p.cu_seqlens_q, b, p.seqlen_q);
    const PhiloxCounter lanes =
        attention_dropout_lanes(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]),
                                attention_dropout_row(row_block, i / kAttentionDropoutBlock, p.heads_q, h),
                                static_cast<uint32_t>(j / kAttentionDropoutBlock), attention_dropout_lane(i, j));
    return attention_dropout_keeps(lanes, i, j, p.dropout.threshold) ? p.dropout.scale : 0.0;
  }

  void solve_row(int64_t b, int64_t mb, int64_t h, int64_t hk, int64_t q0, int64_t k0, int64_t i, int64_t lk,
                 int64_t shift, bool gradients, const std::vector<double>& wq, const std::vector<double>& wk,
                 const std::vector<double>& wv, const std::vector<double>& wg) {
    const AttentionCase& c = shape;
    const int64_t begin = c.window_left < 0 ? 0 : std::max<int64_t>(0, i + shift - c.window_left);
    const int64_t end = c.window_right < 0 ? lk : std::min(lk, i + shift + c.window_right + 1);
    const size_t row = q.at(mb, q0 + i, h, 0), row_v = out.at(mb, q0 + i, h, 0);
    const size_t stat = static_cast<size_t>((mb * c.heads + h) * length_q + q0 + i);
    double largest = -std::numeric_limits<double>::infinity(), total = 0;
    const double sink_logit = static_cast<double>(sink[static_cast<size_t>(h)]);
    if (c.sink) largest = sink_logit;
    std::vector<double> s(static_cast<size_t>(std::max<int64_t>(0, end - begin))), slope(s.size(), 1.0);
    std::vector<double> keep(s.size(), 1.0);
    for (int64_t j = begin; j < end; ++j) {
      double dot = 0;
      const size_t key = k.at(mb, k0 + j, hk, 0);
      for (int64_t d = 0; d < c.head_dim; ++d)
        dot += wq[row + static_cast<size_t>(d)] * wk[key + static_cast<size_t>(d)];
      dot *= scale();
      const auto at = static_cast<size_t>(j - begin);
      if (c.softcap > 0) {
        const double t = std::tanh(dot / c.softcap);
        dot = c.softcap * t;
        slope[at] = 1 - t * t;
      }
      if (c.alibi > 0)
        dot -= static_cast<double>(slopes[static_cast<size_t>(c.alibi == 2 ? b * c.heads + h : h)]) *
               static_cast<double>(std::abs(i + shift - j));
      if (!c.bias.empty()) dot += static_cast<double>(bias[bias_shape.at(b, h, i, j)]);
      if (!c.mask.empty() && mask[mask_shape.at(b, h, i, j)] == 0) dot = -std::numeric_limits<double>::infinity();
      keep[at] = kept(b, h, i, j);
      s[at] = dot;
      largest = std::max(largest, dot);
    }
    const bool seen = largest > -std::numeric_limits<double>::infinity();
    if (!seen) return without_keys(row_v, stat, gradients);
    if (c.sink) total += std::exp(sink_logit - largest);
    for (const double x : s) total += std::exp(x - largest);
    const double row_lse = largest + std::log(total);
    want_lse[stat] = row_lse;
    double delta = 0, delta_squares = 0;
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      const double p = std::exp(s[at] - row_lse) * keep[at];
      const size_t value = v.at(mb, k0 + j, hk, 0);
      for (int64_t d = 0; d < c.dim_v(); ++d)
        want_out[row_v + static_cast<size_t>(d)] += p * wv[value + static_cast<size_t>(d)];
    }
    for (int64_t d = 0; d < c.dim_v(); ++d) {
      const size_t e = row_v + static_cast<size_t>(d);
      delta += wg[e] * want_out[e];
      delta_squares += wg[e] * want_out[e] * wg[e] * want_out[e];
      if (gradients) out.data[e] = from_float<T>(static_cast<float>(want_out[e]));
    }
    if (!gradients) return;
    lse[stat] = static_cast<float>(row_lse);
    delta -= static_cast<double>(dlse[stat]);
    if (c.sink) {
      const double p = std::exp(sink_logit - row_lse);
      want_dsink[static_cast<size_t>(h)] -= p * delta;
      // In float the additions over queries round as well: also where delta is -dlse alone.
      const double of_sum = std::is_same_v<T, float> ? delta * delta : 0;
      squares_dsink[static_cast<size_t>(h)] += p * p * (delta_squares + of_sum);
    }
    // delta's error is that of all keys: it does not average out in a sum over keys.
    if (!c.bias.empty() && bias_shape.strides.k == 0) squares_dbias[bias_shape.at(b, h, i, 0)] += delta_squares;
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      const double p = std::exp(s[at] - row_lse);
      const size_t key = k.at(mb, k0 + j, hk, 0), value = v.at(mb, k0 + j, hk, 0);
      double dp = 0;
      for (int64_t d = 0; d < c.dim_v(); ++d) {
        dp += wg[row_v + static_cast<size_t>(d)] * wv[value + static_cast<size_t>(d)];
        const double term = p * keep[at] * wg[row_v + static_cast<size_t>(d)];
        want_dv[value + static_cast<size_t>(d)] += term;
        squares_dv[value + static_cast<size_t>(d)] += term * term;
      }
      dp *= keep[at];
      // out, which delta is made of, is rounded as well.
      const double of_logit = p * (std::fabs(dp - delta) + std::sqrt(delta_squares));
      if (!c.bias.empty()) {
        want_dbias[bias_shape.at(b, h, i, j)] += p * (dp - delta);
        squares_dbias[bias_shape.at(b, h, i, j)] += of_logit * of_logit;
      }
      const double ds = p * (dp - delta) * slope[at] * scale();
      const double size = of_logit * slope[at] * std::fabs(scale());
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double of_q = size * wk[key + static_cast<size_t>(d)], of_k = size * wq[row + static_cast<size_t>(d)];
        squares_dq[row + static_cast<size_t>(d)] += of_q * of_q;
        squares_dk[key + static_cast<size_t>(d)] += of_k * of_k;
        want_dq[row + static_cast<size_t>(d)] += ds * wk[key + static_cast<size_t>(d)];
        want_dk[key + static_cast<size_t>(d)] += ds * wq[row + static_cast<size_t>(d)];
      }
    }
  }
};

// Within `roundings` half steps of R on every term, added up like independent errors, and two steps of the result. What
// float16 cannot represent is allowed as well.
template <class T, class R = T> void expect_sums(const std::string& name, const Buffer<T>& actual,
                                                 const std::vector<double>& expected,
                                                 const std::vector<double>& squares, double roundings) {
  const double half_step = std::ldexp(1.0, -kMantissaBits<R> - 1);
  int reported = 0;
  for (size_t i = 0; i < actual.size() && reported < 4; ++i) {
    const double allowed = roundings * half_step * std::sqrt(squares[i]) + 0x1p-20;
    expect_close_element(name, i, static_cast<double>(to_float(actual[i])), expected[i], kMantissaBits<T>,
                         kLeastExponent<T>, {.ulps = 2, .relative = 0, .absolute = allowed}, reported);
  }
}

}  // namespace warpsmith::test
