#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "device/launch.h"
#include "device/vector.h"

// Writes 64-bit words of host memory to device memory inside the arguments of launches: the host memory is free again
// when the call returns, nothing waits, no staging buffer has to outlive a copy, and a captured graph carries the words
// in its nodes.
namespace warpsmith::table_upload {

// Half of the 32 KiB of arguments that a launch may have (CUDA 12.1 and newer, sm_70 and newer): the addresses of 2,000
// gradients go in one.
struct Words {
  int64_t at[2040];
};
constexpr int64_t kWords = sizeof(Words) / sizeof(int64_t);
constexpr int kThreads = 256;

static __global__ void __launch_bounds__(kThreads)
    write_words(const __grid_constant__ Words words, int64_t* device, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) device::store(device + i, words.at[i]);
}

inline Status upload(const int64_t* host, int64_t* device, int64_t words, void* stream) {
  LaunchConfig config;
  config.block.x = kThreads;
  for (int64_t begin = 0; begin < words; begin += kWords) {
    const int64_t count = std::min(kWords, words - begin);
    Words block;
    std::memcpy(block.at, host + begin, static_cast<size_t>(count) * sizeof(int64_t));
    std::fill(block.at + count, block.at + kWords, 0);
    WARPSMITH_RETURN_IF_FAILED(launch(write_words, config, stream, block, device + begin, static_cast<int>(count)));
  }
  return {};
}

}  // namespace warpsmith::table_upload
