#pragma once
#include <cmath>

#include "kernels/attention/backward_rows.cuh"
#include "kernels/attention/hopper/sm90_host.h"

// What the launchers of the Hopper backwards share: params of the kernels that work on rows (backward_rows.cuh).
namespace warpsmith::attention {

constexpr int i32(int64_t v) { return static_cast<int>(v); }

// Without the parts of the workspace, which stay null.
inline RowParams problem_rows(const AttentionBwdParams& x) {
  const AttentionProblem& a = x.problem;
  RowParams p{};
  set_problem(p, a);
  p.head_dim = i32(a.head_dim);
  p.dout = x.dout;
  p.out = x.out;
  p.lse = static_cast<const float*>(x.lse);
  p.lse_rest = static_cast<const float*>(x.lse_rest);
  p.dlse = static_cast<const float*>(x.dlse);
  p.dq = x.dq;
  p.dout_strides = x.dout_strides;
  p.out_strides = x.out_strides;
  p.dq_strides = x.dq_strides;
  p.scale = static_cast<float>(a.softmax_scale);
  const double scale = a.dropout.scale > 0 ? a.dropout.scale : 1.0;  // 0: everything is dropped
  p.dropout_log2_scale = static_cast<float>(std::log2(scale));
  p.dropout_inverse_scale = static_cast<float>(1.0 / scale);
  p.dropout = attention_dropout_counters(a);
  return p;
}

// After backward_statistics. Only where the problem has a sink whose gradient is wanted.
inline Status run_sink(const AttentionBwdParams& x, const float* statistics, int block_queries, void* stream) {
  const AttentionProblem& a = x.problem;
  const SinkParams sink{statistics,
                        a.sink,
                        x.dsink,
                        total_blocks(a, block_queries),
                        i32(a.heads_q),
                        block_queries,
                        a.dropout.seed != nullptr};
  const LaunchConfig config{.grid = static_cast<unsigned>(i32(a.heads_q)), .block = kSinkThreads};
  if (a.sink_dtype == Dtype::float32) return launch(backward_sink<float>, config, stream, sink);
  if (a.sink_dtype == Dtype::float16) return launch(backward_sink<float16>, config, stream, sink);
  return launch(backward_sink<bfloat16>, config, stream, sink);
}

}  // namespace warpsmith::attention
