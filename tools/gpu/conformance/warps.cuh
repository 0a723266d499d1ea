#pragma once
#include "conformance.h"
#include "device/matrix_access.h"
#include "device/mma.h"
#include "device/named_barrier.h"
#include "device/reduce.h"
#include "device/vector.h"

// Vector access, shuffles, reductions, named barriers, warp matrix instructions.
namespace warpsmith::conformance {

template <class T, int N, device::Cache cache> __global__ void copy_vectors(const T* x, T* y) {
  device::store_vector<cache>(y + threadIdx.x * N, device::load_vector<N, cache>(x + threadIdx.x * N));
}
template <class T, int N, device::Cache cache> void vector_case(Inputs& in, Output& out) {
  Array<T> x(64 * N), y(64 * N);
  for (T& v : x.host) v = static_cast<T>(in.bits());
  out.check(launch(copy_vectors<T, N, cache>, {.block = 64}, nullptr, x.upload(), y.upload()));
  out.add(y);
}

static __global__ void shuffle_all(const int* x, int source, int distance, int* out) {
  const int v = x[threadIdx.x], t = threadIdx.x;
  int results[8] = {__shfl_sync(0xffffffffu, v, source),
                    __shfl_xor_sync(0xffffffffu, v, distance),
                    __shfl_up_sync(0xffffffffu, v, static_cast<unsigned>(distance)),
                    __shfl_down_sync(0xffffffffu, v, static_cast<unsigned>(distance)),
                    __shfl_xor_sync(0xffffffffu, v, distance, 8),
                    static_cast<int>(__ballot_sync(0xffffffffu, v & 1)),
                    __any_sync(0xffffffffu, v == x[0]) + 2 * __all_sync(0xffffffffu, v == x[0]),
                    static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(v)))};
  for (int i = 0; i < 8; ++i) out[i * 32 + t] = results[i];
}
inline void shuffle_case(Inputs& in, Output& out) {
  Array<int> x(32), y(8 * 32);
  for (int& v : x.host) v = static_cast<int>(in.bits());
  out.check(launch(shuffle_all, {.block = 32}, nullptr, x.upload(), in.integer(0, 31), in.integer(0, 31), y.upload()));
  out.add(y);
}

static __global__ void permute_bytes(const unsigned* x, unsigned* out) {
  const int t = threadIdx.x;
  out[t] = __byte_perm(x[t], x[t + 32], x[t + 64]);
}
inline void byte_perm_case(Inputs& in, Output& out) {
  Array<unsigned> x(96), y(32);
  for (unsigned& v : x.host) v = static_cast<unsigned>(in.bits());
  for (unsigned i = 64; i < 96; ++i) x.host[i] &= 0x7777u;
  out.check(launch(permute_bytes, {.block = 32}, nullptr, x.upload(), y.upload()));
  out.add(y);
}

template <int Threads> __global__ void reduce_block(const float* x, float* out) {
  WARPSMITH_SHARED(float, sums, Threads / 32);
  WARPSMITH_SHARED(float, maxima, Threads / 32);
  const int t = threadIdx.x;
  out[t] = device::block_sum<Threads>(x[t], sums);
  out[Threads + t] = device::block_max<Threads>(x[t], maxima);
  out[2 * Threads + t] = device::group_sum<8>(x[t]);
}
// Ordinary values: the order of additions is fixed, so the bits are.
template <int Threads> void reduce_case(Inputs& in, Output& out) {
  Array<float> x(Threads), y(3 * Threads);
  for (float& v : x.host) v = in.uniform();
  out.check(launch(reduce_block<Threads>, {.block = Threads}, nullptr, x.upload(), y.upload()));
  out.add(y);
}

static __global__ void hand_over(const int* x, int* out) {
  WARPSMITH_SHARED(int, buffer, 64);
  const int t = threadIdx.x;
  if (t < 64) {
    for (int i = 0; i < 4; ++i) {
      if (i > 0) device::named_barrier_wait(2, 128);
      buffer[t] = x[i * 64 + t];
      device::named_barrier_arrive(1, 128);
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      device::named_barrier_wait(1, 128);
      out[i * 64 + t - 64] = buffer[127 - t];
      if (i < 3) device::named_barrier_arrive(2, 128);
    }
  }
}
inline void named_barrier_case(Inputs& in, Output& out) {
  Array<int> x(256), y(256);
  for (int& v : x.host) v = static_cast<int>(in.bits());
  out.check(launch(hand_over, {.block = 128}, nullptr, x.upload(), y.upload()));
  out.add(y);
}

