#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "harness.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_dropout.h"

// Problems of attention for tests on the host: inputs, and params of the launchers. What a result must be is the law's
// (tests/ops/test_attention*.py): results here are compared with each other.
namespace warpsmith::test {

struct AttentionCase {
  int64_t batch = 1, queries = 1, keys = 1, heads = 1, key_heads = 1, head_dim = 64;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  bool sink = false;
  std::vector<int64_t> lengths_q = {}, lengths_k = {};  // packed sequences
  int64_t spare_tokens = 0;                             // packed: behind the last sequence
  std::string bias = "", mask = "";                     // "1001": of shape (batch, 1, 1, keys); "": none
  bool alibi = false;
  double dropout = 0;

  bool packed() const { return !lengths_q.empty(); }
  int64_t sequences() const { return packed() ? static_cast<int64_t>(lengths_q.size()) : batch; }
};

// A tensor of heads in memory, with a stride of its own for each dimension.
template <class T> struct HeadBuffer {
  AttentionStrides strides;
  int64_t dim;
  Buffer<T> data;

  HeadBuffer(int64_t batch, int64_t length, int64_t heads, int64_t head_dim)
      : strides{length * heads * head_dim, heads * head_dim, head_dim},
        dim(head_dim),
        data(static_cast<size_t>(batch * length * heads * head_dim)) {}
  // Of the same shape.
  explicit HeadBuffer(const HeadBuffer& other) : strides(other.strides), dim(other.dim), data(other.data.size()) {}
};

// A tensor that is broadcast to [batch, heads, queries, keys].
struct BroadcastShape {
  int64_t count = 1;
  AttentionBiasStrides strides{};

