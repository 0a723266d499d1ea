#pragma once
#include <algorithm>

#include "device/launch.h"
#include "kernels/attention/backward_rows.cuh"
#include "kernels/attention/portable/attention_portable.h"
#include "kernels/attention/portable/backward_portable_bias.cuh"
#include "kernels/attention/portable/backward_portable_keys.cuh"
#include "kernels/attention/portable/backward_portable_ordered_dq.cuh"
#include "kernels/attention/portable/forward_portable.cuh"

// Launches the portable kernels for elements T. Each dtype's .cu includes this file.
namespace warpsmith::attention {

// Calls use.template operator()<i>() for i = tile, which is in [kFirst, kEnd).
template <int kFirst, int kEnd, class Use> Status with_tile(int tile, Use&& use) {
  if constexpr (kFirst + 1 < kEnd)
    if (tile != kFirst) return with_tile<kFirst + 1, kEnd>(tile, use);
  return use.template operator()<kFirst>();
}

// The tiles of elements T, in the lists of portable_config.h.
template <class T> constexpr int kFirstTile = sizeof(T) == 2 ? 0 : kPortable16Bit;
template <class T> constexpr int kEndTile = sizeof(T) == 2 ? kPortable16Bit : kPortableTiles;

template <class P> Status launch_portable(void (*kernel)(P), int64_t blocks, int threads, int shared_bytes,
                                          void* stream, const P& params) {
  if (blocks == 0) return {};
  const LaunchConfig config{.grid = static_cast<unsigned>(blocks),
                            .block = static_cast<unsigned>(threads),
                            .dynamic_shared_bytes = static_cast<size_t>(shared_bytes)};
  return launch(kernel, config, stream, params);
}

template <class T> Status run_forward_portable(const AttentionFwdParams& p, void* stream) {
  return with_tile<kFirstTile<T>, kEndTile<T>>(tile_of(p.problem), [&]<int i>() {
    constexpr PortableTile tile = kPortableForward[i];
    return launch_portable(forward_portable<T, i>, row_tiles(p.problem, false, tile.rows) * p.problem.heads_q,
                           tile.threads(), tile.forward_shared_bytes(), stream, p);
  });
}

template <class T, int i> Status launch_keys(const BackwardPortableParams& x, void* stream) {
  const AttentionProblem& a = x.gradients.problem;
  const int64_t blocks = row_tiles(a, true, portable_key_rows(i)) * a.heads_k;
  if constexpr (sizeof(T) == 2) {
    constexpr PortableKeyTile tile = kPortableKeys[i];
    return launch_portable(backward_portable_keys<T, i>, blocks, tile.threads(), tile.shared_bytes(), stream, x);
  } else {
    constexpr PortableTile tile = kPortableFloatKeys[i - kPortable16Bit];
    return launch_portable(backward_portable<T, i, true>, blocks, tile.threads(), tile.backward_shared_bytes(true),
                           stream, x);
  }
}

template <class T> Status launch_statistics(const AttentionBwdParams& p, int* tiles_added, int* counter, void* stream) {
  return launch_portable(portable_statistics<T>, row_tiles(p.problem, false, kStatisticsQueries) * p.problem.heads_q,
                         kStatisticsThreads, 0, stream, PortableStatisticsParams{p, tiles_added, counter});
}

// dsink, from lse and delta in the workspace.
template <class T> Status launch_sink(const AttentionBwdParams& p, void* stream) {
  const AttentionProblem& a = p.problem;
  if (p.dsink == nullptr) return {};
  const SinkParams sink{static_cast<const float*>(p.workspace),
                        a.sink,
                        p.dsink,
                        row_tiles(a, false, kStatisticsQueries),
                        static_cast<int>(a.heads_q),
                        kBlockQueries};
  const bool wide = a.sink_dtype == Dtype::float32;
  return launch_portable(wide ? backward_sink<float> : backward_sink<T>, a.heads_q, kSinkThreads, 0, stream, sink);
}

// dq, dk and dv in one kernel, by tile i of kPortableOrderedDq.
template <class T, int i> Status launch_ordered_dq(const AttentionBwdParams& p, void* stream) {
  constexpr PortableOrderedDqTile tile = kPortableOrderedDq[i];
  const AttentionProblem& a = p.problem;
  const PortableOrderedDqWorkspace workspace(a);
  auto* const bytes = static_cast<unsigned char*>(p.workspace);
  const OrderedDqParams x{p, reinterpret_cast<float*>(bytes + workspace.sums),
                          reinterpret_cast<int*>(bytes + workspace.tiles_added),
                          reinterpret_cast<int*>(bytes + workspace.counter)};
  WARPSMITH_RETURN_IF_FAILED(launch_statistics<T>(p, x.tiles_added, x.counter, stream));
  WARPSMITH_RETURN_IF_FAILED(launch_sink<T>(p, stream));
  return launch_portable(backward_portable_ordered_dq<T, i>, row_tiles(a, true, tile.rows) * a.heads_k, tile.threads(),
                         tile.shared_bytes(), stream, x);
}

// Reads lse and delta from the workspace.
template <class T, int i> Status launch_bias(const AttentionBwdParams& p, void* stream) {
  constexpr int kBias = i - kPortablePlain;
  constexpr PortableTile bias = kPortableBias[kBias];
  const int64_t blocks = BiasTiles(p.problem, p.dbias_strides, bias.rows, bias.columns).count;
  auto* kernel = p.problem.bias_dtype == Dtype::float32 ? backward_portable_bias<T, float, kBias>
                                                        : backward_portable_bias<T, T, kBias>;
  return launch_portable(kernel, blocks, bias.threads(), bias.backward_shared_bytes(false), stream, p);
}

// Takes delta from the rounded out, as the Hopper kernels do.
template <class T> Status run_dbias_portable(const AttentionBwdParams& p, void* stream) {
  WARPSMITH_RETURN_IF_FAILED(launch_statistics<T>(p, nullptr, nullptr, stream));
  return with_tile<kPortablePlain, kPortable16Bit>(tile_of(p.problem),
                                                   [&]<int i>() { return launch_bias<T, i>(p, stream); });
}

template <class T> Status run_backward_portable(const AttentionBwdParams& p, void* stream) {
  const AttentionProblem& a = p.problem;
  if constexpr (sizeof(T) == 2) {
    DeviceProperties device;
    WARPSMITH_RETURN_IF_FAILED(device_properties(device));
    const int most = device.max_dynamic_shared_bytes;
    if (orders_dq(a, most))
      return with_tile<0, kPortableOrderedDqTiles>(portable_ordered_dq_tile(std::max(a.head_dim, a.head_dim_v), most),
                                                   [&]<int i>() { return launch_ordered_dq<T, i>(p, stream); });
  }
  const int64_t query_blocks = row_tiles(a, false, kStatisticsQueries);
  WARPSMITH_RETURN_IF_FAILED(launch_statistics<T>(p, nullptr, nullptr, stream));
  // Problems that are not extended come here at head dimension 256 alone, by the last of their tiles: for smaller ones
  // every GPU has the shared memory of backward_portable_ordered_dq.
  constexpr int kFirst = sizeof(T) == 2 ? kPortablePlain - 1 : kFirstTile<T>;
  return with_tile<kFirst, kEndTile<T>>(tile_of(a), [&]<int i>() {
    constexpr PortableTile tile = kPortableQueries[i];
    constexpr int kSharedBytes = tile.backward_shared_bytes(false);
    BackwardPortableParams x{p, static_cast<int*>(p.workspace) + query_blocks * a.heads_q * kStatistics, false};
    // dq first: it corrects the delta that all later kernels read.
    for (const bool second : {false, true}) {
      x.second = second;
      const Status queries = launch_portable(backward_portable<T, i, false>, row_tiles(a, false, tile.rows) * a.heads_q,
                                             tile.threads(), kSharedBytes, stream, x);
      WARPSMITH_RETURN_IF_FAILED(queries);
    }
    WARPSMITH_RETURN_IF_FAILED(launch_sink<T>(p, stream));
    const Status keys = launch_keys<T, i>(x, stream);
    WARPSMITH_RETURN_IF_FAILED(keys);
    if constexpr (tile.extended) {
      if (p.dbias == nullptr) return Status();
      return launch_bias<T, i>(p, stream);
    } else {
      return Status();
    }
  });
}

}  // namespace warpsmith::attention
