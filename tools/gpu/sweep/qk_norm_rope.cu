// Times qk_norm_rope's kernels over their configurations, beside a copy of the same bytes. Build and run on a GPU
// machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     tools/gpu/sweep/qk_norm_rope.cu csrc/kernels/rope/qk_norm_rope.cu -o sweep && ./sweep
#include "common/launch.h"
#include "kernels/rope/qk_norm_rope.h"
#include "kernels/rope/qk_norm_rope_config.h"
#include "kernels/rope/qk_norm_rope_kernel.cuh"
#include "sweep.h"

using namespace warpsmith;
using sweep::Row;

namespace {

template <int U, int kBlocks, bool kEarly>
void sweep_forward(const QkNormRopeFwdParams& p, const QkNormRopeProblem& problem, std::vector<Row>& rows) {
  for (const int threads : {64, 160}) {
    const QkNormRopeConfig c = qk_norm_rope_forward_config(problem, U, threads);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(c.blocks), static_cast<unsigned>(c.parts));
    config.block.x = static_cast<unsigned>(c.threads);
    Status status;
    const auto kernel = qk_norm_rope::forward_registers<bfloat16, bfloat16, false, U, kBlocks, kEarly>;
    const double us = sweep::time_of([&] { status = launch(kernel, config, nullptr, p, c); });
    char text[160];
    std::snprintf(text, sizeof text,
                  "heads a thread %d, %d blocks of 160, weights %s, threads %d, tokens %d, parts %lld", U, kBlocks,
                  kEarly ? "early" : "late", c.threads, c.tokens_a_block, (long long)c.parts);
    if (status.ok()) rows.push_back({us, text});
  }
}

// The new body beside the ring.
template <int U, int kLanes, int kThreads, int kBlocks>
void sweep_heads(const QkNormRopeBwdParams& p, const QkNormRopeProblem& problem, std::vector<Row>& rows,
                 const std::function<std::string()>& verdict) {
  QkNormRopeConfig c = qk_norm_rope_backward_config(problem, U, kThreads);
  if (c.lanes != kLanes && kLanes != 0) return;
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
  const auto kernel = qk_norm_rope::backward_ring<bfloat16, bfloat16, false, U, kLanes, kThreads, kBlocks>;
  Status status;
  const auto call = [&] {
    status = launch(kernel, config, nullptr, p, c, 1e-6f, 1.0f / static_cast<float>(p.shape.head_dim));
    if (p.partials) (void)launch(qk_norm_rope::sum_partials<bfloat16>, sum, nullptr, p, c.blocks);
  };
  const double us = sweep::time_of(call, 21);
  char text[160];
  std::snprintf(text, sizeof text, "heads: %d, lanes %d, %d threads x %d, tokens %d, blocks %lld%s %s", U, kLanes,
                c.threads, kBlocks, c.tokens_a_block, (long long)c.blocks, p.partials ? "" : ", no weights",
                verdict().c_str());
  rows.push_back({us, status.ok() ? text : status.what() + " FAILED"});
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
  const QkNormRopeProblem problem{batch * tokens, q_heads, k_heads, dim, dim, 2};
  std::printf("%lldx%lldx(%lld+%lld)x%lld\n", (long long)batch, (long long)tokens, (long long)q_heads,
              (long long)k_heads, (long long)dim);
  std::vector<Row> rows;
  rows.push_back({sweep::time_of([&] { (void)qk_norm_rope_forward_cuda(f, nullptr); }), "chosen"});
  sweep_forward<4, 4, true>(f, problem, rows);
  sweep_forward<4, 4, false>(f, problem, rows);
  sweep::print("forward", 4.0 * (q_count + k_count), rows, 24);

  rows.clear();
  rows.push_back({sweep::time_of([&] { (void)qk_norm_rope_backward_cuda(b, nullptr); }), "chosen"});
  QkNormRopeBwdParams inputs_alone = b;
  inputs_alone.partials = inputs_alone.dq_weight = inputs_alone.dk_weight = nullptr;
  rows.push_back(
      {sweep::time_of([&] { (void)qk_norm_rope_backward_cuda(inputs_alone, nullptr); }), "chosen, no weights"});
  // What the chosen one wrote, to compare with: the end of dq, and both weights' gradients.
  std::vector<uint16_t> want(1 << 20), got(1 << 20), want_dw(dim), got_dw(dim);
  const auto fetch = [&](std::vector<uint16_t>& to, std::vector<uint16_t>& to_dw) {
    sweep::check(cudaDeviceSynchronize());
    sweep::check(
        cudaMemcpy(to.data(), static_cast<uint16_t*>(q_out) + q_count - (1 << 20), 2 << 20, cudaMemcpyDeviceToHost));
    sweep::check(cudaMemcpy(to_dw.data(), dw, dim * 2, cudaMemcpyDeviceToHost));
    sweep::check(cudaMemset(q_out, 0xff, q_count * 2));
    sweep::check(cudaMemset(dw, 0xff, dim * 2));
  };
  (void)qk_norm_rope_backward_cuda(b, nullptr);
  fetch(want, want_dw);
  const auto verdict = [&] {
    fetch(got, got_dw);
    const auto value = [](uint16_t h) {
      uint32_t u = uint32_t{h} << 16;
      float f;
      std::memcpy(&f, &u, 4);
      return f;
    };
    double worst = 0, worst_dw = 0, most_dw = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double d = std::abs(value(got[i]) - value(want[i]));
      worst = d == d ? std::max(worst, d) : 1e9;
    }
    for (int i = 0; i < dim; ++i) {
      const double d = std::abs(value(got_dw[i]) - value(want_dw[i]));
      worst_dw = d == d ? std::max(worst_dw, d) : 1e9;
      most_dw = std::max<double>(most_dw, std::abs(value(want_dw[i])));
    }
    char text[80];
    std::snprintf(text, sizeof text, "(dq off %.2g, dw off %.2g of %.2g)", worst, worst_dw, most_dw);
    return std::string(text);
  };
  for (const bool weights : {true, false}) {
    const QkNormRopeBwdParams& of = weights ? b : inputs_alone;
    sweep_heads<4, 8, 256, 2>(of, problem, rows, verdict);
    sweep_heads<4, 8, 512, 1>(of, problem, rows, verdict);
    sweep_heads<8, 8, 256, 2>(of, problem, rows, verdict);
    sweep_heads<2, 8, 256, 2>(of, problem, rows, verdict);
    sweep_heads<2, 8, 512, 1>(of, problem, rows, verdict);
    sweep_heads<2, 4, 512, 1>(of, problem, rows, verdict);
    sweep_heads<4, 4, 256, 2>(of, problem, rows, verdict);
    sweep_heads<4, 4, 512, 1>(of, problem, rows, verdict);
  }
  sweep::print("backward", 6.0 * (q_count + k_count), rows, 24);
  for (void* m : {q, k, dq_out, dk_out, q_out, k_out, w, dw, dkw, cos, sin, partials}) sweep::check(cudaFree(m));
}

}  // namespace

int main() {
  run(4, 4096, 32, 8, 128);
  run(8, 2048, 16, 16, 64);
}
