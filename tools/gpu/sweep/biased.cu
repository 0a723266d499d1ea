// Times bodies of bias_gelu's forward (vectors and rows a thread, arithmetic with fewer special functions, a ring of
// asynchronous copies) and its backward, beside what is chosen and a copy of the same bytes. Build and run on a GPU
// machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a
//     tools/gpu/sweep/biased.cu -o sweep && ./sweep
#include "device/async_copy.h"
#include "device/packed.h"
#include "kernels/activation/biased.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::activation;
using sweep::Row;

namespace {

using T = bfloat16;
constexpr int N = 8;
constexpr float kLog2E = 1.44269504f, kSlope = -1.5957691216057307117f * kLog2E, kCube = kSlope * 0.044715f;

// What a thread makes of a vector.
struct Chosen {
  __device__ __forceinline__ static void apply(float (&z)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) z[k] = GeluTanh<DeviceMath<T>>(z[k]).value();
  }
};
struct Folded {  // constants multiplied beforehand
  __device__ __forceinline__ static void apply(float (&z)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k)
      z[k] *= device::reciprocal(1.0f + device::exp2(z[k] * (kSlope + kCube * (z[k] * z[k]))));
  }
};
struct Shared {  // one reciprocal for two elements
  __device__ __forceinline__ static void apply(float (&z)[N]) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      const float a = 1.0f + device::exp2(fminf(z[k] * (kSlope + kCube * (z[k] * z[k])), 63.0f));
      const float b = 1.0f + device::exp2(fminf(z[k + 1] * (kSlope + kCube * (z[k + 1] * z[k + 1])), 63.0f));
      const float r = device::reciprocal(a * b);
      z[k] *= b * r;
      z[k + 1] *= a * r;
    }
  }
};
struct Tanh {  // one special function; digits lost below 0
  __device__ __forceinline__ static void apply(float (&z)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float half = 0.5f * z[k];
      const float t = device::fast_tanh(z[k] * (0.7978845608f + 0.0356774081f * (z[k] * z[k])));
      z[k] = half + half * t;
    }
  }
};
struct None {
  __device__ __forceinline__ static void apply(float (&z)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) z[k] = fmaxf(z[k], 0.0f);
  }
};

template <class Math> __device__ __forceinline__ void finish(const device::Packed<T, N>& x,
                                                             const device::Packed<T, N>& bias, T* y, int64_t element) {
  float z[N], b[N];
  device::unpack<T>(z, x);
  device::unpack<T>(b, bias);
#pragma unroll
  for (int k = 0; k < N; ++k) z[k] += b[k];
  Math::apply(z);
  device::store(device::packed_at<T, N>(y, element), device::rounded<T>(z));
}

struct Flat {
  const T *x, *bias;
  T* y;
  uint32_t vectors, row_vectors, multiplier;
  int shift;
  __device__ __forceinline__ uint32_t column(uint32_t v) const {
    return v - ((__umulhi(multiplier, v) + v) >> shift) * row_vectors;
  }
};

// V vectors a thread, a block's width apart, of tensors without gaps.
template <class Math, int V, int kThreads, int kBlocks> __global__ void __launch_bounds__(kThreads, kBlocks)
    flat(Flat p) {
  const uint32_t first = blockIdx.x * (kThreads * V) + threadIdx.x;
  device::Packed<T, N> x[V], bias[V];
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (first + i * kThreads < p.vectors)
      x[i] = device::load(device::packed_at<T, N>(p.x, int64_t{first + i * kThreads} * N));
#pragma unroll
  for (int i = 0; i < V; ++i)
    bias[i] = device::load(device::packed_at<T, N>(p.bias, p.column(first + i * kThreads) * N));
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (first + i * kThreads < p.vectors) finish<Math>(x[i], bias[i], p.y, int64_t{first + i * kThreads} * N);
}

// A tile of a row, V rows a thread: the bias is loaded once.
template <class Math, int V, int kThreads, int kBlocks> __global__ void __launch_bounds__(kThreads, kBlocks)
    tiled(Flat p, int rows) {
  const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = (blockIdx.y * blockDim.y + threadIdx.y) * V;
  if (column >= p.row_vectors || row >= rows) return;
  const int64_t at = (int64_t{row} * p.row_vectors + column) * N;
  device::Packed<T, N> x[V];
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (row + i < rows) x[i] = device::load(device::packed_at<T, N>(p.x, at + i * (p.row_vectors * N)));
  const device::Packed<T, N> bias = device::load(device::packed_at<T, N>(p.bias, column * N));
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (row + i < rows) finish<Math>(x[i], bias, p.y, at + i * (p.row_vectors * N));
}

