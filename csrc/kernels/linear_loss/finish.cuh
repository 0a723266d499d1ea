#pragma once
#include <cstdint>

#include "device/convert.h"
#include "device/vector.h"
#include "kernels/linear_loss/linear_loss.h"

// Scales the gradients that a forward computed by the upstream gradient, element by element in float. N: elements of a
// step, 8, or 1 where an address is not a multiple of 16 bytes.
namespace warpsmith::linear_loss {

using device::Vector;

constexpr int kFinishThreads = 256;
constexpr int kFinishElems = 8;
constexpr int kFinishUnroll = 4;  // independent loads before the first use

template <class T, int N> __device__ __forceinline__ void read(float (&to)[N], const T* from) {
  constexpr int kPiece = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    const Vector<T, kPiece> piece = device::load_vector<kPiece>(from + first);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) to[first + k] = device::to_float(piece.at[k]);
  }
}

template <class T, int N> __device__ __forceinline__ void write(T* to, const float (&from)[N]) {
  constexpr int kPiece = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    Vector<T, kPiece> piece;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) piece.at[k] = device::from_float<T>(from[first + k]);
    device::store_vector(to + first, piece);
  }
}

__device__ __forceinline__ float finishing_factor(const LinearFinishParams& p) {
  const float factor = device::load(static_cast<const float*>(p.factor));
  if (!p.denominator) return factor;
  const float denominator = device::load(static_cast<const float*>(p.denominator));
  return denominator == 0.f ? factor : factor / denominator;
}

// Reads x and writes out: sizeof(In) + sizeof(Out) bytes an element. Each thread reads the factors, 4 or 8 bytes. In
// place and with a factor of 1, the kernel touches nothing else.
template <class In, class Out, int N> __global__ void __launch_bounds__(kFinishThreads) finish(LinearFinishParams p) {
  const float factor = finishing_factor(p);
  if (p.out == p.x && factor == 1.f) return;
  const In* x = static_cast<const In*>(p.x);
  Out* out = static_cast<Out*>(p.out);
  const int64_t step = int64_t{gridDim.x} * kFinishThreads * N;
  int64_t i = (int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) * N;
  for (; i + (kFinishUnroll - 1) * step + N <= p.count; i += kFinishUnroll * step) {
    float v[kFinishUnroll][N];
#pragma unroll
    for (int u = 0; u < kFinishUnroll; ++u) read(v[u], x + i + u * step);
#pragma unroll
    for (int u = 0; u < kFinishUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < N; ++k) v[u][k] *= factor;
      write(out + i + u * step, v[u]);
    }
  }
  for (; i < p.count; i += step) {
    if (i + N <= p.count) {
      float v[N];
      read(v, x + i);
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] *= factor;
      write(out + i, v);
    } else {
      for (int64_t e = i; e < p.count; ++e)
        device::store(out + e, device::from_float<Out>(device::to_float(device::load(x + e)) * factor));
    }
  }
}

// Reads x and sum, writes both: 2 * sizeof(T) + 8 bytes an element, and the factors.
template <class T, int N> __global__ void __launch_bounds__(kFinishThreads) finish_into_sum(LinearFinishParams p) {
  const float factor = finishing_factor(p);
  T* x = static_cast<T*>(p.x);
  float* sum = static_cast<float*>(p.sum);
  const int64_t step = int64_t{gridDim.x} * kFinishThreads * N;
  for (int64_t i = (int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) * N; i < p.count; i += step) {
    if (i + N <= p.count) {
      float v[N], total[N];
      read(v, x + i);
      read(total, sum + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        total[k] += v[k] * factor;
        v[k] = 0.f;
      }
      write(sum + i, total);
      write(x + i, v);
    } else {
      for (int64_t e = i; e < p.count; ++e) {
        device::store(sum + e, device::load(sum + e) + device::to_float(device::load(x + e)) * factor);
        device::store(x + e, device::from_float<T>(0.f));
      }
    }
  }
}

}  // namespace warpsmith::linear_loss
