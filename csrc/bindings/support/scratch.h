#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "bindings/support/device.h"
#include "bindings/support/matmul.h"
#include "kernels/quantize/quantize.h"

// Small tensors of constants for kernels, without a launch each: parts of a chunk that is filled once.
namespace warpsmith {

#ifdef WARPSMITH_CUDA
namespace scratch_detail {

inline bool is_capturing(const char* op, const Tensor& like) {
  bool capturing = false;
  raise_if_failed(op, stream_is_capturing(current_stream(like), &capturing));
  return capturing;
}

// By thread, device and stream: what fills a chunk runs before what reads it, and the allocator gives a chunk
// that is dropped to later work of its stream alone. Never freed: the allocator may be gone when a thread ends.
template <class Value> Value& of_stream(const Tensor& like) {
  static thread_local auto* const all = new std::map<std::pair<int32_t, void*>, Value>;
  return (*all)[{like.get_device_index(), current_stream(like)}];
}

}  // namespace scratch_detail
#endif

// `count` float32 zeros for a kernel's own use, that nobody else has.
inline Tensor zeros(const char* op, const char* argument, int64_t count, const Tensor& like) {
  const int32_t real = aoti_torch_dtype_float32();
#ifdef WARPSMITH_CUDA
  constexpr int64_t kChunk = int64_t{1} << 18, kApart = 4;  // elements
  if (like.is_cuda() && count <= kChunk / 2 && !scratch_detail::is_capturing(op, like)) {
    struct Chunk {
      std::optional<Tensor> all;
      int64_t used = 0;
    };
    Chunk& chunk = scratch_detail::of_stream<Chunk>(like);
    if (!chunk.all || chunk.used + count > kChunk) {
      Tensor fresh = allocate_vector(op, argument, kChunk, real, like);
      torch::stable::zero_(fresh);
      chunk = {fresh, 0};
    }
    const int64_t from = chunk.used, stride = 1;
    chunk.used += (count + kApart - 1) / kApart * kApart;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(chunk.all->get(), 1, &count, &stride, from, &handle));
    return Tensor(handle);
  }
#endif
  Tensor made = allocate_vector(op, argument, count, real, like);
  torch::stable::zero_(made);
  return made;
}

// At least `count` float32 ones, which nobody may write.
inline Tensor ones(const char* op, int64_t count, const Tensor& like) {
  const int32_t real = aoti_torch_dtype_float32();
#ifdef WARPSMITH_CUDA
  if (like.is_cuda() && !scratch_detail::is_capturing(op, like)) {
    std::optional<Tensor>& kept = scratch_detail::of_stream<std::optional<Tensor>>(like);
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
