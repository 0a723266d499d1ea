#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "device/launch.h"
#include "device/tensor_map.h"

// One program, compiled by nvcc for a card and by a host compiler for the host execution layer. Each case runs one
// primitive on inputs made from a seed; the results of a card are stored and replayed on the host. See README.md.
namespace warpsmith::conformance {

class Inputs {
 public:
  explicit Inputs(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 7) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int integer(int low, int high) { return low + static_cast<int>(bits() % static_cast<uint64_t>(high - low + 1)); }
  float uniform() { return static_cast<float>(bits() >> 40) * 0x1p-23f - 1.0f; }
  // Special values, any bit pattern, and ordinary numbers.
  float edge() {
    constexpr uint32_t kSpecial[] = {0u,          0x80000000u, 1u,          0x007fffffu, 0x00800000u,
                                     0x3f800000u, 0xbf800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f800000u,
                                     0xff800000u, 0x7fc00000u, 0x7f800001u, 0x33800000u, 0x477fe000u,
                                     0x477ff000u, 0x38800000u, 0x387fc000u, 0x3f808000u, 0x3f818000u};
    const uint64_t r = bits();
    uint32_t u = static_cast<uint32_t>(r >> 32);
    if (r % 4 == 0) u = kSpecial[(r >> 8) % (sizeof kSpecial / 4)];
    float f;
    std::memcpy(&f, &u, 4);
    return r % 4 == 1 ? uniform() * 16.0f : f;
  }

 private:
  uint64_t state_;
};

// Memory that kernels see, mirrored on the host.
template <class T> class Array {
 public:
  explicit Array(size_t count, T value = {}) : host(count, value) {
#ifndef WARPSMITH_SIM
    if (cudaMalloc(&device_, bytes()) != cudaSuccess) std::abort();
#endif
  }
  ~Array() {
#ifndef WARPSMITH_SIM
    cudaFree(device_);
#endif
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* upload() {
#ifdef WARPSMITH_SIM
    return host.data();
#else
    if (cudaMemcpy(device_, host.data(), bytes(), cudaMemcpyHostToDevice) != cudaSuccess) std::abort();
    return device_;
#endif
  }
  void download() {
#ifndef WARPSMITH_SIM
    const cudaError_t error = cudaMemcpy(host.data(), device_, bytes(), cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) {
      std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
      std::abort();
    }
#endif
  }
  size_t bytes() const { return host.size() * sizeof(T); }

  std::vector<T> host;

 private:
  T* device_ = nullptr;
};

// What a case produced: bytes that must be equal, or floats that may differ by the primitive's stated error.
struct Output {
  std::string error;  // of the launch; empty if fine
  std::vector<unsigned char> exact;
  std::vector<float> approximate;

  template <class T> void add(Array<T>& array) {
    array.download();
    const auto* p = reinterpret_cast<const unsigned char*>(array.host.data());
    exact.insert(exact.end(), p, p + array.bytes());
  }
  // NaNs count as equal.
  void add_floats(Array<float>& array) {
    array.download();
    for (float& f : array.host)
      if (f != f) f = NAN;
    const auto* p = reinterpret_cast<const unsigned char*>(array.host.data());
    exact.insert(exact.end(), p, p + array.bytes());
  }
  void add_approximate(Array<float>& array) {
    array.download();
    approximate.insert(approximate.end(), array.host.begin(), array.host.end());
  }
  void check(const Status& status) {
    if (!status.ok()) error = status.what();
  }
};

struct Case {
  const char* primitive;
  int seeds;                  // how many vectors a full run makes
  double relative, absolute;  // allowed error of approximate results
  void (*run)(Inputs& in, Output& out);
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* primitive, int seeds, double relative, double absolute, void (*run)(Inputs&, Output&)) {
    cases().push_back({primitive, seeds, relative, absolute, run});
  }
};

#define CONFORMANCE_JOIN2(a, b) a##b
#define CONFORMANCE_JOIN(a, b) CONFORMANCE_JOIN2(a, b)
#define EXACT(primitive, seeds, function)                                                                           \
  const ::warpsmith::conformance::Registration CONFORMANCE_JOIN(registration_, __COUNTER__)(primitive, seeds, 0, 0, \
                                                                                            function)
#define APPROXIMATE(primitive, seeds, relative, absolute, function)                          \
  const ::warpsmith::conformance::Registration CONFORMANCE_JOIN(registration_, __COUNTER__)( \
      primitive, seeds, relative, absolute, function)

}  // namespace warpsmith::conformance
