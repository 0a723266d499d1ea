// Question: which configuration of qk_norm_rope's kernels is fastest, beside a copy of the same bytes?
// links: csrc/kernels/rope/qk_norm_rope.cu
#include "common/instances.h"
#include "device/launch.h"
#include "kernels/rope/qk_norm_backward.cuh"
#include "kernels/rope/qk_norm_forward.cuh"
#include "kernels/rope/rope_config.h"
#include "sweep.h"

using namespace warpsmith;
using sweep::Row;

// The kernels of bfloat16 heads with kLanes lanes; 0: any number. Outside the namespace below: nvcc's host code could
// not name it there, because code_probe.cu has an unnamed namespace too.
template <int U, int kLanes, int kThreads, int kBlocks> using Compiled =
    Instance<QkNormRopeInstance{false, 16 * kLanes, U, kThreads, kBlocks}>;

namespace {

constexpr float kEps = 1e-6f;
float scale_of_sum(const RotaryShape& shape) { return 1.0f / static_cast<float>(shape.head_dim); }

using Verdict = std::function<std::string()>;

template <int U, int kLanes, int kThreads, int kBlocks>
void sweep_forward(const QkNormRopeFwdParams& p, const RopeProblem& problem, std::vector<Row>& rows,
                   const Verdict& verdict) {
  const QkNormRopeConfig c = qk_norm_rope_forward_config(problem, U, kThreads);
  if (c.parts > 1 || (kLanes > 0 && c.known_lanes != kLanes)) return;
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(c.blocks);
  config.block.x = static_cast<unsigned>(c.threads);
  Status status;
  const auto kernel = qk_norm_rope::forward_registers<bfloat16, bfloat16, Compiled<U, kLanes, kThreads, kBlocks>>;
  const double us =
      sweep::time_of([&] { (void)(status = launch(kernel, config, nullptr, p, c, kEps, scale_of_sum(p.shape))); }, 41);
  char text[160];
  std::snprintf(text, sizeof text, "heads a thread %d, lanes %d, %d blocks of %d, threads %d, tokens %d%s", U, kLanes,
                kBlocks, kThreads, c.threads, c.tokens_a_block, verdict().c_str());
  rows.push_back({us, status.ok() ? text : status.what() + " FAILED <- chosen or not"});
}

// `heads`: of one token that a thread takes, one after the other; U of them in the ring.
template <int U, int kLanes, int kThreads, int kBlocks>
void sweep_backward(int heads, const QkNormRopeBwdParams& p, const RopeProblem& problem, std::vector<Row>& rows,
                    const Verdict& verdict) {
  QkNormRopeConfig c = qk_norm_rope_backward_config(problem, heads, kThreads);
  if ((kLanes != 0 && c.lanes != kLanes) || c.heads_a_thread != heads) return;
  c.tokens_a_block = kThreads / c.threads_a_token;
  c.threads = (c.threads_a_token * c.tokens_a_block + 31) / 32 * 32;
  c.shared_bytes = 64 * U * kThreads;
  c.blocks = std::min<int64_t>(132 * kBlocks, (problem.tokens + c.tokens_a_block - 1) / c.tokens_a_block);
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(c.blocks);
  config.block.x = static_cast<unsigned>(c.threads);
  config.dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes);
  LaunchConfig sum;
  sum.grid.x = static_cast<unsigned>((p.shape.head_dim + 3) / 4);
  sum.block.x = qk_norm_rope::kSumThreads;
  sum.programmatic_dependent = true;
  const auto kernel = qk_norm_rope::backward_ring<bfloat16, bfloat16, Compiled<U, kLanes, kThreads, kBlocks>>;
  Status status;
  const auto call = [&] {
    (void)(status = launch(kernel, config, nullptr, p, c, kEps, scale_of_sum(p.shape)));
    if (p.partials) (void)launch(qk_norm_rope::sum_partials<bfloat16>, sum, nullptr, p, c.blocks);
  };
  const double us = sweep::time_of(call, 41);
  char text[160];
  std::snprintf(text, sizeof text, "%d of %d heads, lanes %d, %d threads x %d, tokens %d%s%s", U, heads, kLanes,
                c.threads, kBlocks, c.tokens_a_block, p.partials ? "" : ", no weights", verdict().c_str());
  rows.push_back({us, status.ok() ? text : status.what() + " FAILED <- chosen or not"});
}