// Persistent blocks, a ring of S vectors a thread; each thread keeps its columns.
template <class Math, int S, int kThreads, int kBlocks> __global__ void __launch_bounds__(kThreads, kBlocks)
    ring(Flat p, int rows) {
  extern __shared__ uint4 shared[];
  const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (column >= p.row_vectors) return;
  const int step = gridDim.y * blockDim.y;
  const int64_t stride = int64_t{step} * p.row_vectors * N;
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  const T* from = p.x + (int64_t{row} * p.row_vectors + column) * N;
  T* to = p.y + (int64_t{row} * p.row_vectors + column) * N;
  const device::Packed<T, N> bias = device::load(device::packed_at<T, N>(p.bias, column * N));
  int asked = row;
#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (asked < rows) device::copy_async<16>(shared + s * kThreads + thread, from);
    device::copy_async_commit();
    asked += step, from += stride;
  }
  while (true) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (row >= rows) return;
      if (asked < rows) device::copy_async<16>(shared + (s + S - 1) % S * kThreads + thread, from);
      device::copy_async_commit();
      asked += step, from += stride;
      device::copy_async_wait<S - 1>();
      const auto x = device::load(reinterpret_cast<const device::Packed<T, N>*>(shared + s * kThreads + thread));
      finish<Math>(x, bias, to, 0);
      row += step, to += stride;
    }
  }
}

struct Case {
  int64_t rows, columns;
  Flat p;
  std::vector<uint16_t> want;
  std::vector<Row> all;

  void add(const std::string& text, const std::function<void()>& call, bool right = true) {
    sweep::check(cudaMemset(p.y, 0xff, static_cast<size_t>(rows * columns * 2)));
    const double us = sweep::time_of(call);
    std::vector<uint16_t> got(want.size());
    const int64_t tail = rows * columns - static_cast<int64_t>(want.size());
    sweep::check(cudaMemcpy(got.data(), p.y + tail, got.size() * 2, cudaMemcpyDeviceToHost));
    int64_t different = 0;
    for (size_t i = 0; i < got.size(); ++i) different += std::abs(int{got[i]} - int{want[i]}) > 1;
    all.push_back({us, text + (right && different ? "  WRONG " + std::to_string(different) : "")});
  }

  template <class Math, int V, int kThreads, int kBlocks> void flat_of(const char* math, bool right = true) {
    const unsigned grid = (p.vectors + kThreads * V - 1) / (kThreads * V);
    add(
        std::string("flat, ") + math + ", " + std::to_string(V) + " vectors, " + std::to_string(kThreads) +
            " threads x " + std::to_string(kBlocks),
        [&] { flat<Math, V, kThreads, kBlocks><<<grid, kThreads>>>(p); }, right);
  }
  template <class Math, int V, int kThreads, int kBlocks> void tiled_of(const char* math) {
    unsigned width = kThreads;
    while (width > 1 && (p.row_vectors + width - 1) / width * width * 8 > p.row_vectors * 9) width /= 2;
    const dim3 block(width, kThreads / width);
    const dim3 grid((p.row_vectors + width - 1) / width, (unsigned(rows) + block.y * V - 1) / (block.y * V));
    add(std::string("tiled, ") + math + ", " + std::to_string(V) + " rows, " + std::to_string(kThreads) +
            " threads x " + std::to_string(kBlocks),
        [&] { tiled<Math, V, kThreads, kBlocks><<<grid, block>>>(p, int(rows)); });
  }
  template <class Math, int S, int kThreads, int kBlocks> void ring_of(const char* math) {
    const auto kernel = ring<Math, S, kThreads, kBlocks>;
    const int bytes = S * kThreads * 16;
    sweep::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    unsigned width = kThreads;
    while (width > 1 && (p.row_vectors + width - 1) / width * width * 8 > p.row_vectors * 9) width /= 2;
    const dim3 block(width, kThreads / width);
    const unsigned tiles = (p.row_vectors + width - 1) / width;
    const dim3 grid(tiles, std::max(1u, 132 * kBlocks / tiles));
    add(std::string("ring, ") + math + ", " + std::to_string(S) + " stages, " + std::to_string(kThreads) +
            " threads x " + std::to_string(kBlocks),
        [&] { kernel<<<grid, block, static_cast<size_t>(bytes)>>>(p, int(rows)); });
  }
};

}  // namespace

