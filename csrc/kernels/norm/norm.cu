#include "kernels/norm/norm.h"

#include "common/alignment.h"
#include "common/visit_dtype.h"
#include "kernels/norm/backward.cuh"
#include "kernels/norm/backward_config.h"
#include "kernels/norm/forward.cuh"
#include "kernels/norm/forward_config.h"
#include "kernels/norm/launch.h"
#include "kernels/norm/sum_partials.cuh"

// From params to a kernel: problem, config, launch. The kernels of any length, `looped`, and the second stage of the
// parameter gradients are compiled here.
namespace warpsmith {
namespace norm {
namespace {

template <class Params> Status problem_of(const Params& p, bool aligned, NormProblem* out) {
  if (p.dtype == Dtype::float64) return no_cuda_kernel(p.dtype);
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const NormRow row = row_of(p.op);
  out->rows = p.rows, out->columns = p.columns;
  out->element_bytes = size_bytes(p.dtype);
  out->residual_bytes = row.residual ? size_bytes(p.residual_dtype) : 0;
  out->layer = row.layer, out->dropout = row.dropout;
  out->aligned = aligned;
  out->multiprocessors = device.multiprocessors;
  out->max_shared_bytes = device.max_dynamic_shared_bytes;
  out->code_capability = device.code_capability;
  return {};
}

Status problem_of(const NormForwardParams& p, NormProblem* out) {
  const bool aligned = rows_on_16_bytes(p.x, p.x_stride, p.rows, p.dtype) && on_16_bytes(p.y) &&
                       rows_on_16_bytes(p.residual, p.residual_stride, p.rows, p.residual_dtype) &&
                       on_16_bytes(p.residual_out) && on_16_bytes(p.weight) && on_16_bytes(p.bias);
  out->affine_as_x = p.weight && (!row_of(p.op).layer || p.bias) && p.weight_dtype == p.dtype && p.weight_offset == 0;
  out->as_added = p.as_added;
  return problem_of(p, aligned, out);
}

Status problem_of(const NormBackwardParams& p, NormProblem* out) {
  const bool aligned = rows_on_16_bytes(p.dy, p.dy_stride, p.rows, p.dtype) &&
                       rows_on_16_bytes(p.s, p.s_stride, p.rows, p.residual_dtype) &&
                       rows_on_16_bytes(p.dresidual_out, p.dresidual_out_stride, p.rows, p.residual_dtype) &&
                       on_16_bytes(p.dx) && on_16_bytes(p.dresidual) && on_16_bytes(p.weight);
  return problem_of(p, aligned, out);
}

// `looped` reads every dtype at run time, so it is compiled once, with float in place of the types.
template <class Visit> Status visit_looped(Norm op, Visit&& visit) {
  return visit_op<float>(op, Dtype::float32, [&]<class Op, class>() { return visit.template operator()<Op>(); });
}

Status sum_partial_rows(const NormSumConfig& c, const NormBackwardParams& p, int64_t partial_rows, void* stream) {
  SumPartialsParams sum{{}, {}, partial_rows, p.columns, p.weight_dtype};
  LaunchConfig grid;
  grid.grid.y = 0;
  if (p.dweight_partials) {
    sum.partials[grid.grid.y] = static_cast<const float*>(p.dweight_partials);
    sum.sums[grid.grid.y++] = p.dweight;
  }
  if (p.dbias_partials) {
    sum.partials[grid.grid.y] = static_cast<const float*>(p.dbias_partials);
    sum.sums[grid.grid.y++] = p.dbias;
  }
  if (grid.grid.y == 0) return {};
  grid.grid.x = static_cast<unsigned>(ceil_div(p.columns, int64_t{c.tile_vectors} * c.vector_elems));
  grid.block.x = static_cast<unsigned>(c.threads);
  WARPSMITH_RETURN_IF_FAILED(allow_overlap(&grid));
  return launch(c.vector_elems == 4 ? sum_partials<4> : sum_partials<1>, grid, stream, sum, c.tile_vectors);
}

}  // namespace
}  // namespace norm

Status norm_forward_cuda(const NormForwardParams& p, void* stream, bool* has_cast) {
  using namespace norm;
  NormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const NormConfig c = choose_norm_forward(problem);
  const bool casts = p.cast.data && on_16_bytes(p.cast.data) && norm_casts(problem, c);
  if (has_cast) *has_cast = casts;
  if (c.kernel == NormKernel::looped)
    return visit_looped(p.op, [&]<class Op>() {
      return launch(c.vector_elems == 1 ? forward_looped<Op, 1> : forward_looped<Op, 4>, grid_of(c), stream, p,
                    c.lanes);
    });
  return visit_cuda_dtype(p.dtype, [&]<class T>() { return launch_forward<T>(c, p, casts, stream); });
}

Status norm_partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  NormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(norm::problem_of(p, &problem));
  *partial_rows = norm_partial_rows(choose_norm_backward(problem));
  return {};
}

Status norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  using namespace norm;
  NormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const NormConfig c = choose_norm_backward(problem);
  WARPSMITH_RETURN_IF_FAILED(
      c.kernel == NormKernel::looped
          ? visit_looped(p.op,
                         [&]<class Op>() {
                           return launch(c.vector_elems == 1 ? backward_looped<Op, 1> : backward_looped<Op, 4>,
                                         grid_of(c), stream, p, c.lanes);
                         })
          : visit_cuda_dtype(p.dtype, [&]<class T>() { return launch_backward<T>(c, p, stream); }));
  return sum_partial_rows(choose_norm_sum(p.columns), p, norm_partial_rows(c), stream);
}

}  // namespace warpsmith