  BroadcastShape(const std::string& kept, const int64_t (&sizes)[4]) {
    int64_t* of[4] = {&strides.batch, &strides.head, &strides.q, &strides.k};
    for (size_t i = 4; i-- > 0 && !kept.empty();)
      if (kept[i] == '1' && sizes[i] > 1) *of[i] = count, count *= sizes[i];
  }
};

template <class T> struct AttentionData {
  AttentionCase shape;
  int64_t batch, length_q, length_k, longest_q, longest_k;  // the first three as tensors lie in memory
  HeadBuffer<T> q, k, v, out, dout, dq, dk, dv;
  Buffer<float> lse, lse_rest, dlse, sink, dsink, slopes;
  BroadcastShape bias_shape, mask_shape;
  Buffer<T> bias, dbias;
  Buffer<unsigned char> mask;
  Buffer<int64_t> seed;
  Buffer<int32_t> cu_q, cu_k;
  Buffer<unsigned char> workspace;

  explicit AttentionData(const AttentionCase& c)
      : shape(c),
        batch(c.packed() ? 1 : c.batch),
        length_q(c.packed() ? sum(c.lengths_q) + c.spare_tokens : c.queries),
        length_k(c.packed() ? sum(c.lengths_k) + c.spare_tokens : c.keys),
        longest_q(longest(c.lengths_q, c.queries)),
        longest_k(longest(c.lengths_k, c.keys)),
        q(batch, length_q, c.heads, c.head_dim),
        k(batch, length_k, c.key_heads, c.head_dim),
        v(batch, length_k, c.key_heads, c.head_dim),
        out(batch, length_q, c.heads, c.head_dim),
        dout(out),
        dq(q),
        dk(k),
        dv(v),
        lse(static_cast<size_t>(batch * c.heads * length_q)),
        lse_rest(lse.size()),
        dlse(lse.size()),
        sink(static_cast<size_t>(c.heads)),
        dsink(sink.size()),
        slopes(sink.size()),
        bias_shape(c.bias, {c.sequences(), c.heads, longest_q, longest_k}),
        mask_shape(c.mask, {c.sequences(), c.heads, longest_q, longest_k}),
        bias(static_cast<size_t>(bias_shape.count)),
        dbias(bias.size()),
        mask(static_cast<size_t>(mask_shape.count)),
        seed(2),
        cu_q(c.lengths_q.size() + 1),
        cu_k(c.lengths_k.size() + 1),
        workspace(0) {
    uint64_t next = 1;
    for (HeadBuffer<T>* x : {&q, &k, &v, &dout}) fill_normal(x->data, next++);
    for (Buffer<float>* x : {&sink, &dlse}) fill_normal(*x, next++);
    fill_normal(bias, next++);
    fill_normal(slopes, next++, 0.05f);
    Random random(next);
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = random.bits() % 4 != 0;
    for (size_t i = 0; i < 2; ++i) seed[i] = static_cast<int64_t>(random.bits());
    cu_q[0] = cu_k[0] = 0;
    for (size_t i = 0; i < c.lengths_q.size(); ++i) {
      cu_q[i + 1] = cu_q[i] + static_cast<int32_t>(c.lengths_q[i]);
      cu_k[i + 1] = cu_k[i] + static_cast<int32_t>(c.lengths_k[i]);
    }
  }

  AttentionProblem problem() {
    AttentionProblem p{};
    const AttentionCase& c = shape;
    p.batch = c.sequences(), p.heads_q = c.heads, p.heads_k = c.key_heads;
    p.seqlen_q = longest_q, p.seqlen_k = longest_k, p.head_dim = c.head_dim, p.head_dim_v = c.head_dim;
    if (c.packed()) p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data();
    p.total_q = batch * length_q, p.total_k = batch * length_k;
    p.softmax_scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim)), p.softcap = c.softcap;
    p.window_left = c.window_left, p.window_right = c.window_right, p.align_bottom_right = true;
    p.dtype = p.bias_dtype = std::is_same_v<T, bfloat16>  ? Dtype::bfloat16
                             : std::is_same_v<T, float16> ? Dtype::float16
                                                          : Dtype::float32;
    if (c.sink) p.sink = sink.data();
    p.sink_dtype = Dtype::float32;
    if (!c.bias.empty()) p.bias = bias.data();
    p.bias_strides = bias_shape.strides;
    if (!c.mask.empty()) p.mask = mask.data();
    p.mask_strides = mask_shape.strides;
    if (c.alibi) p.alibi_slopes = slopes.data();
    p.dropout = make_attention_dropout(c.dropout > 0 ? seed.data() : nullptr, c.dropout);
    return p;
  }
  AttentionFwdParams forward() {
    return {problem(),       q.data.data(), k.data.data(), v.data.data(), out.data.data(), lse.data(),
            lse_rest.data(), q.strides,     k.strides,     v.strides,     out.strides,     nullptr};
  }
  AttentionBwdParams backward() {
    AttentionBwdParams p{};
    p.problem = problem();
    p.dout = dout.data.data(), p.dlse = dlse.data();
    p.q = q.data.data(), p.k = k.data.data(), p.v = v.data.data();
    p.out = out.data.data(), p.lse = lse.data(), p.lse_rest = lse_rest.data();
    p.dq = dq.data.data(), p.dk = dk.data.data(), p.dv = dv.data.data();
    if (shape.sink) p.dsink = dsink.data();
    if (!shape.bias.empty()) p.dbias = dbias.data();
    p.dbias_strides = bias_shape.strides;
    p.dout_strides = dout.strides, p.q_strides = q.strides, p.k_strides = k.strides, p.v_strides = v.strides;
    p.out_strides = out.strides, p.dq_strides = dq.strides, p.dk_strides = dk.strides, p.dv_strides = dv.strides;
    p.deterministic = true;
    return p;
  }

  // By the kernels that the device's plan names.
  Status run(AttentionFwdParams p) {
    AttentionForwardPlan plan;
    WARPSMITH_RETURN_IF_FAILED(attention_forward_plan_cuda(p, plan));
    p.workspace = workspace_of(plan.workspace_bytes);
    return attention_forward_cuda(p, plan, nullptr);
  }
  Status run(AttentionBwdParams p) {
    AttentionBackwardPlan plan;
    WARPSMITH_RETURN_IF_FAILED(attention_backward_plan_cuda(p, plan));
    p.workspace = workspace_of(plan.workspace_bytes);
    return attention_backward_cuda(p, plan, nullptr);
  }
  void* workspace_of(int64_t bytes) {
    workspace = Buffer<unsigned char>(static_cast<size_t>(bytes));
    return workspace.data();
  }
  void poison_results() {
    for (HeadBuffer<T>* x : {&out, &dq, &dk, &dv}) x->data.poison();
    for (Buffer<float>* x : {&lse, &lse_rest, &dsink}) x->poison();
    dbias.poison();
  }
  // Calls f(name, data, bytes) with each result.
  template <class F> void for_results(F&& f) {
    const auto give = [&](const char* name, const auto& x) { f(name, x.data(), x.size() * sizeof(x[0])); };
    give("out", out.data), give("lse", lse), give("lse_rest", lse_rest), give("dq", dq.data), give("dk", dk.data);
    give("dv", dv.data), give("dbias", dbias), give("dsink", dsink);
  }
  // Everything that the results hold, bit for bit.
  std::string bits() {
    std::string all;
    for_results(
        [&](const char*, const void* data, size_t bytes) { all.append(static_cast<const char*>(data), bytes); });
    return all;
  }

 private:
  static int64_t sum(const std::vector<int64_t>& x) { return std::accumulate(x.begin(), x.end(), int64_t{0}); }
  static int64_t longest(const std::vector<int64_t>& lengths, int64_t otherwise) {
    return lengths.empty() ? otherwise : *std::max_element(lengths.begin(), lengths.end());
  }
};

}  // namespace warpsmith::test
