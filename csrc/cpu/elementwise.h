#pragma once
#include <algorithm>
#include <cstdint>

#include "common/activation_functions.h"
#include "common/half_host.h"
#include "common/parallel.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "cpu/vector_math.h"

// What elementwise CPU kernels share.
namespace warpsmith::cpu {

// The elementary functions of vector_math.h as the activation functions want them.
template <class F> struct HostMath {
  using Float = F;
  WARPSMITH_HOST_DEVICE static activation::SigmoidAndRest<F> sigmoid(F x) {
    const F e = math::exp_nonpositive(-std::fabs(x)), larger = F(1) / (F(1) + e), smaller = e * larger;
    return {x >= F(0) ? larger : smaller, x >= F(0) ? smaller : larger};
  }
  WARPSMITH_HOST_DEVICE static F normal_bell(F x) { return math::normal_bell(x); }
  WARPSMITH_HOST_DEVICE static F normal_cdf(F x, F bell) { return math::normal_cdf(x, bell); }
};

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

template <class T> T* offset(const void* base, int64_t elements) {
  return base ? static_cast<T*>(const_cast<void*>(base)) + elements : nullptr;
}

}  // namespace warpsmith::cpu
