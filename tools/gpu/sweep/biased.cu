// Times bias_gelu's kernels over loads ahead, resident blocks and tile widths, beside what is chosen and a copy of
// the same bytes. Build and run on a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a
//     tools/gpu/sweep/biased.cu -o sweep && ./sweep
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/activation/biased.cuh"

using namespace warpsmith;
using namespace warpsmith::activation;

namespace {

void check(cudaError_t e) {
  if (e != cudaSuccess) std::printf("CUDA error: %s\n", cudaGetErrorString(e)), std::exit(1);
}

char* allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes));
  return static_cast<char*>(p);
}

char* random_bfloat16(int64_t count, unsigned seed) {
  std::vector<uint16_t> host(1 << 20);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (auto& h : host) {
    const float f = normal(engine);
    uint32_t u;
    std::memcpy(&u, &f, 4);
    h = static_cast<uint16_t>(u >> 16);
  }
  char* p = allocate(static_cast<size_t>(count) * 2);
  for (int64_t at = 0; at < count * 2; at += 2 << 20)
    check(cudaMemcpy(p + at, host.data(), std::min<int64_t>(2 << 20, count * 2 - at), cudaMemcpyHostToDevice));
  return p;
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

struct Row {
  double us;
  std::string text;
};

void print(const char* what, int64_t rows, int64_t columns, double bytes, std::vector<Row>& all) {
  static char *from = allocate(size_t{1} << 30), *to = allocate(size_t{1} << 30);
  const double copy_us =
      time_of([&] { check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes / 2), cudaMemcpyDeviceToDevice)); });
  std::printf("%s %lldx%lld: copy of the same bytes %.1f us (%.2f TB/s)\n", what, static_cast<long long>(rows),
              static_cast<long long>(columns), copy_us, bytes / copy_us * 1e-6);
  std::sort(all.begin(), all.end(), [](const Row& a, const Row& b) { return a.us < b.us; });
  for (size_t i = 0; i < all.size(); ++i)
    if (i < 6 || all[i].text.find("chosen") == 0)
      std::printf("  %7.1f us  %.2f TB/s  %.3f of copy  %s\n", all[i].us, bytes / all[i].us * 1e-6, copy_us / all[i].us,
                  all[i].text.c_str());
}

// The chosen tiles, with another width.
BiasedConfig with_width(BiasedConfig c, int width, int64_t columns) {
  c.width = width;
  c.tiles = (columns / 8 + width - 1) / width;
  return c;
}

using T = bfloat16;

// Persistent blocks whose threads keep their columns and load the next row before they work on this one.
template <int kResident> __global__ void __launch_bounds__(kBiasedThreads, kResident)
    forward_ahead(BiasedFwdParams p, BiasedTile tile) {
  constexpr int N = 8;
  const BiasedPlace at(tile);
  const int64_t column = at.column * N, step = tile.row_blocks * at.rows_at_once;
  if (column >= p.columns) return;
  float bias[N];
  load_floats<N, T>(p.bias, column, bias);
  int64_t r = at.row_block * at.rows_at_once + at.row;
  Vector<T, N> next = {};
  if (r < p.rows) next = load_at<T, N>({p.x, 0}, r * p.x_stride + column);
  for (; r < p.rows; r += step) {
    const Vector<T, N> x = next;
    if (r + step < p.rows) next = load_at<T, N>({p.x, 0}, (r + step) * p.x_stride + column);
    Vector<T, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k)
      y.at[k] = device::from_float<T>(GeluTanh<DeviceMath<T>>(device::to_float(x.at[k]) + bias[k]).value());
    store_at<T, N>({p.y, 0}, r * p.columns + column, y);
  }
}

// The backward that loads the next row before it works on this one.
template <int kResident> __global__ void __launch_bounds__(kBiasedThreads, kResident)
    backward_ahead(BiasedBwdParams p, BiasedTile tile) {
  constexpr int N = 8;
  WARPSMITH_SHARED(float, scratch, kBiasedThreads* N);
  const BiasedPlace at(tile);
  const int64_t column = at.column * N, step = tile.row_blocks * at.rows_at_once;
  float sum[N] = {};
  if (column < p.columns) {
    float bias[N];
    load_floats<N, T>(p.bias, column, bias);
    int64_t r = at.row_block * at.rows_at_once + at.row;
    Vector<T, N> next_x = {}, next_dy = {};
    if (r < p.rows) {
      next_dy = load_at<T, N>({p.dy, 0}, r * p.dy_stride + column);
      next_x = load_at<T, N>({p.x, 0}, r * p.x_stride + column);
    }
    for (; r < p.rows; r += step) {
      const Vector<T, N> x = next_x, dy = next_dy;
      if (r + step < p.rows) {
        next_dy = load_at<T, N>({p.dy, 0}, (r + step) * p.dy_stride + column);
        next_x = load_at<T, N>({p.x, 0}, (r + step) * p.x_stride + column);
      }
      Vector<T, N> dx;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const GeluTanh<DeviceMath<T>> f(device::to_float(x.at[k]) + bias[k]);
        const float g = f.times_derivative(device::to_float(dy.at[k]));
        sum[k] += g;
        dx.at[k] = device::from_float<T>(g);
      }
      store_at<T, N>({p.dx, 0}, r * p.columns + column, dx);
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) scratch[threadIdx.x * N + k] = sum[k];
  __syncthreads();
  const int width = N << tile.width_log2;
  const int64_t left = (at.column >> tile.width_log2 << tile.width_log2) * N;
  for (int c = threadIdx.x; c < width && left + c < p.columns; c += kBiasedThreads) {
    float total = 0;
    for (int r = 0; r < at.rows_at_once; ++r) total += scratch[r * width + c];
    device::store(static_cast<float*>(p.partials) + at.row_block * p.columns + left + c, total);
  }
}

