#pragma once
#include "device/packed.h"
#include "tiles/float8_cast.cuh"

// How the family's kernels load values and store bytes.
namespace warpsmith::quantize {

// Raises a maximum of magnitudes, which order as their bits do: no order of the calls shows.
__device__ __forceinline__ void raise(float* most, float magnitude) {
  atomicMax(reinterpret_cast<unsigned*>(most), __float_as_uint(magnitude));
}

// 16 bytes of values, as they lie in memory, of which `here` exist; the others are 0. `whole`: one access may read them
// if all exist.
template <class T> constexpr int kPiece = 16 / sizeof(T);
template <class T> using Piece = device::Packed<T, kPiece<T>>;

template <class T> __device__ __forceinline__ Piece<T> load_piece(const T* x, int here, bool whole) {
  if (whole && here >= kPiece<T>) return device::load(device::packed_at<T, kPiece<T>>(x, 0));
  Piece<T> piece = {};
#pragma unroll
  for (int k = 0; k < kPiece<T>; ++k) {
    if (k >= here) break;
    const T element = device::load(x + k);
    if constexpr (sizeof(T) == 2) {
      piece.at[k / 2] |= static_cast<uint32_t>(element.bits) << (16 * (k % 2));
    } else {
      piece.at[k] = element;
    }
  }
  return piece;
}

template <class T> __device__ __forceinline__ float element(const Piece<T>& piece, int k) {
  if constexpr (sizeof(T) == 2) {
    return k % 2 ? device::high_half<T>(piece.at[k / 2]) : device::low_half<T>(piece.at[k / 2]);
  } else {
    return piece.at[k];
  }
}

// The first `here` of 4 W bytes. `whole`: likewise.
template <int W>
__device__ __forceinline__ void store_bytes(uint8_t* to, const Vector<uint32_t, W>& bytes, int here, bool whole) {
  if (whole && here >= 4 * W) {
    device::store(reinterpret_cast<Vector<uint32_t, W>*>(to), bytes);
    return;
  }
  static_assert(W <= 2);
  uint64_t rest = W == 2 ? uint64_t{bytes.at[W - 1]} << 32 | bytes.at[0] : bytes.at[0];  // no index into registers
#pragma unroll 1
  for (int k = 0; k < here && k < 4 * W; ++k, rest >>= 8) device::store(to + k, static_cast<uint8_t>(rest));
}

}  // namespace warpsmith::quantize
