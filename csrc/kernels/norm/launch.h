#pragma once
#include <array>
#include <cstddef>
#include <utility>

#include "common/status.h"
#include "device/launch.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_config.h"

// What the launchers share. norm.cu chooses a kernel and calls the launcher for the activation's type. Each launcher is
// instantiated in its own file (norm_forward_*.cu, norm_backward_*.cu), so that they compile in parallel.
namespace warpsmith::norm {

// Not for kernel looped, which norm.cu launches.
template <class T> Status launch_forward(const NormConfig& c, const NormForwardParams& p, bool casts, void* stream);
template <class T> Status launch_backward(const NormConfig& c, const NormBackwardParams& p, void* stream);

// The part of a problem that an op's types decide: enough to make a list of instances.
template <class Op, class T, class R> constexpr NormProblem typed_problem() {
  NormProblem p;
  p.element_bytes = sizeof(T);
  p.residual_bytes = Op::kResidual ? sizeof(R) : 0;
  p.layer = Op::kLayer, p.dropout = Op::kDropout;
  return p;
}

// The list of instances for these types. Each: NormForwardInstances or NormBackwardInstances.
template <class Each, class Op, class T, class R> struct Instances {
  static constexpr NormProblem kProblem = typed_problem<Op, T, R>();
  static constexpr size_t kCount = [] {
    size_t count = 0;
    Each()(kProblem, [&](const NormInstance&) { ++count; });
    return count;
  }();
  static constexpr std::array<NormInstance, kCount> all = [] {
    std::array<NormInstance, kCount> made;
    size_t place = 0;
    Each()(kProblem, [&](const NormInstance& instance) { made[place++] = instance; });
    return made;
  }();
  using Places = std::make_index_sequence<kCount>;

  template <size_t kPlace> struct At {
    static constexpr NormInstance i = all[kPlace];
    using type = Compiled<i.kernel, i.scope, i.vectors, i.rows, i.lanes, i.fills, i.weight_with_x, i.keep,
                          i.shared_weight, i.cluster, i.max_threads, i.min_blocks_before_sm90, i.min_blocks>;
  };
  template <size_t kPlace> using Type = typename At<kPlace>::type;
};

// Calls visit.operator()<Op, R>() for the row of `op` and the storage type of the residual.
template <class T, class Visit> Status visit_op(Norm op, Dtype residual_dtype, Visit&& visit) {
  const auto with_residual = [&]<class Op>() {
    if constexpr (Op::kResidual && sizeof(T) == 2) {
      if (residual_dtype == Dtype::float32) return visit.template operator()<Op, float>();
    }
    return visit.template operator()<Op, T>();
  };
  switch (op) {
#define WARPSMITH_CASE(op, ...) \
  case Norm::op: return with_residual.template operator()<NormOp<__VA_ARGS__>>();
    WARPSMITH_NORM_OPS(WARPSMITH_CASE)
#undef WARPSMITH_CASE
  }
  return Status::unsupported("no such norm");
}

inline LaunchConfig grid_of(const NormConfig& c) {
  return {.grid = static_cast<unsigned>(c.blocks),
          .block = static_cast<unsigned>(c.threads),
          .dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes),
          .cluster = static_cast<unsigned>(c.cluster),
          .bulk_copies = c.bulk_copies()};
}

}  // namespace warpsmith::norm
