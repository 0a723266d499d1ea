#pragma once
#include <algorithm>
#include <limits>
#include <numeric>

#include "attention_case.h"
#include "attention_law.h"
#include "kernels/attention/attention_dropout.h"

// Problems of attention for tests on the host: inputs, params, and what forward and backward must give, in double
// precision.
namespace warpsmith::test {

template <class T> struct AttentionData {
  AttentionCase shape;
  int64_t batch_memory, length_q, length_k;  // as tensors lie in memory
  HeadBuffer<T> q, k, v, out, dout, dq, dk, dv;
  Buffer<float> lse, lse_rest, dlse, sink, dsink, slopes;
  Buffer<T> narrow_sink, narrow_dsink;
  BroadcastShape bias_shape, mask_shape;
  Buffer<float> bias, dbias;
  Buffer<T> narrow_bias, narrow_dbias;
  Buffer<unsigned char> mask;
  Buffer<int64_t> seed;
  Buffer<int32_t> cu_q, cu_k;
  Buffer<unsigned char> workspace;
  std::vector<double> want_out, want_lse, want_dq, want_dk, want_dv, want_dsink, want_dbias;
  Deviations of_out, of_dq, of_dk, of_dv, of_dbias, of_dsink;  // how far each may be off
  bool delta_of_rounded_out = false;  // the kernels take delta from out, and round P before dS is made of it

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
        lse_rest(lse.size()),
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
    p.dropout = make_attention_dropout(c.dropout > 0 ? seed.data() : nullptr, c.dropout);
    p.dropout_place = c.place;
    return p;
  }
  AttentionFwdParams forward() {
    return {problem(),       q.data.data(), k.data.data(), v.data.data(), out.data.data(), lse.data(),
            lse_rest.data(), q.strides,     k.strides,     v.strides,     out.strides,     nullptr};
  }
  AttentionBwdParams backward() {
    AttentionBwdParams p{};
    p.problem = problem();
    p.dout = dout.data.data(), p.dlse = dlse.data();
    p.q = q.data.data(), p.k = k.data.data(), p.v = v.data.data(), p.out = out.data.data(), p.lse = lse.data(),
    p.lse_rest = lse_rest.data();
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
    lse.poison(), lse_rest.poison();
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
    want_dsink.assign(static_cast<size_t>(c.heads), 0.0), want_dbias.assign(bias.size(), 0.0);
    const auto shared = static_cast<double>(length_q) * static_cast<double>(c.heads) / static_cast<double>(c.key_heads);
    const double of_bias = static_cast<double>(sequences() * c.heads * length_q * length_k) /
                           static_cast<double>(std::max<int64_t>(1, bias_shape.count));
    const auto keys_of_row = static_cast<double>(length_k), queries_of_head = static_cast<double>(length_q);
    of_out = {want_out.size(), c.dim_v(), keys_of_row, keys_of_row};
    of_dq = {want_dq.size(), c.head_dim, keys_of_row, keys_of_row};
    of_dk = {want_dk.size(), c.head_dim, shared, keys_of_row}, of_dv = {want_dv.size(), c.dim_v(), shared, keys_of_row};
    of_dsink = {want_dsink.size(), 1, static_cast<double>(batch_memory) * queries_of_head, keys_of_row};
    of_dbias = {want_dbias.size(), 1, of_bias, keys_of_row};
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
    lse[stat] = -std::numeric_limits<float>::infinity(), lse_rest[stat] = 0;
    for (int64_t d = 0; d < shape.dim_v(); ++d) out.data[row_v + static_cast<size_t>(d)] = T{};
  }

