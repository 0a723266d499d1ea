// Times rope's kernel over heads a thread, registers and block sizes, beside a copy of the same bytes. Build and run on
// a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     tools/gpu/sweep/rope.cu -o sweep && ./sweep
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "common/launch.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rope_kernel.cuh"

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

template <bool kInterleaved, int U, int kBlocks>
void sweep(const RopeParams& p, const RopeProblem& problem, std::vector<Row>& rows) {
  for (const int threads : {32, 64, 96, 128, 160, 192, 256}) {
    const RopeConfig c = rope_config_of(problem, U, threads);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(c.blocks_x), static_cast<unsigned>(c.blocks_y));
    config.block = dim3(c.threads_x, c.threads_y, c.threads_z);
    Status status;
    const auto kernel = rope::rotate_heads<bfloat16, bfloat16, 8, kInterleaved, U, kBlocks>;
    const double us = time_of([&] { status = launch(kernel, config, nullptr, p, c); });
    char text[160];
    std::snprintf(text, sizeof text, "heads a thread %d, %d blocks of 256, threads %d x %d x %d", U, kBlocks,
                  c.threads_x, c.threads_y, c.threads_z);
    if (status.ok()) rows.push_back({us, text});
  }
}

template <bool kInterleaved> void run(int64_t batch, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t dim) {
  const int64_t q_count = batch * tokens * q_heads * dim, k_count = batch * tokens * k_heads * dim;
  void *q = numbers(q_count), *k = numbers(k_count), *q_out = allocate(q_count * 2), *k_out = allocate(k_count * 2);
  void *cos = numbers(tokens * dim / 2), *sin = numbers(tokens * dim / 2);
  const auto layout = [&](int64_t heads) { return RotaryHeads{heads, tokens * heads * dim, heads * dim, dim}; };
  const RopeParams p{q,
                     k,
                     q_out,
                     k_out,
                     layout(q_heads),
                     layout(k_heads),
                     layout(q_heads),
                     layout(k_heads),
                     {cos, sin, tokens, 0, dim / 2, 1, false, Dtype::bfloat16},
                     {},
                     {batch, tokens, dim, dim, kInterleaved, false},
                     false,
                     Dtype::bfloat16};
  const RopeProblem problem{batch * tokens, q_heads, k_heads, dim, dim, 2};
  std::vector<Row> rows;
  sweep<kInterleaved, 1, 4>(p, problem, rows);
  sweep<kInterleaved, 1, 5>(p, problem, rows);
  sweep<kInterleaved, 1, 6>(p, problem, rows);
  sweep<kInterleaved, 2, 2>(p, problem, rows);
  sweep<kInterleaved, 2, 3>(p, problem, rows);
  sweep<kInterleaved, 2, 4>(p, problem, rows);
  sweep<kInterleaved, 4, 2>(p, problem, rows);
  sweep<kInterleaved, 4, 3>(p, problem, rows);
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.us < b.us; });

  const double bytes = 4.0 * (q_count + k_count);
  static char *from = static_cast<char*>(allocate(1 << 30)), *to = static_cast<char*>(allocate(1 << 30));
  const double copy_us =
      time_of([&] { check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes / 2), cudaMemcpyDeviceToDevice)); });
  std::printf("%s %lldx%lldx(%lld+%lld)x%lld: copy of the same bytes %.1f us (%.2f TB/s)\n",
              kInterleaved ? "interleaved" : "halves", (long long)batch, (long long)tokens, (long long)q_heads,
              (long long)k_heads, (long long)dim, copy_us, bytes / copy_us * 1e-6);
  for (size_t i = 0; i < std::min<size_t>(rows.size(), 8); ++i)
    std::printf("  %7.1f us  %.2f TB/s  %.3f of copy  %s\n", rows[i].us, bytes / rows[i].us * 1e-6,
                copy_us / rows[i].us, rows[i].text.c_str());
  std::printf("  slowest %.1f us %s\n", rows.back().us, rows.back().text.c_str());
  for (void* m : {q, k, q_out, k_out, cos, sin}) check(cudaFree(m));
}

}  // namespace

int main() {
  run<false>(4, 4096, 32, 8, 128);
  run<true>(4, 4096, 32, 8, 128);
  run<false>(1, 8192, 64, 8, 128);
  run<false>(8, 2048, 16, 16, 64);
  run<false>(8, 1024, 12, 12, 64);
}
