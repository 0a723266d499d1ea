#pragma once
#include "device/cluster.h"
#include "device/programmatic_launch.h"
#include "device/register_budget.h"
#include "kernels/linear/hopper/product_sm90_consumer.cuh"
#include "kernels/linear/hopper/product_sm90_finisher.cuh"
#include "kernels/linear/hopper/product_sm90_float8.cuh"

// A product of 16-bit matrices or of 8-bit floats on Hopper: TMA, wgmma, specialised warpgroups, clusters, persistent
// blocks.
//
// Reads each operand once for every row or column of cluster tiles; the second-level cache serves what neighbours have
// read. Writes out (16 bits, or float32, which may be added to), and what its epilogue keeps. Sums in float32, each by
// one block in the order of k. Sizes are free: elements beyond an edge are read as 0 and not written.
//
// One block per multiprocessor, clusters of two:
//   warpgroup 0: one thread, the loader, copies stages of 64 k into a ring. Each block of the cluster loads half of the
//                operand that both share, for both.
//   warpgroups 1 and 2, the consumers: half of the tile's rows each. They never meet but before the last store. A
//                finished tile is rounded in registers, which takes half the space, and stored 16 x 64 elements at a
//                time while the products of the next tile run; each warp stages and stores for itself.
//   the rest of warpgroup 0, the finishers of `activate`, `residual` and `derivative`: compute the epilogue of what
//                consumers stage (product_sm90_finisher.cuh), so that no warp that multiplies waits for memory or
//                special functions.
namespace warpsmith::linear {

// The loader, one thread.
template <ProductKernel kernel>
__device__ __forceinline__ void load_stages(const ProductArguments& p, const MapsOf<kernel.siblings()>& maps,
                                            const ProductShared<kernel>& shared, int begun) {
  constexpr ProductTile tile = kernel.tile;
  const ProductPlace<kernel> place(p, begun);
  uint16_t a_blocks = 0, b_blocks = 0;  // of the cluster: those that share the operand's tile with this one
  for (int i = 0; i < tile.cluster_columns; ++i)
    a_blocks |= static_cast<uint16_t>(1u << (place.rank_row + tile.cluster_rows * i));
  for (int i = 0; i < tile.cluster_rows; ++i)
    b_blocks |= static_cast<uint16_t>(1u << (tile.cluster_rows * place.rank_column + i));
  // The part of a tile of `size` rows or columns that this block, `part` of `parts`, loads for all.
  const auto load = [&](auto mn_major, unsigned char* to, const TensorMap* map, Mbarrier* full, int first, int batch,
                        int size, int k, int part, auto parts, uint16_t blocks) {
    const auto copy_box = [&]<int Rank>(unsigned char* at, const int (&c)[Rank]) {
      if constexpr (parts > 1)
        device::tensor_load_multicast(at, map, full, blocks, c);
      else
        device::tensor_load(at, map, full, c);
    };
    const auto copy = [&](unsigned char* at, int x, int y) {
      if constexpr (kernel.symmetric())
        copy_box(at, {x, y, batch});
      else
        copy_box(at, {x, y});
    };
    if constexpr (mn_major) {  // panels of 64 columns; the parts are rows of k, because panels may be odd in number
      constexpr int kRows = kStageInner / parts;
#pragma unroll
      for (int panel = 0; panel < size / kPanelColumns; ++panel)
        copy(to + panel * kPanelBytes + part * kRows * kRowBytes, first + panel * kPanelColumns, k + part * kRows);
    } else {
      const int rows = size / parts;
      copy(to + part * rows * kRowBytes, k, first + part * rows);
    }
  };
  // `gated`: the first block of a cluster loads b's half of the tile, the second up's.
  const bool second = kernel.gated() && place.rank_row == 1;
  const TensorMap* b_map;
  if constexpr (kernel.gated())
    b_map = second ? &maps.up : &maps.b;
  else
    b_map = map_of(maps.b, 0);
  using AMajor = std::bool_constant<kernel.layout == ProductLayout::tn>;
  using BMajor = std::bool_constant<kernel.layout != ProductLayout::nt>;
  Ring<tile.stages> ring;
  unsigned bias_parity = 0;
  Ring<kernel.vectors()> vector;  // of 8-bit floats
  ProductShares<kernel.splits> shares(p, place.cluster, place.clusters);
  for (Share share; shares.next(&share);) {
    const TilePlace at = place.tile(share.unit);
    for (int block = share.begin; block < share.end; ++block, ring.next()) {
      Mbarrier* full = shared.full + ring.stage;
      device::mbarrier_wait(shared.empty + ring.stage, ring.parity ^ 1);
      int bias_bytes = 0;
      unsigned char* vectors = shared.bias;
      if (kernel.takes_bias() && p.biased<kernel>(at.batch) && block == p.blocks - 1) {  // comes with the last stage
        if constexpr (kernel.float8()) {
          device::mbarrier_wait(shared.bias_empty + vector.stage, vector.parity ^ 1);
          vectors += vector.stage * kernel.vector_bytes();
          vector.next();
        } else {
          device::mbarrier_wait(shared.bias_empty, bias_parity ^= 1);
        }
        bias_bytes =
            max(0, min(kernel.columns(), (kernel.siblings() ? p.widths[at.batch] : p.columns) - at.column) * 2);
      }
      // halves: of an element
      const auto load_bias = [&](int which, const void* bias, int halves = 1) {
        if (bias_bytes > 0 && bias != nullptr)
          device::bulk_load(vectors + which * kernel.columns() * 2,
                            static_cast<const unsigned char*>(bias) + int64_t{at.column} * 2 * halves,
                            bias_bytes * halves, full);
      };
      const void* const scales = p.column_scales<kernel>() ? p.b_scale : nullptr;
      const int biases = kernel.gated()    ? (p.bias != nullptr) + (p.up_bias != nullptr)
                         : kernel.float8() ? (p.bias != nullptr) + (scales != nullptr) * 2
                                           : 1;
      int scale_bytes = 0;  // of the stage's terms
      if constexpr (kernel.blocks())
        if (!p.b_squares) scale_bytes = max(0, min(tile.columns, p.columns - at.column)) * 4;
      device::mbarrier_arrive_expect(full, tile.stage_bytes() + biases * bias_bytes + scale_bytes);
      if constexpr (kernel.blocks())
        if (scale_bytes > 0)
          device::bulk_load(shared.block_scales + ring.stage * tile.columns,
                            p.b_scale + int64_t{block} * p.columns + at.column, scale_bytes, full);
      load_bias(0, kernel.siblings() ? p.biases[at.batch] : p.bias);
      if constexpr (kernel.gated()) load_bias(1, p.up_bias);
      if constexpr (kernel.float8()) load_bias(1, scales, 2);
      int k = block * kStageInner, of_a = 0, of_b = 0;  // siblings
      if constexpr (kernel.siblings()) {
        of_b = at.batch;
        if constexpr (kernel.layout == ProductLayout::nn) {
          of_a = of_b = p.sibling_at(block);
          k -= p.first[of_b] * kStageInner;
        }
      }
      load(AMajor(), shared.a(ring.stage), map_of(maps.a, of_a), full, at.row, at.batch, tile.rows, k,
           place.rank_column, std::integral_constant<int, tile.cluster_columns>(), a_blocks);
      const int column = at.column - (second ? kernel.columns() : 0);
      load(BMajor(), shared.b(ring.stage), b_map + of_b, full, column, at.batch, tile.columns, k, place.rank_row,
           std::integral_constant<int, tile.cluster_rows>(), b_blocks);
      if constexpr (kernel.epilogue == ProductEpilogue::wide && !kernel.splits) {
        // Out is read as it is added to. The last stages bring it to the second-level cache before, a few boxes each:
        // at once they would delay the operands, and those of a long sum would replace what came early.
        constexpr int kAcross = tile.columns / kWideColumns, kBoxes = tile.rows / 16 * kAcross;
        int box = (block - p.blocks) * p.prefetch + kBoxes;
        for (const int end = box + p.prefetch; box < end; ++box)
          if (box >= 0)
            device::tensor_prefetch(&maps.out, {at.column + box % kAcross * kWideColumns, at.row + box / kAcross * 16});
      }
    }
  }
}

// I: an entry of kProducts.
template <class T, class I> __global__ void __launch_bounds__(kProductThreads, 1)
    product_sm90(const __grid_constant__ typename InstanceMaps<I>::type maps,
                 const __grid_constant__ ProductArguments p) {
  constexpr ProductKernel kernel = I::value;
  WARPSMITH_DYNAMIC_SHARED(memory);
  WARPSMITH_SHARED(ProductState<kernel>, state, 1);
  const ProductShared<kernel> shared(memory, state);
  if (threadIdx.x == 32) {
    device::prefetch_tensor_map(map_of(maps.a, 0));
    device::prefetch_tensor_map(map_of(maps.b, 0));
    device::prefetch_tensor_map(map_of(maps.out, 0));
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kernel.tile.stages; ++i) {
      device::mbarrier_init(shared.full + i, 1);
      device::mbarrier_init(shared.empty + i, kConsumerWarps * kernel.tile.cluster());
    }
    if constexpr (kernel.computes()) {
      for (int i = 0; i < kConsumerWarps * kernel.panels(); ++i) device::mbarrier_init(shared.panel_full + i, 1);
      for (int i = 0; i < kConsumerWarps; ++i) {
        device::mbarrier_init(shared.panel_empty + i, 1);
        device::mbarrier_init(shared.z_full + i, 1);
      }
    }
    for (int i = 0; i < kernel.vectors(); ++i) device::mbarrier_init(shared.bias_empty + i, kConsumerWarps);
    device::mbarrier_init_fence();
  }
  if constexpr (kernel.splits) {
    device::wait_for_previous_kernel();  // which has written 0
    if (threadIdx.x == 0 && device::cluster_rank() == 0) device::store(&state->begun, atomicAdd(p.flags, 1));
  }
  device::cluster_barrier();
  int begun = 0;
  if constexpr (kernel.splits)
    begun = __shfl_sync(0xffffffffu, device::load(device::cluster_shared(&state->begun, 0)), 0);
  device::launch_dependents();
  if constexpr (!kernel.splits) device::wait_for_previous_kernel();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    device::decrease_registers<kernel.producer_registers()>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) load_stages<kernel>(p, maps, shared, begun);
    if constexpr (kernel.hands_over())
      if (warp > 0) ProductFinisher<T, kernel>(p, maps, shared, warp - 1).run();
    __syncwarp(0xffffffffu);
  } else {
    device::increase_registers<kernel.consumer_registers()>();
    using Consumer = std::conditional_t<kernel.float8(), Float8Consumer<kernel>, ProductConsumer<T, kernel>>;
    ProductShared<kernel> kept = shared;
    if constexpr (kernel.promotes()) kept.keep_addresses();
    Consumer(p, kept, maps, begun, warpgroup - 1).run();
    __syncwarp(0xffffffffu);
  }
  device::cluster_barrier();  // a block that has exited can no longer be given buffers
}

}  // namespace warpsmith::linear
