#pragma once
#include "conformance.h"
#include "device/async_copy.h"
#include "device/cluster.h"
#include "device/fence.h"
#include "device/tensor_copy.h"
#include "device/vector.h"

// Asynchronous copies of every kind, mbarriers, clusters.
namespace warpsmith::conformance {

using device::Mbarrier;
using device::Swizzle;

template <int Bytes> __global__ void copy_async_tiles(const uint32_t* x, const int* valid, uint32_t* y) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  constexpr int kWords = Bytes / 4;
  const int t = threadIdx.x;
  for (int i = 0; i < 2; ++i) {
    device::copy_async<Bytes>(memory + (i * 64 + t) * Bytes, x + (i * 64 + t) * kWords, valid[i * 64 + t] != 0);
    device::copy_async_commit();
  }
  device::copy_async_wait<1>();
  __syncthreads();
  const auto* words = reinterpret_cast<const uint32_t*>(memory);
  for (int i = 0; i < kWords; ++i) y[t * kWords + i] = words[(63 - t) * kWords + i];
  device::copy_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < kWords; ++i) y[(64 + t) * kWords + i] = words[(127 - t) * kWords + i];
}
template <int Bytes> void copy_async_case(Inputs& in, Output& out) {
  Array<uint32_t> x(32 * Bytes), y(32 * Bytes);
  Array<int> valid(128);
  for (uint32_t& v : x.host) v = static_cast<uint32_t>(in.bits());
  for (int& v : valid.host) v = in.integer(0, 3) > 0;
  const LaunchConfig config{.block = 64, .dynamic_shared_bytes = 128 * Bytes};
  out.check(launch(copy_async_tiles<Bytes>, config, nullptr, x.upload(), valid.upload(), y.upload()));
  out.add(y);
}

// Linear loads through a ring of two buffers, then stores and additions of what was loaded.
static __global__ void bulk_tiles(const float* x, float* stored, float* added, int tiles, int floats) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 2);
  auto* buffer = reinterpret_cast<float*>(memory);
  const int t = threadIdx.x;
  if (t == 0) {
    for (int s = 0; s < 2; ++s) device::mbarrier_init(full + s, 1);
    device::mbarrier_init_fence();
  }
  __syncthreads();
  device::Ring<2> ring;
  for (int i = 0; i < tiles; ++i, ring.next()) {
    float* tile = buffer + ring.stage * floats;
    if (t == 0) {
      device::bulk_wait_read<1>();
      device::mbarrier_arrive_expect(full + ring.stage, floats * 4);
      device::bulk_load(tile, x + i * floats, floats * 4, full + ring.stage);
    }
    device::mbarrier_wait(full + ring.stage, ring.parity);
    for (int k = t; k < floats; k += 64) tile[k] += 1;
    device::fence_async_shared();
    __syncthreads();
    if (t == 0) {
      device::bulk_store(stored + i * floats, tile, floats * 4);
      device::bulk_add(added, tile, floats * 4);
      device::bulk_commit();
    }
  }
  if (t == 0) device::bulk_wait<0>();
}
inline void bulk_case(Inputs& in, Output& out) {
  const int tiles = in.integer(1, 6), floats = 4 * in.integer(1, 64);
  const auto count = static_cast<size_t>(tiles * floats);
  Array<float> x(count), stored(count), added(static_cast<size_t>(floats));
  for (float& v : x.host) v = static_cast<float>(in.integer(-100, 100));
  const LaunchConfig config{.block = 64, .dynamic_shared_bytes = static_cast<size_t>(floats) * 8};
  out.check(launch(bulk_tiles, config, nullptr, x.upload(), stored.upload(), added.upload(), tiles, floats));
  out.add(stored);
  out.add(added);
}

