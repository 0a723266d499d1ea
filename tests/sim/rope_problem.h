#pragma once
#include <limits>
#include <vector>

#include "dtypes.h"
#include "harness.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_config.h"

// Problems of rope and qk_norm_rope with their inputs, outputs and oracles: the formulas in double precision.
namespace warpsmith::test {

struct RotarySetting {
  int64_t batch = 2, tokens = 3, q_heads = 2, k_heads = 1, head_dim = 64, rotary_dim = 64;
  bool interleaved = false, inverse = false;
  bool head_major = false;  // (batch, heads, tokens, head_dim) in memory
  int64_t padding = 0;      // elements between heads
  Offsets offset = {};      // of the arguments
  bool per_token = false;
  std::vector<int32_t> cu_seqlens = {};
  std::vector<int64_t> offsets = {};
  bool wide_offsets = true;
  int64_t position_offset = 0;
  int64_t rows = 0;  // of the table; 0: as many as the tokens need
};

inline RotaryHeads layout_of(const RotarySetting& s, int64_t heads, int64_t padding) {
  const int64_t width = s.head_dim + padding;
  if (s.head_major) return {heads, heads * s.tokens * width, width, s.tokens * width};
  return {heads, heads * s.tokens * width, heads * width, width};
}

template <class T> Buffer<T> heads_buffer(const RotarySetting& s, int64_t heads, int64_t padding, size_t offset) {
  return Buffer<T>(static_cast<size_t>(s.batch * s.tokens * heads * (s.head_dim + padding)), offset);
}

inline size_t element(const RotaryHeads& l, int64_t b, int64_t t, int64_t h, int64_t d) {
  return static_cast<size_t>(b * l.batch_stride + t * l.token_stride + h * l.head_stride + d);
}

// cos and sin, positions, and the position (or row) of every token, -1 where it has none.
template <class C> struct RotaryTables {
  Buffer<C> cos, sin;
  Buffer<int32_t> cu_seqlens, narrow;
  Buffer<int64_t> wide;
  RotaryAngles angles{};
  RotaryPositions positions{};
  std::vector<int64_t> row_of;  // [batch * tokens]

  static int64_t most_rows(const RotarySetting& s) {
    if (s.rows) return s.rows;
    int64_t most = s.position_offset;
    for (const int64_t o : s.offsets) most = std::max(most, s.position_offset + o);
    return most + s.tokens;
  }
  static size_t count(const RotarySetting& s) {
    return static_cast<size_t>(s.per_token ? s.batch * s.tokens * s.rotary_dim : most_rows(s) * (s.rotary_dim / 2));
  }

  explicit RotaryTables(const RotarySetting& s)
      : cos(count(s), s.offset[4]),
        sin(count(s), s.offset[5]),
        cu_seqlens(s.cu_seqlens.size()),
        narrow(s.offsets.size()),
        wide(s.offsets.size()) {
    fill_normal(cos, 11);  // any numbers: the kernel does not know that they are cosines
    fill_normal(sin, 12);
    const int64_t pairs = s.rotary_dim / 2;
    if (s.per_token)
      for (Buffer<C>* t : {&cos, &sin})
        for (int64_t row = 0; row < s.batch * s.tokens; ++row)
          for (int64_t i = 0; i < pairs; ++i) {
            const auto at = [&](int64_t c) -> C& { return (*t)[static_cast<size_t>(row * s.rotary_dim + c)]; };
            (s.interleaved ? at(2 * i + 1) : at(i + pairs)) = s.interleaved ? at(2 * i) : at(i);
          }
    for (size_t i = 0; i < s.cu_seqlens.size(); ++i) cu_seqlens[i] = s.cu_seqlens[i];
    for (size_t i = 0; i < s.offsets.size(); ++i) wide[i] = s.offsets[i], narrow[i] = static_cast<int32_t>(wide[i]);

    angles = {cos.data(),
              sin.data(),
              s.per_token ? s.tokens : most_rows(s),
              s.per_token ? s.tokens * s.rotary_dim : 0,
              s.per_token ? s.rotary_dim : pairs,
              s.per_token && s.interleaved ? 2 : 1,
              s.per_token,
              kDtype<C>};
    const void* offsets = s.wide_offsets ? static_cast<const void*>(wide.data()) : narrow.data();
    positions = {s.cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
                 static_cast<int64_t>(s.cu_seqlens.size()) - 1,
                 s.offsets.empty() ? nullptr : offsets,
                 s.offsets.size() > 1 ? 1 : 0,
                 s.wide_offsets,
                 s.position_offset};
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t t = 0; t < s.tokens; ++t) row_of.push_back(find_row(s, b, t));
  }

