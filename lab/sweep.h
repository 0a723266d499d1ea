#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "device/code_probe.cu"  // which launchers ask

// What the programs of this folder share: memory with numbers in it, the timer, and the table beside a copy.
namespace sweep {

inline void check(cudaError_t e) {
  if (e != cudaSuccess) std::printf("CUDA error: %s\n", cudaGetErrorString(e)), std::exit(1);
}

template <class T = void> T* allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes));
  return static_cast<T*>(p);
}

// Standard normal numbers, cut to bfloat16; a million of them, again and again.
inline void* random_bfloat16(int64_t count, unsigned seed) {
  std::vector<uint16_t> host(1 << 20);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (auto& h : host) {
    const float f = normal(engine);
    uint32_t u;
    std::memcpy(&u, &f, 4);
    h = static_cast<uint16_t>(u >> 16);
  }
  char* p = allocate<char>(static_cast<size_t>(count) * 2);
  for (int64_t at = 0; at < count * 2; at += 2 << 20)
    check(cudaMemcpy(p + at, host.data(), static_cast<size_t>(std::min<int64_t>(2 << 20, count * 2 - at)),
                     cudaMemcpyHostToDevice));
  return p;
}

// Median microseconds of a call on the default stream, after some more calls, because the first after an idle time are
// slower. The L2 is flushed by a write of 256 MB before each, which also hides the launch.
inline double time_of(const std::function<void()>& call, int repeats = 11, int warm_up = 10) {
  constexpr size_t kFlushBytes = 256 << 20;
  static char* flush = allocate<char>(kFlushBytes);
  static cudaEvent_t start, stop;
  if (!start) check(cudaEventCreate(&start)), check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < repeats + warm_up; ++i) {
    check(cudaMemsetAsync(flush, i, kFlushBytes));
    check(cudaEventRecord(start));
    call();
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop));
    if (i >= warm_up) times.push_back(ms);
  }
  check(cudaGetLastError());
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3;
}

// Of a copy that moves `bytes`, half of them read and half written.
inline double copy_time_of(double bytes, int repeats = 11) {
  const size_t half = static_cast<size_t>(bytes / 2);
  char *from = allocate<char>(half), *to = allocate<char>(half);
  const double us = time_of([&] { check(cudaMemcpyAsync(to, from, half, cudaMemcpyDeviceToDevice)); }, repeats);
  check(cudaFree(from));
  check(cudaFree(to));
  return us;
}

__global__ void count_differences(const uint16_t* a, const uint16_t* b, int64_t count, unsigned* found) {
  unsigned other = 0, wrong = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float x = __uint_as_float(unsigned{a[i]} << 16), y = __uint_as_float(unsigned{b[i]} << 16);
    other += a[i] != b[i];
    wrong += !(fabsf(x - y) <= 0x1p-7f * fabsf(y) + 1e-5f);
  }
  if (other) atomicAdd(found, other);
  if (wrong) atomicAdd(found + 1, wrong);
}

// Of two bfloat16 tensors. Other bits alone are another contraction of products and sums: one unit in the last place.
struct Differences {
  unsigned other_bits, wrong;
};
inline Differences differences(const void* a, const void* b, int64_t count) {
  static unsigned* found = allocate<unsigned>(sizeof(Differences));
  Differences d;
  check(cudaMemset(found, 0, sizeof d));
  count_differences<<<1024, 256>>>(static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), count, found);
  check(cudaMemcpy(&d, found, sizeof d, cudaMemcpyDeviceToHost));
  return d;
}

struct Row {
  double us;
  std::string text;
};

// Prints the fastest, and all whose text has the word "chosen", beside a copy of the same bytes, whose time it returns.
inline double print(const std::string& title, double bytes, std::vector<Row> rows, size_t fastest = 6) {
  const double copy_us = copy_time_of(bytes);
  std::printf("%s: copy of the same bytes %.1f us (%.2f TB/s)\n", title.c_str(), copy_us, bytes / copy_us * 1e-6);
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.us < b.us; });
  for (size_t i = 0; i < rows.size(); ++i)
    if (i < fastest || rows[i].text.find("chosen") != std::string::npos)
      std::printf("  %7.1f us  %.2f TB/s  %.3f of copy  %s\n", rows[i].us, bytes / rows[i].us * 1e-6,
                  copy_us / rows[i].us, rows[i].text.c_str());
  return copy_us;
}

}  // namespace sweep
