#pragma once
#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/status.h"
#include "device/swizzle.h"
#include "device/tensor_map_type.h"

#ifndef WARPSMITH_SIM
#include <cuda.h>
#include <cuda_runtime.h>
#endif

// Tensor maps for device/tensor_copy.h, made on the host once per tensor and passed by value to the kernel. Copies move
// bytes: 8-bit elements travel in pairs, as a 16-bit dtype with half the size along the innermost dimension.
namespace warpsmith {

struct TensorMapSpec {
  const void* base = nullptr;  // device memory, 16-byte aligned
  Dtype dtype = Dtype::bfloat16;
  int rank = 0;                   // 1 to 5
  int64_t sizes[5] = {};          // elements, innermost first
  int64_t strides_bytes[5] = {};  // of dimensions 1 and up, multiples of 16; dimension 0 is contiguous
  int box[5] = {};                // elements of one copy, 1 to 256 a dimension
  // With a swizzle, the innermost dimension of the box is exactly its span (32, 64 or 128 bytes).
  device::Swizzle swizzle = device::Swizzle::none;
};

// What the hardware demands, in words; the driver says only "invalid argument". CUDA driver API,
// cuTensorMapEncodeTiled.
inline Status check_tensor_map(const TensorMapSpec& s) {
  const auto invalid = [](const std::string& what) {
    return Status::device("cudaErrorInvalidValue: tensor map: " + what);
  };
  const auto at = [](const char* what, int i) { return std::string(what) + "[" + std::to_string(i) + "]"; };
  if (s.rank < 1 || s.rank > 5) return invalid("rank must be 1 to 5, got " + std::to_string(s.rank));
  if (!s.base || reinterpret_cast<uintptr_t>(s.base) % 16) return invalid("the base address must be 16-byte aligned");
  for (int i = 0; i < s.rank; ++i) {
    if (s.sizes[i] < 1 || s.sizes[i] > int64_t{1} << 32) return invalid(at("sizes", i) + " must be 1 to 2^32");
    if (s.box[i] < 1 || s.box[i] > 256) return invalid(at("box", i) + " must be 1 to 256");
    if (i > 0 && (s.strides_bytes[i] < 0 || s.strides_bytes[i] % 16 || s.strides_bytes[i] >= int64_t{1} << 40))
      return invalid(at("strides_bytes", i) + " must be a multiple of 16 below 2^40");
  }
  const int inner_bytes = s.box[0] * size_bytes(s.dtype);
  if (inner_bytes % 16) return invalid("the innermost dimension of the box must be a multiple of 16 bytes");
  if (s.swizzle != device::Swizzle::none && inner_bytes != device::swizzle_span_bytes(s.swizzle))
    return invalid("the innermost dimension of the box must be the swizzle's span");
  return {};
}

#ifdef WARPSMITH_SIM

namespace sim {
void encode_tensor_map(TensorMap& out, const TensorMapSpec& spec);
}

inline Status make_tensor_map(TensorMap& out, const TensorMapSpec& spec) {
  WARPSMITH_RETURN_IF_FAILED(check_tensor_map(spec));
  sim::encode_tensor_map(out, spec);
  return {};
}

#else

// The driver's encoder, looked up once: the library must load where there is no driver.
inline Status make_tensor_map(TensorMap& out, const TensorMapSpec& spec) {
  WARPSMITH_RETURN_IF_FAILED(check_tensor_map(spec));
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (!encode) return Status::device("tensor maps need a driver for CUDA 12.0 or newer");
  CUtensorMapDataType type{};
  switch (spec.dtype) {
    case Dtype::float32: type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32; break;
    case Dtype::float16: type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16; break;
    case Dtype::bfloat16: type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; break;
    case Dtype::float64: type = CU_TENSOR_MAP_DATA_TYPE_FLOAT64; break;
  }
  constexpr CUtensorMapSwizzle kSwizzle[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  cuuint64_t sizes[5], strides[5];
  cuuint32_t box[5], element_strides[5];
  for (int i = 0; i < spec.rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(spec.sizes[i]);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(spec.strides_bytes[i]);
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
    element_strides[i] = 1;
  }
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  const auto encoded = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&out), type, static_cast<cuuint32_t>(spec.rank),
                  const_cast<void*>(spec.base), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  kSwizzle[static_cast<int>(spec.swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encoded();
  // A thread without a call of the runtime that needed the device: autograd's, before its first launch. Calls of the
  // runtime bind the device's context to the thread by themselves, calls of the driver do not.
  int device = 0;
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaGetDevice(&device) == cudaSuccess &&
      cudaSetDevice(device) == cudaSuccess)
    result = encoded();
  if (result != CUDA_SUCCESS)
    return Status::device("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  return {};
}

#endif

}  // namespace warpsmith
