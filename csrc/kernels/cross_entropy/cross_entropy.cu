#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/cross_entropy/backward.cuh"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/forward.cuh"
#include "kernels/cross_entropy/totals.cuh"

namespace warpsmith {
namespace {

using namespace cross_entropy;

LaunchConfig grid_of(const CrossEntropyConfig& c) {
  return {.grid = static_cast<unsigned>(c.blocks),
          .block = static_cast<unsigned>(c.threads),
          .dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes),
          .cluster = static_cast<unsigned>(c.cluster),
          .bulk_copies = c.bulk};
}

Status problem_of(int64_t rows, int64_t classes, const void* base, int64_t stride, Dtype dtype,
                  CrossEntropyProblem* out) {
  constexpr int64_t kMostClasses = (int64_t{1} << 31) - 64;
  if (classes > kMostClasses)
    return Status::unsupported("classes: expected at most " + std::to_string(kMostClasses) + ", got " +
                               std::to_string(classes));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *out = {rows,
          classes,
          size_bytes(dtype),
          rows_on_16_bytes(base, stride, rows, dtype),
          true,
          true,
          device.multiprocessors,
          device.code_capability,
          device.max_dynamic_shared_bytes};
  return {};
}

template <class T, Terms kTerms>
void (*forward_kernel(const CrossEntropyConfig& c))(CrossEntropyParams, Options, Schedule) {
  constexpr Terms kLooped = kTerms == Terms::entropy ? Terms::general : kTerms;
  if (c.kernel == CrossEntropyKernel::looped) return forward_looped<T, kLooped>;
  return c.block_a_row() ? forward_resident<T, true, kTerms> : forward_resident<T, false, kTerms>;
}

// `entropy`: the result that a forward writes, or the gradient that a backward reads; null: not wanted. An entropy kept
// only for a backward does not change the choice of kernel.
template <class Visit> Status with_terms(const CrossEntropyParams& p, const void* entropy, Visit&& visit) {
  if (p.softcap != 0 || p.label_smoothing != 0) return visit.template operator()<Terms::general>();
  return entropy ? visit.template operator()<Terms::entropy>() : visit.template operator()<Terms::plain>();
}

// `overlap`: the previous kernel on the stream is ours and calls launch_dependents().
template <class Source>
Status launch_total(const Source& source, int64_t count, void* partials_any, bool overlap, void* stream) {
  float* partials = static_cast<float*>(partials_any);
  LaunchConfig first{.grid = static_cast<unsigned>(total_blocks(count)), .block = kTotalThreads};
  if (overlap) WARPSMITH_RETURN_IF_FAILED(allow_overlap(&first));
  WARPSMITH_RETURN_IF_FAILED(launch(total<Source>, first, stream, source, partials, count));
  if (first.grid.x == 1) return {};
  return launch(total_of_partials<Source>, {.block = kTotalThreads}, stream, source, partials, int64_t{first.grid.x});
}

}  // namespace

Status cross_entropy_forward_cuda(const CrossEntropyParams& p, void* stream) {
  CrossEntropyProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p.rows, p.classes, p.logits, p.logits_stride, p.dtype, &problem));
  problem.gradient = p.dlogits != nullptr;
  problem.loss = p.loss != nullptr;
  return cross_entropy_forward_cuda_with(choose_cross_entropy_forward(problem), p, stream);
}

Status cross_entropy_forward_cuda_with(const CrossEntropyConfig& c, const CrossEntropyParams& p, void* stream) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    return with_terms(p, p.entropy, [&]<Terms kTerms>() {
      LaunchConfig grid = grid_of(c);
      if (p.follows_denominator) WARPSMITH_RETURN_IF_FAILED(allow_overlap(&grid));
      return launch(forward_kernel<T, kTerms>(c), grid, stream, p, Options(p), Schedule(c));
    });
  });
}

Status cross_entropy_backward_cuda(const CrossEntropyParams& p, void* stream) {
  CrossEntropyProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p.rows, p.classes, p.logits, p.logits_stride, p.dtype, &problem));
  const CrossEntropyConfig c = choose_cross_entropy_backward(problem);
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    return with_terms(p, p.grad_entropy, [&]<Terms kTerms>() {
      return launch(backward_streaming<T, kTerms>, grid_of(c), stream, p, Options(p), c.lanes);
    });
  });
}

Status cross_entropy_scale_cuda(const CrossEntropyScaleParams& p, void* stream) {
  CrossEntropyProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p.rows, p.columns, p.x, p.stride, p.dtype, &problem));
  const CrossEntropyConfig c = choose_cross_entropy_scale(problem);
  return visit_cuda_dtype(p.dtype, [&]<class T>() { return launch(scale_rows<T>, grid_of(c), stream, p, c.lanes); });
}

Status cross_entropy_denominator_cuda(const CrossEntropyDenominatorParams& p, void* stream) {
  if (p.class_weight_total)
    WARPSMITH_RETURN_IF_FAILED(launch_total(ClassWeightTotal{p}, p.classes, p.partials, false, stream));
  return p.denominator ? launch_total(Denominator{p}, p.rows, p.partials, false, stream) : Status();
}

Status cross_entropy_reduce_cuda(const CrossEntropyReduceParams& p, void* stream) {
  return launch_total(Losses{p}, p.rows, p.partials, p.follows_forward, stream);
}

}  // namespace warpsmith