int main() {
  const int64_t shapes[][2] = {{16384, 4096}, {65536, 768}, {4096, 8192}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t count = rows * columns;
    void *x = sweep::random_bfloat16(count, 1), *bias = sweep::random_bfloat16(columns, 3);
    void* y = sweep::allocate(static_cast<size_t>(count) * 2);
    const BiasedFwdParams f{x, bias, y, rows, columns, columns, true, Dtype::bfloat16, Dtype::bfloat16};
    const uint32_t row_vectors = static_cast<uint32_t>(columns / 8);
    int shift = 0;
    while ((uint64_t{1} << shift) < row_vectors) ++shift;
    const uint32_t multiplier =
        static_cast<uint32_t>(((((uint64_t{1} << shift) - row_vectors) << 32) / row_vectors) + 1);
    Case c{rows,
           columns,
           {static_cast<T*>(x), static_cast<T*>(bias), static_cast<T*>(y), static_cast<uint32_t>(count / 8),
            row_vectors, multiplier, shift},
           {},
           {}};
    const auto chosen = [&] { (void)biased_forward_cuda<GeluTanh>(f, nullptr).ok(); };
    chosen();
    c.want.resize(1 << 22);
    sweep::check(
        cudaMemcpy(c.want.data(), static_cast<T*>(y) + count - (1 << 22), size_t{2} << 22, cudaMemcpyDeviceToHost));
    c.add("chosen", chosen);
    c.flat_of<Chosen, 1, 256, 8>("as chosen");
    c.flat_of<Folded, 1, 256, 8>("folded");
    c.flat_of<Folded, 1, 128, 16>("folded");
    c.flat_of<Folded, 1, 512, 4>("folded");
    c.flat_of<Folded, 2, 256, 6>("folded");
    c.flat_of<Folded, 2, 128, 12>("folded");
    c.flat_of<Shared, 1, 256, 8>("shared reciprocal");
    c.flat_of<Tanh, 1, 256, 8>("tanh.approx", false);
    c.flat_of<None, 1, 256, 8>("relu", false);
    c.tiled_of<Folded, 1, 256, 8>("folded");
    c.tiled_of<Folded, 1, 128, 16>("folded");
    c.tiled_of<Chosen, 1, 256, 8>("as chosen");
    c.tiled_of<Chosen, 1, 128, 16>("as chosen");
    c.tiled_of<Folded, 2, 128, 12>("folded");
    c.tiled_of<Folded, 2, 256, 6>("folded");
    c.tiled_of<Folded, 4, 256, 5>("folded");
    c.ring_of<Folded, 4, 256, 6>("folded");
    sweep::print("bias_gelu forward " + std::to_string(rows) + "x" + std::to_string(columns),
                 static_cast<double>(count) * 4, c.all, 30);
    void *dy = sweep::random_bfloat16(count, 2), *dbias = sweep::allocate(static_cast<size_t>(columns) * 2);
    void* partials = sweep::allocate(size_t{132} * 16 * static_cast<size_t>(columns) * 4);
    const BiasedBwdParams b{dy,      x,       bias,    y,    dbias,           partials,       rows,
                            columns, columns, columns, true, Dtype::bfloat16, Dtype::bfloat16};
    BiasedBwdParams alone = b;
    alone.dbias = nullptr, alone.partials = nullptr;
    const double us = sweep::time_of([&] { (void)biased_backward_cuda<GeluTanh>(b, nullptr).ok(); });
    const double alone_us = sweep::time_of([&] { (void)biased_backward_cuda<GeluTanh>(alone, nullptr).ok(); });
    sweep::print("bias_gelu backward " + std::to_string(rows) + "x" + std::to_string(columns),
                 static_cast<double>(count) * 6, {{us, "chosen"}, {alone_us, "chosen, without dbias"}});
    for (void* p : {x, bias, y, dy, dbias, partials}) sweep::check(cudaFree(p));
  }
  return 0;
}
