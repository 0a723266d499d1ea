#include <tuple>
#include <utility>

#include "common/instances.h"
#include "kernels/attention/hopper/attention_sm90.h"
#include "kernels/attention/hopper/backward_bias_sm90.cuh"
#include "kernels/attention/hopper/backward_rows_host.h"
#include "kernels/attention/hopper/backward_sm90.cuh"
#include "kernels/attention/hopper/backward_wide.h"

namespace warpsmith {
namespace attention {
namespace {

// The workspace: sums of dq, dk and dv of each part, statistics, tiles_added, then two counters, some_far and
// first_tiles (packed only).
struct Workspace {
  int64_t sums, key_sums, statistics, tiles_added, counter, first_tiles, bytes;
};
Workspace workspace_of(const AttentionProblem& p, const BackwardTile& tile) {
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t blocks = total_blocks(p, tile.block_queries) * p.heads_q;
  Workspace w{};
  w.key_sums = w.sums + blocks * tile.block_queries * tile.head_dim * 4;
  const int64_t parts = backward_parts(p);
  const int64_t key_sums = parts == 1 ? 0 : total_tiles(p) * p.heads_k * parts * 2 * kTileKeys * tile.head_dim;
  w.statistics = w.key_sums + key_sums * 4;
  w.tiles_added = w.statistics + blocks * statistics_stride(tile.block_queries, tile.dropout) * 4;
  w.counter = w.tiles_added + aligned(blocks * 8);
  w.first_tiles = w.counter + 16;
  w.bytes = aligned(w.first_tiles + (p.cu_seqlens_q != nullptr ? 4 * (p.batch + 2) : 0));
  return w;
}

// Address and strides of a gradient of keys so that `batch * strides.batch + row * strides.seq` is a place in its map.
std::pair<void*, AttentionStrides> by_map_place(void* to, AttentionStrides strides, const AttentionProblem& p) {
  if (p.cu_seqlens_k == nullptr) return {to, strides};
  strides.batch = strides.seq;
  const auto before = 2 * static_cast<uintptr_t>(kMapRows) * static_cast<uintptr_t>(strides.seq);
  return {reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(to) - before), strides};
}

BackwardParams device_params(const AttentionBwdParams& x, const BackwardTile& tile) {
  const AttentionProblem& a = x.problem;
  const Workspace w = workspace_of(a, tile);
  unsigned char* memory = static_cast<unsigned char*>(x.workspace);
  BackwardParams p{};
  set_problem(p, a);
  p.parts = backward_parts(a);
  p.heads_per_part = i32(a.heads_q / a.heads_k / p.parts);
  p.blocks_first =
      !tile.biased() && visits_blocks_first(a);  // with biases a step's head is its place in the inner loop
  p.head_dim = i32(a.head_dim);
  p.dq_sums = reinterpret_cast<float*>(memory + w.sums);
  p.statistics = reinterpret_cast<const float*>(memory + w.statistics);
  p.tiles_added = reinterpret_cast<int*>(memory + w.tiles_added);
  p.some_far = reinterpret_cast<int*>(memory + w.counter) + 2;
  std::tie(p.dk, p.dk_strides) = by_map_place(x.dk, x.dk_strides, a);
  std::tie(p.dv, p.dv_strides) = by_map_place(x.dv, x.dv_strides, a);
  if (p.parts > 1) p.key_sums = reinterpret_cast<float*>(memory + w.key_sums);
  p.scale = static_cast<float>(a.softmax_scale);
  p.to_logits = a.bias != nullptr ? 1.0f : p.scale;
  p.to_scores = 1.0f / p.to_logits;
  p.scale_log2 = p.to_logits * kLog2e;
  p.dropout = dropout_params(a);
  p.biases = bias_params(a);
  Schedule& s = p.schedule;
  s.counter = reinterpret_cast<int*>(memory + w.counter);
  if (a.cu_seqlens_q != nullptr) s.first_tiles = reinterpret_cast<const int*>(memory + w.first_tiles);
  s.batch = p.batch;
  s.heads = i32(a.heads_k * p.parts);
  s.row_tiles = i32((a.seqlen_k + kTileKeys - 1) / kTileKeys);
  s.tiles = i32(int64_t{s.row_tiles} * a.batch * s.heads);
  s.heads_first = true;
  // The number of heads scheduled together. More heads: the tiles of one head start several steps apart. Fewer heads:
  // their q, dout and sums of dq mostly stay in the L2 cache. With tiles of unequal length, 64 MB beat 32 MB at head
  // dimension 64, and at 128 where 32 MB hold fewer than 4 heads (measured: docs/design/attention.md).
  const bool equal = p.window.left == Window::kUnbounded && p.window.right == Window::kUnbounded;
  const int64_t head_bytes = std::max<int64_t>(a.seqlen_q, 1) * tile.head_dim * 8 * p.heads_per_part;
  const int64_t in_32_mb = (32 << 20) / head_bytes, in_64_mb = (64 << 20) / head_bytes;
  const int64_t together = equal                 ? in_32_mb
                           : tile.head_dim == 64 ? in_64_mb
                                                 : std::max(in_32_mb, std::min<int64_t>(in_64_mb, 4));
  s.heads_together = i32(std::clamp<int64_t>(together, 1, 4096 / tile.head_dim));
  return p;
}

RowParams row_params(const AttentionBwdParams& x, const BackwardParams& b) {
  RowParams p = problem_rows(x);
  p.statistics = const_cast<float*>(b.statistics);
  p.dq_sums = b.dq_sums;
  p.tiles_added = b.tiles_added;
  p.counter = b.schedule.counter;
  p.some_far = b.some_far;
  return p;
}

KeyParams key_params(const AttentionBwdParams& x, const BackwardParams& b) {
  KeyParams p{};
  p.schedule = b.schedule;
  p.schedule.heads = i32(x.problem.heads_k);
  p.schedule.tiles = i32(int64_t{p.schedule.row_tiles} * x.problem.batch * x.problem.heads_k);
  p.window = b.window;
  p.cu_seqlens_q = b.cu_seqlens_q;
  p.cu_seqlens_k = b.cu_seqlens_k;
  p.queries = b.queries;
  p.keys = b.keys;
  p.total_q = b.total_q;
  p.total_k = b.total_k;
  p.head_dim = b.head_dim;
  p.head_dim_v = b.head_dim_v;
  p.dk = x.dk;
  p.dv = x.dv;
  p.dk_strides = x.dk_strides;
  p.dv_strides = x.dv_strides;
  p.key_sums = b.key_sums;
  p.parts = b.parts;
  p.scale = b.scale;
  return p;
}

// Whether some tile of keys may be seen by no query. Without packing, only the first and the last tile can be.
bool has_unseen_keys(const BackwardParams& p) {
  const auto unseen = [&](int tile) {
    const VisitedBlocks visited = visited_blocks(p.window, tile, p.queries, p.keys, kTileKeys);
    return visited.first >= visited.end;
  };
  return p.cu_seqlens_q != nullptr || unseen(0) || unseen(p.schedule.row_tiles - 1);
}

// Whether dbias has a Hopper kernel: rows of it are stored in pieces of 16 bytes, and nothing is added over queries.
bool fits_bias_gradient(const AttentionBwdParams& x) {
  const AttentionBiasStrides& s = x.dbias_strides;
  return reinterpret_cast<uintptr_t>(x.dbias) % 16 == 0 && x.problem.seqlen_k % 8 == 0 && s.k == 1 && s.q != 0 &&
         s.q % 8 == 0 && s.head % 8 == 0 && s.batch % 8 == 0;
}

template <class T, BackwardTile tile>
Status run_bias_gradient(const AttentionBwdParams& x, const BackwardMaps& maps, const BackwardParams& b, void* stream) {
  const AttentionProblem& a = x.problem;
  const auto tiles = [](int64_t length) { return (length + kBiasTile - 1) / kBiasTile; };
  BiasGradientParams p{};
  set_problem(p, a);
  p.statistics = b.statistics;
  p.biases = b.biases;
  p.scale_log2 = b.scale_log2;
  p.query_tiles = i32(tiles(a.seqlen_q));
  p.key_tiles = i32(tiles(a.seqlen_k));
  p.bias_batch = x.dbias_strides.batch == 0 ? 1 : p.batch;
  p.bias_heads = x.dbias_strides.head == 0 ? 1 : p.heads;
  p.tiles = p.query_tiles * p.key_tiles * p.bias_heads * p.bias_batch;
  p.dbias = x.dbias;
  p.strides = x.dbias_strides;
  p.counter = b.schedule.counter + 1;
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  return launch(backward_sm90_bias<T, tile.head_dim, tile.block_queries>,
                {.grid = static_cast<unsigned>(std::min(device.multiprocessors, p.tiles)),
                 .block = kBiasThreads,
                 .dynamic_shared_bytes = BiasGradientShared<tile.head_dim>::kBytes},
                stream, maps, p);
}

// I: an entry of kBackwardTiles.
template <class T, class I> Status run(const AttentionBwdParams& x, const AttentionBackwardPlan& plan, void* stream) {
  constexpr BackwardTile tile = I::value;
  const AttentionProblem& a = x.problem;
  BackwardMaps maps;
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.q, q_tensor(x), a.dtype, tile.block_queries));
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.k, k_tensor(x), a.dtype, kTileKeys));
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.v, v_tensor(x), a.dtype, kTileKeys));
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.dout, dout_tensor(x), a.dtype, tile.block_queries));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const BackwardParams p = device_params(x, tile);
  const RowParams rows = row_params(x, p);
  const auto row_grid = static_cast<unsigned>(total_blocks(a, tile.block_queries) * a.heads_q);
  const KeyParams keys = key_params(x, p);
  const auto key_grid = static_cast<unsigned>(total_tiles(a) * a.heads_k);
  if (p.cu_seqlens_q != nullptr) {
    const PrepareParams prepare{
        p.schedule.counter, const_cast<int*>(p.schedule.first_tiles), a.cu_seqlens_k, p.batch, p.total_k, p.keys,
        kTileKeys};
    WARPSMITH_RETURN_IF_FAILED(launch(prepare_schedule<kPrepareThreads>, {.block = kPrepareThreads}, stream, prepare));
  }
  if (has_unseen_keys(p)) {
    WARPSMITH_RETURN_IF_FAILED(launch(backward_unseen_keys<T>, {.grid = key_grid, .block = kDqThreads}, stream, keys));
  }
  WARPSMITH_RETURN_IF_FAILED(launch(backward_statistics<T, tile.block_queries, tile.dropout>,
                                    {.grid = row_grid, .block = row_threads(tile.block_queries)}, stream, rows));
  const bool sink = a.sink != nullptr && x.dsink != nullptr;
  if (sink) WARPSMITH_RETURN_IF_FAILED(run_sink(x, p.statistics, tile.block_queries, stream));
  const LaunchConfig config{
      .grid = static_cast<unsigned>(std::min<int64_t>(device.multiprocessors, int64_t{key_grid} * p.parts)),
      .block = tile.threads(),
      .dynamic_shared_bytes = BackwardShared<tile>::kBytes,
      .programmatic_dependent = !sink};
  WARPSMITH_RETURN_IF_FAILED(launch(backward_sm90<T, I>, config, stream, maps, p));
  if (p.parts > 1)
    WARPSMITH_RETURN_IF_FAILED(launch(backward_dkv<T, tile.head_dim>,
                                      {.grid = 2 * key_grid, .block = kDkvThreads, .programmatic_dependent = true},
                                      stream, keys));
  WARPSMITH_RETURN_IF_FAILED(launch(backward_dq<T, tile.head_dim, tile.block_queries>,
                                    {.grid = row_grid, .block = kDqThreads, .programmatic_dependent = true}, stream,
                                    rows));
  if constexpr (tile.biases == Biases::tensor)
    if (plan.hopper_dbias) return run_bias_gradient<T, tile>(x, maps, p, stream);
  return {};
}

}  // namespace
}  // namespace attention

AttentionBackwardPlan attention_backward_plan_sm90(const AttentionBwdParams& p) {
  using namespace attention;
  AttentionBackwardPlan plan{choose_attention_backward_sm90(kernel_problem(p))};
  if (!plan.hopper.supported) return plan;
  const BackwardTile& tile = plan.hopper.tile;
  plan.hopper_dbias = p.dbias != nullptr && tile.biases == Biases::tensor && fits_bias_gradient(p);
  plan.workspace_bytes = tile == kBackward256 ? wide_workspace_bytes(p.problem) : workspace_of(p.problem, tile).bytes;
  return plan;
}

Status attention_backward_sm90(const AttentionBwdParams& p, const AttentionBackwardPlan& plan, void* stream) {
  using namespace attention;
  if (plan.hopper.tile == kBackward256) return run_wide_backward(p, stream);
  const auto run_tile = instance_of<kBackwardTiles>(
      [&](const BackwardTile& tile) { return tile == plan.hopper.tile; },
      [&]<class I>() { return p.problem.dtype == Dtype::bfloat16 ? &run<bfloat16, I> : &run<float16, I>; });
  return run_tile(p, plan, stream);
}

}  // namespace warpsmith