template <int kResident> void forward(const BiasedFwdParams& p, std::vector<Row>& all) {
  for (const int width : {32, 64, 256})
    for (const int waves : {1, 2, 4}) {
      BiasedConfig c = with_width(choose_biased_forward({p.rows, p.columns, 2}), width, p.columns);
      c.row_blocks = std::clamp<int64_t>(int64_t{kResident} * waves * 132 / c.tiles, 1,
                                         biased_detail::ceil_div(p.rows, c.rows_at_once()));
      const double us = time_of([&] {
        check(launch(forward_ahead<kResident>, grid_of(c), nullptr, p, tile_of(c)).ok() ? cudaSuccess
                                                                                        : cudaErrorUnknown);
      });
      all.push_back({us, "ahead, " + std::to_string(kResident) + " resident, width " + std::to_string(width) +
                             ", waves " + std::to_string(waves)});
    }
}

template <int kResident, class Kernel>
void backward(const char* name, Kernel kernel, const BiasedBwdParams& p, std::vector<Row>& all) {
  for (const int width : {8, 16, 32})
    for (const int waves : {1, 2}) {
      BiasedConfig c = with_width(choose_biased_backward({p.rows, p.columns, 2}), width, p.columns);
      c.row_blocks = std::clamp<int64_t>(int64_t{kResident} * waves * 132 / c.tiles, 1,
                                         biased_detail::ceil_div(p.rows, c.rows_at_once()));
      LaunchConfig sum;
      sum.grid.x = static_cast<unsigned>(biased_detail::ceil_div(p.columns, kBiasSumColumns));
      sum.block.x = kBiasSumColumns * kBiasSumSlices;
      sum.programmatic_dependent = true;
      const double us = time_of([&] {
        const bool ok = launch(kernel, grid_of(c), nullptr, p, tile_of(c)).ok() &&
                        launch(sum_bias_partials<T>, sum, nullptr, p, c.row_blocks).ok();
        check(ok ? cudaSuccess : cudaErrorUnknown);
      });
      all.push_back({us, std::string(name) + ", " + std::to_string(kResident) + " resident, width " +
                             std::to_string(width) + ", waves " + std::to_string(waves)});
    }
}

}  // namespace

int main() {
  const int64_t shapes[][2] = {{16384, 4096}, {65536, 768}, {4096, 8192}, {1024, 12288}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t count = rows * columns;
    char *x = random_bfloat16(count, 1), *dy = random_bfloat16(count, 2), *bias = random_bfloat16(columns, 3);
    char *y = allocate(static_cast<size_t>(count) * 2), *dbias = allocate(static_cast<size_t>(columns) * 2);
    char* partials = allocate(size_t{132} * 16 * static_cast<size_t>(columns) * 4);
    const BiasedFwdParams f{x, bias, y, rows, columns, columns, true, Dtype::bfloat16, Dtype::bfloat16};
    const BiasedBwdParams b{dy,      x,       bias,    y,    dbias,           partials,       rows,
                            columns, columns, columns, true, Dtype::bfloat16, Dtype::bfloat16};
    std::vector<Row> all;
    all.push_back({time_of([&] { (void)biased_forward_cuda<GeluTanh>(f, nullptr).ok(); }), "chosen"});
    forward<4>(f, all);
    forward<5>(f, all);
    forward<6>(f, all);
    forward<8>(f, all);
    check(cudaDeviceSynchronize());
    print("bias_gelu forward", rows, columns, static_cast<double>(count) * 4, all);
    all.clear();
    all.push_back({time_of([&] { (void)biased_backward_cuda<GeluTanh>(b, nullptr).ok(); }), "chosen"});
    BiasedBwdParams alone = b;
    alone.dbias = nullptr, alone.partials = nullptr;
    all.push_back(
        {time_of([&] { (void)biased_backward_cuda<GeluTanh>(alone, nullptr).ok(); }), "chosen, without dbias"});
    backward<3>("ahead", backward_ahead<3>, b, all);
    backward<4>("ahead", backward_ahead<4>, b, all);
    backward<5>("plain", biased_backward<GeluTanh, T, T, 8, 5>, b, all);
    backward<6>("plain", biased_backward<GeluTanh, T, T, 8, 6>, b, all);
    check(cudaDeviceSynchronize());
    print("bias_gelu backward", rows, columns, static_cast<double>(count) * 6, all);
    for (char* p : {x, dy, bias, y, dbias, partials}) check(cudaFree(p));
  }
  return 0;
}
