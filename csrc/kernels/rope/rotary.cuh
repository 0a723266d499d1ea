#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/vector.h"
#include "kernels/rope/rotary.h"

// Device code that rope and qk_norm_rope share. T: storage of the activations, C: of cos and sin; arithmetic is float.
namespace warpsmith::rotary {

using device::Vector;

template <class T, int N> __device__ __forceinline__ const Vector<T, N>* vector_at(const void* base, int64_t element) {
  return reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(base) + element);
}

template <class T, int N> __device__ __forceinline__ Vector<T, N>* vector_at(void* base, int64_t element) {
  return reinterpret_cast<Vector<T, N>*>(static_cast<T*>(base) + element);
}

// N elements as floats, in pieces of at most 16 bytes.
template <int N, class T> __device__ __forceinline__ void load_floats(float (&to)[N], const T* from) {
  constexpr int kPiece = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    const auto piece = device::load_vector<kPiece>(from + first);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) to[first + k] = device::to_float(piece.at[k]);
  }
}

template <class T, int N> __device__ __forceinline__ void unpack(float (&to)[N], const Vector<T, N>& from) {
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = device::to_float(from.at[k]);
}

template <class T, int N> __device__ __forceinline__ Vector<T, N> rounded(const float (&x)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    Vector<uint32_t, N / 2> pairs;
#pragma unroll
    for (int k = 0; k < N / 2; ++k) pairs.at[k] = device::pack<T>(x[2 * k], x[2 * k + 1]);
    return __builtin_bit_cast(Vector<T, N>, pairs);
  } else {
    Vector<T, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k) y.at[k] = device::from_float<T>(x[k]);
    return y;
  }
}

// Where a token stands, and where its angles are.
struct Token {
  int64_t batch, index;  // of the batch entry, and in it
  int64_t angles;        // element of cos and sin at which its row begins
  bool valid;            // has angles
};

// The last sequence that begins at or before `token`; empty sequences are passed over.
__device__ __forceinline__ int64_t sequence_of(const RotaryPositions& p, int64_t token) {
  int64_t low = 0, high = p.sequences;  // cu_seqlens[low] <= token, but where low is 0; cu_seqlens[high] > token
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (device::load(p.cu_seqlens + middle) <= token)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ Token find_token(const RotaryShape& shape, const RotaryAngles& a, const RotaryPositions& p,
                                            int64_t token) {
  Token t{0, token, 0, true};
  if (shape.batch > 1) {
    t.batch = token / shape.tokens;
    t.index = token - t.batch * shape.tokens;
  }
  if (a.per_token) {
    t.angles = t.batch * a.batch_stride + t.index * a.row_stride;
    return t;
  }
  uint64_t position = static_cast<uint64_t>(t.index) + static_cast<uint64_t>(p.offset);  // wraps: below 0 is beyond
  int64_t entry = t.batch;
  if (p.cu_seqlens) {
    entry = sequence_of(p, token);
    const int64_t begin = device::load(p.cu_seqlens + entry);
    t.valid = begin <= token && token < device::load(p.cu_seqlens + entry + 1);
    position -= static_cast<uint64_t>(begin);
  }
  if (p.offsets) {
    const int64_t at = entry * p.offset_stride;
    position +=
        static_cast<uint64_t>(p.wide_offsets ? device::load(static_cast<const int64_t*>(p.offsets) + at)
                                             : int64_t{device::load(static_cast<const int32_t*>(p.offsets) + at)});
  }
  t.valid = t.valid && position < static_cast<uint64_t>(a.rows);
  t.angles = t.valid ? static_cast<int64_t>(position) * a.row_stride : 0;
  return t;
}

// The elements of a thread: two vectors of a head, which hold both members of each of their pairs, or two vectors that
// are copied. Vectors of several elements lie half the rotary dimension apart; of single ones, interleaved pairs are
// neighbours.
struct Columns {
  int first, second;  // elements of the head
  bool rotates;
  bool has_second;  // always, where it rotates
};

template <int N>
__device__ __forceinline__ Columns columns_of(const RotaryShape& shape, int rotating, int columns, int column) {
  const int rotary_dim = static_cast<int>(shape.rotary_dim);
  if (column < rotating) {
    if (N == 1 && shape.interleaved) return {2 * column, 2 * column + 1, true, true};
    return {column * N, column * N + rotary_dim / 2, true, true};
  }
  const int first = rotary_dim + (column - rotating) * N, second = first + (columns - rotating) * N;
  return {first, second, false, second < shape.head_dim};
}

// The N angles of a thread's two vectors. Half-split and single elements: of pair (first[k], second[k]). Interleaved
// vectors: of the N / 2 pairs of the first, then those of the second.
template <class C, int N, bool kInterleaved> struct Angles {
  float cos[N], sin[N];

  __device__ __forceinline__ Angles(const RotaryShape& shape, const RotaryAngles& a, const Token& token,
                                    const Columns& c) {
    const C *cos_row = static_cast<const C*>(a.cos) + token.angles,
            *sin_row = static_cast<const C*>(a.sin) + token.angles;
    if (!token.valid) {
#pragma unroll
      for (int k = 0; k < N; ++k) cos[k] = sin[k] = __int_as_float(0x7fc00000);
      return;
    }
    if constexpr (!kInterleaved) {
      const int64_t pair = N == 1 && shape.interleaved ? c.first / 2 * a.column_stride : c.first;
      load_floats(cos, cos_row + pair);
      load_floats(sin, sin_row + pair);
    } else {
      load_pairs(cos, cos_row, a.column_stride, c);
      load_pairs(sin, sin_row, a.column_stride, c);
    }
    if (shape.inverse)
#pragma unroll
      for (int k = 0; k < N; ++k) sin[k] = -sin[k];
  }

 private:
  __device__ __forceinline__ static void load_pairs(float (&to)[N], const C* row, int column_stride, const Columns& c) {
    constexpr int H = N / 2;
    float first[H], second[H];
    if (column_stride == 1) {
      load_floats(first, row + c.first / 2);
      load_floats(second, row + c.second / 2);
    } else {
      float twice[N];
      load_floats(twice, row + c.first);
#pragma unroll
      for (int k = 0; k < H; ++k) first[k] = twice[2 * k];
      load_floats(twice, row + c.second);
#pragma unroll
      for (int k = 0; k < H; ++k) second[k] = twice[2 * k];
    }
#pragma unroll
    for (int k = 0; k < H; ++k) to[k] = first[k], to[H + k] = second[k];
  }
};

// (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of two vectors.
template <class C, int N, bool kInterleaved>
__device__ __forceinline__ void rotate(float (&first)[N], float (&second)[N], const Angles<C, N, kInterleaved>& by) {
  if constexpr (!kInterleaved) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float a = first[k], b = second[k];
      first[k] = a * by.cos[k] - b * by.sin[k];
      second[k] = b * by.cos[k] + a * by.sin[k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const float a = first[2 * k], b = first[2 * k + 1], c = second[2 * k], d = second[2 * k + 1];
      first[2 * k] = a * by.cos[k] - b * by.sin[k];
      first[2 * k + 1] = b * by.cos[k] + a * by.sin[k];
      second[2 * k] = c * by.cos[N / 2 + k] - d * by.sin[N / 2 + k];
      second[2 * k + 1] = d * by.cos[N / 2 + k] + c * by.sin[N / 2 + k];
    }
  }
}

}  // namespace warpsmith::rotary
