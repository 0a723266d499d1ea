#pragma once
#include <algorithm>

#include "device/convert.h"
#include "device/fence.h"
#include "device/matrix_access.h"
#include "device/named_barrier.h"
#include "device/vector.h"
#include "device/wgmma.h"
#include "kernels/linear/hopper/product_sm90_pipeline.cuh"

// The consumer warpgroups of a Hopper product (product_sm90.cuh): sums and epilogues.
namespace warpsmith::linear {

// A warpgroup owns half of the tile's rows: kBlocks blocks of 64, of which each warp has 16. A panel is 16 rows by 64
// columns of a warp; its parts, of 16 columns, are 4 words of two elements a thread, in the order of wgmma.
template <class T, ProductKernel kernel> struct ProductConsumer {
  static constexpr ProductTile tile = kernel.tile;
  static constexpr ProductEpilogue kEpilogue = kernel.epilogue;
  static constexpr int kBlocks = tile.rows / 128, kPanels = tile.columns / kPanelColumns;
  static constexpr int kTilePanels = kBlocks * kPanels, kPanelParts = 4, kPartWords = 4;
  static constexpr int kPanelWords = kPanelParts * kPartWords;
  // A panel is stored in steps: prepared and sent; or handed over; or, with arithmetic, each part and sent. First of
  // all `gated` sends both sums, and `symmetric` asks for z.
  static constexpr bool kOpens = kernel.computes() && !kernel.hands_over();
  static constexpr int kPanelSteps = kOpens ? kPanelParts + 2 : kernel.hands_over() ? 1 : 2;
  static constexpr int kSteps = kPanelSteps * (kernel.gated() ? kTilePanels / 2 : kTilePanels);
  static constexpr int kNothing = 1 << 20;  // behind the last step of any tile
  static constexpr device::Major kA = kernel.layout == ProductLayout::tn ? device::Major::mn : device::Major::k;
  static constexpr device::Major kB = kernel.layout == ProductLayout::nt ? device::Major::k : device::Major::mn;
  // 2^-16 steps of an epilogue with arithmetic for each stage: at least one of `gated`, at most one where panels are
  // handed over.
  static constexpr int pace(int blocks) {
    const int even = ((kSteps << 16) + blocks - 1) / blocks;
    return kernel.hands_over() ? std::min(1 << 16, even) : std::max(1 << 16, even);
  }
  static_assert(kernel.defers() || !kernel.computes());
  static_assert(!kernel.hands_over() || kTilePanels % 2 == 0, "the parity in pass_panel");

  const ProductArguments& p;
  const ProductShared<kernel>& shared;
  const MapsOf<kernel.siblings()>& maps;
  const TensorMap* const out;  // of `siblings` the first
  const ProductPlace<kernel> place;
  const int group, lane, warp;  // warp: of the eight
  unsigned char* const staging;
  uint32_t lane_offset;  // in a staging buffer, of the row that this lane gives to store_matrix
  Ring<tile.stages> ring;
  using Sums = float[kBlocks][tile.columns / 2];
  Sums acc;
  uint32_t finished[kernel.defers() ? kTilePanels * kPanelWords : kPanelWords];  // or a panel at a time
  TilePlace now{}, before{};  // this warp's first row and column of the tile in acc, and of the finished one
  int buffer = 0;
  unsigned z_parity = 0;  // of `symmetric`

  __device__ __forceinline__ ProductConsumer(const ProductArguments& arguments, const ProductShared<kernel>& memory,
                                             const MapsOf<kernel.siblings()>& tensors, int begun, int warpgroup)
      : p(arguments),
        shared(memory),
        maps(tensors),
        out(map_of(tensors.out, 0)),
        place(arguments, begun),
        group(warpgroup),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0) - 4),
        staging(memory.staging(warp)),
        lane_offset(
            device::swizzled(Swizzle::bytes128, static_cast<uint32_t>(lane % 16 * kRowBytes + lane / 16 * 16))) {}

  // ---- products

  __device__ __forceinline__ void multiply(Sums& to, int stage, bool accumulate) {
    const auto descriptor = [](device::Major major, const unsigned char* at) {
      return device::wgmma_descriptor(Swizzle::bytes128, at, major == device::Major::mn ? kPanelBytes : 16, 1024);
    };
    const auto bytes = [](device::Major major) { return major == device::Major::mn ? 16 * kRowBytes : 32; };  // of 16 k
    const uint64_t first_a = descriptor(kA, shared.a(stage) + group * kBlocks * kPanelBytes),
                   first_b = descriptor(kB, shared.b(stage));
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageInner / 16; ++k)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const uint64_t a = device::advance(first_a, m * kPanelBytes + k * bytes(kA)),
                       b = device::advance(first_b, k * bytes(kB));
        device::wgmma<T, tile.columns, kA, kB>(to[m], a, b, k > 0 || accumulate);
      }
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
  // A part of a panel into a staging buffer, and a panel.
  __device__ __forceinline__ void stage(unsigned char* to, int part, const uint32_t* w) {
    const uint32_t four[4] = {w[0], w[1], w[2], w[3]};
    device::store_matrix(to + (lane_offset ^ part * 32), four);
  }
  __device__ __forceinline__ void stage_panel(unsigned char* to, const uint32_t* w) {
#pragma unroll
    for (int part = 0; part < kPanelParts; ++part) stage(to, part, w + part * kPartWords);
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

  __device__ __forceinline__ const TensorMap* out_of_finished() const {
    return out + (kernel.siblings() ? before.batch : 0);
  }
  static __device__ __forceinline__ int panel_row(int panel) { return panel / kPanels * 64; }
  static __device__ __forceinline__ int panel_column(int panel) { return panel % kPanels * kPanelColumns; }

  // `finished` begins with the panel that is being stored, its second half with that of up's sums: moves the others up.
  __device__ __forceinline__ void next_panel() {
    __syncwarp(0xffffffffu);  // or nvcc makes selections of it, for every step
    constexpr int kHalves = kernel.gated() ? 2 : 1, kWords = kTilePanels * kPanelWords / kHalves;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int i = 0; i < kWords - kPanelWords; ++i)
        finished[half * kWords + i] = finished[half * kWords + i + kPanelWords];
  }
  // The words of one of `parts` parts of what lies at `from`, `apart` words apart.
  template <int parts, int words, int apart = words>
  static __device__ __forceinline__ void choose(const uint32_t* from, int part, uint32_t (&w)[words]) {
#pragma unroll
    for (int i = 0; i < parts; ++i)
      if (part == i) {
#pragma unroll
        for (int j = 0; j < words; ++j) w[j] = from[i * apart + j];
      }
  }
  // Computes a part of a panel: 16 columns of 16 rows, from rounded sums.
  __device__ __forceinline__ void compute_part(int part) {
    uint32_t w[kPartWords];
    choose<kPanelParts>(finished, part, w);
    if constexpr (kernel.symmetric()) {
      if (p.add) {
        if (part == 0) {
          device::mbarrier_wait(shared.z_full + warp, z_parity);
          z_parity ^= 1;
        }
        uint32_t x[kPartWords];
        device::load_matrix(x, staging + (lane_offset ^ part * 32));
#pragma unroll
        for (int i = 0; i < kPartWords; ++i)
          w[i] = device::pack<T>(device::low_half<T>(w[i]) + p.beta * device::low_half<T>(x[i]),
                                 device::high_half<T>(w[i]) + p.beta * device::high_half<T>(x[i]));
        __syncwarp(0xffffffffu);
      }
      stage(staging, part, w);
      if (is_mirrored()) {  // 16 rows of 32 bytes
        const int row = lane / 16 * 8 + lane % 8, byte = lane / 8 % 2 * 16;
        device::store_matrix<true>(staging + kBufferBytes + part * 512 +
                                       device::swizzled(Swizzle::bytes32, static_cast<uint32_t>(row * 32 + byte)),
                                   w);
      }
    } else {
      if (part == 0) wait_for_stores();
      uint32_t up[kPartWords];
      choose<kPanelParts>(finished + kTilePanels / 2 * kPanelWords, part, up);
      with_activation<T>(p.activation, [&]<class F>() {
#pragma unroll
        for (int i = 0; i < kPartWords; ++i)
          w[i] = device::pack<T>(F(device::low_half<T>(w[i])).value() * device::low_half<T>(up[i]),
                                 F(device::high_half<T>(w[i])).value() * device::high_half<T>(up[i]));
      });
      stage(staging + kBufferBytes, part, w);
    }
  }
  // `symmetric`: asks for a panel of z, where its result will replace it; and whether the tile has a mirror image.
  __device__ __forceinline__ void ask_for_panel(int panel) {
    wait_for_stores();
    if (p.add && lane == 0) {
      Mbarrier* full = shared.z_full + warp;
      device::mbarrier_arrive_expect(full, kBufferBytes);
      device::tensor_load(staging, &maps.z, full,
                          {before.column + panel_column(panel), before.row + panel_row(panel), before.batch});
    }
    __syncwarp(0xffffffffu);
  }
  __device__ __forceinline__ bool is_mirrored() const {
    return before.column / tile.columns > before.row / (tile.rows * tile.cluster_rows);
  }
  // `gated`: stores both sums of a panel of out.
  __device__ __forceinline__ void keep_panel(int panel) {
    if (!p.keep) return;
    wait_for_stores();
    stage_panel(staging, finished);
    stage_panel(staging + kBufferBytes, finished + kTilePanels / 2 * kPanelWords);
    const int row = before.row + panel_row(panel), column = before.column + panel_column(panel);
    send([&] {
      device::tensor_store(&maps.z, staging, {column, row});
      device::tensor_store(&maps.up_z, staging + kBufferBytes, {column, row});
    });
  }
  // Stores a panel whose parts are computed.
  __device__ __forceinline__ void send_computed(int panel) {
    const int row = before.row + panel_row(panel), column = before.column + panel_column(panel);
    unsigned char* const second = staging + kBufferBytes;
    if constexpr (kernel.symmetric())
      send([&] {
        device::tensor_store(out, staging, {column, row, before.batch});
        if (is_mirrored()) device::tensor_store(&maps.up_z, second, {row, column, before.batch});
      });
    else
      send([&] { device::tensor_store(out, second, {column, row}); });
  }
  // Hands a panel over to the warps that finish it.
  __device__ __forceinline__ void pass_panel(int panel) {
    device::mbarrier_wait(shared.panel_empty + warp, (panel & 1) ^ 1);
#pragma unroll
    for (int part = 0; part < kPanelParts; ++part) {
      uint32_t w[kPartWords];
      choose<kTilePanels, kPartWords, kPanelWords>(finished + part * kPartWords, panel, w);
      stage(staging, part, w);
    }
    __syncwarp(0xffffffffu);
    device::mbarrier_arrive_if(lane == 0, shared.panel_full + panel * kConsumerWarps + warp);
  }
  // A panel of an epilogue without arithmetic, in two steps, each of which ends before the products of a stage do.
  __device__ __forceinline__ void prepare_panel(const uint32_t* w) {
    stage_panel(take_buffer(), w);
    device::fence_async_shared();
  }
  __device__ __forceinline__ void send_panel(int panel) {
    __syncwarp(0xffffffffu);
    if (lane == 0) {
      device::tensor_store(out_of_finished(), staging + (buffer ^ 1) * kBufferBytes,
                           {before.column + panel_column(panel), before.row + panel_row(panel)});
      device::bulk_commit();
    }
    __syncwarp(0xffffffffu);
  }
  // The step of the finished tile that is due; nothing from kSteps on.
  __device__ __forceinline__ void store_step(int step) {
    if constexpr (kernel.defers()) {
      if (step >= kSteps) return;
      const int panel = step / kPanelSteps, turn = step % kPanelSteps;
      if constexpr (kernel.hands_over()) {
        pass_panel(panel);
      } else if constexpr (kOpens) {
        if (turn > 0 && turn < kPanelSteps - 1) {
          compute_part(turn - 1);
        } else if (turn > 0) {
          send_computed(panel);
        } else if constexpr (kernel.symmetric()) {
          ask_for_panel(panel);
        } else {
          keep_panel(panel);
        }
        if (turn == kPanelSteps - 1) next_panel();
      } else if (turn == 0) {
        uint32_t w[kPanelWords];
        choose<kTilePanels>(finished, panel, w);
        prepare_panel(w);
      } else {
        send_panel(panel);
      }
    }
  }
  // The steps of the finished tile that are due while the products of stage `block` run.
  __device__ __forceinline__ void store_steps(int& step, int block) {
    for (; step < kSteps && step < (block + 1) * p.pace >> 16; ++step) store_step(step);
  }
  __device__ __forceinline__ void place_now(int unit) {
    now = place.tile(unit);
    now.row += group * (tile.rows / 2) + warp % 4 * 16;
  }

  // ---- a tile whose sums are complete

  // Words of the bias for a panel's columns, as they lie in sums.
  __device__ __forceinline__ void load_bias(const unsigned char* from, int panel, uint32_t (&bias)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      bias[j] = device::load(
          reinterpret_cast<const uint32_t*>(from + (panel * kPanelColumns + 8 * j + lane % 4 * 2) * sizeof(T)));
  }
  __device__ __forceinline__ void add_bias() {
    if constexpr (kernel.takes_bias()) {
      if (!p.biased<kernel>(now.batch)) return;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (kernel.gated() && (panel < kPanels / 2 ? p.bias : p.up_bias) == nullptr) continue;
        uint32_t bias[8];  // all loads before their use
        load_bias(shared.bias, panel, bias);
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
  // Reads, under the last products of a tile, what finishing it needs first.
  __device__ __forceinline__ void open_tile() {}
  __device__ __forceinline__ void round_tile() {
    add_bias();
    if (kernel.symmetric() && p.alpha != 1) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
#pragma unroll
        for (float& sum : acc[m]) sum *= p.alpha;
    }
#pragma unroll
    for (int panel = 0; panel < kTilePanels; ++panel) {
      const float* from = acc[panel / kPanels] + panel % kPanels * 32;
      uint32_t* w = finished + (kernel.defers() ? panel * kPanelWords : 0);
#pragma unroll
      for (int i = 0; i < kPanelWords; ++i) w[i] = device::pack<T>(from[2 * i], from[2 * i + 1]);
      if constexpr (!kernel.defers()) {
        prepare_panel(w);
        send_panel(panel);
      }
    }
  }
  __device__ __forceinline__ void finish_tile(bool last) {
    before = now;
    if constexpr (kEpilogue == ProductEpilogue::wide) {
      store_wide(last);
    } else {
      round_tile();
    }
  }
  // The last tile of an epilogue without arithmetic, in one go, through the memory of the ring, which is free.
  __device__ __forceinline__ void store_last_tile() {
    unsigned char* const own = ring_memory();
#pragma unroll
    for (int panel = 0; panel < kTilePanels; ++panel)
      stage_panel(own + panel * kBufferBytes, finished + panel * kPanelWords);
    send([&] {
      for (int panel = 0; panel < kTilePanels; ++panel)
        device::tensor_store(out_of_finished(), own + panel * kBufferBytes,
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

  __device__ __forceinline__ void run() { run_as(*this); }
  // By what `self`, derived from this, makes of products, places and finished tiles.
  template <class Self> __device__ __forceinline__ void run_as(Self& self) {
    ProductShares<kernel.splits> shares(p, place.cluster, place.clusters);
    int skip = kNothing;  // `finished` holds nothing yet
    int step = kNothing;  // of an epilogue with arithmetic
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
        self.multiply(acc, ring.stage, block > 0);
        if constexpr (kOpens) store_steps(step, block);  // with two groups in flight
        device::wgmma_wait<1>();
        if (block > 0) release(previous);
        previous = ring.stage;
        ring.next();
        if constexpr (kernel.hands_over()) {
          if (block == 0 || (block - 1) * p.pace >> 16 < block * p.pace >> 16)
            store_step(skip + (block * p.pace >> 16));
        } else if constexpr (!kOpens) {
          store_step(skip + block);
        }
      }
      if constexpr (kOpens) {
        for (; step < kSteps; ++step) store_step(step);
      } else if (kernel.defers() && !kernel.hands_over() && !more) {
        if constexpr (kernel.defers())
          if (skip == 0) store_last_tile();
      } else {
        for (int part = blocks; skip + part < kSteps; ++part) store_step(skip + part);  // of a short sum
      }
      if (more) {
        self.place_now(share.unit);
        self.open_tile();
      }
      device::wgmma_wait<0>();
      if (!more) break;
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
        self.finish_tile(last);
      }
      skip = complete ? 0 : kNothing;
      step = 0;
      __syncwarp(0xffffffffu);
    }
    if (lane == 0) device::bulk_wait_read<0>();
  }
};

}  // namespace warpsmith::linear
