#pragma once
#include <algorithm>

#include "common/alignment.h"
#include "common/instances.h"
#include "device/launch.h"
#include "device/tensor_map.h"
#include "kernels/linear/hopper/product_sm90.cuh"
#include "kernels/linear/hopper/product_sm90.h"

// Launches the products of one layout, of halves or of 8-bit floats.
namespace warpsmith::linear {

// A map over (columns, rows) of a row-major matrix; its box is box_rows rows of the swizzle's span. With `batches` over
// (columns, rows, matrices), so many elements apart.
inline Status matrix_map(TensorMap& map, const void* base, Dtype dtype, int64_t rows, int64_t columns, int64_t stride,
                         int box_rows, int64_t batches = 0, int64_t apart = 0, Swizzle swizzle = Swizzle::bytes128) {
  const int size = size_bytes(dtype);
  return make_tensor_map(map, {.base = base,
                               .dtype = dtype,
                               .rank = batches > 0 ? 3 : 2,
                               .sizes = {columns, rows, batches},
                               .strides_bytes = {0, rows == 1 ? 16 : stride * size, batches == 1 ? 16 : apart * size},
                               .box = {swizzle_span_bytes(swizzle) / size, box_rows, 1},
                               .swizzle = swizzle});
}

template <ProductKernel kernel>
Status map_a(TensorMap& map, const ProductParams& x, const void* base, int64_t inner, int64_t stride) {
  constexpr bool tn = kernel.layout == ProductLayout::tn;
  return matrix_map(map, base, x.dtype, tn ? inner : x.rows, tn ? x.rows : inner, stride,
                    (tn ? kStageInner : kernel.tile.rows) / kernel.tile.cluster_columns,
                    kernel.symmetric() ? x.batches : 0, x.a_apart);
}
template <ProductKernel kernel>
Status map_b(TensorMap& map, const ProductParams& x, const void* base, int64_t columns, int64_t inner, int64_t stride) {
  constexpr bool nt = kernel.layout == ProductLayout::nt;
  return matrix_map(map, base, x.dtype, nt ? columns : inner, nt ? inner : columns, stride,
                    (nt ? kernel.tile.columns : kStageInner) / kernel.tile.cluster_rows,
                    kernel.symmetric() ? x.batches : 0, x.b_apart);
}
template <ProductKernel kernel>
Status map_out(TensorMap& map, const ProductParams& x, const void* base, int64_t columns) {
  return matrix_map(map, base, kernel.epilogue == ProductEpilogue::wide ? Dtype::float32 : x.dtype, x.rows, columns,
                    columns, 16, kernel.symmetric() ? x.batches : 0, x.rows * x.columns);
}

template <ProductKernel kernel> Status place(ProductMaps& maps, ProductArguments&, const ProductParams& x) {
  WARPSMITH_RETURN_IF_FAILED(map_a<kernel>(maps.a, x, x.a, x.inner, x.a_stride));
  WARPSMITH_RETURN_IF_FAILED(map_b<kernel>(maps.b, x, x.b, x.columns, x.inner, x.b_stride));
  if constexpr (kernel.gated())
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.up, x.up, x.dtype, x.columns, x.inner, x.up_stride, kernel.columns()));
  WARPSMITH_RETURN_IF_FAILED(map_out<kernel>(maps.out, x, x.out, x.columns));
  const int64_t batches = kernel.symmetric() ? x.batches : 0;
  if constexpr (kernel.symmetric())
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.up_z, x.out, x.dtype, x.rows, x.columns, x.columns, kPanelColumns,
                                          batches, x.rows * x.columns, Swizzle::bytes32));
  if (x.z)
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.z, x.z, x.dtype, x.rows, x.columns, x.z_stride, 16, batches, x.z_apart));
  if (x.up_z) WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.up_z, x.up_z, x.dtype, x.rows, x.columns, x.z_stride, 16));
  return {};
}
template <ProductKernel kernel> Status place(SiblingMaps& maps, ProductArguments& p, const ProductParams& x) {
  constexpr bool nt = kernel.layout == ProductLayout::nt;
  int& end = nt ? p.unit_columns : p.blocks;
  end = 0;
  std::fill_n(p.first, kMostSiblings, INT32_MAX);
  for (int i = 0; i < x.sibling_count; ++i) {
    const ProductSibling& s = x.siblings[i];
    p.first[i] = end;
    p.widths[i] = static_cast<int>(s.width);
    p.biases[i] = s.bias;
    end += static_cast<int>(ceil_div(s.width, int64_t{nt ? kernel.tile.columns : kStageInner}));
    if constexpr (nt) WARPSMITH_RETURN_IF_FAILED(map_out<kernel>(maps.out[i], x, s.out, s.width));
    if constexpr (!nt) WARPSMITH_RETURN_IF_FAILED(map_a<kernel>(maps.a[i], x, s.a, s.width, s.a_stride));
    WARPSMITH_RETURN_IF_FAILED(
        map_b<kernel>(maps.b[i], x, s.b, nt ? s.width : x.columns, nt ? x.inner : s.width, s.b_stride));
  }
  return nt ? map_a<kernel>(maps.a[0], x, x.a, x.inner, x.a_stride) : map_out<kernel>(maps.out[0], x, x.out, x.columns);
}

