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

// I: an entry of kProducts. T: of 16-bit factors; maps of 8-bit floats are of pairs.
template <class T, class I> Status run_product(const ProductParams& x, void* stream) {
  constexpr ProductKernel kernel = I::value;
  constexpr ProductTile tile = kernel.tile;
  constexpr bool kWide = kernel.epilogue == ProductEpilogue::wide;
  const int64_t batches = kernel.symmetric() ? x.batches : 0, out_apart = x.rows * x.columns;
  ProductMaps maps{};
  if constexpr (kernel.layout == ProductLayout::tn)
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.a, x.a, x.dtype, x.inner, x.rows, x.a_stride,
                                          kStageInner / tile.cluster_columns, batches, x.a_apart));
  else
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.a, x.a, x.dtype, x.rows, x.inner, x.a_stride,
                                          tile.rows / tile.cluster_columns, batches, x.a_apart));
  if constexpr (kernel.layout == ProductLayout::nt)
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.b, x.b, x.dtype, x.columns, x.inner, x.b_stride,
                                          tile.columns / tile.cluster_rows, batches, x.b_apart));
  else
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.b, x.b, x.dtype, x.inner, x.columns, x.b_stride,
                                          kStageInner / tile.cluster_rows, batches, x.b_apart));
  if constexpr (kernel.gated())
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.up, x.up, x.dtype, x.columns, x.inner, x.up_stride, kernel.columns()));
  WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.out, x.out, kWide ? Dtype::float32 : x.dtype, x.rows, x.columns, x.columns,
                                        16, batches, out_apart));
  if constexpr (kernel.symmetric())
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.up_z, x.out, x.dtype, x.rows, x.columns, x.columns, kPanelColumns,
                                          batches, out_apart, Swizzle::bytes32));
  if (x.z)
    WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.z, x.z, x.dtype, x.rows, x.columns, x.z_stride, 16, batches, x.z_apart));
  if (x.up_z) WARPSMITH_RETURN_IF_FAILED(matrix_map(maps.up_z, x.up_z, x.dtype, x.rows, x.columns, x.z_stride, 16));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));

  ProductArguments p{};
  p.rows = static_cast<int>(x.rows);
  p.columns = static_cast<int>(x.columns);
  p.blocks = static_cast<int>(ceil_div(x.inner, kStageInner));
  p.pace = ProductConsumer<T, kernel>::pace(p.blocks);
  p.unit_rows = static_cast<int>(ceil_div(x.rows, int64_t{tile.rows} * tile.cluster_rows));
  p.unit_columns = static_cast<int>(ceil_div(x.columns, int64_t{kernel.columns()} * tile.cluster_columns));
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
  p.a_scale = x.a_scale;
  p.b_scale = x.b_scale;
  p.scales_of_rows = x.scales_of_rows;
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
