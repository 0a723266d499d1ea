#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

// The part of DLPack's C exchange interface that is used here: a tensor object's address, sizes and strides by one C
// call, without knowing the library that made it. Source: DLPack 1.3, include/dlpack/dlpack.h, "DLPackExchangeAPI".
// torch offers it as torch.Tensor.__dlpack_c_exchange_api__ (torch 2.11: a capsule of this name).
namespace warpsmith::host::dlpack {

constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr uint32_t kMajorVersion = 1;

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, id;
  bool operator==(const Device&) const = default;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

constexpr uint8_t kFloat = 2, kBfloat = 4;  // codes

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim], in elements
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48);

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  // 0, or -1 with a Python exception. The result borrows from `object` and is good while nobody changes that.
  int (*tensor_from_object)(void* object, Tensor* out);
  void (*current_stream)();
};

inline const ExchangeApi& find(const pybind11::capsule& capsule) {
  auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  if (!api) throw pybind11::error_already_set();
  while (api && api->version.major != kMajorVersion) api = api->previous;
  if (!api || !api->tensor_from_object)
    throw pybind11::value_error("exchange_api: expected DLPack 1 with tensor_from_object");
  return *api;
}

}  // namespace warpsmith::host::dlpack
