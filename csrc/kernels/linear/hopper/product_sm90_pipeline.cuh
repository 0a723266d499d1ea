#pragma once
#include <type_traits>

#include "device/cluster.h"
#include "device/mbarrier.h"
#include "device/swizzle.h"
#include "device/tensor_copy.h"
#include "kernels/linear/linear_config.h"
#include "kernels/linear/product_config.h"
#include "tiles/activation_math.cuh"

// What the warpgroups of a Hopper product share (product_sm90.cuh): arguments, memory and barriers, the order of tiles.
namespace warpsmith::linear {

using device::Mbarrier;
using device::Ring;
using device::Swizzle;

constexpr int kProductThreads = 384;
constexpr int kStageInner = 64;    // k of a stage; 8-bit floats are counted in pairs
constexpr int kPanelColumns = 64;  // 16-bit columns of a swizzled row
constexpr int kRowBytes = 128;     // of a swizzled row
constexpr int kPanelBytes = kStageInner * kRowBytes;
constexpr int kWideColumns = 32;                                // of a swizzled row of float32
constexpr int kWarpBuffers = 2, kBufferBytes = 16 * kRowBytes;  // in which a warp stages 16 rows
constexpr int kBandUnits = 8;

struct ProductMaps {
  TensorMap a, b, out;
  TensorMap z;         // kept by `activate` and `gated`, read by `residual` and `derivative`; else unused
  TensorMap up, up_z;  // of `gated`; up_z: of `symmetric` out, in boxes of 64 rows by 16 columns
};

// Of `siblings`: nt has one a, nn one out.
struct SiblingMaps {
  TensorMap a[kMostSiblings], b[kMostSiblings], out[kMostSiblings];
};
template <bool siblings> using MapsOf = std::conditional_t<siblings, SiblingMaps, ProductMaps>;
template <class I> struct InstanceMaps {  // a plain name for the kernel's argument
  static constexpr ProductKernel kernel = I::value;
  using type = MapsOf<kernel.siblings()>;
};
__device__ __forceinline__ const TensorMap* map_of(const TensorMap& map, int) { return &map; }
__device__ __forceinline__ const TensorMap* map_of(const TensorMap (&maps)[kMostSiblings], int sibling) {
  return maps + sibling;
}

struct ProductArguments {
  int rows, columns;
  int blocks;     // stages of a sum
  int pace;       // ProductConsumer::pace
  int unit_rows;  // cluster tiles along each side
  int unit_columns;
  int units, whole;            // of them, and how many are computed whole; the sums of the others are split
  const void *bias, *up_bias;  // [columns], T; null: none. The second: of `gated`
  const void* read;            // `residual`, `derivative`: z; `activate`: null
  void *written, *kept;        // out and, of `activate`, z or null; where the consumers hand their sums over
  int64_t z_stride;
  float* partials;  // [partial_rows(rows), columns]: column sums of `derivative`; null: not wanted
  float* sums;      // where sums are split: a tile for each share of a block
  int* flags;       // likewise: the number of clusters that have begun, then a flag for each warp of each share
  LinearActivation activation;
  bool keep;                       // z and up_z of `gated`
  bool add;                        // `wide`: out is added to; `symmetric`: beta z is added
  float alpha, beta;               // of `symmetric`
  const float *a_scale, *b_scale;  // of 8-bit floats, as in ProductParams
  ProductScales scales;
  bool b_squares;
  bool to_float16;  // what 8-bit floats give; else bfloat16
  // Of `siblings`: the first unit along the columns (nt) or stage (nn) of each, INT_MAX where there is none; columns
  // and bias of each, of nt.
  int first[kMostSiblings], widths[kMostSiblings];
  const void* biases[kMostSiblings];
  int prefetch;  // of `wide` that adds: boxes of out that each of the last stages brings to the second-level cache

