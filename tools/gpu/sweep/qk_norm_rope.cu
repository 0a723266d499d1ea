// Times qk_norm_rope's kernels over their configurations, beside a copy of the same bytes. Build and run on a GPU
// machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     tools/gpu/sweep/qk_norm_rope.cu csrc/kernels/rope/qk_norm_rope.cu -o sweep && ./sweep
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "common/launch.h"
#include "kernels/rope/qk_norm_rope.h"
#include "kernels/rope/qk_norm_rope_config.h"
#include "kernels/rope/qk_norm_rope_kernel.cuh"

using namespace warpsmith;

namespace {

void check(cudaError_t e) {
  if (e != cudaSuccess) std::printf("CUDA error: %s\n", cudaGetErrorString(e)), std::exit(1);
}

void* allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes));
  return p;
}

__global__ void fill(uint16_t* p, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    p[i] = static_cast<uint16_t>(0x3f00 + (i * 2654435761u >> 7) % 0x100);  // bfloat16 from 0.5 to 2
}

void* numbers(int64_t count) {
  auto* p = static_cast<uint16_t*>(allocate(count * 2));
  fill<<<1024, 256>>>(p, count);
  check(cudaDeviceSynchronize());
  return p;
}

// Median microseconds, the L2 flushed by a 256 MB write before each call, which also hides the launch.
double time_of(const std::function<void()>& call) {
  constexpr size_t kFlushBytes = 256 << 20;
  static void* flush = allocate(kFlushBytes);
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    check(cudaMemsetAsync(flush, i, kFlushBytes));
    check(cudaEventRecord(start));
    call();
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 3) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3;
}

struct Row {
  double us;
  std::string text;
};

template <int U, int kBlocks, bool kEarly>
void sweep_forward(const QkNormRopeFwdParams& p, const QkNormRopeProblem& problem, std::vector<Row>& rows) {
  for (const int threads : {32, 64, 96, 128, 160}) {
    const QkNormRopeConfig c = qk_norm_rope_forward_config(problem, U, threads);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(c.blocks), static_cast<unsigned>(c.parts));
    config.block.x = static_cast<unsigned>(c.threads);
    Status status;
    const auto kernel = qk_norm_rope::forward_registers<bfloat16, bfloat16, false, U, kBlocks, kEarly>;
    const double us = time_of([&] { status = launch(kernel, config, nullptr, p, c); });
    char text[160];
    std::snprintf(text, sizeof text,
                  "heads a thread %d, %d blocks of 160, weights %s, threads %d, tokens %d, parts %lld", U, kBlocks,
                  kEarly ? "early" : "late", c.threads, c.tokens_a_block, (long long)c.parts);
    if (status.ok()) rows.push_back({us, text});
  }
}

void print(const char* what, double bytes, std::vector<Row> rows) {
  static char *from = static_cast<char*>(allocate(1 << 30)), *to = static_cast<char*>(allocate(1 << 30));
  const double copy_us =
      time_of([&] { check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes / 2), cudaMemcpyDeviceToDevice)); });
  std::printf("%s: copy of the same bytes %.1f us (%.2f TB/s)\n", what, copy_us, bytes / copy_us * 1e-6);
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.us < b.us; });
  for (size_t i = 0; i < rows.size(); ++i)
    if (i < 7 || rows[i].text.find("chosen") != std::string::npos)
      std::printf("  %7.1f us  %.2f TB/s  %.3f of copy  %s\n", rows[i].us, bytes / rows[i].us * 1e-6,
                  copy_us / rows[i].us, rows[i].text.c_str());
}

void run(int64_t batch, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t dim) {
  const int64_t q_count = batch * tokens * q_heads * dim, k_count = batch * tokens * k_heads * dim;
  void *q = numbers(q_count), *k = numbers(k_count), *dq_out = numbers(q_count), *dk_out = numbers(k_count);
  void *q_out = allocate(q_count * 2), *k_out = allocate(k_count * 2), *w = numbers(dim), *dw = allocate(dim * 2);
  void *cos = numbers(tokens * dim / 2), *sin = numbers(tokens * dim / 2), *partials = allocate(size_t{4096} * dim * 8);
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
                              dw,
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
  rows.push_back({time_of([&] { (void)qk_norm_rope_forward_cuda(f, nullptr); }), "chosen"});
  sweep_forward<2, 4, true>(f, problem, rows);
  sweep_forward<2, 5, true>(f, problem, rows);
  sweep_forward<4, 3, true>(f, problem, rows);
  sweep_forward<4, 3, false>(f, problem, rows);
  sweep_forward<4, 4, true>(f, problem, rows);
  sweep_forward<4, 4, false>(f, problem, rows);
  sweep_forward<8, 2, true>(f, problem, rows);
  print("forward", 4.0 * (q_count + k_count), rows);

  rows.clear();
  rows.push_back({time_of([&] { (void)qk_norm_rope_backward_cuda(b, nullptr); }), "chosen"});
  QkNormRopeBwdParams inputs_alone = b;
  inputs_alone.partials = inputs_alone.dq_weight = inputs_alone.dk_weight = nullptr;
  rows.push_back({time_of([&] { (void)qk_norm_rope_backward_cuda(inputs_alone, nullptr); }), "chosen, no weights"});
  for (const int heads : {1, 2, 4, 5, 8})
    for (const int stages : {2, 3, 4})
      for (const int together : {1, 2, 3, 4, 6, 8}) {
        const QkNormRopeConfig c = qk_norm_rope_backward_config(problem, heads, stages, together);
        if (c.heads_a_thread != heads || together * c.threads > 512) continue;
        Status status;
        const double us = time_of([&] { status = qk_norm_rope_backward_cuda_with(c, b, nullptr); });
        char text[160];
        std::snprintf(text, sizeof text,
                      "heads a thread %d, stages %d, together %d, threads %d, tokens %d, blocks %lld", heads, stages,
                      together, c.threads, c.tokens_a_block, (long long)c.blocks);
        if (status.ok()) rows.push_back({us, text});
      }
  print("backward", 6.0 * (q_count + k_count), rows);
  for (void* m : {q, k, dq_out, dk_out, q_out, k_out, w, dw, cos, sin, partials}) check(cudaFree(m));
}

}  // namespace

int main() {
  run(4, 4096, 32, 8, 128);
  run(8, 2048, 16, 16, 64);
}