  // By looking through all sequences, unlike the kernel.
  int64_t find_row(const RotarySetting& s, int64_t b, int64_t t) const {
    if (s.per_token) return b * s.tokens + t;
    int64_t position = t, entry = b;
    if (!s.cu_seqlens.empty()) {
      entry = -1;
      for (size_t i = 0; i + 1 < s.cu_seqlens.size(); ++i)
        if (s.cu_seqlens[i] <= t && t < s.cu_seqlens[i + 1]) entry = static_cast<int64_t>(i);
      if (entry < 0) return -1;
      position -= s.cu_seqlens[static_cast<size_t>(entry)];
    }
    __int128 shifted = position + static_cast<__int128>(s.position_offset);
    if (!s.offsets.empty()) shifted += s.offsets[s.offsets.size() > 1 ? static_cast<size_t>(entry) : 0];
    return shifted < 0 || shifted >= angles.rows ? -1 : static_cast<int64_t>(shifted);
  }

  // cos and sin of pair i of token (b, t); NaN without a row.
  std::pair<double, double> angle(const RotarySetting& s, int64_t b, int64_t t, int64_t i) const {
    const int64_t row = row_of[static_cast<size_t>(b * s.tokens + t)];
    if (row < 0) return {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};
    const size_t at = static_cast<size_t>(row * angles.row_stride + i * angles.column_stride);
    const double sign = s.inverse ? -1 : 1;
    return {static_cast<double>(to_float(cos[at])), sign * static_cast<double>(to_float(sin[at]))};
  }

  // Rotates one head in place.
  void rotate(const RotarySetting& s, int64_t b, int64_t t, std::vector<double>& head) const {
    const int64_t pairs = s.rotary_dim / 2;
    for (int64_t i = 0; i < pairs; ++i) {
      const auto [c, sn] = angle(s, b, t, i);
      double& first = head[static_cast<size_t>(s.interleaved ? 2 * i : i)];
      double& second = head[static_cast<size_t>(s.interleaved ? 2 * i + 1 : i + pairs)];
      const double x = first, y = second;
      first = x * c - y * sn;
      second = y * c + x * sn;
    }
  }
};

// Settings that reach the kernels' corners, by chance.
inline RotarySetting random_setting(Random& random, int64_t most_tokens) {
  RotarySetting s;
  s.batch = random.integer(1, 3);
  s.tokens = random.size(1, most_tokens);
  s.q_heads = random.size(1, 9);
  s.k_heads = random.integer(0, 3);
  s.head_dim = random.coin() ? random.choice<int64_t>({16, 32, 64, 80, 96, 128}) : random.size(2, 140);
  s.rotary_dim = random.coin() ? s.head_dim / 2 * 2 : random.integer(1, s.head_dim / 2) * 2;
  s.interleaved = random.coin();
  s.head_major = random.coin();
  s.padding = random.choice<int64_t>({0, 0, 8, 1});
  s.offset = Offsets::draw(random, 8);
  s.wide_offsets = random.coin();
  switch (random.integer(0, 3)) {
    case 1: s.per_token = true; break;
    case 2:
      s.batch = 1;
      s.cu_seqlens = {0};
      for (int i = 0; i < 4; ++i)
        s.cu_seqlens.push_back(static_cast<int32_t>(random.integer(s.cu_seqlens.back(), s.tokens)));
      if (random.coin()) s.offsets = {0, 3, random.integer(0, 5), 1};
      break;
    case 3:
      for (int64_t b = 0; b < s.batch; ++b) s.offsets.push_back(random.integer(0, 7));
      break;
    default: s.position_offset = random.integer(0, 5);
  }
  return s;
}

inline RopeProblem planned_of(const RotarySetting& s, size_t element_bytes) {
  return {s.batch * s.tokens, s.q_heads, s.k_heads, s.head_dim, s.rotary_dim, static_cast<int>(element_bytes)};
}

// A problem of one op. T: storage of q and k; C: of cos and sin; W: of the weights.
template <RopeOp op, class T, class C, class W = T> struct Problem;

