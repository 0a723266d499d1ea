#pragma once
#include <cstdint>

#include "device/packed.h"
#include "kernels/rope/rope.h"

// Device code that rope and qk_norm_rope share. T: storage type of the activations; C: storage type of cos and sin.
// Arithmetic is float.
namespace warpsmith::rotary {

using device::Packed, device::packed_at, device::rounded, device::unpack;

// Loads N elements as floats, in accesses of at most 16 bytes.
template <int N, class T> __device__ __forceinline__ void load_floats(float (&to)[N], const T* from) {
  constexpr int kPiece = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    float piece[kPiece];
    unpack<T>(piece, device::load(packed_at<T, kPiece>(from, first)));
#pragma unroll
    for (int k = 0; k < kPiece; ++k) to[first + k] = piece[k];
  }
}

// Where a token is, and where its angles are.
struct Token {
  int64_t batch, index;  // batch entry, and index in that entry
  int64_t angles;        // index of the first element of the token's row of cos and sin
  bool valid;            // the token has a row of cos and sin
};

// The last sequence that begins at or before `token`. It is empty only if the token is in no sequence.
__device__ __forceinline__ int64_t sequence_of(const RotaryPositions& p, int64_t token) {
  int64_t low = 0, high = p.sequences;  // low == 0 or cu_seqlens[low] <= token; cu_seqlens[high] > token
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (device::load(p.cu_seqlens + middle) <= token)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Finds the batch entry and index, not the angles.
__device__ __forceinline__ Token place_of(const RotaryShape& shape, int64_t token) {
  Token t{0, token, 0, true};
  if (shape.batch > 1) {
    // A 64-bit division costs some hundred instructions, a 32-bit one twenty.
    t.batch = token >> 32 == 0 && shape.tokens >> 32 == 0
                  ? int64_t{static_cast<uint32_t>(token) / static_cast<uint32_t>(shape.tokens)}
                  : token / shape.tokens;
    t.index = token - t.batch * shape.tokens;
  }
  return t;
}

// Finds the angles of a token whose batch entry and index are known.
__device__ __forceinline__ void find_angles(Token& t, const RotaryShape& shape, const RotaryAngles& a,
                                            const RotaryPositions& p) {
  if (a.per_token) {
    t.angles = t.batch * a.batch_stride + t.index * a.row_stride;
    return;
  }
  uint64_t position = static_cast<uint64_t>(t.index) + static_cast<uint64_t>(p.offset);  // wraps: below 0 is beyond
  int64_t entry = t.batch;
  if (p.cu_seqlens) {
    const int64_t token = t.batch * shape.tokens + t.index;
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
}

__device__ __forceinline__ Token find_token(const RotaryShape& shape, const RotaryAngles& a, const RotaryPositions& p,
                                            int64_t token) {
  Token t = place_of(shape, token);
  find_angles(t, shape, a, p);
  return t;
}

// A thread's elements of a head: two vectors that together hold whole pairs, or two vectors that are not rotated. The
// two vectors are half the rotary dimension apart. Single elements of interleaved pairs are neighbours.
struct Columns {
  int first, second;  // elements of the head
  bool rotates;
  bool has_second;  // always true if the vectors rotate
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

// The N angles of a thread's two vectors. Half-split vectors and single elements: angle k belongs to the pair
// (first[k], second[k]). Interleaved vectors: first the N / 2 pairs of the first vector, then the N / 2 pairs of the
// second.
template <int N> struct Angles {
  float cos[N], sin[N];
};

// With all bits set, 32-bit and 16-bit floats are NaN. A word holds two 16-bit elements.
__device__ __forceinline__ void set_bits(uint32_t& two) { two = 0xffffffffu; }
__device__ __forceinline__ void set_bits(float& x) { x = __uint_as_float(0xffffffffu); }
template <class T> __device__ __forceinline__ void set_bits(T& x) { x.bits = 0xffff; }

__device__ __forceinline__ void negate(uint32_t& two) { two ^= 0x80008000u; }
__device__ __forceinline__ void negate(float& x) { x = -x; }
template <class T> __device__ __forceinline__ void negate(T& x) { x.bits ^= 0x8000; }

// cos and sin as stored, not yet converted. Loading and converting are separate so that these loads overlap with
// others; converting at once would stall on each load.
template <class C, int N, bool kInterleaved> struct PackedAngles {
  static constexpr int kAdjacent = kInterleaved ? N / 2 : N, kMost = 16 / sizeof(C);
  static constexpr int kPiece = kAdjacent < kMost ? kAdjacent : kMost, kPieces = N / kPiece;
  Packed<C, kPiece> cos[kPieces], sin[kPieces];

  // Starts as NaN; a token without angles keeps it.
  __device__ __forceinline__ PackedAngles() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) cos[i] = sin[i] = all_bits();
  }

  // Call it only for a token that has angles.
  __device__ __forceinline__ void load(const RotaryShape& shape, const RotaryAngles& a, const Token& token,
                                       const Columns& c) {
    const C *cos_row = static_cast<const C*>(a.cos) + token.angles,
            *sin_row = static_cast<const C*>(a.sin) + token.angles;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int k = i * kPiece;
      const int pair = kInterleaved ? (k < N / 2 ? c.first / 2 + k : c.second / 2 + k - N / 2)
                                    : (N == 1 && shape.interleaved ? c.first / 2 : c.first + k);
      if ((!kInterleaved && N > 1) || a.column_stride == 1) {
        cos[i] = device::load(packed_at<C, kPiece>(cos_row, pair));
        sin[i] = device::load(packed_at<C, kPiece>(sin_row, pair));
      } else {
        cos[i] = every_second(cos_row + 2 * pair);
        sin[i] = every_second(sin_row + 2 * pair);
      }
    }
  }

  __device__ __forceinline__ Angles<N> unpacked(bool inverse) const {
    Angles<N> by;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float c[kPiece], s[kPiece];
      unpack<C>(c, cos[i]);
      unpack<C>(s, inverse ? negative(sin[i]) : sin[i]);
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        by.cos[i * kPiece + k] = c[k];
        by.sin[i * kPiece + k] = s[k];
      }
    }
    return by;
  }

 private:
  using Piece = Packed<C, kPiece>;

  __device__ __forceinline__ static Piece all_bits() {
    Piece piece;
#pragma unroll
    for (auto& e : piece.at) set_bits(e);
    return piece;
  }

  __device__ __forceinline__ static Piece negative(Piece piece) {
#pragma unroll
    for (auto& e : piece.at) negate(e);
    return piece;
  }

  // Reads angles that are stored twice, element by element. This form is rare and must not cost the others registers.
  __device__ __forceinline__ static Packed<C, kPiece> every_second(const C* from) {
    float x[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) x[k] = device::to_float(device::load(from + 2 * k));
    return rounded<C>(x);
  }
};

// Rotates the pairs of two vectors: (a, b) -> (a cos - b sin, b cos + a sin).
template <bool kInterleaved, int N>
__device__ __forceinline__ void rotate(float (&first)[N], float (&second)[N], const Angles<N>& by) {
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