// One box: loaded, its image in shared memory written out, and stored or added at other coordinates.
struct Corner {
  int at[5];
};
template <int Rank> __global__ void move_box(const __grid_constant__ TensorMap from,
                                             const __grid_constant__ TensorMap to, Corner source, Corner target,
                                             int bytes, int add, unsigned char* image) {
  WARPSMITH_DYNAMIC_SHARED(buffer);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  if (threadIdx.x == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    device::mbarrier_arrive_expect(full, bytes);
    int a[Rank], b[Rank];
    for (int i = 0; i < Rank; ++i) {
      a[i] = source.at[i];
      b[i] = target.at[i];
    }
    if constexpr (Rank == 2) device::tensor_prefetch(&from, a);
    device::tensor_load(buffer, &from, full, a);
    device::mbarrier_wait(full, 0);
    if (add)
      device::tensor_add(&to, buffer, b);
    else
      device::tensor_store(&to, buffer, b);
    device::bulk_commit();
  }
  __syncthreads();
  device::mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < bytes; i += 32) image[i] = buffer[i];
  if (threadIdx.x == 0) device::bulk_wait<0>();
}

template <class T> constexpr Dtype kDtypeOf = Dtype::float32;
template <> constexpr Dtype kDtypeOf<float16> = Dtype::float16;
template <> constexpr Dtype kDtypeOf<bfloat16> = Dtype::bfloat16;
inline void set_small_integer(float& v, int i) { v = static_cast<float>(i); }
inline void set_small_integer(float16& v, int i) {
  const _Float16 h = static_cast<_Float16>(i);
  std::memcpy(&v, &h, 2);
}
inline void set_small_integer(bfloat16& v, int i) {
  const auto f = static_cast<float>(i);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  v.bits = static_cast<uint16_t>(u >> 16);
}

template <class T, int Rank, Swizzle kSwizzle> void box_case(Inputs& in, Output& out) {
  constexpr int kPer16 = 16 / static_cast<int>(sizeof(T));
  TensorMapSpec spec{.dtype = kDtypeOf<T>, .rank = Rank, .swizzle = kSwizzle};
  size_t count = 1, bytes = sizeof(T);
  Corner source{}, target{};
  for (int i = 0; i < Rank; ++i) {
    spec.strides_bytes[i] = static_cast<int64_t>(count * sizeof(T));
    spec.sizes[i] = i == 0 ? kPer16 * in.integer(1, 12) : in.integer(1, Rank > 3 ? 4 : 12);
    spec.box[i] = i > 0                       ? in.integer(1, Rank > 3 ? 3 : 10)
                  : kSwizzle == Swizzle::none ? kPer16 * in.integer(1, 4)
                                              : device::swizzle_span_bytes(kSwizzle) / static_cast<int>(sizeof(T));
    count *= static_cast<size_t>(spec.sizes[i]);
    bytes *= static_cast<size_t>(spec.box[i]);
    const int step = i == 0 ? kPer16 : 1;  // the innermost coordinate is a multiple of 16 bytes
    source.at[i] = step * in.integer(-3, static_cast<int>(spec.sizes[i]) / step);
    target.at[i] =
        step * in.integer(0, static_cast<int>(spec.sizes[i]) / step);  // stores may not begin before the tensor
  }
  Array<T> x(count), y(count);
  Array<unsigned char> image(bytes);
  for (T& v : x.host) set_small_integer(v, in.integer(-60, 60));
  for (T& v : y.host) set_small_integer(v, in.integer(-60, 60));
  TensorMap from, to;
  spec.base = x.upload();
  out.check(make_tensor_map(from, spec));
  spec.base = y.upload();
  out.check(make_tensor_map(to, spec));
  const LaunchConfig config{.block = 32, .dynamic_shared_bytes = bytes};
  out.check(launch(move_box<Rank>, config, nullptr, from, to, source, target, static_cast<int>(bytes), in.integer(0, 1),
                   image.upload()));
  out.add(y);
  out.add(image);
}

