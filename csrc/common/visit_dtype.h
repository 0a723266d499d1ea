#pragma once
#include <string>
#include <type_traits>

#include "common/dtype.h"
#include "common/half.h"
#include "common/status.h"

// From a dtype known at run time to storage types. Each visitor is a lambda `[&]<class T>()` that returns a Status or
// nothing.
namespace warpsmith {

namespace detail {

template <class T, class Visit> Status visited(Visit& visit) {
  if constexpr (std::is_void_v<decltype(visit.template operator()<T>())>) {
    visit.template operator()<T>();
    return {};
  } else {
    return visit.template operator()<T>();
  }
}

}  // namespace detail

// Whether a weight, bias or residual may have dtype `beside`: the activation's, or float32 beside a 16-bit activation.
constexpr bool is_same_or_float32(Dtype beside, Dtype dtype) {
  return beside == dtype || (beside == Dtype::float32 && size_bytes(dtype) == 2);
}
// The same rule as text for error messages.
inline std::string same_or_float32_text(Dtype dtype) {
  return size_bytes(dtype) == 2 ? std::string(name(dtype)) + " or float32" : name(dtype);
}

inline Status no_cuda_kernel(Dtype dtype) {
  return Status::unsupported(std::string("no CUDA kernel for ") + name(dtype));
}

// The dtypes of CUDA kernels.
template <class Visit> Status visit_cuda_dtype(Dtype dtype, Visit&& visit) {
  switch (dtype) {
    case Dtype::float32: return detail::visited<float>(visit);
    case Dtype::float16: return detail::visited<float16>(visit);
    case Dtype::bfloat16: return detail::visited<bfloat16>(visit);
    case Dtype::float64: break;
  }
  return no_cuda_kernel(dtype);
}

// The dtypes of CPU kernels.
template <class Visit> Status visit_cpu_dtype(Dtype dtype, Visit&& visit) {
  if (dtype == Dtype::float64) return detail::visited<double>(visit);
  return visit_cuda_dtype(dtype, visit);
}

// visit.template operator()<T, W>(): an activation of type T beside a weight, bias or residual of type W.
template <class Visit> Status visit_cuda_dtypes(Dtype dtype, Dtype beside, Visit&& visit) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    if (sizeof(T) == 2 && beside == Dtype::float32) return visit.template operator()<T, float>();
    return visit.template operator()<T, T>();
  });
}

template <class Visit> Status visit_cpu_dtypes(Dtype dtype, Dtype beside, Visit&& visit) {
  if (dtype == Dtype::float64) return visit.template operator()<double, double>();
  return visit_cuda_dtypes(dtype, beside, visit);
}

}  // namespace warpsmith
