#pragma once
#include <limits>
#include <optional>
#include <vector>

#include "harness.h"
#include "kernels/rope/rotary.h"

// What the tests of rope and qk_norm_rope share: tensors of heads, angles, positions, and the oracle's rotation.
namespace warpsmith::test {

template <class T> constexpr Dtype kDtype = Dtype::float32;
template <> constexpr Dtype kDtype<float16> = Dtype::float16;
template <> constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

struct RotarySetting {
  int64_t batch = 2, tokens = 3, q_heads = 2, k_heads = 1, head_dim = 64, rotary_dim = 64;
  bool interleaved = false, inverse = false;
  bool head_major = false;  // (batch, heads, tokens, head_dim) in memory
  int64_t padding = 0;      // elements between heads
  size_t offset = 0;        // elements past an aligned address
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
      : cos(count(s), s.offset),
        sin(count(s), s.offset),
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
  s.offset = static_cast<size_t>(random.choice<int64_t>({0, 0, 0, 1}));
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

}  // namespace warpsmith::test
