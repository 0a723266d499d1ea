#pragma once
#include "device/float8.h"
#include "kernels/linear/hopper/product_sm90_consumer.cuh"

// The consumer warpgroups of a Hopper product of 8-bit floats (product_sm90.cuh): sums, scales and rounding.
namespace warpsmith::linear {

// fast:     the tensor core adds up all terms.
// promoted: the tensor core adds up the terms of a stage; these sums are added in float32, in ordinary registers.
// blocks:   likewise, each times the scales of its row and column for these terms.
template <ProductKernel kernel> struct Float8Consumer : ProductConsumer<bfloat16, kernel> {
  using Base = ProductConsumer<bfloat16, kernel>;
  using Base::acc, Base::before, Base::finished, Base::group, Base::lane, Base::now, Base::p, Base::place, Base::ring,
      Base::shared;
  using Base::kBlocks, Base::kPanels, Base::kPanelWords, Base::kSteps, Base::tile;
  using Factor = std::conditional_t<kernel.factors == ProductFactors::e4m3, float8_e4m3, float8_e5m2>;
  using Block = float[tile.columns / 2];  // the sums of 64 rows
  static_assert(kernel.defers() && (kernel.promotes() || kBlocks == 1));

  using Two = device::Vector<float, 2>;
  static constexpr int kEarly = kernel.promotes() ? 0 : 6;  // of 8 registers spill
  Two first_scales[std::max(1, kEarly)];                    // of this lane's first columns

  float scale = 1.0f;             // lane l: of row l % 16 of this warp's rows in block l / 16, or of all rows
  Ring<kernel.vectors()> vector;  // where this tile's bias and scales of columns lie

  __device__ __forceinline__ Float8Consumer(const ProductArguments& arguments, const ProductShared<kernel>& memory,
                                            const ProductMaps& tensors, int begun, int warpgroup)
      : Base(arguments, memory, tensors, begun, warpgroup) {
    if (p.scales == ProductScales::one && p.a_scale != nullptr) scale = device::load(p.a_scale);
    if (p.scales == ProductScales::one && p.b_scale != nullptr) scale *= device::load(p.b_scale);
  }

  // The products of a stage, of one block.
  __device__ __forceinline__ void multiply_block(Block& to, int m, int stage, bool accumulate) {
    const auto descriptor = [](const unsigned char* at) {
      return device::wgmma_descriptor(Swizzle::bytes128, at, 16, 1024);
    };
    const uint64_t a = descriptor(shared.a(stage) + (group * kBlocks + m) * kPanelBytes),
                   b = descriptor(shared.b(stage));
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageInner / 16; ++k)
      device::wgmma_float8<Factor, float8_e4m3, tile.columns>(to, device::advance(a, k * 32),
                                                              device::advance(b, k * 32), k > 0 || accumulate);
    device::wgmma_commit();
  }
  __device__ __forceinline__ void multiply(Base::Sums& to, int stage, bool accumulate) {
    multiply_block(to[0], 0, stage, accumulate);
  }
  __device__ __forceinline__ void place_now(int unit) {
    Base::place_now(unit);
    if (kernel.blocks() || p.scales != ProductScales::rows || p.a_scale == nullptr) return;
    const int row = own_row();
    scale = row < p.rows ? device::load(p.a_scale + row) : 1.0f;
  }
  __device__ __forceinline__ int own_row() const { return now.row + lane / 16 * 64 + lane % 16; }
  __device__ __forceinline__ float scale_of(int m, int i) const {  // of this lane's row i in block m
    return __shfl_sync(0xffffffffu, scale, m * 16 + lane / 4 + 8 * i);
  }
  // Of `blocks`: the scales of a stage's terms are read while the stage before is multiplied.
  float square = 1.0f, next_scale, next_square = 1.0f;  // of squares: that of all columns
  __device__ __forceinline__ void read_block_scales(int block) {
    const int row = own_row();
    next_scale = row < p.rows ? device::load(p.a_scale + int64_t{row} * p.blocks + block) : 0.0f;
    if (p.b_squares && now.column < p.columns)
      next_square = device::load(p.b_scale + int64_t{now.column / tile.columns} * p.blocks + block);
  }
  __device__ __forceinline__ void take_block_scales(int block) {
    if (block == 0) read_block_scales(0);
    scale = next_scale;
    square = next_square;
    if (block + 1 < p.blocks) read_block_scales(block + 1);
  }

