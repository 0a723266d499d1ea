#pragma once
#include <type_traits>

#include "device/cluster.h"
#include "device/tensor_copy.h"
#include "kernels/linear/linear_config.h"
#include "kernels/linear/product_config.h"

// What the warpgroups of a Hopper product share (product_sm90.cuh): arguments, memory and barriers, the order of tiles.
namespace warpsmith::linear {

using device::Mbarrier;
using device::Ring;
using device::Swizzle;

constexpr int kProductThreads = 384, kConsumerWarps = 8;
constexpr int kStageInner = 64;    // k of a stage
constexpr int kPanelColumns = 64;  // 16-bit columns of a swizzled row
constexpr int kRowBytes = 128;     // of a swizzled row
constexpr int kPanelBytes = kStageInner * kRowBytes;
constexpr int kWarpBuffers = 2, kBufferBytes = 16 * kRowBytes;  // in which a warp stages 16 rows for their store
constexpr int kBandUnits = 8;

struct ProductArguments {
  int rows, columns;
  int blocks;                          // stages of a sum
  int units, unit_rows, unit_columns;  // cluster tiles, and how many there are along each side
  const void* bias;                    // [columns], T; null: none
  float* partials;                     // [ceil(rows / 16), columns]: column sums of `derivative`; null: not wanted
  LinearActivation activation;
  bool keep;  // z of `activate`
  bool add;   // `wide`: out is added to
};

// One variable, so that one register holds the address of everything in it.
template <ProductKernel kernel> struct ProductState {
  Mbarrier full[kernel.tile.stages], empty[kernel.tile.stages];
  Mbarrier input[kConsumerWarps * kWarpBuffers], bias_empty[1];
  alignas(16) unsigned char bias[kernel.tile.columns * 2];
};

template <ProductKernel kernel> struct ProductShared {
  unsigned char* memory;
  Mbarrier *full, *empty, *input, *bias_empty;
  unsigned char* bias;

  __device__ __forceinline__ ProductShared(unsigned char* dynamic, ProductState<kernel>* s)
      : memory(dynamic), full(s->full), empty(s->empty), input(s->input), bias_empty(s->bias_empty), bias(s->bias) {}
  __device__ __forceinline__ unsigned char* a(int stage) const { return memory + stage * kernel.tile.stage_bytes(); }
  __device__ __forceinline__ unsigned char* b(int stage) const { return a(stage) + kernel.tile.rows * kRowBytes; }
  __device__ __forceinline__ unsigned char* staging(int warp) const {
    return a(kernel.tile.stages) + warp * kWarpBuffers * kBufferBytes;
  }
};

struct TilePlace {
  int row, column;  // of the block's first element
};

// Which tiles are this block's.
template <ProductKernel kernel> struct ProductPlace {
  const ProductArguments& p;
  int rank, rank_row, rank_column;  // in the cluster
  int cluster, clusters;

  __device__ __forceinline__ explicit ProductPlace(const ProductArguments& arguments) : p(arguments) {
    constexpr ProductTile tile = kernel.tile;
    rank = static_cast<int>(device::cluster_rank());
    rank_row = rank % tile.cluster_rows;
    rank_column = rank / tile.cluster_rows;
    cluster = blockIdx.x / tile.cluster();
    clusters = gridDim.x / tile.cluster();
  }
  // Bands of kBandUnits units along the columns; in a band the short side runs fastest. So the units of a wave share
  // operands in the second-level cache.
  __device__ __forceinline__ TilePlace tile(int unit) const {
    const int band = unit / (kBandUnits * p.unit_rows), first = band * kBandUnits;
    const int width = min(kBandUnits, p.unit_columns - first), rest = unit - first * p.unit_rows;
    const int row = rest / width, column = first + rest - row * width;
    return {(row * kernel.tile.cluster_rows + rank_row) * kernel.tile.rows,
            (column * kernel.tile.cluster_columns + rank_column) * kernel.tile.columns};
  }
};

}  // namespace warpsmith::linear
