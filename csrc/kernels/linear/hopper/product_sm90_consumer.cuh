#pragma once
#include "device/convert.h"
#include "device/fence.h"
#include "device/matrix_access.h"
#include "device/named_barrier.h"
#include "device/vector.h"
#include "device/wgmma.h"
#include "kernels/linear/hopper/product_sm90_pipeline.cuh"
#include "tiles/activation_math.cuh"

// The consumer warpgroups of a Hopper product (product_sm90.cuh): sums and epilogues.
namespace warpsmith::linear {

// Calls use.template operator()<F>() with the function of an activation (common/activation_functions.h). The branch is
// taken once for 16 values of a thread.
template <class T, class Use> __device__ __forceinline__ void with_activation(LinearActivation activation, Use&& use) {
  using Math = activation::DeviceMath<T>;
  if (activation == LinearActivation::gelu_tanh)
    use.template operator()<activation::GeluTanh<Math>>();
  else if (activation == LinearActivation::gelu)
    use.template operator()<activation::Gelu<Math>>();
  else if (activation == LinearActivation::silu)
    use.template operator()<activation::Silu<Math>>();
  else
    use.template operator()<activation::Relu<Math>>();
}

// A warpgroup owns half of the tile's rows: kBlocks blocks of 64, of which each warp has 16. A panel is 16 rows by 64
// columns of a warp; its halves, of 32 columns, are 8 words of two elements a thread, in the order of wgmma.
template <class T, ProductKernel kernel> struct ProductConsumer {
  static constexpr ProductTile tile = kernel.tile;
  static constexpr ProductEpilogue kEpilogue = kernel.epilogue;
  static constexpr int kBlocks = tile.rows / 128, kPanels = tile.columns / kPanelColumns;
  static constexpr int kParts = 2 * kBlocks * kPanels;                                // halves of panels in a tile
  static constexpr int kSteps = kernel.gated() ? 3 * kBlocks * kPanels / 2 : kParts;  // in which it is stored
  static constexpr int kHalfWords = 8;
  static constexpr int kNothing = 1 << 20;  // behind the last step of any tile
  static constexpr device::Major kA = kernel.layout == ProductLayout::tn ? device::Major::mn : device::Major::k;
  static constexpr device::Major kB = kernel.layout == ProductLayout::nt ? device::Major::k : device::Major::mn;
  static_assert(kernel.defers() || !kernel.computes());

  const ProductArguments& p;
  const ProductShared<kernel>& shared;
  const ProductMaps& maps;
  const TensorMap* const out;
  const ProductPlace<kernel> place;
  const int group, lane, warp;  // warp: of the eight
  unsigned char* const staging;
  uint32_t lane_offset;  // in a staging buffer, of the row that this lane gives to store_matrix
  Ring<tile.stages> ring;
  float acc[kBlocks][tile.columns / 2];
  uint32_t finished[kernel.defers() ? kParts * kHalfWords : 2 * kHalfWords];  // or a panel at a time
  TilePlace now{}, before{};  // this warp's first row and column of the tile in acc, and of the finished one
  int buffer = 0;
  unsigned input_parity = 0;  // a bit a buffer

  __device__ __forceinline__ ProductConsumer(const ProductArguments& arguments, const ProductShared<kernel>& memory,
                                             const ProductMaps& tensors, int begun, int warpgroup)
      : p(arguments),
        shared(memory),
        maps(tensors),
        out(&tensors.out),
        place(arguments, begun),
        group(warpgroup),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0) - 4),
        staging(memory.staging(warp)),
        lane_offset(
            device::swizzled(Swizzle::bytes128, static_cast<uint32_t>(lane % 16 * kRowBytes + lane / 16 * 16))) {}

  // ---- products

  __device__ __forceinline__ void multiply(int stage, bool accumulate) {
    const auto descriptor = [](device::Major major, const unsigned char* at) {
      return device::wgmma_descriptor(Swizzle::bytes128, at, major == device::Major::mn ? kPanelBytes : 16, 1024);
    };
    const auto bytes = [](device::Major major) { return major == device::Major::mn ? 16 * kRowBytes : 32; };  // of 16 k
    const uint64_t a = descriptor(kA, shared.a(stage) + group * kBlocks * kPanelBytes),
                   b = descriptor(kB, shared.b(stage));
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageInner / 16; ++k)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
        device::wgmma<T, tile.columns, kA, kB>(acc[m], device::advance(a, m * kPanelBytes + k * bytes(kA)),
                                               device::advance(b, k * bytes(kB)), k > 0 || accumulate);
    device::wgmma_commit();
  }
  // Gives a stage back to the loaders of all blocks that copy into it.
  __device__ __forceinline__ void release(int stage) {
    device::mbarrier_arrive_cluster_if(lane < tile.cluster(), shared.empty + stage,
                                       lane < tile.cluster() ? lane : place.rank);
  }

  // ---- stores: each warp for itself, from two buffers in turn

  __device__ __forceinline__ void wait_for_stores() {
    if (lane == 0) device::bulk_wait_read<0>();
    __syncwarp(0xffffffffu);
  }
  __device__ __forceinline__ unsigned char* take_buffer() {
    if (lane == 0) device::bulk_wait_read<kWarpBuffers - 1>();
    __syncwarp(0xffffffffu);
    unsigned char* taken = staging + buffer * kBufferBytes;
    buffer ^= 1;
    return taken;
  }
  // This warp's part of the ring's memory behind the last product.
  static constexpr int kWarpBytes = tile.stages * tile.stage_bytes() / kConsumerWarps / 1024 * 1024;
  __device__ __forceinline__ unsigned char* ring_memory() const {
    device::named_barrier_wait(1, 256);  // the other warpgroup reads the ring no more
    return shared.memory + warp * kWarpBytes;
  }
  // Half a panel into a staging buffer.
  __device__ __forceinline__ void stage(unsigned char* to, int half, const uint32_t* w) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t four[4] = {w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3]};
      device::store_matrix(to + (lane_offset ^ (2 * half + j) * 32), four);
    }
  }
  // 16 x 32 floats.
  __device__ __forceinline__ void stage_floats(unsigned char* to, const float* v) {
    const int row = lane / 4, pair = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // columns 8 (i / 2) and on, rows 0 to 7 and 8 to 15
      const int r = row + i % 2 * 8;
      const uint32_t at = device::swizzled(Swizzle::bytes128, r * kRowBytes + i / 2 * 32 + pair * 8);
      float two[2] = {v[2 * i], v[2 * i + 1]};
      device::hold(two);
      device::store_vector(reinterpret_cast<float*>(to + at), device::Vector<float, 2>{two[0], two[1]});
    }
  }
  template <class Stores> __device__ __forceinline__ void send(Stores&& stores) {
    device::fence_async_shared();
    __syncwarp(0xffffffffu);
    if (lane == 0) {
      stores();
      device::bulk_commit();
    }
    __syncwarp(0xffffffffu);
  }

  // ---- epilogues of tiles that wait in registers

  static __device__ __forceinline__ int panel_row(int panel) { return panel / kPanels * 64; }
  static __device__ __forceinline__ int panel_column(int panel) { return panel % kPanels * kPanelColumns; }

  // Loads panel `panel` of z for the tile at `at` into its staging buffer, where its result will replace it.
  __device__ __forceinline__ void fetch(int panel, const TilePlace& at) {
    if (lane == 0) {
      Mbarrier* full = shared.input + warp * kWarpBuffers + panel % kWarpBuffers;
      device::mbarrier_arrive_expect(full, kBufferBytes);
      device::tensor_load(staging + panel % kWarpBuffers * kBufferBytes, &maps.z, full,
                          {at.column + panel_column(panel), at.row + panel_row(panel)});
    }
    __syncwarp(0xffffffffu);
  }
  // Column sums of a warp's 16 rows. v[i]: this lane's value of column 8 (i / 4) + 2 (lane % 4) + i % 2 of the half,
  // rows lane / 4 + 8 (i / 2 % 2).
  __device__ __forceinline__ void store_sums(const float (&v)[2 * kHalfWords], int row, int column) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = v[i / 2 * 4 + i % 2] + v[i / 2 * 4 + i % 2 + 2];
    // Each exchange halves the columns that a lane holds: lane / 4 says which one is left.
