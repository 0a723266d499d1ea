#include "kernels/quantize/quantize.h"

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/quantize/dequantize.cuh"
#include "kernels/quantize/finish.cuh"
#include "kernels/quantize/quantize_launch.h"
#include "kernels/quantize/tiles.cuh"

namespace warpsmith {

using namespace quantize;

namespace {

template <Finish kFinish> Status finish(const Partials& p, void* stream) {
  if (p.items == 0) return {};
  LaunchConfig config;
  if constexpr (kFinish != Finish::sum) {
    if (p.items == 1 && p.count > kFinishParts) {
      config.block.x = kFinishThreads;
      return launch(finish_one<kFinish>, config, stream, p);
    }
  }
  config.grid.x = static_cast<unsigned>(ceil_div(p.items, kFinishItems));
  config.block.x = kFinishItems * kFinishParts;
  return launch(finish_items<kFinish>, config, stream, p);
}

// x alone.
Tiles tiles_of(const void* x, int64_t rows, int64_t columns, int64_t stride, Dtype dtype) {
  Tiles t{};
  t.x = x;
  t.rows = rows;
  t.columns = columns;
  t.x_stride = stride;
  t.down = ceil_div(rows, kTile);
  t.across = ceil_div(columns, kTile);
  t.whole = rows_on_16_bytes(x, stride, rows, dtype);
  return t;
}

// Scales that no block can compute alone.
Status compute_scales(const QuantizeParams& p, Tiles t, float*& workspace, void* stream) {
  const Float8Limits limits = p.e5m2 ? kE5m2Limits : kE4m3Limits;
  const auto take = [&](int64_t elems) {
    float* taken = workspace;
    workspace += elems;
    return taken;
  };
  const bool by_row = p.scaling == Fp8Scaling::row;
  if (!by_row) t.partials = take(t.down * t.across);
  if (by_row && p.data) t.row_partials = take(t.across * p.rows);
  if (by_row && p.transposed) t.column_partials = take(t.down * p.columns);
  if (t.down * t.across > 0) WARPSMITH_RETURN_IF_FAILED(launch_amax(p.dtype, t, stream));
  const auto scales = [&](const float* from, float* to, int64_t count, int64_t items) {
    return finish<Finish::scale>({from, to, count, items, limits, p.power_of_two}, stream);
  };
  if (!by_row) return scales(t.partials, p.scale, t.down * t.across, 1);
  if (p.data) WARPSMITH_RETURN_IF_FAILED(scales(t.row_partials, p.scale, t.across, p.rows));
  return p.transposed ? scales(t.column_partials, p.transposed_scale, t.down, p.columns) : Status();
}

Status cast_tiles(const QuantizeParams& p, const QuantizeConfig& c, Tiles t, float* workspace, void* stream) {
  t.data = static_cast<uint8_t*>(p.data);
  t.transposed = static_cast<uint8_t*>(p.transposed);
  t.row_scale = p.scale;
  t.column_scale = p.transposed_scale;
  t.column_sums = p.column_sums ? workspace : nullptr;
  t.counts = p.counts;
  t.square = p.scaling == Fp8Scaling::tensor || p.scaling == Fp8Scaling::block2d;
  t.power_of_two = p.power_of_two;
  t.whole_data = p.columns % (16 / size_bytes(p.dtype)) == 0 || p.rows == 1;
  t.whole_transposed = p.rows % 16 == 0 || p.columns == 1;
  t.of_square = !p.given && !c.amax_pass;
  if (c.blocks > 0) WARPSMITH_RETURN_IF_FAILED(launch_casts(p.dtype, p.e5m2, t, stream));
  if (!p.column_sums) return {};
  return finish<Finish::sum>({t.column_sums, p.column_sums, t.down, p.columns, {}, false}, stream);
}

}  // namespace

Status quantize_cuda(const QuantizeParams& p, void* stream) {
  if (size_bytes(p.dtype) > 4) return no_cuda_kernel(p.dtype);
  const QuantizeConfig c = choose_quantize(problem_of(p));
  if (p.counts) {
    LaunchConfig two;
    two.block.x = 2;
    WARPSMITH_RETURN_IF_FAILED(launch(clear_counts, two, stream, p.counts));
  }
  Tiles t = tiles_of(p.x, p.rows, p.columns, p.x_stride, p.dtype);
  float* workspace = p.workspace;
  t.partials = p.amax ? workspace + (p.column_sums ? t.down * t.columns : 0) : nullptr;
  if (c.amax_pass) WARPSMITH_RETURN_IF_FAILED(compute_scales(p, t, workspace, stream));
  if (c.tiles) {
    WARPSMITH_RETURN_IF_FAILED(cast_tiles(p, c, t, workspace, stream));
  } else if (c.blocks > 0) {
    WARPSMITH_RETURN_IF_FAILED(launch_segments(p, c, stream));
  } else if (p.scaling == Fp8Scaling::row && !p.given) {  // rows without columns have scales
    return finish<Finish::scale>({nullptr, p.scale, 0, p.rows, {}, true}, stream);
  }
  return p.amax ? finish<Finish::amax>({t.partials, p.amax, c.blocks, 1, {}, false}, stream) : Status();
}

Status fp8_amax_cuda(const Fp8AmaxParams& p, void* stream) {
  if (size_bytes(p.dtype) > 4) return no_cuda_kernel(p.dtype);
  Tiles t = tiles_of(p.x, p.rows, p.columns, p.x_stride, p.dtype);
  (p.by_row ? t.row_partials : t.partials) = p.workspace;
  if (t.down * t.across > 0) WARPSMITH_RETURN_IF_FAILED(launch_amax(p.dtype, t, stream));
  return finish<Finish::amax>(
      {p.workspace, p.amax, p.by_row ? t.across : t.down * t.across, p.by_row ? p.rows : 1, {}, false}, stream);
}

Status fp8_scale_cuda(const Fp8ScaleParams& p, void* stream) {
  return finish<Finish::scale>({p.amax, p.scale, 1, p.count, p.e5m2 ? kE5m2Limits : kE4m3Limits, p.power_of_two},
                               stream);
}

Status dequantize_cuda(const DequantizeParams& p, void* stream) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    constexpr int N = 16 / sizeof(T), kParts = kDequantizeThreads / 32;
    const int64_t parts_a_row = ceil_div(p.columns, 32 * N), parts = p.rows * parts_a_row;
    if (parts == 0) return Status();
    const bool whole = on_16_bytes(p.data) && (p.rows == 1 || (p.data_stride % N == 0 && p.columns % N == 0));
    LaunchConfig config;
    config.grid.x = static_cast<unsigned>(ceil_div(parts, kParts));
    config.block.x = kDequantizeThreads;
    const auto kernel = p.e5m2 ? &dequantize<T, float8_e5m2> : &dequantize<T, float8_e4m3>;
    return launch(kernel, config, stream, p, parts, device::FastDivide(parts_a_row), parts_a_row, whole);
  });
}

}  // namespace warpsmith
