#pragma once
#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "common/half_host.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/vectorize.h"
#include "cpu/vector_math.h"
#include "kernels/activation/functions.h"

// What elementwise CPU kernels share.
namespace warpsmith::cpu {

// The elementary functions of vector_math.h as the activation functions want them.
template <class F> struct HostMath {
  using Float = F;
  WARPSMITH_HOST_DEVICE static activation::Sigmoid<F> sigmoid(F x) {
    const F e = math::exp_nonpositive(-std::fabs(x)), larger = F(1) / (F(1) + e), smaller = e * larger;
    return {x >= F(0) ? larger : smaller, x >= F(0) ? smaller : larger};
  }
  WARPSMITH_HOST_DEVICE static F normal_bell(F x) { return math::normal_bell(x); }
  WARPSMITH_HOST_DEVICE static F normal_cdf(F x, F bell) { return math::normal_cdf(x, bell); }
};

// The arithmetic type of a storage type.
template <class T> struct ArithmeticOf {
  using type = float;
};
template <> struct ArithmeticOf<double> {
  using type = double;
};
template <class T> using Arithmetic = typename ArithmeticOf<T>::type;

constexpr int64_t kElementwiseGrain = 16 * 1024;  // elements a thread takes at least

// Runs piece(row, column, count) over pieces of rows, in parallel; one long row where rows have no gaps.
template <class Piece>
void for_pieces(int64_t rows, int64_t columns, bool contiguous, const Parallel& parallel, Piece&& piece) {
  if (contiguous) {
    parallel(rows * columns, kElementwiseGrain, [&](int64_t begin, int64_t end) { piece(0, begin, end - begin); });
    return;
  }
  parallel(rows, std::max<int64_t>(1, kElementwiseGrain / columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) piece(r, 0, columns);
  });
}

// Calls visit(T) with the storage type.
template <class Visit> Status for_dtype(Dtype dtype, Visit&& visit) {
  switch (dtype) {
    case Dtype::float32: visit(float{}); return {};
    case Dtype::float64: visit(double{}); return {};
    case Dtype::float16: visit(float16{}); return {};
    case Dtype::bfloat16: visit(bfloat16{}); return {};
  }
  return Status::unsupported("no CPU kernel for this dtype");
}

template <class T> T* offset(const void* base, int64_t elements) {
  return base ? static_cast<T*>(const_cast<void*>(base)) + elements : nullptr;
}

}  // namespace warpsmith::cpu
