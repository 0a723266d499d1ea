#include "common/instances.h"
#include "kernels/attention/hopper/attention_sm90.h"
#include "kernels/attention/hopper/forward_sm90.cuh"
#include "kernels/attention/hopper/sm90_host.h"

namespace warpsmith {
namespace attention {
namespace {

// Whether tiles differ in length. Blocks then take tiles from a counter.
bool needs_counter(const AttentionProblem& p) {
  return p.cu_seqlens_q != nullptr || p.window_left >= 0 || p.window_right >= 0;
}
int64_t workspace_bytes(const AttentionProblem& p) {
  if (!needs_counter(p)) return 0;
  return 16 + (p.cu_seqlens_q != nullptr ? 4 * (p.batch + 2) : 0);
}

ForwardParams device_params(const AttentionFwdParams& x, const ForwardTile& tile) {
  const AttentionProblem& a = x.problem;
  constexpr auto i32 = [](int64_t v) { return static_cast<int>(v); };
  ForwardParams p{};
  set_problem(p, a);
  p.lse = static_cast<float*>(x.lse);
  p.lse_rest = static_cast<float*>(x.lse_rest);
  p.sink = a.sink;
  p.sink_is_float = a.sink_dtype == Dtype::float32;
  p.to_logits = a.softcap > 0 || a.bias != nullptr ? 1.0f : static_cast<float>(a.softmax_scale);
  p.scale_log2 = p.to_logits * kLog2e;
  if (a.softcap > 0) {
    p.softcap = static_cast<float>(a.softcap);
    p.to_softcap = static_cast<float>(a.softmax_scale / a.softcap);
  }
  p.dropout = dropout_params(a);
  p.biases = bias_params(a);
  Schedule& s = p.schedule;
  if (needs_counter(a)) s.counter = static_cast<int*>(x.workspace);
  if (a.cu_seqlens_q != nullptr) s.first_tiles = s.counter + 4;
  s.batch = p.batch;
  s.heads = p.heads;
  s.row_tiles = i32((a.seqlen_q + tile.tile_rows() - 1) / tile.tile_rows());
  s.tiles = i32(s.row_tiles * a.batch * a.heads_q);
  s.heads_first = s.descending = needs_counter(a);
  s.batch_first = p.biases.bias != nullptr && p.biases.bias_strides.batch == 0;  // which all sequences read
  constexpr int64_t kCacheBytes = 32 << 20;                                      // of the L2 cache, for keys and values
  const int64_t fit = kCacheBytes / (std::max<int64_t>(a.seqlen_k, 1) * tile.head_dim * 4);
  const SectionHeads sections = forward_sections(a.batch * a.heads_q, fit, p.heads_per_key_head);
  s.heads_together = sections.together;
  s.joined_heads = sections.joined;
  return p;
}

// I: an entry of kForwardTiles.
template <class T, class I> Status run(const AttentionFwdParams& x, void* stream) {
  constexpr ForwardTile tile = I::value;
  const AttentionProblem& a = x.problem;
  TensorMap q, k, v, out, bias{};
  WARPSMITH_RETURN_IF_FAILED(head_map(q, q_tensor(x), a.dtype, kGroupRows));
  WARPSMITH_RETURN_IF_FAILED(head_map(k, k_tensor(x), a.dtype, tile.block_keys));
  WARPSMITH_RETURN_IF_FAILED(head_map(v, v_tensor(x), a.dtype, tile.block_keys));
  WARPSMITH_RETURN_IF_FAILED(head_map(out, out_tensor(x), a.dtype, kGroupRows));
  const ForwardParams p = device_params(x, tile);
  if (tile.stages_biases()) WARPSMITH_RETURN_IF_FAILED(bias_map(bias, a, p.biases.rows));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  // Packed: an upper bound, because the lengths are on the device. Blocks without a tile return at once.
  int64_t tiles = p.schedule.tiles;
  if (p.cu_seqlens_q != nullptr) tiles = (a.total_q / tile.tile_rows() + a.batch + 1) * a.heads_q;
  if (p.schedule.counter != nullptr) {
    const PrepareParams prepare{
        p.schedule.counter, const_cast<int*>(p.schedule.first_tiles), a.cu_seqlens_q, p.batch, p.total_q, p.queries,
        tile.tile_rows()};
    WARPSMITH_RETURN_IF_FAILED(launch(prepare_schedule<kPrepareThreads>, {.block = kPrepareThreads}, stream, prepare));
  }
  const LaunchConfig config{.grid = static_cast<unsigned>(std::min<int64_t>(device.multiprocessors, tiles)),
                            .block = static_cast<unsigned>(tile.threads()),
                            .dynamic_shared_bytes = static_cast<size_t>(tile.shared_bytes()),
                            .programmatic_dependent = p.schedule.counter != nullptr};
  return launch(forward_sm90<T, I>, config, stream, q, k, v, out, bias, p);
}

}  // namespace
}  // namespace attention

AttentionForwardPlan attention_forward_plan_sm90(const AttentionFwdParams& p) {
  return {choose_attention_forward_sm90(attention::kernel_problem(p)), attention::workspace_bytes(p.problem)};
}

Status attention_forward_sm90(const AttentionFwdParams& p, const AttentionForwardChoice& choice, void* stream) {
  using namespace attention;
  const auto run_tile = instance_of<kForwardTiles>(
      [&](const ForwardTile& tile) { return tile == choice.tile; },
      [&]<class I>() { return p.problem.dtype == Dtype::bfloat16 ? &run<bfloat16, I> : &run<float16, I>; });
  return run_tile(p, stream);
}

}  // namespace warpsmith