#pragma unroll
    for (int width = 4; width > 0; width /= 2) {
      const bool upper = lane & 4 * width;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + width], 4 * width);
        sum[i] = (upper ? sum[i + width] : sum[i]) + other;
      }
    }
    const int which = lane / 4, at = column + which / 2 * 8 + lane % 4 * 2 + which % 2;
    if (row < p.rows && at < p.columns) device::store(p.partials + int64_t{row / 16} * p.columns + at, sum[0]);
  }

  // Half a panel: 32 columns of 16 rows. Its sums are w, rounded.
  __device__ __forceinline__ void finish_half(int panel, int half, uint32_t (&w)[kHalfWords]) {
    const int row = before.row + panel_row(panel), column = before.column + panel_column(panel);
    if constexpr (kernel.reads()) {
      const int which = panel % kWarpBuffers;
      unsigned char* at = staging + which * kBufferBytes;
      if (half == 0) {
        device::mbarrier_wait(shared.input + warp * kWarpBuffers + which, input_parity >> which & 1);
        input_parity ^= 1u << which;
      }
      uint32_t x[kHalfWords];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t four[4];
        device::load_matrix(four, at + (lane_offset ^ (2 * half + j) * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * j + i] = four[i];
      }
      if constexpr (kEpilogue == ProductEpilogue::residual) {
#pragma unroll
        for (int i = 0; i < kHalfWords; ++i)
          w[i] = device::pack<T>(device::low_half<T>(w[i]) + device::low_half<T>(x[i]),
                                 device::high_half<T>(w[i]) + device::high_half<T>(x[i]));
      } else {
        float g[2 * kHalfWords];
        with_activation<T>(p.activation, [&]<class F>() {
#pragma unroll
          for (int i = 0; i < kHalfWords; ++i) {
            g[2 * i] = F(device::low_half<T>(x[i])).times_derivative(device::low_half<T>(w[i]));
            g[2 * i + 1] = F(device::high_half<T>(x[i])).times_derivative(device::high_half<T>(w[i]));
          }
        });
#pragma unroll
        for (int i = 0; i < kHalfWords; ++i) w[i] = device::pack<T>(g[2 * i], g[2 * i + 1]);
        if (p.partials != nullptr) store_sums(g, row, column + half * 32);
      }
      __syncwarp(0xffffffffu);
      stage(at, half, w);
      if (half == 0) return;
      send([&] { device::tensor_store(out, at, {column, row}); });
      if (panel > 0 && panel - 1 + kWarpBuffers < kParts / 2) {  // the next panel, where the last one was
        if (lane == 0) device::bulk_wait_read<1>();
        fetch(panel - 1 + kWarpBuffers, before);
      }
    } else {
      static_assert(kEpilogue == ProductEpilogue::activate);
      unsigned char* const result = staging + kBufferBytes;
      if (half == 0) wait_for_stores();
      stage(staging, half, w);
      with_activation<T>(p.activation, [&]<class F>() {
#pragma unroll
        for (int i = 0; i < kHalfWords; ++i)
          w[i] = device::pack<T>(F(device::low_half<T>(w[i])).value(), F(device::high_half<T>(w[i])).value());
      });
      stage(result, half, w);
      if (half == 1)
        send([&] {
          if (p.keep) device::tensor_store(&maps.z, staging, {column, row});
          device::tensor_store(out, result, {column, row});
        });
    }
  }
  // `gated`: words of both sums for a part of out.
  __device__ __forceinline__ void choose(int part, uint32_t (&gate)[kHalfWords], uint32_t (&up)[kHalfWords]) const {
#pragma unroll
    for (int i = 0; i < kParts / 2; ++i)
      if (part == i) {
#pragma unroll
        for (int j = 0; j < kHalfWords; ++j) {
          gate[j] = finished[i * kHalfWords + j];
          up[j] = finished[(kParts / 2 + i) * kHalfWords + j];
        }
      }
  }
  // `gated`: a panel of out in three steps, of which the first stores both sums, and the others compute a half each.
  __device__ __forceinline__ void gate_step(int panel, int step) {
    const int row = before.row + panel_row(panel), column = before.column + panel_column(panel);
    uint32_t gate[kHalfWords], up[kHalfWords];
    if (step == 0) {
      if (!p.keep) return;
      wait_for_stores();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        choose(2 * panel + half, gate, up);
        stage(staging, half, gate);
        stage(staging + kBufferBytes, half, up);
      }
      send([&] {
        device::tensor_store(&maps.z, staging, {column, row});
        device::tensor_store(&maps.up_z, staging + kBufferBytes, {column, row});
      });
      return;
    }
    choose(2 * panel + step - 1, gate, up);
    with_activation<T>(p.activation, [&]<class F>() {
#pragma unroll
      for (int i = 0; i < kHalfWords; ++i)
        gate[i] = device::pack<T>(F(device::low_half<T>(gate[i])).value() * device::low_half<T>(up[i]),
                                  F(device::high_half<T>(gate[i])).value() * device::high_half<T>(up[i]));
    });
    if (step == 1) wait_for_stores();
    stage(staging, step - 1, gate);
    if (step == 2) send([&] { device::tensor_store(out, staging, {column, row}); });
  }
  // A panel of an epilogue without arithmetic, in two steps, each of which ends before the products of a stage do.
  __device__ __forceinline__ void stage_panel(const uint32_t* w) {
    unsigned char* const to = take_buffer();
    stage(to, 0, w);
    stage(to, 1, w + kHalfWords);
    device::fence_async_shared();
  }
  __device__ __forceinline__ void send_panel(int panel) {
    __syncwarp(0xffffffffu);
    if (lane == 0) {
      device::tensor_store(out, staging + (buffer ^ 1) * kBufferBytes,
                           {before.column + panel_column(panel), before.row + panel_row(panel)});
      device::bulk_commit();
    }
    __syncwarp(0xffffffffu);
  }
  // The step of the finished tile that is due, a part but for `gated`; nothing from kSteps on.
  __device__ __forceinline__ void store_part(int part) {
    if constexpr (kernel.gated()) {
      if (part < kSteps) gate_step(part / 3, part % 3);
    } else if constexpr (kernel.defers()) {
      if (part >= kParts) return;
      constexpr int kWords = kernel.computes() ? kHalfWords : 2 * kHalfWords;
      const int chosen = kernel.computes() ? part : part / 2;
      if (!kernel.computes() && part % 2 == 1) {
        send_panel(chosen);
        return;
      }
      uint32_t w[kWords];
#pragma unroll
      for (int i = 0; i < kParts * kHalfWords / kWords; ++i)
        if (chosen == i) {
#pragma unroll
          for (int j = 0; j < kWords; ++j) w[j] = finished[i * kWords + j];
        }
      if constexpr (kernel.computes())
        finish_half(part / 2, part % 2, w);
      else
        stage_panel(w);
    }
  }

  // ---- a tile whose sums are complete

  // Words of the bias for a panel's columns, as they lie in sums.
  __device__ __forceinline__ void load_bias(int panel, uint32_t (&bias)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      bias[j] = device::load(
          reinterpret_cast<const uint32_t*>(shared.bias + (panel * kPanelColumns + 8 * j + lane % 4 * 2) * sizeof(T)));
  }
  __device__ __forceinline__ void add_bias() {
    if constexpr (kernel.takes_bias()) {
      if (!p.biased<kernel>()) return;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (kernel.gated() && (panel < kPanels / 2 ? p.bias : p.up_bias) == nullptr) continue;
        uint32_t bias[8];  // all loads before their use
        load_bias(panel, bias);
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
#pragma unroll
          for (int j = 0; j < 32; ++j)
            acc[m][32 * panel + j] += j % 2 ? device::high_half<T>(bias[j / 4]) : device::low_half<T>(bias[j / 4]);
      }
      __syncwarp(0xffffffffu);
      device::mbarrier_arrive_cluster_if(lane == 0, shared.bias_empty, place.rank);
    }
  }
  // Sends 16 x 32 floats, piece i of the tile in acc, from a staging buffer.
  __device__ __forceinline__ void send_wide(const unsigned char* from, int i) {
    const int column = now.column + i * 32 % tile.columns, row = now.row + i * 32 / tile.columns * 64;
    if (p.add)
      device::tensor_add(out, from, {column, row});
    else
      device::tensor_store(out, from, {column, row});
  }
  // last: nothing comes behind it, and it goes through the memory of the ring.
  __device__ __forceinline__ void store_wide(bool last) {
    constexpr int kPieces = kBlocks * tile.columns / 32;
    const auto piece = [&](int i) { return acc[i * 32 / tile.columns] + i * 32 % tile.columns / 2; };
    if (kWarpBytes >= kPieces * kBufferBytes && last) {
      unsigned char* const own = ring_memory();
#pragma unroll
      for (int i = 0; i < kPieces; ++i) stage_floats(own + i * kBufferBytes, piece(i));
      send([&] {
        for (int i = 0; i < kPieces; ++i) send_wide(own + i * kBufferBytes, i);
      });
      return;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      unsigned char* at = take_buffer();
      stage_floats(at, piece(i));
      send([&] { send_wide(at, i); });
    }
  }
  __device__ __forceinline__ void finish_tile(bool last) {
    before = now;
    if constexpr (kEpilogue == ProductEpilogue::wide) {
      store_wide(last);
    } else {
      add_bias();
#pragma unroll
      for (int panel = 0; panel < kParts / 2; ++panel) {
        const float* from = acc[panel / kPanels] + panel % kPanels * 32;
        uint32_t* w = finished + (kernel.defers() ? panel * 2 * kHalfWords : 0);
#pragma unroll
        for (int i = 0; i < 2 * kHalfWords; ++i) w[i] = device::pack<T>(from[2 * i], from[2 * i + 1]);
        if constexpr (!kernel.defers()) {
          stage_panel(w);
          send_panel(panel);
        }
      }
    }
  }
  // The last tile of an epilogue without arithmetic, in one go, through the memory of the ring, which is free.
  __device__ __forceinline__ void store_last_tile() {
    unsigned char* const own = ring_memory();
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      stage(own + part / 2 * kBufferBytes, part % 2, finished + part * kHalfWords);
    send([&] {
      for (int panel = 0; panel < kParts / 2; ++panel)
        device::tensor_store(out, own + panel * kBufferBytes,
                             {before.column + panel_column(panel), before.row + panel_row(panel)});
    });
  }

  // ---- shares of a sum that is split

  using Four = device::Vector<float, 4>;
  __device__ __forceinline__ int64_t share_of(int slot) const { return int64_t{slot} * tile.cluster() + place.rank; }
  __device__ __forceinline__ float* sums_of(int slot) const {
    return p.sums + share_of(slot) * tile.rows * tile.columns + threadIdx.x % 256 * 4;  // 16 bytes a thread at a time
  }
  __device__ __forceinline__ int* flag_of(int slot) const {
    return p.flags + 1 + share_of(slot) * kConsumerWarps + warp;
  }
  __device__ __forceinline__ void hand_over(int slot) {
    float* const to = sums_of(slot);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < tile.columns / 8; ++i) {
        float v[4] = {acc[m][4 * i], acc[m][4 * i + 1], acc[m][4 * i + 2], acc[m][4 * i + 3]};
        device::hold(v);  // floats, as which nvcc then keeps the sums: it would move them to integers after each wgmma
        device::store(reinterpret_cast<Four*>(to + (m * tile.columns / 8 + i) * 1024), Four{v[0], v[1], v[2], v[3]});
      }
    __syncwarp(0xffffffffu);
    if (lane == 0) {
      __threadfence();
      device::store_release(flag_of(slot), 1);
    }
    __syncwarp(0xffffffffu);
  }
  __device__ __forceinline__ void take_over(int slot) {
    const int* flag = flag_of(slot);
    while (__shfl_sync(0xffffffffu, device::load_acquire(flag), 0) == 0) {}  // uniform for ptxas
    __syncwarp(0xffffffffu);  // what lane 0 has acquired, all lanes may read
    const float* const from = sums_of(slot);
    constexpr int kTogether = 8;  // loads in flight
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < tile.columns / 8; i += kTogether) {
        Four x[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
          x[j] = device::load(reinterpret_cast<const Four*>(from + (m * tile.columns / 8 + i + j) * 1024));
        float v[4 * kTogether];
#pragma unroll
        for (int j = 0; j < 4 * kTogether; ++j) v[j] = x[j / 4].at[j % 4];
        device::hold(v);
#pragma unroll
        for (int j = 0; j < 4 * kTogether; ++j) acc[m][4 * i + j] += v[j];
      }
    __syncwarp(0xffffffffu);
  }

  __device__ __forceinline__ void run() {
    ProductShares<kernel.splits> shares(p, place.cluster, place.clusters);
    int skip = kNothing;  // `finished` holds nothing yet
    for (;;) {
      Share share{0, 0, p.blocks, 0};
      bool more = shares.next(&share);
      if constexpr (kernel.splits) {  // uniform for ptxas
        more = __shfl_sync(0xffffffffu, more, 0);
        share.unit = __shfl_sync(0xffffffffu, share.unit, 0);
        share.begin = __shfl_sync(0xffffffffu, share.begin, 0);
        share.end = __shfl_sync(0xffffffffu, share.end, 0);
      }
      const int blocks = more ? share.end - share.begin : 0;
      int previous = 0;
      for (int block = 0; block < blocks; ++block) {
        device::mbarrier_wait(shared.full + ring.stage, ring.parity);
        multiply(ring.stage, block > 0);
        if constexpr (kernel.computes()) store_part(skip + block);  // with two groups in flight
        device::wgmma_wait<1>();
        if (block > 0) release(previous);
        previous = ring.stage;
        ring.next();
        if constexpr (!kernel.computes()) store_part(skip + block);
      }
      if (kernel.defers() && !kernel.computes() && !more) {
        if constexpr (kernel.defers())
          if (skip == 0) store_last_tile();
      } else {
        for (int part = blocks; skip + part < kSteps; ++part) store_part(skip + part);  // of a short sum
      }
      if (more) {
        now = place.tile(share.unit);
        now.row += group * (tile.rows / 2) + warp % 4 * 16;
      }
      device::wgmma_wait<0>();
      if (!more) break;
      if constexpr (kernel.reads()) {
        wait_for_stores();
#pragma unroll
        for (int i = 0; i < kWarpBuffers; ++i) fetch(i, now);
      }
      release(previous);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) device::hold(acc[m]);
      bool complete = true;
      if constexpr (kernel.splits) {
        if (share.begin > 0) {
          hand_over(__shfl_sync(0xffffffffu, share.slot, 0));
          complete = false;
        } else if (blocks < p.blocks) {
          int step = 1;
          for (int slot; (slot = __shfl_sync(0xffffffffu, shares.next_other(share.unit, &step), 0)) >= 0;)
            take_over(slot);
        }
      }
      if (complete) {
        bool last = false;
        if constexpr (kEpilogue == ProductEpilogue::wide) last = shares.ends();
        if constexpr (kernel.splits) last = __shfl_sync(0xffffffffu, last, 0);
        finish_tile(last);
      }
      skip = complete ? 0 : kNothing;
      __syncwarp(0xffffffffu);
    }
    if (lane == 0) device::bulk_wait_read<0>();
  }
};

}  // namespace warpsmith::linear
