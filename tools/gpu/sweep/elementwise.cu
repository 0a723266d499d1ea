// Times shapes of the elementwise body (threads of a block, vectors a thread, cache hints) for the gated activations,
// beside the kernel that is chosen and a copy of the same bytes. Build and run on a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a
//     tools/gpu/sweep/elementwise.cu -o sweep && ./sweep
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/activation/gated.cuh"

using namespace warpsmith;
using namespace warpsmith::activation;
using device::Cache;

namespace {

void check(cudaError_t e) {
  if (e != cudaSuccess) std::printf("CUDA error: %s\n", cudaGetErrorString(e)), std::exit(1);
}

char* allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes));
  return static_cast<char*>(p);
}

void fill_normal(char* p, int64_t count, unsigned seed) {
  std::vector<uint16_t> host(1 << 20);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (auto& h : host) {
    const float f = normal(engine);
    uint32_t u;
    std::memcpy(&u, &f, 4);
    h = static_cast<uint16_t>(u >> 16);
  }
  for (int64_t at = 0; at < count * 2; at += 2 << 20)
    check(cudaMemcpy(p + at, host.data(), std::min<int64_t>(2 << 20, count * 2 - at), cudaMemcpyHostToDevice));
}

// Median microseconds, the L2 flushed by a 256 MB write before each call, which also hides the launch.
double time_of(const std::function<void()>& call) {
  constexpr size_t kFlushBytes = 256 << 20;
  static char* flush = allocate(kFlushBytes);
  static cudaEvent_t start, stop;
  static const bool made = (check(cudaEventCreate(&start)), check(cudaEventCreate(&stop)), true);
  (void)made;
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

// V vectors of each tensor a thread, a block's width apart; every load before the first use. Sizes that divide evenly.
template <class Op, int V, Cache kLoad, Cache kStore>
__global__ void candidate(Op op, ElementwiseParams<Op::I, Op::O> p) {
  using T = bfloat16;
  constexpr int N = 8;
  const int64_t first = (int64_t{blockIdx.x} * V * blockDim.x + threadIdx.x) * N, step = int64_t{blockDim.x} * N;
  Vector<T, N> in[V][Op::I];
#pragma unroll
  for (int v = 0; v < V; ++v)
#pragma unroll
    for (int i = 0; i < Op::I; ++i)
      in[v][i] = device::load<kLoad>(
          reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(p.in[i].data) + first + v * step));
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float x[Op::I][N], y[Op::O][N];
#pragma unroll
    for (int i = 0; i < Op::I; ++i)
#pragma unroll
      for (int k = 0; k < N; ++k) x[i][k] = device::to_float(in[v][i].at[k]);
    op.template apply<T, N>(x, y, first);
#pragma unroll
    for (int o = 0; o < Op::O; ++o) {
      Vector<T, N> out;
#pragma unroll
      for (int k = 0; k < N; ++k) out.at[k] = device::from_float<T>(y[o][k]);
      device::store<kStore>(
          reinterpret_cast<Vector<T, N>*>(static_cast<T*>(const_cast<void*>(p.out[o].data)) + first + v * step), out);
    }
  }
}

struct Row {
  double us;
  std::string text;
};

