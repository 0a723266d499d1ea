#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

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

// By thread, device, stream and dtype: what fills a chunk runs before what reads it, and the allocator gives a chunk
// that is dropped to later work of its stream alone. Never freed: the allocator may be gone when a thread ends.
template <class Value> Value& of_stream(const Tensor& like, int32_t dtype) {
  static thread_local auto* const all = new std::map<std::tuple<int32_t, void*, int32_t>, Value>;
  return (*all)[{like.get_device_index(), current_stream(like), dtype}];
}

}  // namespace scratch_detail
#endif

// `count` zeros that nobody else has, on 16 bytes; on the CPU of any value, since its loops write.
inline Tensor zeros(const char* op, const char* argument, int64_t count, int32_t dtype, const Tensor& like) {
  if (!runs_kernels(like)) return allocate_vector(op, argument, count, dtype, like);
#ifdef WARPSMITH_CUDA
  constexpr int64_t kApart = 4;  // elements
  const int64_t elems = int64_t{1} << (dtype == aoti_torch_dtype_int64() ? 12 : 18);
  if (like.is_cuda() && count <= elems / 2 && !scratch_detail::is_capturing(op, like)) {
    struct Chunk {
      std::optional<Tensor> all;
      int64_t used = 0;
    };
    Chunk& chunk = scratch_detail::of_stream<Chunk>(like, dtype);
    if (!chunk.all || chunk.used + count > elems) {
      Tensor fresh = allocate_vector(op, argument, elems, dtype, like);
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
  Tensor made = allocate_vector(op, argument, count, dtype, like);
  torch::stable::zero_(made);
  return made;
}

// At least `count` float32 ones, which nobody may write.
inline Tensor ones(const char* op, int64_t count, const Tensor& like) {
  const int32_t real = aoti_torch_dtype_float32();
#ifdef WARPSMITH_CUDA
  if (like.is_cuda() && !scratch_detail::is_capturing(op, like)) {
    std::optional<Tensor>& kept = scratch_detail::of_stream<std::optional<Tensor>>(like, real);
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