  // By how much the weight of a key is multiplied.
  double kept(int64_t b, int64_t h, int64_t i, int64_t j) {
    if (shape.dropout <= 0) return 1;
    const AttentionProblem p = problem();
    // The counter words of attention_dropout.h, from positions in the whole.
    const AttentionDropoutPlace& at = shape.place;
    const int64_t queries = at.queries > 0 ? at.queries : p.seqlen_q, heads = at.heads > 0 ? at.heads : p.heads_q;
    const int64_t row_block = shape.packed() ? cu_q[static_cast<size_t>(b)] / 16 + b : b * ((queries + 15) / 16);
    i += at.first_query, j += at.first_key, h += at.first_head;
    const PhiloxCounter lanes =
        attention_dropout_lanes(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]),
                                static_cast<uint32_t>((row_block + i / 16) * heads + h),
                                static_cast<uint32_t>(j / 32 * 32), attention_dropout_lane(i, j));
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
    std::vector<double> keep(s.size(), 1.0), of_logit(s.size()), of_slope(s.size());
    for (int64_t j = begin; j < end; ++j) {
      double dot = 0, squares = 0;
      const size_t key = k.at(mb, k0 + j, hk, 0);
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double term = wq[row + static_cast<size_t>(d)] * wk[key + static_cast<size_t>(d)];
        dot += term;
        squares += term * term;
      }
      const auto at = static_cast<size_t>(j - begin);
      of_logit[at] =
          square(scale()) * (additions(static_cast<double>(c.head_dim), squares, dot) + rounding<float>(dot));
      dot *= scale();
      if (c.softcap > 0) {
        const double t = std::tanh(dot / c.softcap);
        dot = c.softcap * t;
        slope[at] = 1 - t * t;
        of_logit[at] = square(slope[at]) * of_logit[at] + square(kTanhError * dot);
        of_slope[at] = square(2 * t * t * kTanhError);
      }
      if (c.alibi > 0)
        dot -= static_cast<double>(slopes[static_cast<size_t>(c.alibi == 2 ? b * c.heads + h : h)]) *
               static_cast<double>(std::abs(i + shift - j));
      if (!c.bias.empty()) dot += static_cast<double>(bias[bias_shape.at(b, h, i, j)]);
      if (!c.mask.empty() && mask[mask_shape.at(b, h, i, j)] == 0) dot = -std::numeric_limits<double>::infinity();
      keep[at] = kept(b, h, i, j);
      of_logit[at] += 2 * rounding<float>(dot) + square(kExponentialError);
      s[at] = dot;
      largest = std::max(largest, dot);
    }
    const bool seen = largest > -std::numeric_limits<double>::infinity();
    if (!seen) return without_keys(row_v, stat, gradients);
    if (c.sink) total += std::exp(sink_logit - largest);
    for (const double x : s) total += std::exp(x - largest);
    const double row_lse = largest + std::log(total);
    want_lse[stat] = row_lse;
    double delta = 0;
    RowDeviations off;  // of attention_law.h, beside whose formulas these sums stand
    off.lse = 4 * rounding<float>(row_lse) + square(kExponentialError * (2 + row_lse - largest));
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      const double p = std::exp(s[at] - largest) / total;
      const size_t value = v.at(mb, k0 + j, hk, 0);
      for (int64_t d = 0; d < c.dim_v(); ++d)
        want_out[row_v + static_cast<size_t>(d)] += p * keep[at] * wv[value + static_cast<size_t>(d)];
      off.weight += p;
      off.weight_squares += p * p;
      if (p > 0) off.lse += p * p * of_logit[at];
    }
    off.lse += additions(static_cast<double>(s.size()), off.weight_squares, off.weight);
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      const double p = std::exp(s[at] - largest) / total;
      const size_t value = v.at(mb, k0 + j, hk, 0);
      if (p == 0) continue;
      const double of_rounding = rounding_of_operand<T>(p * keep[at] * total) / square(total);
      for (int64_t d = 0; d < c.dim_v(); ++d) {
        const double x = wv[value + static_cast<size_t>(d)];
        const size_t e = row_v + static_cast<size_t>(d);
        of_out.add(e, p * keep[at] * x,
                   square(p * (keep[at] * x - want_out[e])) * of_logit[at] + square(x) * of_rounding);
      }
    }
    double delta_squares = 0;
    for (int64_t d = 0; d < c.dim_v(); ++d) {
      const size_t e = row_v + static_cast<size_t>(d);
      const T rounded = from_float<T>(static_cast<float>(want_out[e]));
      const double term = wg[e] * (delta_of_rounded_out ? static_cast<double>(to_float(rounded)) : want_out[e]);
      delta += term;
      delta_squares += square(term);
      if (gradients) out.data[e] = rounded;
    }
    if (!gradients) return;
    if (delta_of_rounded_out) off.delta += additions(static_cast<double>(c.dim_v()), delta_squares, delta);
    lse[stat] = static_cast<float>(row_lse);
    lse_rest[stat] = static_cast<float>((largest - static_cast<double>(lse[stat])) + std::log(total));
    off.delta += 2 * rounding<float>(delta) + 2 * rounding<float>(static_cast<double>(dlse[stat]));
    delta -= static_cast<double>(dlse[stat]);

    // The gradients of the logits, how far each is off by what has been computed for its key alone, and their sums.
    std::vector<double> ds(s.size()), own(s.size()), mean(static_cast<size_t>(c.head_dim));
    double sum_ds = 0, size = 0, ds_squares = 0;
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      const double p = std::exp(s[at] - largest) / total;
      if (p == 0) continue;
      const size_t key = k.at(mb, k0 + j, hk, 0), value = v.at(mb, k0 + j, hk, 0);
      double dp = 0, squares = 0;
      for (int64_t d = 0; d < c.dim_v(); ++d) {
        const double g = wg[row_v + static_cast<size_t>(d)], term = g * wv[value + static_cast<size_t>(d)];
        const double weight = p * keep[at], of_weight = square(weight) * (of_logit[at] + off.lse);
        dp += term;
        squares += term * term;
        want_dv[value + static_cast<size_t>(d)] += weight * g;
        of_dv.add(value + static_cast<size_t>(d), weight * g, square(g) * (of_weight + rounding_of_operand<T>(weight)));
      }
      own[at] = square(keep[at]) * (additions(static_cast<double>(c.dim_v()), squares, dp) + rounding<float>(dp));
      dp *= keep[at];
      own[at] = square(p) * (own[at] + square(dp - delta) * of_logit[at]);
      ds[at] = p * (dp - delta);
      if (delta_of_rounded_out) own[at] += square(dp - delta) * rounding<T>(p);
      off.of_keys += own[at];
      sum_ds += ds[at];
      size += std::fabs(ds[at]);
      ds_squares += square(ds[at]);
      for (int64_t d = 0; d < c.head_dim; ++d)
        mean[static_cast<size_t>(d)] += p * slope[at] * wk[key + static_cast<size_t>(d)];
    }
    off.delta += additions(static_cast<double>(s.size()), ds_squares, sum_ds);
    const std::vector<double> centre = delta_of_rounded_out ? std::vector<double>(mean.size()) : mean;
    if (c.sink) {
      const double p = std::exp(sink_logit - largest) / total, term = p * delta;
      want_dsink[static_cast<size_t>(h)] -= term;
      of_dsink.add(static_cast<size_t>(h), term,
                   square(p) * (off.delta + off.of_keys) +
                       square(term) * (off.lse + 2 * rounding<float>(sink_logit) + square(kExponentialError)));
    }
    if (!c.bias.empty() && bias_shape.strides.k == 0)
      of_dbias.add(bias_shape.at(b, h, i, 0), 0,
                   square(1 - off.weight) * off.of_keys + square(off.weight) * off.delta + square(sum_ds) * off.lse);
    for (int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<size_t>(j - begin);
      const double p = std::exp(s[at] - largest) / total;
      const size_t key = k.at(mb, k0 + j, hk, 0);
      const double of_ds = off.of_gradient(p, ds[at], own[at], delta_of_rounded_out);
      if (!c.bias.empty()) {
        const size_t element = bias_shape.at(b, h, i, j);
        want_dbias[element] += ds[at];
        of_dbias.add(element, ds[at], bias_shape.strides.k == 0 ? 0 : of_ds);
      }
      const double product = ds[at] * slope[at] * scale();
      const double of_product = square(slope[at] * scale()) * of_ds + square(ds[at] * scale()) * of_slope[at] +
                                square(scale()) * rounding_of_operand<T>(ds[at] * slope[at]) + rounding<float>(product);
      // The parts of of_ds that are the same for all keys of a row are added to dq below.
      const double of_dq_alone = of_product - square(slope[at] * scale()) * of_ds;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const size_t e = static_cast<size_t>(d);
        const double wide_q = wq[row + e], wide_k = wk[key + e];
        want_dq[row + e] += product * wide_k;
        want_dk[key + e] += product * wide_q;
        of_dq.add(row + e, product * wide_k,
                  square(scale() * (slope[at] * wide_k - centre[e])) * own[at] + square(wide_k) * of_dq_alone);
        of_dk.add(key + e, product * wide_q, square(wide_q) * of_product);
      }
    }
    for (size_t d = 0; d < static_cast<size_t>(c.head_dim); ++d) {
      of_dq.variance[row + d] += square(scale() * mean[d]) * off.delta + square(want_dq[row + d]) * off.lse;
      if (c.softcap == 0 && !delta_of_rounded_out)
        of_dq.slack[row + d] += kHalfStep<T> / 8 * size * std::fabs(scale() * mean[d]);
    }
  }
};

}  // namespace warpsmith::test
