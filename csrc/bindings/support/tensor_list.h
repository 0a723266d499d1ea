#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings/support/device.h"
#include "bindings/support/tensor.h"
#include "kernels/optim/optim.h"

// What bindings of multi-tensor ops share: lists, and tables of 64-bit words on a device.
namespace warpsmith {

using Tensors = std::vector<Tensor>;

inline std::string item(const char* list, size_t i) { return std::string(list) + "[" + std::to_string(i) + "]"; }

// Elements fill their memory without gaps or overlap, in any order of the dimensions.
inline bool is_dense(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline Tensor allocate_words(const char* op, const char* argument, int64_t count, const Tensor& like) {
  return allocate_vector(op, argument, count, aoti_torch_dtype_int64(), like);
}

inline void write_words(const char* op, const int64_t* host, const Tensor& to) {
  const int64_t count = to.numel();
  int64_t* words = static_cast<int64_t*>(to.mutable_data_ptr());
  run_on(
      op, to, [&](void* stream) { return optim_upload_cuda(host, words, count, stream); },
      [&](const Parallel&) {
        std::copy_n(host, count, words);
        return Status();
      });
}

}  // namespace warpsmith