template <class Op> void sweep(const char* name, int64_t rows, int64_t columns, char* (&memory)[5]) {
  const int64_t count = rows * columns;
  ElementwiseParams<Op::I, Op::O> p{};
  p.rows = rows, p.columns = columns, p.dtype = Dtype::bfloat16;
  for (int i = 0; i < Op::I; ++i) p.in[i] = {memory[i], columns};
  for (int o = 0; o < Op::O; ++o) p.out[o] = {memory[Op::I + o], columns};
  std::vector<Row> all;
  const auto add = [&](const std::string& text, const std::function<void()>& call) {
    const double us = time_of(call);
    check(cudaGetLastError());
    all.push_back({us, text});
  };
  add("chosen", [&] {
    if (!launch_elementwise(Op{}, p, nullptr).ok()) std::printf("the launch failed\n");
  });
  {  // gate and up, and their gradients, as halves of one tensor
    auto q = p;
    const int gate = Op::I == 3 ? 1 : 0;
    q.in[gate] = {memory[gate], 2 * columns};
    q.in[gate + 1] = {memory[gate] + columns * 2, 2 * columns};
    if (Op::O == 2) q.out[0] = {memory[3], 2 * columns}, q.out[1] = {memory[3] + columns * 2, 2 * columns};
    add("chosen, packed", [&, q] {
      if (!launch_elementwise(Op{}, q, nullptr).ok()) std::printf("the launch failed\n");
    });
  }
  const auto shapes = [&]<int V, Cache kLoad, Cache kStore>(const char* hints) {
    for (const int threads : {128, 256, 512, 1024}) {
      const int64_t block = int64_t{threads} * V * 8;
      if (count % block) continue;
      add(std::to_string(threads) + " threads, " + std::to_string(V) + " vectors, " + hints, [&, threads, block] {
        candidate<Op, V, kLoad, kStore><<<static_cast<unsigned>(count / block), threads>>>(Op{}, p);
      });
    }
  };
  constexpr Cache kKeep = Cache::keep, kOnce = Cache::streaming;
  shapes.template operator()<1, kKeep, kKeep>("plain");
  shapes.template operator()<2, kKeep, kKeep>("plain");
  shapes.template operator()<4, kKeep, kKeep>("plain");
  shapes.template operator()<1, kOnce, kOnce>("streaming");
  shapes.template operator()<1, kOnce, kKeep>("streaming loads");
  shapes.template operator()<1, kKeep, kOnce>("streaming stores");
  shapes.template operator()<2, kOnce, kOnce>("streaming");

  const double bytes = static_cast<double>(count) * 2 * (Op::I + Op::O);
  static char *from = allocate(size_t{1} << 30), *to = allocate(size_t{1} << 30);
  const double copy_us =
      time_of([&] { check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes / 2), cudaMemcpyDeviceToDevice)); });
  std::printf("%s %lldx%lld: copy of the same bytes %.1f us (%.2f TB/s)\n", name, static_cast<long long>(rows),
              static_cast<long long>(columns), copy_us, bytes / copy_us * 1e-6);
  std::sort(all.begin(), all.end(), [](const Row& a, const Row& b) { return a.us < b.us; });
  for (size_t i = 0; i < all.size(); ++i)
    if (i < 4 || all[i].text.find("chosen") == 0)
      std::printf("  %7.1f us  %.2f TB/s  %.3f of copy  %s\n", all[i].us, bytes / all[i].us * 1e-6, copy_us / all[i].us,
                  all[i].text.c_str());
}

}  // namespace

int main() {
  const int64_t shapes[][2] = {{8192, 14336}, {65536, 768}, {1024, 12288}};
  char* memory[5];
  for (int i = 0; i < 5; ++i) {
    memory[i] = allocate(size_t{2} * 2 * shapes[0][0] * shapes[0][1]);
    fill_normal(memory[i], 2 * shapes[0][0] * shapes[0][1], static_cast<unsigned>(i));
  }
  for (const auto& [rows, columns] : shapes) {
    sweep<GatedForward<Silu>>("swiglu forward", rows, columns, memory);
    sweep<GatedBackward<Silu>>("swiglu backward", rows, columns, memory);
    sweep<GatedForward<GeluTanh>>("geglu tanh forward", rows, columns, memory);
    sweep<GatedBackward<GeluTanh>>("geglu tanh backward", rows, columns, memory);
    sweep<GatedForward<Gelu>>("geglu exact forward", rows, columns, memory);
    sweep<GatedBackward<Gelu>>("geglu exact backward", rows, columns, memory);
  }
  return 0;
}