constexpr int kPrefetchStages = 32;  // the last of a sum, in which out is brought to the second-level cache

// I: an entry of kProducts. T: of 16-bit factors; maps of 8-bit floats are of pairs.
template <class T, class I> Status run_product(const ProductParams& x, void* stream) {
  constexpr ProductKernel kernel = I::value;
  constexpr ProductTile tile = kernel.tile;
  MapsOf<kernel.siblings()> maps{};
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));

  ProductArguments p{};
  p.rows = static_cast<int>(x.rows);
  p.columns = static_cast<int>(x.columns);
  p.blocks = static_cast<int>(ceil_div(x.inner, kStageInner));
  p.pace = ProductConsumer<T, kernel>::pace(p.blocks);
  p.unit_rows = static_cast<int>(ceil_div(x.rows, int64_t{tile.rows} * tile.cluster_rows));
  p.unit_columns = static_cast<int>(ceil_div(x.columns, int64_t{kernel.columns()} * tile.cluster_columns));
  WARPSMITH_RETURN_IF_FAILED(place<kernel>(maps, p, x));
  const int64_t units =
      kernel.symmetric() ? x.batches * triangle_units(p.unit_rows) : int64_t{p.unit_rows} * p.unit_columns;
  if (units > INT32_MAX / 2) return Status::unsupported("a product of more than 2^30 tiles");
  p.units = static_cast<int>(units);
  p.alpha = x.alpha;
  p.beta = x.beta;
  p.bias = x.bias;
  p.up_bias = x.up_bias;
  p.read = kernel.reads() ? x.z : nullptr;
  p.written = x.out;
  p.kept = kernel.reads() ? nullptr : x.z;
  p.z_stride = x.z_stride;
  p.partials = x.partials;
  p.activation = x.activation;
  p.keep = x.z != nullptr;
  p.add = kernel.symmetric() ? x.z != nullptr : x.add;
  if (kernel.epilogue == ProductEpilogue::wide && x.add)
    p.prefetch = static_cast<int>(
        ceil_div(tile.rows * tile.columns / (16 * kWideColumns), std::clamp(p.blocks, 1, kPrefetchStages)));
  p.a_scale = x.a_scale;
  p.b_scale = x.b_scale;
  p.scales = x.scales;
  p.b_squares = x.b_squares;
  p.to_float16 = x.dtype == Dtype::float16;
  const int64_t all = product_clusters(tile, device.multiprocessors),
                clusters = kernel.splits ? all : std::min(all, units);
  p.whole = kernel.splits ? static_cast<int>(units / all * all) : p.units;
  p.sums = x.sums;
  p.flags = x.flags;
  LaunchConfig config{.grid = static_cast<unsigned>(clusters * tile.cluster()),
                      .block = kProductThreads,
                      .dynamic_shared_bytes = static_cast<size_t>(tile.shared_bytes()),
                      .cluster = static_cast<unsigned>(tile.cluster())};
  WARPSMITH_RETURN_IF_FAILED(allow_overlap(&config));
  return launch(product_sm90<T, I>, config, stream, maps, p);
}

template <ProductLayout layout, bool float8 = false>
Status launch_product(const ProductParams& p, const ProductKernel& kernel, void* stream) {
  using Run = Status (*)(const ProductParams&, void*);
  const Run run = instance_of<kProducts>([&](const ProductKernel& k) { return k == kernel; },
                                         [&]<class I>() -> Run {
                                           if constexpr (I::value.layout != layout || I::value.float8() != float8)
                                             return nullptr;
                                           else if constexpr (float8)
                                             return &run_product<bfloat16, I>;
                                           else
                                             return p.dtype == Dtype::bfloat16 ? &run_product<bfloat16, I>
                                                                               : &run_product<float16, I>;
                                         });
  return run(p, stream);
}

}  // namespace warpsmith::linear