void run(int64_t batch, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t dim) {
  const int64_t q_count = batch * tokens * q_heads * dim, k_count = batch * tokens * k_heads * dim;
  void *q = sweep::random_bfloat16(q_count, 1), *k = sweep::random_bfloat16(k_count, 2),
       *dq_out = sweep::random_bfloat16(q_count, 3), *dk_out = sweep::random_bfloat16(k_count, 4);
  void *q_out = sweep::allocate(q_count * 2), *k_out = sweep::allocate(k_count * 2),
       *w = sweep::random_bfloat16(dim, 5), *dw = sweep::allocate(dim * 2), *dkw = sweep::allocate(dim * 2);
  void *cos = sweep::random_bfloat16(tokens * dim / 2, 6), *sin = sweep::random_bfloat16(tokens * dim / 2, 7),
       *partials = sweep::allocate(size_t{4096} * dim * 8);
  const auto layout = [&](int64_t heads) { return RotaryHeads{heads, tokens * heads * dim, heads * dim, dim}; };
  const RotaryHeads of_q = layout(q_heads), of_k = layout(k_heads);
  const RotaryAngles angles{cos, sin, tokens, 0, dim / 2, 1, false, Dtype::bfloat16};
  const QkNormRopeFwdParams f{q,
                              k,
                              w,
                              w,
                              q_out,
                              k_out,
                              of_q,
                              of_k,
                              of_q,
                              of_k,
                              angles,
                              {},
                              {batch, tokens, dim, dim, false, false},
                              1e-6,
                              Dtype::bfloat16,
                              Dtype::bfloat16};
  const QkNormRopeBwdParams b{dq_out,
                              dk_out,
                              q,
                              k,
                              w,
                              w,
                              q_out,
                              k_out,
                              dw,
                              dkw,
                              partials,
                              of_q,
                              of_k,
                              of_q,
                              of_k,
                              of_q,
                              of_k,
                              angles,
                              {},
                              {batch, tokens, dim, dim, false, true},
                              1e-6,
                              Dtype::bfloat16,
                              Dtype::bfloat16};
  const RopeProblem problem{batch * tokens, q_heads, k_heads, dim, dim, 2};
  std::printf("%lldx%lldx(%lld+%lld)x%lld\n", (long long)batch, (long long)tokens, (long long)q_heads,
              (long long)k_heads, (long long)dim);
  std::vector<Row> rows;
  const auto add = [&](const char* text, const std::function<void()>& call) {
    rows.push_back({sweep::time_of(call, 41), text});
  };
  // What the chosen one writes, which the others must agree with.
  void *want_q = sweep::allocate(q_count * 2), *want_k = sweep::allocate(k_count * 2);
  std::vector<uint16_t> want_dw(dim), got_dw(dim);
  const auto keep = [&] {
    sweep::check(cudaDeviceSynchronize());
    sweep::check(cudaMemcpy(want_q, q_out, q_count * 2, cudaMemcpyDeviceToDevice));
    sweep::check(cudaMemcpy(want_k, k_out, k_count * 2, cudaMemcpyDeviceToDevice));
    sweep::check(cudaMemcpy(want_dw.data(), dw, dim * 2, cudaMemcpyDeviceToHost));
  };
  const auto verdict = [&] {
    const auto of_q = sweep::differences(q_out, want_q, q_count), of_k = sweep::differences(k_out, want_k, k_count);
    std::string text;
    if (const unsigned n = of_q.other_bits + of_k.other_bits) text += ", other bits " + std::to_string(n);
    if (const unsigned n = of_q.wrong + of_k.wrong) text += ", WRONG " + std::to_string(n) + " <- chosen or not";
    sweep::check(cudaMemset(q_out, 0xff, q_count * 2));
    sweep::check(cudaMemset(k_out, 0xff, k_count * 2));
    return text;
  };
  const auto verdict_with_weights = [&] {
    sweep::check(cudaMemcpy(got_dw.data(), dw, dim * 2, cudaMemcpyDeviceToHost));
    sweep::check(cudaMemset(dw, 0xff, dim * 2));
    double worst = 0, most = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const auto value = [](uint16_t h) {
        const uint32_t u = uint32_t{h} << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return f;
      };
      const double d = std::abs(value(got_dw[i]) - value(want_dw[i]));
      worst = d == d ? std::max(worst, d) : 1e9;
      most = std::max<double>(most, std::abs(value(want_dw[i])));
    }
    return verdict() + (worst > 0.01 * most ? ", WRONG weights <- chosen or not" : "");
  };
  const auto forward = [&] { (void)qk_norm_rope_forward_cuda(f, nullptr); };
  add("chosen", forward);
  keep();
  sweep_forward<4, 0, 160, 4>(f, problem, rows, verdict);
  sweep_forward<4, 8, 160, 4>(f, problem, rows, verdict);
  sweep_forward<4, 8, 160, 3>(f, problem, rows, verdict);
  sweep_forward<4, 8, 96, 6>(f, problem, rows, verdict);
  sweep_forward<4, 8, 320, 2>(f, problem, rows, verdict);
  sweep_forward<4, 8, 288, 2>(f, problem, rows, verdict);
  sweep_forward<4, 8, 640, 1>(f, problem, rows, verdict);
  sweep_forward<4, 4, 160, 4>(f, problem, rows, verdict);
  sweep_forward<4, 4, 96, 6>(f, problem, rows, verdict);
  sweep_forward<4, 4, 128, 5>(f, problem, rows, verdict);
  sweep_forward<4, 4, 320, 2>(f, problem, rows, verdict);
  sweep_forward<2, 8, 160, 5>(f, problem, rows, verdict);
  sweep_forward<2, 8, 160, 6>(f, problem, rows, verdict);
  sweep_forward<2, 4, 160, 5>(f, problem, rows, verdict);
  sweep_forward<2, 4, 128, 8>(f, problem, rows, verdict);
  sweep_forward<8, 8, 160, 2>(f, problem, rows, verdict);
  sweep_forward<8, 8, 320, 1>(f, problem, rows, verdict);
  sweep_forward<8, 4, 160, 2>(f, problem, rows, verdict);
  add("chosen, again", forward);
  sweep::print("forward", 4.0 * (q_count + k_count), rows, 24);

  rows.clear();
  QkNormRopeBwdParams inputs_alone = b;
  inputs_alone.partials = inputs_alone.dq_weight = inputs_alone.dk_weight = nullptr;
  const auto backward = [&] { (void)qk_norm_rope_backward_cuda(b, nullptr); };
  add("chosen, no weights", [&] { (void)qk_norm_rope_backward_cuda(inputs_alone, nullptr); });
  add("chosen", backward);
  keep();
  for (const int heads : {2, 4, 6, 8}) {
    sweep_backward<2, 0, 512, 1>(heads, b, problem, rows, verdict_with_weights);
    sweep_backward<2, 8, 512, 1>(heads, b, problem, rows, verdict_with_weights);
    sweep_backward<2, 4, 512, 1>(heads, b, problem, rows, verdict_with_weights);
  }
  sweep_backward<4, 8, 512, 1>(4, b, problem, rows, verdict_with_weights);
  sweep_backward<4, 4, 512, 1>(4, b, problem, rows, verdict_with_weights);
  sweep_backward<2, 8, 256, 2>(2, b, problem, rows, verdict_with_weights);
  sweep_backward<2, 4, 256, 2>(2, b, problem, rows, verdict_with_weights);
  add("chosen, again", backward);
  sweep::print("backward", 6.0 * (q_count + k_count), rows, 24);
  sweep::check(cudaFree(want_q));
  sweep::check(cudaFree(want_k));
  for (void* m : {q, k, dq_out, dk_out, q_out, k_out, w, dw, dkw, cos, sin, partials}) sweep::check(cudaFree(m));
}

}  // namespace

int main() {
  run(4, 4096, 32, 8, 128);
  run(1, 8192, 64, 8, 128);
  run(8, 2048, 16, 16, 64);
  run(4, 4096, 14, 2, 64);
}
