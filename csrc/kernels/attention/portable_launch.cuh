#pragma once
#include "common/launch.h"
#include "kernels/attention/attention_portable.h"
#include "kernels/attention/backward_portable_bias.cuh"
#include "kernels/attention/backward_rows.cuh"
#include "kernels/attention/forward_portable.cuh"

// Launches of the portable kernels for elements T: included by the .cu of each dtype.
namespace warpsmith::attention {

// Calls use.template operator()<i>() for the tile of a problem.
template <class T, int i = portable_tile(sizeof(T), 1), class Use>
Status with_portable_tile(const AttentionProblem& p, Use&& use) {
  const int64_t head_dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if constexpr (kPortableForward[i].head_dim < 256) {
    if (head_dim > kPortableForward[i].head_dim)
      return with_portable_tile<T, portable_tile(sizeof(T), kPortableForward[i].head_dim + 1)>(p, use);
  }
  return use.template operator()<i>();
}

template <class P> Status launch_portable(void (*kernel)(P), int64_t blocks, int threads, int shared_bytes,
                                          void* stream, const P& params) {
  if (blocks == 0) return {};
  const LaunchConfig config{.grid = static_cast<unsigned>(blocks),
                            .block = static_cast<unsigned>(threads),
                            .dynamic_shared_bytes = static_cast<size_t>(shared_bytes)};
  return launch(kernel, config, stream, params);
}

template <class T> Status run_forward_portable(const AttentionFwdParams& p, void* stream) {
  return with_portable_tile<T>(p.problem, [&]<int i>() {
    constexpr PortableTile tile = kPortableForward[i];
    return launch_portable(forward_portable<T, i>, row_tiles(p.problem, false, tile.rows) * p.problem.heads_q,
                           tile.threads(), tile.forward_shared_bytes(), stream, p);
  });
}

template <class T> Status run_backward_portable(const AttentionBwdParams& p, void* stream) {
  const AttentionProblem& a = p.problem;
  const int64_t query_blocks = row_tiles(a, false, kStatisticsQueries);
  WARPSMITH_RETURN_IF_FAILED(
      launch_portable(portable_statistics<T>, query_blocks * a.heads_q, kStatisticsThreads, 0, stream, p));
  return with_portable_tile<T>(a, [&]<int i>() {
    constexpr PortableTile tile = kPortableBackward[i];
    const auto run = [&](auto* kernel, int64_t blocks, int threads, const auto& params) {
      return launch_portable(kernel, blocks, threads, tile.backward_shared_bytes(), stream, params);
    };
    BackwardPortableParams x{p, static_cast<int*>(p.workspace) + query_blocks * a.heads_q * kStatistics, false};
    // First dq, which corrects delta: all others read that.
    for (const bool second : {false, true}) {
      x.second = second;
      WARPSMITH_RETURN_IF_FAILED(run(backward_portable<T, i, false>, row_tiles(a, false, tile.rows) * a.heads_q,
                                     kBackwardThreads<i, false>, x));
    }
    if (p.dsink != nullptr) {
      const SinkParams sink{static_cast<const float*>(p.workspace),
                            a.sink,
                            p.dsink,
                            query_blocks,
                            static_cast<int>(a.heads_q),
                            kBlockQueries};
      const bool wide = a.sink_dtype == Dtype::float32;
      WARPSMITH_RETURN_IF_FAILED(
          launch_portable(wide ? backward_sink<float> : backward_sink<T>, a.heads_q, kSinkThreads, 0, stream, sink));
    }
    WARPSMITH_RETURN_IF_FAILED(
        run(backward_portable<T, i, true>, row_tiles(a, true, tile.rows) * a.heads_k, kBackwardThreads<i, true>, x));
    if (p.dbias == nullptr) return Status();
    const int64_t blocks = BiasTiles(a, p.dbias_strides, tile.rows, tile.columns).count;
    if (a.bias_dtype == Dtype::float32) return run(backward_portable_bias<T, float, i>, blocks, tile.threads(), p);
    return run(backward_portable_bias<T, T, i>, blocks, tile.threads(), p);
  });
}

}  // namespace warpsmith::attention