template <class T> __global__ void mma_fragments(const uint32_t* a, const uint32_t* b, float* d) {
  const int t = threadIdx.x;
  uint32_t fa[4], fb[2];
  float acc[4];
  for (int i = 0; i < 4; ++i) fa[i] = a[t * 4 + i];
  for (int i = 0; i < 2; ++i) fb[i] = b[t * 2 + i];
  for (int i = 0; i < 4; ++i) acc[i] = d[t * 4 + i];
  device::mma_m16n8k16<T>(acc, fa, fb);
  for (int i = 0; i < 4; ++i) d[t * 4 + i] = acc[i];
}
template <class T, bool integers> void mma_case(Inputs& in, Output& out) {
  Array<uint32_t> a(128), b(64);
  Array<float> d(128);
  const auto element = [&] { return integers ? static_cast<float>(in.integer(-8, 8)) : in.uniform(); };
  const auto pair = [&](Array<uint32_t>& x) {
    Array<float> v(2 * x.host.size());
    for (float& f : v.host) f = element();
    for (size_t i = 0; i < x.host.size(); ++i) {
      const auto bits = [&](float f) -> uint32_t {  // exactly representable values: no rounding on the way
        uint32_t u;
        if (std::is_same_v<T, bfloat16>) {
          std::memcpy(&u, &f, 4);
          return u >> 16;
        }
        const _Float16 h = static_cast<_Float16>(f);
        uint16_t s;
        std::memcpy(&s, &h, 2);
        return s;
      };
      x.host[i] = bits(v.host[2 * i]) | bits(v.host[2 * i + 1]) << 16;
    }
  };
  pair(a);
  pair(b);
  for (float& f : d.host) f = element();
  out.check(launch(mma_fragments<T>, {.block = 32}, nullptr, a.upload(), b.upload(), d.upload()));
  if (integers)
    out.add(d);
  else
    out.add_approximate(d);
}

template <int Matrices, bool Transposed>
__global__ void move_matrices(const uint16_t* x, const int* rows, uint32_t* loaded, uint16_t* stored) {
  struct alignas(16) Row {
    uint16_t at[8];
  };
  WARPSMITH_SHARED(Row, tile, 64);
  const int t = threadIdx.x;
  for (int r = t; r < 64; r += 32)
    for (int i = 0; i < 8; ++i) tile[r].at[i] = x[r * 8 + i];
  __syncwarp(0xffffffffu);
  uint32_t registers[Matrices];
  device::load_matrix<Transposed>(registers, tile + rows[t]);
  for (int i = 0; i < Matrices; ++i) loaded[t * Matrices + i] = registers[i];
  __syncwarp(0xffffffffu);
  device::store_matrix<Transposed>(tile + 32 + t, registers);
  __syncwarp(0xffffffffu);
  for (int r = t; r < 64; r += 32)
    for (int i = 0; i < 8; ++i) stored[r * 8 + i] = tile[r].at[i];
}
template <int Matrices, bool Transposed> void matrix_case(Inputs& in, Output& out) {
  Array<uint16_t> x(512), stored(512);
  Array<int> rows(32);
  Array<uint32_t> loaded(32 * Matrices);
  for (uint16_t& v : x.host) v = static_cast<uint16_t>(in.bits());
  for (int& v : rows.host) v = in.integer(0, 63);
  out.check(launch(move_matrices<Matrices, Transposed>, {.block = 32}, nullptr, x.upload(), rows.upload(),
                   loaded.upload(), stored.upload()));
  out.add(loaded);
  out.add(stored);
}

using device::Cache;
EXACT("load_store.2", 60, (vector_case<uint16_t, 1, Cache::keep>));
EXACT("load_store.4", 60, (vector_case<uint16_t, 2, Cache::streaming>));
EXACT("load_store.8", 60, (vector_case<uint32_t, 2, Cache::keep>));
EXACT("load_store.16", 60, (vector_case<uint32_t, 4, Cache::streaming>));
EXACT("shuffle", 400, shuffle_case);
EXACT("byte_perm", 100, byte_perm_case);
EXACT("block_reduce.128", 200, reduce_case<128>);
EXACT("block_reduce.96", 200, reduce_case<96>);
EXACT("block_reduce.1024", 100, reduce_case<1024>);
EXACT("named_barrier", 100, named_barrier_case);
EXACT("mma.float16", 300, (mma_case<float16, true>));
EXACT("mma.bfloat16", 300, (mma_case<bfloat16, true>));
APPROXIMATE("mma.rounding", 50, 1e-5, 1e-5, (mma_case<float16, false>));
EXACT("load_store_matrix.x1", 150, (matrix_case<1, false>));
EXACT("load_store_matrix.x2", 150, (matrix_case<2, false>));
EXACT("load_store_matrix.x4", 150, (matrix_case<4, false>));
EXACT("load_store_matrix.x1.transposed", 150, (matrix_case<1, true>));
EXACT("load_store_matrix.x2.transposed", 150, (matrix_case<2, true>));
EXACT("load_store_matrix.x4.transposed", 150, (matrix_case<4, true>));

}  // namespace warpsmith::conformance