// Every block loads half a tile for all blocks of its cluster and adds up what its neighbours hold.
static __global__ void share_tiles(const __grid_constant__ TensorMap map, float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  WARPSMITH_SHARED(Mbarrier, told, 1);
  const auto* tile = reinterpret_cast<const float*>(memory);
  const unsigned rank = device::cluster_rank(), blocks = device::cluster_size();
  const int t = threadIdx.x;
  if (t == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init(told, static_cast<int>(blocks));
    device::mbarrier_init_fence();
    device::mbarrier_arrive_expect(full, 128 * static_cast<int>(blocks));
  }
  device::cluster_barrier();
  if (t == 0)
    device::tensor_load_multicast(memory + 128 * rank, &map, full, static_cast<uint16_t>((1u << blocks) - 1),
                                  {0, static_cast<int>(rank + blockIdx.x / blocks * blocks)});
  device::mbarrier_wait(full, 0);
  float sum = 0;
  for (unsigned r = 0; r < blocks; ++r)
    sum += tile[r * 32 + t] + device::cluster_shared(const_cast<float*>(tile), r)[t];
  if (t == 0)
    for (unsigned r = 0; r < blocks; ++r) device::mbarrier_arrive_remote(device::cluster_shared(told, r));
  device::mbarrier_wait(told, 0);
  out[blockIdx.x * 32 + t] = sum;
  device::cluster_barrier();
}
template <int Blocks> void cluster_case(Inputs& in, Output& out) {
  Array<float> x(32 * 2 * Blocks), y(32 * 2 * Blocks);
  for (float& v : x.host) v = static_cast<float>(in.integer(-100, 100));
  TensorMap map;
  out.check(make_tensor_map(map, {.base = x.upload(),
                                  .dtype = Dtype::float32,
                                  .rank = 2,
                                  .sizes = {32, 2 * Blocks},
                                  .strides_bytes = {0, 128},
                                  .box = {32, 1}}));
  const LaunchConfig config{.grid = 2 * Blocks, .block = 32, .dynamic_shared_bytes = 128 * Blocks, .cluster = Blocks};
  out.check(launch(share_tiles, config, nullptr, map, y.upload()));
  out.add(y);
}

// Every block gives its buffer back to every block; then one of them loads the next tile into all buffers.
static __global__ void load_twice(const __grid_constant__ TensorMap map, float* out) {
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(Mbarrier, full, 1);
  WARPSMITH_SHARED(Mbarrier, empty, 1);
  const unsigned rank = device::cluster_rank(), blocks = device::cluster_size();
  const int t = threadIdx.x;
  if (t == 0) {
    device::mbarrier_init(full, 1);
    device::mbarrier_init(empty, static_cast<int>(blocks));
    device::mbarrier_init_fence();
  }
  device::cluster_barrier();
  float sum = 0;
  for (unsigned turn = 0; turn < 3; ++turn) {
    if (turn > 0) device::mbarrier_wait(empty, (turn - 1) & 1);
    if (t == 0) {
      device::mbarrier_arrive_expect(full, 128);
      if (turn % blocks == rank)
        device::tensor_load_multicast(memory, &map, full, static_cast<uint16_t>((1u << blocks) - 1),
                                      {0, static_cast<int>(turn + 3 * (blockIdx.x / blocks))});
    }
    device::mbarrier_wait(full, turn & 1);
    sum = 2 * sum + reinterpret_cast<const float*>(memory)[t];
    __syncwarp(0xffffffffu);
    device::mbarrier_arrive_cluster_if(t < static_cast<int>(blocks), empty, t < static_cast<int>(blocks) ? t : 0);
  }
  out[blockIdx.x * 32 + t] = sum;
  device::cluster_barrier();
}
template <int Blocks> void arrive_cluster_case(Inputs& in, Output& out) {
  Array<float> x(32 * 2 * 3), y(32 * 2 * Blocks);
  for (float& v : x.host) v = static_cast<float>(in.integer(-100, 100));
  TensorMap map;
  out.check(make_tensor_map(map, {.base = x.upload(),
                                  .dtype = Dtype::float32,
                                  .rank = 2,
                                  .sizes = {32, 6},
                                  .strides_bytes = {0, 128},
                                  .box = {32, 1}}));
  const LaunchConfig config{.grid = 2 * Blocks, .block = 32, .dynamic_shared_bytes = 128, .cluster = Blocks};
  out.check(launch(load_twice, config, nullptr, map, y.upload()));
  out.add(y);
}

