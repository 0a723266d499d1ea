// Times rms_norm's kernels over their configurations, beside a copy of the same bytes. Build and run on a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     tools/gpu/sweep/rms_norm.cu csrc/kernels/norm/rms_norm.cu -o sweep && ./sweep
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/norm/rms_norm.h"
#include "kernels/norm/rms_norm_config.h"

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

void* random_bfloat16(int64_t count, unsigned seed) {
  std::vector<uint16_t> host(1 << 20);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (auto& h : host) {
    const float f = normal(engine);
    uint32_t u;
    memcpy(&u, &f, 4);
    h = static_cast<uint16_t>(u >> 16);
  }
  char* p = static_cast<char*>(allocate(count * 2));
  for (int64_t at = 0; at < count * 2; at += 2 << 20)
    check(cudaMemcpy(p + at, host.data(), std::min<int64_t>(2 << 20, count * 2 - at), cudaMemcpyHostToDevice));
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
  for (int i = 0; i < 13; ++i) {
    check(cudaMemsetAsync(flush, i, kFlushBytes));
    check(cudaEventRecord(start));
    call();
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3;
}

struct Row {
  double us;
  std::string text;
};

void print(const char* direction, int64_t rows, int64_t columns, double bytes, double copy_us, std::vector<Row> all) {
  std::sort(all.begin(), all.end(), [](const Row& a, const Row& b) { return a.us < b.us; });
  std::printf("%s %lldx%lld: copy of the same bytes %.1f us (%.2f TB/s)\n", direction, (long long)rows,
              (long long)columns, copy_us, bytes / copy_us * 1e-6);
  for (size_t i = 0; i < all.size(); ++i)
    if (i < 5 || all[i].text.find("chosen") != std::string::npos)
      std::printf("  %7.1f us  %.2f TB/s  %.3f of copy  %s\n", all[i].us, bytes / all[i].us * 1e-6, copy_us / all[i].us,
                  all[i].text.c_str());
}

std::string text_of(const RmsNormConfig& c, bool chosen) {
  char s[160];
  std::snprintf(s, sizeof s, "%s lanes %d vectors %d threads %d blocks %lld stages %d%s", name(c.kernel), c.lanes,
                c.vectors, c.threads, (long long)c.blocks, c.stages, chosen ? "  <- chosen" : "");
  return s;
}

int round_up(int64_t a, int to) { return static_cast<int>((a + to - 1) / to * to); }

// Every ring of `tensors` rows a stage that fits.
template <class Visit> void for_rings(const RmsNormProblem& p, int tensors, Visit&& visit) {
  const int64_t vectors = p.columns / 8;
  for (int v : {1, 2, 3, 4})
    for (int narrow : {0, 1})
      for (int threads : {128, 256})
        for (int stages : {2, 3, 4})
          for (int together : {1, 2, 3, 4, 6, 8}) {
            RmsNormConfig c;
            c.kernel = RmsNormKernel::ring, c.vector_elems = 8, c.vectors = v, c.stages = stages;
            if (narrow) {
              c.lanes = 1;
              while (c.lanes * v < vectors) c.lanes *= 2;
              if (c.lanes > 32 || (c.lanes / 2) * v >= vectors) continue;
              c.threads = threads;
            } else {
              c.threads = c.lanes = round_up((vectors + v - 1) / v, 32);
              if (c.lanes <= 32 || c.lanes > ring_threads(v) || threads == 128) continue;
            }
            c.shared_bytes = int64_t{stages} * tensors * 16 * v * c.threads;
            if ((c.shared_bytes + 1536) * together > 228 * 1024 || together * c.threads > 2048) continue;
            c.blocks = std::min<int64_t>(int64_t{together} * p.multiprocessors, (p.rows + c.groups() - 1) / c.groups());
            visit(c);
          }
}

}  // namespace

int main() {
  const int64_t shapes[][2] = {{16384, 4096}, {4096, 8192}, {1024, 12288}, {65536, 768}, {131072, 128}, {32768, 2048}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t count = rows * columns, vectors = columns / 8;
    void *x = random_bfloat16(count, 1), *dy = random_bfloat16(count, 2), *w = random_bfloat16(columns, 3),
         *y = allocate(count * 2);
    void *rstd = allocate(rows * 4), *dw = allocate(columns * 2), *partials = allocate(size_t{2048} * columns * 4);
    const auto copy = [&](int64_t bytes) {
      static char* from = static_cast<char*>(allocate(1 << 30));
      static char* to = static_cast<char*>(allocate(1 << 30));
      return time_of([&, bytes] { check(cudaMemcpyAsync(to, from, bytes / 2, cudaMemcpyDeviceToDevice)); });
    };
    RmsNormFwdParams f{x, w, y, rstd, rows, columns, columns, 1e-6, 0, Dtype::bfloat16, Dtype::bfloat16};
    RmsNormBwdParams b{
        dy, x, w, rstd, y, dw, partials, rows, columns, columns, columns, 0, Dtype::bfloat16, Dtype::bfloat16};
    RmsNormProblem problem{rows, columns, 2, true, 132, 227 * 1024};

    std::vector<Row> all;
    const auto forward = [&](RmsNormConfig c, bool chosen) {
      Status status;
      const double us = time_of([&] { status = rms_norm_forward_cuda_with(c, f, nullptr); });
      if (status.ok()) all.push_back({us, text_of(c, chosen)});
    };
    forward(choose_rms_norm_forward(problem), true);
    for (int threads : {64, 128, 256, 512, 1024}) {
      RmsNormConfig c = choose_rms_norm_forward(problem);
      c.kernel = RmsNormKernel::registers, c.stages = 0, c.shared_bytes = 0;
      for (bool warp : {true, false}) {
        c.lanes = warp ? 32 : threads, c.threads = threads,
        c.vectors = static_cast<int>((vectors + c.lanes - 1) / c.lanes);
        if (c.vectors > 4 || (warp && threads != 64)) continue;
        c.blocks = (rows + c.groups() - 1) / c.groups();
        forward(c, false);
      }
    }
    for_rings(problem, 1, [&](const RmsNormConfig& ring) { forward(ring, false); });
    print("forward", rows, columns, count * 4.0, copy(count * 4), all);

    all.clear();
    const auto backward = [&](RmsNormConfig c, bool chosen) {
      if (rms_norm_partial_rows(c) > 2048) return;
      Status status;
      const double us = time_of([&] { status = rms_norm_backward_cuda_with(c, b, nullptr); });
      if (status.ok()) all.push_back({us, text_of(c, chosen)});
    };
    backward(choose_rms_norm_backward(problem), true);
    for_rings(problem, 2, [&](const RmsNormConfig& ring) { backward(ring, false); });
    print("backward", rows, columns, count * 6.0, copy(count * 6), all);
    for (void* p : {x, dy, w, y, rstd, dw, partials}) check(cudaFree(p));
  }
}
