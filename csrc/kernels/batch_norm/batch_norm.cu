#include "kernels/batch_norm/batch_norm.h"

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/batch_norm/backward.cuh"
#include "kernels/batch_norm/normalize.cuh"
#include "kernels/batch_norm/statistics.cuh"

// From params to launches.
namespace warpsmith {

using namespace batch_norm;

namespace {

template <class Params> Status problem_of(const Params& p, BatchNormProblem* out) {
  if (p.dtype == Dtype::float64) return no_cuda_kernel(p.dtype);
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *out = {p.rows, p.columns, size_bytes(p.dtype), device.multiprocessors};
  return {};
}

Turns turns_of(const BatchNormProblem& p, const BatchNormConfig& c) {
  return {p.rows,  p.columns, p.columns / c.vector_elems, ceil_div(p.rows, c.rows_a_turn), c.slices, c.rows_a_turn,
          c.tiles, c.lanes};
}

// after: the kernel waits for the one before it by itself.
template <class Params> Status launch_pass(void (*kernel)(Params), int64_t blocks, bool after, const Params& p,
                                           void* stream, size_t ring_bytes = 0) {
  LaunchConfig config{.grid = static_cast<unsigned>(blocks), .block = kThreads, .dynamic_shared_bytes = ring_bytes};
  if (after) WARPSMITH_RETURN_IF_FAILED(allow_overlap(&config));
  return launch(kernel, config, stream, p);
}

// visit.template operator()<T, N>(): vectors of 16 bytes, or single elements.
template <class Visit> Status visit_vectors(Dtype dtype, int vector_elems, Visit&& visit) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    constexpr int N = 16 / sizeof(T);
    return vector_elems == N ? visit.template operator()<T, N>() : visit.template operator()<T, 1>();
  });
}

template <class Params> Affine affine_of(const Params& p) {
  return {p.weight, p.bias, static_cast<const float*>(p.mean), static_cast<const float*>(p.rstd), p.weight_dtype};
}

}  // namespace

Status batch_norm_slices_cuda(const BatchNormForwardParams& p, int64_t* slices) {
  BatchNormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  *slices = choose_batch_norm(problem, BatchNormTogether::statistics).slices;
  return {};
}

Status batch_norm_slices_cuda(const BatchNormBackwardParams& p, int64_t* slices) {
  BatchNormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  *slices = choose_batch_norm(problem, BatchNormTogether::sums).slices;
  return {};
}

Status batch_norm_forward_cuda(const BatchNormForwardParams& p, void* stream) {
  BatchNormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const BatchNormConfig c = choose_batch_norm(problem, BatchNormTogether::statistics);
  FinishStatisticsParams finish{.x = p.x,
                                .means = nullptr,
                                .squares = nullptr,
                                .running_mean = p.running_mean,
                                .running_var = p.running_var,
                                .new_mean = p.new_mean,
                                .new_var = p.new_var,
                                .mean = static_cast<float*>(p.mean),
                                .rstd = static_cast<float*>(p.rstd),
                                .exact = p.exact,
                                .of_ranks = p.of_ranks,
                                .rows = p.rows,
                                .columns = p.columns,
                                .slices = c.slices,
                                .ranks = p.ranks,
                                .slice_rows = BatchNormSliceRows(p.rows, c),
                                .keep = static_cast<float>(1 - p.momentum),
                                .momentum = static_cast<float>(p.momentum),
                                .eps = p.eps,
                                .x_dtype = p.dtype,
                                .dtype = p.running_dtype};
  if (p.training) {
    float* const means = static_cast<float*>(p.partials);
    const StatisticsParams s{p.x, p.x_stride / c.vector_elems, means, means + c.slices * p.columns,
                             turns_of(problem, c)};
    finish.means = s.means;
    finish.squares = s.squares;
    WARPSMITH_RETURN_IF_FAILED(visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() {
      return launch_pass(statistics<T, N>, c.blocks(), false, s, stream);
    }));
  }
  WARPSMITH_RETURN_IF_FAILED(launch_pass(finish_statistics, ceil_div(p.columns, kItems), p.training, finish, stream));
  if (!p.y) return {};
  const BatchNormConfig last = choose_batch_norm(problem, BatchNormTogether::normalize);
  const int64_t x_stride = p.x_stride / last.vector_elems, residual_stride = p.residual_stride / last.vector_elems;
  const NormalizeParams n{
      p.x, p.residual, p.y, p.mask, affine_of(p), x_stride, residual_stride, turns_of(problem, last), p.relu};
  return visit_vectors(p.dtype, last.vector_elems, [&]<class T, int N>() {
    const auto kernel = p.residual ? &normalize<T, N, true> : &normalize<T, N, false>;
    return launch_pass(kernel, last.blocks(), true, n, stream, kRingBytes<T, N>);
  });
}

Status batch_norm_backward_cuda(const BatchNormBackwardParams& p, void* stream) {
  BatchNormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  const BatchNormConfig c = choose_batch_norm(problem, BatchNormTogether::sums);
  GradientsParams g{.dy = p.dy,
                    .x = p.x,
                    .mask = p.mask,
                    .dx = p.dx,
                    .dresidual = p.dresidual,
                    .sums = nullptr,
                    .products = nullptr,
                    .means = nullptr,
                    .affine = affine_of(p),
                    .dy_stride = p.dy_stride / c.vector_elems,
                    .x_stride = p.x_stride / c.vector_elems,
                    .turns = turns_of(problem, c),
                    .relu = p.relu};
  const bool needs_sums = p.needs_sums();
  if (needs_sums) {
    const int64_t length = c.slices * p.columns;
    g.sums = static_cast<float*>(p.partials);
    g.products = g.sums + length;
    WARPSMITH_RETURN_IF_FAILED(visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() {
      return launch_pass(sums<T, N>, c.blocks(), false, g, stream, kRingBytes<T, N>);
    }));
    float* const means = g.products + length;
    const FinishSumsParams finish{.sums = g.sums,
                                  .products = g.products,
                                  .mean = g.affine.mean,
                                  .rstd = g.affine.rstd,
                                  .mean_sum = means,
                                  .mean_product = means + p.columns,
                                  .dweight = p.dweight,
                                  .dbias = p.dbias,
                                  .exact = p.exact,
                                  .rows = p.rows,
                                  .columns = p.columns,
                                  .slices = c.slices,
                                  .dtype = p.weight_dtype};
    WARPSMITH_RETURN_IF_FAILED(launch_pass(finish_sums, ceil_div(p.columns, kItems), true, finish, stream));
    g.means = p.training ? means : nullptr;
  }
  if (!p.dx && !p.dresidual) return {};
  if (p.sums_of_ranks) {
    float* const means = static_cast<float*>(p.partials);
    const LaunchConfig config{.grid = static_cast<unsigned>(ceil_div(p.columns, int64_t{kThreads})), .block = kThreads};
    WARPSMITH_RETURN_IF_FAILED(
        launch(mean_of_ranks, config, stream, p.sums_of_ranks, p.statistics_of_ranks, means, p.ranks, p.columns));
    g.means = means;
  }
  const BatchNormConfig last = choose_batch_norm(problem, BatchNormTogether::gradients);
  g.turns = turns_of(problem, last);
  return visit_vectors(p.dtype, last.vector_elems, [&]<class T, int N>() {
    const bool after = needs_sums || p.sums_of_ranks;
    return launch_pass(gradients<T, N>, last.blocks(), after, g, stream, kRingBytes<T, N>);
  });
}

}  // namespace warpsmith