  // Columns' scales first: a gradient's or a large row's would overflow before small weights'.
  template <class Out> __device__ __forceinline__ void round_block(int m, const unsigned char* vectors) {
    if (p.bias != nullptr) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        uint32_t bias[8];  // all loads before their use
        this->load_bias(vectors, panel, bias);
#pragma unroll
        for (int j = 0; j < 32; ++j)
          acc[m][32 * panel + j] += j % 2 ? device::high_half<Out>(bias[j / 4]) : device::low_half<Out>(bias[j / 4]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPanels * kPanelWords; ++i)
      finished[m * kPanels * kPanelWords + i] = device::pack<Out>(acc[m][2 * i], acc[m][2 * i + 1]);
  }
  __device__ __forceinline__ const unsigned char* vectors() const {
    return shared.bias + vector.stage * kernel.vector_bytes();
  }
  template <int n> __device__ __forceinline__ void load_column_scales(Two (&scales)[n], int panel, int first) const {
#pragma unroll
    for (int j = first; j < n; ++j)  // all loads before their use
      scales[j] = device::load(reinterpret_cast<const Two*>(
          vectors() + tile.columns * 2 + (panel * kPanelColumns + 8 * j + lane % 4 * 2) * sizeof(float)));
  }
  // Scales a block whose sums are complete, and rounds it into `finished`.
  __device__ __forceinline__ void finish_block(int m) {
    if (p.template column_scales<kernel>()) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        Two scales[8];
        const int there = panel == 0 ? kEarly : 0;
#pragma unroll
        for (int j = 0; j < there; ++j) scales[j] = first_scales[j];
        load_column_scales(scales, panel, there);
#pragma unroll
        for (int j = 0; j < 32; ++j) acc[m][32 * panel + j] *= scales[j / 4].at[j % 2];
      }
    }
    if constexpr (!kernel.blocks()) {
      const float of_row[2] = {scale_of(m, 0), scale_of(m, 1)};
#pragma unroll
      for (int j = 0; j < tile.columns / 2; ++j)
        acc[m][j] = __fmul_rn(acc[m][j], of_row[j / 2 % 2]);  // no part of adding the bias
    }
    if (p.to_float16)
      round_block<float16>(m, vectors());
    else
      round_block<bfloat16>(m, vectors());
    if (m < kBlocks - 1) return;
    if (p.template biased<kernel>(0)) {
      __syncwarp(0xffffffffu);
      device::mbarrier_arrive_cluster_if(lane == 0, shared.bias_empty + vector.stage, place.rank);
      vector.next();
    }
    __syncwarp(0xffffffffu);
  }

  // Stores the panels of a block, two behind a fence.
  __device__ __forceinline__ void store_block(int m) {
#pragma unroll
    for (int first = 0; first < kPanels; first += kWarpBuffers) {
      this->wait_for_stores();
#pragma unroll
      for (int i = first; i < kPanels && i < first + kWarpBuffers; ++i)
        this->stage_panel(Base::staging + (i - first) * kBufferBytes, finished + (m * kPanels + i) * kPanelWords);
      this->send([&] {
#pragma unroll
        for (int i = first; i < kPanels && i < first + kWarpBuffers; ++i)
          device::tensor_store(Base::out, Base::staging + (i - first) * kBufferBytes,
                               {before.column + i * kPanelColumns, before.row + m * 64});
      });
    }
  }
  __device__ __forceinline__ void open_tile() {
    if (p.template column_scales<kernel>()) load_column_scales(first_scales, 0, 0);
  }
  __device__ __forceinline__ void finish_tile(bool) {
    finish_block(0);
    before = now;
  }
  // acc[m] += part, times the scales of its terms.
  __device__ __forceinline__ void add_scaled(int m, const Block& part, bool first) {
    const float of_row[2] = {scale_of(m, 0) * square, scale_of(m, 1) * square};
    const auto add = [&](int i, float by) { acc[m][i] = fmaf(part[i], by, first ? 0.0f : acc[m][i]); };
    if (p.b_squares) {
#pragma unroll
      for (int i = 0; i < tile.columns / 2; ++i) add(i, of_row[i / 2 % 2]);
      return;
    }
    const float* const scales = shared.block_scales + ring.stage * tile.columns + lane % 4 * 2;
    constexpr int kTogether = 4;  // loads before their use; of 8 registers spill
#pragma unroll
    for (int first_column = 0; first_column < tile.columns; first_column += 8 * kTogether) {
      Two of_columns[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        of_columns[j] = device::load(reinterpret_cast<const Two*>(scales + first_column + 8 * j));
#pragma unroll
      for (int j = 0; j < 4 * kTogether; ++j)
        add(first_column / 2 + j, of_row[j / 2 % 2] * of_columns[j / 4].at[j % 2]);
    }
  }
  // acc += the products of a stage. A stage's sums of the second block follow those of the first into the same
  // registers. `meanwhile()` is called while the products of the first block run.
  template <class Meanwhile> __device__ __forceinline__ void add_stage(bool first, int block, Meanwhile&& meanwhile) {
    device::mbarrier_wait(shared.full + ring.stage, ring.parity);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Block part;
      multiply_block(part, m, ring.stage, false);
      if (m == 0) meanwhile();
      if constexpr (kernel.blocks())
        if (m == 0) take_block_scales(block);
      device::wgmma_wait<0>();
      if (m == kBlocks - 1 && (!kernel.blocks() || p.b_squares)) this->release(ring.stage);
      device::hold(part);
      if constexpr (kernel.blocks()) {
        add_scaled(m, part, first);
      } else {
#pragma unroll
        for (int i = 0; i < tile.columns / 2; ++i) acc[m][i] = (first ? 0.0f : acc[m][i]) + part[i];
      }
    }
    if (kernel.blocks() && !p.b_squares) {  // all lanes have read the columns' scales
      __syncwarp(0xffffffffu);
      this->release(ring.stage);
    }
    ring.next();
  }
  __device__ __forceinline__ void run_promoted() {
    ProductShares<false> shares(p, place.cluster, place.clusters);
    bool begun = false;
    for (Share share; shares.next(&share);) {
      add_stage(true, 0, [&] {
        if (begun) {
          if (kBlocks == 2) finish_block(kBlocks - 1);
#pragma unroll
          for (int stored = 0; stored < kBlocks; ++stored) store_block(stored);  // at once: else words are spilled
        }
        place_now(share.unit);
      });
      for (int block = 1; block < p.blocks; ++block) add_stage(false, block, [] {});
      finish_block(0);
      before = now;
      begun = true;
      __syncwarp(0xffffffffu);
    }
    if (begun) {
      if (kBlocks == 2) finish_block(kBlocks - 1);
      this->store_last_tile();
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (kernel.promotes()) {
      run_promoted();
      if (lane == 0) device::bulk_wait_read<0>();
    } else {
      this->run_as(*this);
    }
  }
};

}  // namespace warpsmith::linear