  // The sibling of a unit or a stage.
  __device__ __forceinline__ int sibling_at(int place) const {
    int sibling = 0;
#pragma unroll
    for (int i = 1; i < kMostSiblings; ++i) sibling += place >= first[i];
    return sibling;
  }
  template <ProductKernel kernel> __device__ __forceinline__ bool biased(int sibling) const {
    if constexpr (kernel.siblings()) return biases[sibling] != nullptr;
    return bias != nullptr || (kernel.gated() && up_bias != nullptr) || column_scales<kernel>();
  }
  template <ProductKernel kernel> __device__ __forceinline__ bool column_scales() const {
    return kernel.float8() && scales == ProductScales::rows && b_scale != nullptr;
  }
};

// One variable, so that one register holds the address of everything in it.
template <ProductKernel kernel> struct ProductState {
  Mbarrier full[kernel.tile.stages], empty[kernel.tile.stages];
  // Of the panel that a consumer warp hands over (full: one for each panel of a tile), and of z for it.
  static constexpr int kHanding = kernel.computes() ? kConsumerWarps : 1;
  Mbarrier panel_full[kHanding * kernel.panels()], panel_empty[kHanding], z_full[kHanding];
  Mbarrier bias_empty[kernel.vectors()];
  int begun;  // clusters before this one, where sums are split
  alignas(16) unsigned char bias[kernel.vectors() * kernel.vector_bytes()];
  // `blocks`: of the columns of each stage.
  alignas(16) float block_scales[kernel.blocks() ? kernel.tile.stages * kernel.tile.columns : 1];
};

// The same address in shared memory. What a shuffle gives ptxas keeps in a register; the address of a variable it
// computes anew for each stage, in front of a wait (S2UR). For what instructions of shared memory alone use.
template <class T> __device__ __forceinline__ T* kept_address(T* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  const uint32_t low = __shfl_sync(0xffffffffu, static_cast<uint32_t>(address), 0);
  return reinterpret_cast<T*>((address & ~uintptr_t{0xffffffffu}) | low);
}

template <ProductKernel kernel> struct ProductShared {
  unsigned char* memory;
  Mbarrier *full, *empty, *panel_full, *panel_empty, *z_full, *bias_empty;
  unsigned char* bias;
  float* block_scales;

  __device__ __forceinline__ ProductShared(unsigned char* dynamic, ProductState<kernel>* s)
      : memory(dynamic),
        full(s->full),
        empty(s->empty),
        panel_full(s->panel_full),
        panel_empty(s->panel_empty),
        z_full(s->z_full),
        bias_empty(s->bias_empty),
        bias(s->bias),
        block_scales(s->block_scales) {}
  __device__ __forceinline__ void keep_addresses() {
    memory = kept_address(memory);
    full = kept_address(full);
    empty = kept_address(empty);
  }
  __device__ __forceinline__ unsigned char* a(int stage) const { return memory + stage * kernel.tile.stage_bytes(); }
  __device__ __forceinline__ unsigned char* b(int stage) const { return a(stage) + kernel.tile.rows * kRowBytes; }
  // Of a consumer warp. Where panels are handed over, the first buffer is for them, and the second one for z.
  __device__ __forceinline__ unsigned char* staging(int warp) const {
    return a(kernel.tile.stages) + warp * kWarpBuffers * kBufferBytes;
  }
};

// Stages [begin, end) of a unit's sum.
struct Share {
  int unit, begin, end;
  int slot;  // where a share that does not begin at 0 leaves its sums
};

// The shares of one cluster: whole units, then, where sums are split, shares of the R < C units left for C clusters. F
// = C / R fronts of R clusters each walk through the sum side by side, so that the units share operands in the
// second-level cache: front i adds stages [i W, (i + 1) W) of every unit. The L = C % R clusters left over take the
// rest of each sum, [F W, blocks): first that of one unit each, then equal parts of the others' together, the pool.
// Cluster u of front 0 owns unit `whole` + u: it adds the other shares in the order of k. `cluster` counts down from
// the last one that began, so that a cluster waits only for those that began before it.
template <bool splits> struct ProductShares {
  int unit, clusters, whole, blocks;
  int cluster, left = 0, fronts = 0, front_stages = 0, rest = 0, over = 0, pool = 0;  // R, F, W, blocks - F W, L
  int turn = 0, at = 0, end = 0;                                                      // of the pool

  __device__ __forceinline__ ProductShares(const ProductArguments& p, int own, int all)
      : unit(own), clusters(all), whole(p.whole), blocks(p.blocks), cluster(own) {
    if constexpr (splits) {
      left = p.units - whole;
      if (left == 0) return;
      fronts = clusters / left;
      front_stages = (left * blocks + clusters - 1) / clusters;
      rest = max(0, blocks - fronts * front_stages);
      over = clusters - fronts * left;
      pool = (left - over) * rest;
    }
  }
  __device__ __forceinline__ int cut(int part) const { return pool * part / over; }
  __device__ __forceinline__ bool next(Share* s) {
    if (unit < whole) {
      *s = {unit, 0, blocks, 0};
      unit += clusters;
      return true;
    }
    if constexpr (splits) {
      if (left == 0) return false;
      if (turn == 0) {
        turn = 1;
        if (cluster < fronts * left) {
          turn = 2;
          const int begin = cluster / left * front_stages;
          *s = {whole + cluster % left, begin, min(blocks, begin + front_stages), cluster};
          return begin < blocks;
        }
        at = cut(cluster - fronts * left);
        end = cut(cluster - fronts * left + 1);
        if (rest > 0) {
          *s = {whole + cluster - fronts * left, fronts * front_stages, blocks, cluster};
          return true;
        }
      }
      if (turn == 1 && at < end) {
        const int of = at / rest, first = at - of * rest;
        *s = {whole + over + of, fronts * front_stages + first, fronts * front_stages + min(rest, first + end - at),
              clusters + cluster - fronts * left + of};
        at += s->end - s->begin;
        return true;
      }
    }
    return false;
  }
  __device__ __forceinline__ bool ends() const {
    ProductShares rest_of_them = *this;
    Share s;
    return !rest_of_them.next(&s);
  }
  // The slot of a unit's next share behind the owner's, in the order of k; -1: there is none. `step` is 1 at first.
  __device__ __forceinline__ int next_other(int split_unit, int* step) const {
    const int u = split_unit - whole;
    if (*step < fronts) {
      const int front = (*step)++;
      if (front * front_stages < blocks) return front * left + u;
      return -1;  // and nothing is left
    }
    if (rest == 0) return -1;
    int part = (*step)++ - fronts;
    if (u < over) return part == 0 ? fronts * left + u : -1;
    const int first = (u - over) * rest;
    if (part == 0) part = max(0, first / (pool / over + 1) - 1);  // not behind the first that has something
    while (part < over && (cut(part + 1) <= first || cut(part + 1) == cut(part))) ++part;
    *step = part + 1 + fronts;
    return part < over && cut(part) < first + rest ? clusters + part + u - over : -1;
  }
};

// Calls use.template operator()<F>() with the function of an activation (common/activation_functions.h).
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

struct TilePlace {
  int row, column;  // of the block's first element
  int batch = 0;    // of `symmetric`; of `siblings` nt: which
};

// Unit `unit` of those on and above the diagonals of matrices of side x side units, in bands of kBandUnits columns, of
// which each is a rectangle above a triangle.
__host__ __device__ __forceinline__ TilePlace triangle_unit(int unit, int side) {
  const int all = side * (side + 1) / 2, batch = unit / all;
  int rest = unit - batch * all, first = 0, width = min(kBandUnits, side);
  for (int band; rest >= (band = first * width + width * (width + 1) / 2); width = min(kBandUnits, side - first)) {
    rest -= band;
    first += kBandUnits;
  }
  int row = rest / width, column = first + rest - row * width;
  if (row >= first) {
    rest -= first * width;
    for (row = first; rest >= width; ++row) rest -= width--;
    column = row + rest;
  }
  return {row, column, batch};
}

// Which tiles are this block's.
template <ProductKernel kernel> struct ProductPlace {
  const ProductArguments& p;
  int rank, rank_row, rank_column;  // in the cluster
  int cluster, clusters;

  __device__ __forceinline__ ProductPlace(const ProductArguments& arguments, int begun) : p(arguments) {
    constexpr ProductTile tile = kernel.tile;
    rank = static_cast<int>(device::cluster_rank());
    rank_row = rank % tile.cluster_rows;
    rank_column = rank / tile.cluster_rows;
    clusters = gridDim.x / tile.cluster();
    cluster = kernel.splits ? clusters - 1 - begun : static_cast<int>(blockIdx.x) / tile.cluster();
  }
  // Bands of kBandUnits units along the columns; in a band the short side runs fastest. So the units of a wave share
  // operands in the second-level cache.
  __device__ __forceinline__ TilePlace tile(int unit) const {
    if constexpr (kernel.symmetric()) {
      const TilePlace u = triangle_unit(unit, p.unit_rows);
      return {(u.row * kernel.tile.cluster_rows + rank_row) * kernel.tile.rows, u.column * kernel.tile.columns,
              u.batch};
    }
    const int band = unit / (kBandUnits * p.unit_rows), first = band * kBandUnits;
    const int width = min(kBandUnits, p.unit_columns - first), rest = unit - first * p.unit_rows;
    const int row = rest / width, column = first + rest - row * width;
    TilePlace at{(row * kernel.tile.cluster_rows + rank_row) * kernel.tile.rows,
                 (column * kernel.tile.cluster_columns + rank_column) * kernel.columns()};
    if constexpr (kernel.siblings() && kernel.layout == ProductLayout::nt) {
      at.batch = p.sibling_at(column);
      at.column -= p.first[at.batch] * kernel.tile.cluster_columns * kernel.columns();
    }
    return at;
  }
};

}  // namespace warpsmith::linear