template <class T, class C, class W> struct Problem<RopeOp::rope, T, C, W> {
  RotarySetting s;
  RotaryTables<C> tables;
  Buffer<T> q, k, q_out, k_out;
  std::vector<double> want_q, want_k;
  RopeParams params{};

  explicit Problem(const RotarySetting& setting, uint64_t seed = 1)
      : s(setting),
        tables(setting),
        q(heads_buffer<T>(s, s.q_heads, s.padding, s.offset[0])),
        k(heads_buffer<T>(s, s.k_heads, s.padding, s.offset[1])),
        q_out(heads_buffer<T>(s, s.q_heads, 0, s.offset[2])),
        k_out(heads_buffer<T>(s, s.k_heads, 0, s.offset[3])) {
    fill_normal(q, seed);
    fill_normal(k, seed + 1);
    params = {q.data(),
              k.data(),
              q_out.data(),
              k_out.data(),
              layout_of(s, s.q_heads, s.padding),
              layout_of(s, s.k_heads, s.padding),
              layout_of(s, s.q_heads, 0),
              layout_of(s, s.k_heads, 0),
              tables.angles,
              tables.positions,
              {s.batch, s.tokens, s.head_dim, s.rotary_dim, s.interleaved, s.inverse},
              false,
              kDtype<T>};
    want_q = oracle(q, params.q_in_layout, params.q_out_layout, q_out.size());
    want_k = oracle(k, params.k_in_layout, params.k_out_layout, k_out.size());
  }

  std::vector<double> oracle(const Buffer<T>& x, const RotaryHeads& in, const RotaryHeads& out, size_t count) const {
    std::vector<double> want(count), head(static_cast<size_t>(s.head_dim));
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t h = 0; h < in.heads; ++h) {
          for (int64_t d = 0; d < s.head_dim; ++d)
            head[static_cast<size_t>(d)] = static_cast<double>(to_float(x[element(in, b, t, h, d)]));
          tables.rotate(s, b, t, head);
          for (int64_t d = 0; d < s.head_dim; ++d) want[element(out, b, t, h, d)] = head[static_cast<size_t>(d)];
        }
    return want;
  }

  void check() {
    const Tolerance rounding{.ulps = 0.51, .relative = 1e-6, .absolute = 1e-6};
    expect_close("q", q_out, want_q, rounding);
    expect_close("k", k_out, want_k, rounding);
    same_bits_for_every_seed("q", q_out);
    same_bits_for_every_seed("k", k_out);
  }

  void run() {
    under_every_seed([&] {
      q_out.poison(), k_out.poison();
      expect_ok(rope_cuda(params, nullptr));
      check();
    });
  }

  RopeProblem planned() const { return planned_of(s, sizeof(T)); }
};

