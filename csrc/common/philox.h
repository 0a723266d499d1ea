#pragma once
#include <cstdint>

#include "common/host_device.h"

// Philox4x32-10: four random words as a pure function of a 128-bit counter and a 64-bit key, so that any thread makes
// any element's numbers, forward and backward, on the CPU and in kernels alike. Source: Salmon, Moraes, Dror, Shaw,
// "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
namespace warpsmith {

struct PhiloxCounter {
  uint32_t word[4];
};

// Ten rounds are the paper's recommendation; seven are the fewest that pass its tests. Of several counters at once: a
// round's key is computed once for all.
template <int rounds, int N> WARPSMITH_HOST_DEVICE void philox_of_each(PhiloxCounter (&counters)[N], uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < rounds; ++round) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < N; ++i) {
      PhiloxCounter& c = counters[i];
      const uint64_t p0 = static_cast<uint64_t>(0xd2511f53u) * c.word[0],
                     p1 = static_cast<uint64_t>(0xcd9e8d57u) * c.word[2];
      c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
            static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    }
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

template <int rounds = 10> WARPSMITH_HOST_DEVICE PhiloxCounter philox(PhiloxCounter c, uint64_t key) {
  PhiloxCounter one[] = {c};
  philox_of_each<rounds>(one, key);
  return one[0];
}

}  // namespace warpsmith
