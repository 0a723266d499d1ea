#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include "bindings/support/device.h"
#include "bindings/support/matmul.h"
#include "kernels/quantize/quantize.h"

// Small tensors of constants for kernels, without a launch each: parts of a chunk that is filled once.
namespace warpsmith {

#ifdef WARPSMITH_CUDA
namespace scratch_detail {

// Chunks are of the default stream alone, which no graph captures, in order for all threads: what fills a chunk is
// launched before what reads it, and the allocator gives a chunk that is dropped to later work of that stream.
inline bool has_chunks(const Tensor& like) { return like.is_cuda() && current_stream(like) == nullptr; }

struct Zeros {
  std::optional<Tensor> chunk;
  int64_t used = 0;
};
struct Chunks {
  Zeros reals, integers;
  std::optional<Tensor> ones;
};
inline std::mutex& mutex() {
  static auto* const made = new std::mutex;
  return *made;
}
// Never freed: the allocator may be gone when the process ends.
inline Chunks& of_device(const Tensor& like) {
  static auto* const all = new std::map<int32_t, Chunks>;
  return (*all)[like.get_device_index()];
}

}  // namespace scratch_detail
#endif

// `count` zeros, float32 or int64, that nobody else has; with dim = 0 one, as a tensor without dimensions.
inline Tensor zeros(const char* op, const char* argument, int64_t count, const Tensor& like, bool integers = false,
                    int64_t dim = 1) {
  const int32_t code = integers ? aoti_torch_dtype_int64() : aoti_torch_dtype_float32();
#ifdef WARPSMITH_CUDA
  constexpr int64_t kChunk = int64_t{1} << 18, kApart = 4;  // elements
  if (count <= kChunk / 2 && scratch_detail::has_chunks(like)) {
    const std::lock_guard<std::mutex> lock(scratch_detail::mutex());
    scratch_detail::Chunks& chunks = scratch_detail::of_device(like);
    scratch_detail::Zeros& zeros = integers ? chunks.integers : chunks.reals;
    if (!zeros.chunk || zeros.used + count > kChunk) {
      Tensor fresh = allocate_vector(op, argument, kChunk, code, like);
      torch::stable::zero_(fresh);
      zeros.chunk = fresh;
      zeros.used = 0;
    }
    const int64_t from = zeros.used, stride = 1;
    zeros.used += (count + kApart - 1) / kApart * kApart;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(zeros.chunk->get(), dim, &count, &stride, from, &handle));
    return Tensor(handle);
  }
#endif
  Tensor made = allocate(op, argument, &count, dim, code, like);
  torch::stable::zero_(made);
  return made;
}

// At least `count` float32 ones, which nobody may write.
inline Tensor ones(const char* op, int64_t count, const Tensor& like) {
  const int32_t real = aoti_torch_dtype_float32();
#ifdef WARPSMITH_CUDA
  if (scratch_detail::has_chunks(like)) {
    const std::lock_guard<std::mutex> lock(scratch_detail::mutex());
    std::optional<Tensor>& kept = scratch_detail::of_device(like).ones;
    if (!kept || kept->size(0) < count) {
      Tensor more = allocate_vector(op, "ones", std::max<int64_t>(2 * count, 1 << 14), real, like);
      kept = torch::stable::fill_(more, 1.0);
    }
    return *kept;
  }
#endif
  Tensor made = allocate_vector(op, "ones", count, real, like);
  return torch::stable::fill_(made, 1.0);
}

}  // namespace warpsmith