template <class T, class C, class W> struct Problem<RopeOp::qk_norm_rope, T, C, W> {
  static constexpr double kEps = 1e-5;

  RotarySetting s;
  RotaryTables<C> tables;
  Buffer<W> weight[2], dweight[2];
  Buffer<T> x[2], dy[2], y[2], dx[2];  // of q, of k
  Buffer<float> partials;
  RotaryHeads in[2], out[2];
  std::vector<double> want_y[2], want_dx[2], want_dweight[2];
  QkNormRopeFwdParams forward{};
  QkNormRopeBwdParams backward{};

  explicit Problem(const RotarySetting& setting, uint64_t seed = 1)
      : s(setting),
        tables(setting),
        weight{Buffer<W>(width(), s.offset[6]), Buffer<W>(width(), s.offset[7])},
        dweight{Buffer<W>(width()), Buffer<W>(width())},
        x{heads_buffer<T>(s, s.q_heads, s.padding, s.offset[0]), heads_buffer<T>(s, s.k_heads, s.padding, s.offset[1])},
        dy{heads_buffer<T>(s, s.q_heads, s.padding, s.offset[2]),
           heads_buffer<T>(s, s.k_heads, s.padding, s.offset[3])},
        y{heads_buffer<T>(s, s.q_heads, 0, 0), heads_buffer<T>(s, s.k_heads, 0, 0)},
        dx{heads_buffer<T>(s, s.q_heads, 0, 0), heads_buffer<T>(s, s.k_heads, 0, 0)},
        partials(0) {
    for (int i = 0; i < 2; ++i) {
      const uint64_t first = seed + static_cast<uint64_t>(10 * i);
      fill_normal(x[i], first), fill_normal(dy[i], first + 1), fill_normal(weight[i], first + 2, 0.3f, 1.0f);
      in[i] = layout_of(s, i ? s.k_heads : s.q_heads, s.padding);
      out[i] = layout_of(s, i ? s.k_heads : s.q_heads, 0);
      compute_oracle(i);
    }
    RotaryShape shape{s.batch, s.tokens, s.head_dim, s.rotary_dim, s.interleaved, false};
    forward = {x[0].data(), x[1].data(), weight[0].data(), weight[1].data(), y[0].data(),   y[1].data(),
               in[0],       in[1],       out[0],           out[1],           tables.angles, tables.positions,
               shape,       kEps,        kDtype<T>,        kDtype<W>};
    shape.inverse = true;
    backward = {dy[0].data(),
                dy[1].data(),
                x[0].data(),
                x[1].data(),
                weight[0].data(),
                weight[1].data(),
                dx[0].data(),
                dx[1].data(),
                dweight[0].data(),
                dweight[1].data(),
                nullptr,
                in[0],
                in[1],
                in[0],
                in[1],
                out[0],
                out[1],
                tables.angles,
                tables.positions,
                shape,
                kEps,
                kDtype<T>,
                kDtype<W>};
  }

  size_t width() const { return static_cast<size_t>(s.head_dim); }

  void compute_oracle(int i) {
    want_y[i].resize(y[i].size());
    want_dx[i].resize(y[i].size());
    want_dweight[i].assign(width(), 0);
    RotarySetting back = s;
    back.inverse = true;
    std::vector<double> head(width()), gradient(width());
    const double n = static_cast<double>(s.head_dim);
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t t = 0; t < s.tokens; ++t)
        for (int64_t h = 0; h < in[i].heads; ++h) {
          double squares = 0, dot = 0;
          for (size_t d = 0; d < width(); ++d) {
            const size_t at = element(in[i], b, t, h, static_cast<int64_t>(d));
            head[d] = static_cast<double>(to_float(x[i][at]));
            gradient[d] = static_cast<double>(to_float(dy[i][at]));
            squares += head[d] * head[d];
          }
          const double rstd = 1 / std::sqrt(squares / n + kEps);
          tables.rotate(back, b, t, gradient);
          for (size_t d = 0; d < width(); ++d) {
            const double w = static_cast<double>(to_float(weight[i][d]));
            want_dweight[i][d] += gradient[d] * head[d] * rstd;
            dot += gradient[d] * w * head[d] * rstd;
          }
          for (size_t d = 0; d < width(); ++d)
            want_dx[i][element(out[i], b, t, h, static_cast<int64_t>(d))] =
                rstd * (gradient[d] * static_cast<double>(to_float(weight[i][d])) - head[d] * rstd * dot / n);
          for (size_t d = 0; d < width(); ++d) head[d] *= rstd * static_cast<double>(to_float(weight[i][d]));
          tables.rotate(s, b, t, head);
          for (size_t d = 0; d < width(); ++d) want_y[i][element(out[i], b, t, h, static_cast<int64_t>(d))] = head[d];
        }
  }

  // Half a rounding step of the storage type, and a few of float; sums of terms of size one may cancel.
  static Tolerance rounding(double terms) {
    return {.ulps = 0.51, .relative = 5e-6, .absolute = 2e-6 * std::sqrt(terms)};
  }

  void check_forward() {
    for (int i = 0; i < 2; ++i) {
      expect_close(i ? "k" : "q", y[i], want_y[i], rounding(2));
      same_bits_for_every_seed(i ? "k" : "q", y[i]);
    }
  }

  void check_backward() {
    const double rows = static_cast<double>(s.batch * s.tokens * (s.q_heads + s.k_heads));
    for (int i = 0; i < 2; ++i) {
      if (i ? backward.dk : backward.dq) {
        expect_close(i ? "dk" : "dq", dx[i], want_dx[i], rounding(8));
        same_bits_for_every_seed(i ? "dk" : "dq", dx[i]);
      }
      if (i ? backward.dk_weight : backward.dq_weight) {
        expect_close(i ? "dk_weight" : "dq_weight", dweight[i], want_dweight[i], rounding(8 * rows));
        same_bits_for_every_seed(i ? "dk_weight" : "dq_weight", dweight[i]);
      }
    }
  }

  void poison() {
    for (int i = 0; i < 2; ++i) y[i].poison(), dx[i].poison(), dweight[i].poison();
    partials.poison();
  }

  void make_room(int64_t partial_rows) {
    partials = Buffer<float>(static_cast<size_t>(partial_rows) * 2 * width());
    backward.partials = partials.data();
  }

  void run() {
    int64_t partial_rows = 0;
    expect_ok(qk_norm_rope_partial_rows_cuda(backward, &partial_rows));
    make_room(partial_rows);
    under_every_seed([&] {
      poison();
      expect_ok(qk_norm_rope_forward_cuda(forward, nullptr));
      check_forward();
      expect_ok(qk_norm_rope_backward_cuda(backward, nullptr));
      check_backward();
    });
  }

  RopeProblem planned() const { return planned_of(s, sizeof(T)); }
};

}  // namespace warpsmith::test
