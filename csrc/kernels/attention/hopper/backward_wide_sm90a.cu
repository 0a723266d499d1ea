#include "kernels/attention/hopper/backward_wide.h"

#include "kernels/attention/hopper/backward_rows_host.h"
#include "kernels/attention/hopper/backward_wide.cuh"

namespace warpsmith::attention {
namespace {

// Offsets in the workspace: the statistics, then for packed sequences the first tiles of keys and of query rows.
struct Workspace {
  int64_t statistics, first_key_tiles, first_row_tiles, bytes;
};
Workspace workspace_of(const AttentionProblem& p) {
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  // Each has four words of a counter, which prepare_schedule resets and these kernels do not read, then [batch + 2]
  // first tiles.
  const int64_t first_tiles = p.cu_seqlens_q != nullptr ? aligned(16 + 4 * (p.batch + 2)) : 0;
  Workspace w{};
  w.first_key_tiles = aligned(total_blocks(p, kWideStep) * p.heads_q * kWideStride * 4);
  w.first_row_tiles = w.first_key_tiles + first_tiles;
  w.bytes = w.first_row_tiles + first_tiles;
  return w;
}

// `length`: tokens of a sequence. `cached_bytes`: bytes that every tile of a head reads, if no mask cuts any off.
Schedule schedule_of(const AttentionProblem& a, unsigned char* first_tiles, int64_t heads, int64_t length,
                     int tile_rows, int64_t cached_bytes) {
  Schedule s{};
  if (a.cu_seqlens_q != nullptr) s.first_tiles = reinterpret_cast<const int*>(first_tiles + 16);
  s.batch = i32(a.batch);
  s.heads = i32(heads);
  s.row_tiles = i32((length + tile_rows - 1) / tile_rows);
  s.tiles = i32(int64_t{s.row_tiles} * a.batch * heads);
  s.heads_first = true;
  // Heads whose operands fit together into 32 MiB of the L2 cache.
  s.heads_together = i32(std::clamp<int64_t>((32 << 20) / std::max<int64_t>(cached_bytes, 1), 1, a.batch * heads));
  return s;
}

Status prepare(const Schedule& s, unsigned char* memory, const int32_t* cu_seqlens, int64_t total, int64_t longest,
               int tile_rows, void* stream) {
  if (s.first_tiles == nullptr) return {};
  const PrepareParams params{reinterpret_cast<int*>(memory),
                             const_cast<int*>(s.first_tiles),
                             cu_seqlens,
                             s.batch,
                             i32(total),
                             i32(longest),
                             tile_rows};
  return launch(prepare_schedule<kPrepareThreads>, {.block = kPrepareThreads}, stream, params);
}

// Blocks of threads for the tiles of s. Packed: a bound, since the lengths are on the device. Blocks without a tile
// return at once.
unsigned grid_of(const Schedule& s, int64_t total, int tile_rows) {
  if (s.first_tiles == nullptr) return static_cast<unsigned>(s.tiles);
  return static_cast<unsigned>((total / tile_rows + s.batch + 1) * s.heads);
}

WideParams device_params(const AttentionBwdParams& x, const float* statistics) {
  const AttentionProblem& a = x.problem;
  WideParams p{};
  set_problem(p, a);
  p.head_dim = i32(a.head_dim);
  p.statistics = statistics;
  p.dq = x.dq;
  p.dk = x.dk;
  p.dv = x.dv;
  p.dq_strides = x.dq_strides;
  p.dk_strides = x.dk_strides;
  p.dv_strides = x.dv_strides;
  p.scale = static_cast<float>(a.softmax_scale);
  p.to_scores = 1.0f / p.scale;
  p.scale_log2 = p.scale * kLog2e;
  return p;
}

template <class T> Status run(const AttentionBwdParams& x, void* stream) {
  const AttentionProblem& a = x.problem;
  const Workspace w = workspace_of(a);
  unsigned char* memory = static_cast<unsigned char*>(x.workspace);
  WideMaps maps;
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.q, q_tensor(x), a.dtype, 64));
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.k, k_tensor(x), a.dtype, 64));
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.v, v_tensor(x), a.dtype, 64));
  WARPSMITH_RETURN_IF_FAILED(head_map(maps.dout, dout_tensor(x), a.dtype, 64));
  RowParams rows = problem_rows(x);
  rows.statistics = reinterpret_cast<float*>(memory + w.statistics);
  const auto row_grid = static_cast<unsigned>(total_blocks(a, kWideStep) * a.heads_q);
  WARPSMITH_RETURN_IF_FAILED(launch(backward_statistics<T, kWideStep, false, kWideRowLanes>,
                                    {.grid = row_grid, .block = row_threads(kWideStep, kWideRowLanes)}, stream, rows));
  if (a.sink != nullptr && x.dsink != nullptr)
    WARPSMITH_RETURN_IF_FAILED(run_sink(x, rows.statistics, kWideStep, stream));

  WideParams p = device_params(x, rows.statistics);
  // With a causal mask the first keys are seen by most queries, and the last rows see most keys: the longest tiles come
  // first.
  const int64_t queries_bytes = a.seqlen_q * kWideDim * 4 * p.heads_per_key_head;
  p.schedule = schedule_of(a, memory + w.first_key_tiles, a.heads_k, a.seqlen_k, kWideKeys, queries_bytes);
  WARPSMITH_RETURN_IF_FAILED(
      prepare(p.schedule, memory + w.first_key_tiles, a.cu_seqlens_k, a.total_k, a.seqlen_k, kWideKeys, stream));
  WARPSMITH_RETURN_IF_FAILED(launch(backward_sm90_wide_keys<T>,
                                    {.grid = grid_of(p.schedule, a.total_k, kWideKeys),
                                     .block = kWideThreads,
                                     .dynamic_shared_bytes = WideKeysShared::kBytes},
                                    stream, maps, p));
  const int64_t keys_bytes = a.seqlen_k * kWideDim * 4 / p.heads_per_key_head;
  p.schedule = schedule_of(a, memory + w.first_row_tiles, a.heads_q, a.seqlen_q, kWideRows, keys_bytes);
  p.schedule.descending = a.window_right >= 0;
  WARPSMITH_RETURN_IF_FAILED(
      prepare(p.schedule, memory + w.first_row_tiles, a.cu_seqlens_q, a.total_q, a.seqlen_q, kWideRows, stream));
  return launch(backward_sm90_wide_queries<T>,
                {.grid = grid_of(p.schedule, a.total_q, kWideRows),
                 .block = kWideThreads,
                 .dynamic_shared_bytes = WideQueriesShared::kBytes},
                stream, maps, p);
}

}  // namespace

int64_t wide_workspace_bytes(const AttentionProblem& p) { return workspace_of(p).bytes; }

Status run_wide_backward(const AttentionBwdParams& x, void* stream) {
  return x.problem.dtype == Dtype::bfloat16 ? run<bfloat16>(x, stream) : run<float16>(x, stream);
}

}  // namespace warpsmith::attention
