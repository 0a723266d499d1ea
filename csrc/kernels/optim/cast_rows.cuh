#pragma once
#include <cstdint>

#include "device/packed.h"
#include "device/reduce.h"
#include "kernels/optim/optim_config.h"
#include "tiles/float8_cast.cuh"

// Casts the rows of a chunk to 8-bit floats behind the step that has stored them: the bits that quantize_fp8(weight,
// "row") gives. Reads the chunk twice, from the caches: its stores were the last. Writes a byte an element and 4 bytes
// a row. The step itself keeps no row: it holds one vector a thread at a time.
namespace warpsmith::optim {

static_assert(kOptimCastRows == kOptimThreads, "a thread clears the maximum of a row, and writes its scale");

// Of the block's chunk, if p.casts has its tensor. Called by the whole block; the barriers also order the stores of all
// threads before the loads of others. It reads the table once more: what lived across the step would cost it registers.
template <class T> __device__ __forceinline__ void cast_rows(const OptimParams& p) {
  constexpr int N = 16 / sizeof(T);
  WARPSMITH_SHARED(float, most, kOptimCastRows);
  const ListChunk at = p.chunks[blockIdx.x];
  const Float8Rows to = p.casts[at.tensor];
  if (!to.data) return;
  const OptimTensor& t = p.tensors[at.tensor];
  const int64_t begin = int64_t{at.chunk} * t.chunk_elems, first_row = begin / t.row_elems;
  const T* const param = static_cast<const T*>(t.param) + begin;
  const int elems = static_cast<int>(t.numel - begin < t.chunk_elems ? t.numel - begin : t.chunk_elems);
  const unsigned row = static_cast<unsigned>(t.row_elems);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  most[thread] = 0.0f;
  __syncthreads();
  const auto load = [&](int i, float (&values)[N]) {
    device::unpack<T>(values, device::load(device::packed_at<T, N>(param, i)));
  };
  // Magnitudes order as their bits do, so no order of the threads shows. A warp within a row raises its maximum once.
  const bool within = row % (32 * N) == 0;
  for (int first = (thread - lane) * N; first < elems; first += kOptimThreads * N) {
    const int i = first + lane * N;
    float amax = 0.0f;
    if (i < elems) {
      float values[N];
      load(i, values);
#pragma unroll
      for (int k = 0; k < N; ++k) amax = fmaxf(amax, quantize::finite_magnitude(values[k]));
    }
    if (within) amax = device::group_max<32>(amax);
    if (within ? lane == 0 : i < elems)
      atomicMax(reinterpret_cast<unsigned*>(most + static_cast<unsigned>(i) / row), __float_as_uint(amax));
  }
  __syncthreads();
  const auto scale_of = [&](int r) { return scale_of_amax(most[r], kE4m3Limits, true); };
  if (thread < elems / t.row_elems) device::store(to.scale + first_row + thread, scale_of(thread));
  uint8_t* const data = to.data + begin;
  bool odd = false;
  for (int i = thread * N; i < elems; i += kOptimThreads * N) {
    float values[N];
    load(i, values);
    device::Vector<uint32_t, N / 4> bytes;
    const float scale = scale_of(static_cast<int>(static_cast<unsigned>(i) / row));
    odd |= quantize::cast<float8_e4m3, true>(values, {scale, reciprocal_of(scale)}, bytes);
    device::store(reinterpret_cast<device::Vector<uint32_t, N / 4>*>(data + i), bytes);
  }
  if (!odd) return;
  quantize::Counts counts;  // nobody wants them
#pragma unroll 1
  for (int i = thread * N; i < elems; i += kOptimThreads * N) {  // elements that are not finite: each alone
    const float scale = scale_of(static_cast<int>(static_cast<unsigned>(i) / row));
#pragma unroll 1
    for (int k = i; k < i + N; ++k)
      device::store(data + k, quantize::repair<float8_e4m3>(device::to_float(device::load(param + k)), scale, counts));
  }
}

}  // namespace warpsmith::optim