// A first barrier that orders nothing but that every block has started, then values written into the neighbour's
// memory.
static __global__ void push_to_neighbour(const float* x, float* y) {
  WARPSMITH_SHARED(float, received, 32);
  const unsigned rank = device::cluster_rank(), blocks = device::cluster_size();
  const int t = threadIdx.x;
  device::cluster_arrive_relaxed();
  device::cluster_wait();
  device::cluster_shared(received, (rank + 1) % blocks)[t] = x[blockIdx.x * 32 + t];
  device::cluster_barrier();
  y[blockIdx.x * 32 + t] = received[t];
}
template <int Blocks> void relaxed_cluster_case(Inputs& in, Output& out) {
  Array<float> x(32 * 2 * Blocks), y(32 * 2 * Blocks);
  for (float& v : x.host) v = static_cast<float>(in.integer(-100, 100));
  const LaunchConfig config{.grid = 2 * Blocks, .block = 32, .cluster = Blocks};
  out.check(launch(push_to_neighbour, config, nullptr, static_cast<const float*>(x.upload()), y.upload()));
  out.add(y);
}

using Sixteen = device::Vector<float, 4>;

// Every block sends four numbers to every block of its cluster, which waits for the bytes of all.
static __global__ void send_to_all(const float* x, float* y) {
  WARPSMITH_SHARED(Sixteen, received, 8);
  WARPSMITH_SHARED(device::Mbarrier, all_in, 1);
  const unsigned rank = device::cluster_rank(), blocks = device::cluster_size();
  const int t = threadIdx.x;
  if (t == 0) {
    device::mbarrier_init(all_in, 1);
    device::mbarrier_init_fence();
  }
  __syncwarp(0xffffffffu);
  device::cluster_arrive_relaxed();
  device::cluster_wait();
  if (t == 0) device::mbarrier_arrive_expect(all_in, static_cast<int>(blocks) * 16);
  if (t < static_cast<int>(blocks)) {
    Sixteen mine;
    for (int i = 0; i < 4; ++i) mine.at[i] = x[blockIdx.x * 4 + i] + static_cast<float>(t);
    device::store_async(device::cluster_shared(received + rank, static_cast<unsigned>(t)), mine,
                        device::cluster_shared(all_in, static_cast<unsigned>(t)));
  }
  device::mbarrier_wait(all_in, 0);
  if (t < static_cast<int>(blocks))
    for (int i = 0; i < 4; ++i) y[(blockIdx.x * blocks + t) * 4 + i] = received[t].at[i];
}
template <int Blocks> void store_async_case(Inputs& in, Output& out) {
  Array<float> x(4 * 2 * Blocks), y(4 * 2 * Blocks * Blocks);
  for (float& v : x.host) v = static_cast<float>(in.integer(-100, 100));
  const LaunchConfig config{.grid = 2 * Blocks, .block = 32, .cluster = Blocks};
  out.check(launch(send_to_all, config, nullptr, static_cast<const float*>(x.upload()), y.upload()));
  out.add(y);
}

EXACT("copy_async.4", 200, copy_async_case<4>);
EXACT("copy_async.8", 200, copy_async_case<8>);
EXACT("copy_async.16", 200, copy_async_case<16>);
EXACT("bulk_copy", 400, bulk_case);
EXACT("tensor_copy.1d", 200, (box_case<float, 1, Swizzle::none>));
EXACT("tensor_copy.2d.float32", 200, (box_case<float, 2, Swizzle::none>));
EXACT("tensor_copy.2d.float16.swizzle32", 200, (box_case<float16, 2, Swizzle::bytes32>));
EXACT("tensor_copy.2d.bfloat16.swizzle64", 200, (box_case<bfloat16, 2, Swizzle::bytes64>));
EXACT("tensor_copy.2d.bfloat16.swizzle128", 200, (box_case<bfloat16, 2, Swizzle::bytes128>));
EXACT("tensor_copy.2d.float32.swizzle128", 200, (box_case<float, 2, Swizzle::bytes128>));
EXACT("tensor_copy.3d", 200, (box_case<bfloat16, 3, Swizzle::bytes128>));
EXACT("tensor_copy.4d", 200, (box_case<float16, 4, Swizzle::bytes64>));
EXACT("tensor_copy.5d", 200, (box_case<bfloat16, 5, Swizzle::bytes128>));
EXACT("cluster.2", 150, cluster_case<2>);
EXACT("cluster.4", 150, cluster_case<4>);
EXACT("cluster.arrive_if", 150, arrive_cluster_case<2>);
EXACT("cluster.arrive_relaxed", 150, relaxed_cluster_case<4>);
EXACT("store_async.2", 150, store_async_case<2>);
EXACT("store_async.8", 150, store_async_case<8>);

}  // namespace warpsmith::conformance
