#pragma once
#include <cstdint>

#include "common/half_host.h"
#include "common/parallel.h"
#include "common/vectorize.h"

// The second stage of a parameter's gradient on the CPU.
namespace warpsmith::cpu {

#define WARPSMITH_ADD_TO(Math)                                                                                \
  WARPSMITH_VECTORIZE static void add_to(const Math* __restrict__ x, Math* __restrict__ sum, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) sum[i] += x[i];                                                       \
  }
WARPSMITH_ADD_TO(float)
WARPSMITH_ADD_TO(double)
#undef WARPSMITH_ADD_TO

// sums [columns] = the rows of `partials` [rows, columns] added up in their order, into the first of them. Row by row,
// because a column's partial sums lie far apart. grain: columns of a thread at least.
template <class Math, class W>
void add_partials(Math* partials, int64_t rows, int64_t columns, W* sums, int64_t grain, const Parallel& parallel) {
  parallel(columns, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = 1; row < rows; ++row) add_to(partials + row * columns + begin, partials + begin, end - begin);
    for (int64_t c = begin; c < end; ++c) sums[c] = from_float<W>(partials[c]);
  });
}

}  // namespace warpsmith::cpu
