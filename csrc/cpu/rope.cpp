#include "kernels/rope/rope.h"

#include <algorithm>
#include <string>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "cpu/rope_angles.h"

namespace warpsmith {
namespace cpu {
namespace {

// All heads of one token; x may be y. Free functions, one per dtype: target_clones reaches neither lambdas nor
// templates.
#define WARPSMITH_ROPE(T, Math)                                                                               \
  WARPSMITH_VECTORIZE void rotate_halves(const T* x, T* y, int64_t heads, int64_t x_step, int64_t y_step,     \
                                         const Math* cos, const Math* sin, int64_t pairs) {                   \
    for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {                                           \
      WARPSMITH_IVDEP                                                                                         \
      for (int64_t i = 0; i < pairs; ++i) {                                                                   \
        const Math a = to_float(x[i]), b = to_float(x[i + pairs]);                                            \
        y[i] = from_float<T>(a * cos[i] - b * sin[i]);                                                        \
        y[i + pairs] = from_float<T>(b * cos[i] + a * sin[i]);                                                \
      }                                                                                                       \
    }                                                                                                         \
  }                                                                                                           \
  WARPSMITH_VECTORIZE void rotate_neighbours(const T* x, T* y, int64_t heads, int64_t x_step, int64_t y_step, \
                                             const Math* cos, const Math* sin, int64_t pairs) {               \
    for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {                                           \
      WARPSMITH_IVDEP                                                                                         \
      for (int64_t i = 0; i < pairs; ++i) {                                                                   \
        const Math a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);                                        \
        y[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);                                                    \
        y[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);                                                \
      }                                                                                                       \
    }                                                                                                         \
  }
WARPSMITH_ROPE(float, float)
WARPSMITH_ROPE(double, double)
WARPSMITH_ROPE(float16, float)
WARPSMITH_ROPE(bfloat16, float)
#undef WARPSMITH_ROPE

template <class T, class Math> void rotate_token(const RopeParams& p, const void* in, void* out,
                                                 const RotaryHeads& in_layout, const RotaryHeads& out_layout,
                                                 int64_t batch, int64_t index, const Math* cos, const Math* sin) {
  const T* x = static_cast<const T*>(in) + start_of(in_layout, batch, index);
  T* y = static_cast<T*>(out) + start_of(out_layout, batch, index);
  const int64_t heads = in_layout.heads, pairs = p.shape.rotary_dim / 2;
  if (p.shape.interleaved)
    rotate_neighbours(x, y, heads, in_layout.head_stride, out_layout.head_stride, cos, sin, pairs);
  else
    rotate_halves(x, y, heads, in_layout.head_stride, out_layout.head_stride, cos, sin, pairs);
  if (p.inplace || p.shape.rotary_dim == p.shape.head_dim) return;
  for (int64_t h = 0; h < heads; ++h)
    std::copy_n(x + h * in_layout.head_stride + p.shape.rotary_dim, p.shape.head_dim - p.shape.rotary_dim,
                y + h * out_layout.head_stride + p.shape.rotary_dim);
}

// T: storage type of q and k, C: of cos and sin.
template <class T, class C> Status rotate(const RopeParams& p, const Parallel& parallel) {
  using Math = Arithmetic<T>;
  const int64_t elements = std::max<int64_t>(1, (p.q_in_layout.heads + p.k_in_layout.heads) * p.shape.head_dim);
  parallel(
      p.shape.batch * p.shape.tokens, std::max<int64_t>(1, kRotaryGrain / elements), [&](int64_t begin, int64_t end) {
        TokenAngles<C, Math> angles(p.shape, p.angles, p.positions);
        for (int64_t token = begin; token < end; ++token) {
          const int64_t batch = token / p.shape.tokens, index = token % p.shape.tokens;
          angles.look_up(batch, index);
          rotate_token<T>(p, p.q, p.q_out, p.q_in_layout, p.q_out_layout, batch, index, angles.cos(), angles.sin());
          rotate_token<T>(p, p.k, p.k_out, p.k_in_layout, p.k_out_layout, batch, index, angles.cos(), angles.sin());
        }
      });
  return {};
}

Status refused(const char* argument, const std::string& expected, const std::string& got) {
  return Status::failure(Status::Kind::invalid_argument,
                         std::string(argument) + ": expected " + expected + ", got " + got);
}

}  // namespace
}  // namespace cpu

Status rotary_check_positions_cpu(const RotaryShape& shape, const RotaryAngles& angles, const RotaryPositions& p) {
  if (angles.per_token) return {};
  const int64_t entries = p.cu_seqlens ? p.sequences : shape.batch;
  if (p.cu_seqlens) {
    if (p.cu_seqlens[0] != 0) return cpu::refused("cu_seqlens", "0 first", std::to_string(p.cu_seqlens[0]));
    for (int64_t i = 0; i < entries; ++i)
      if (p.cu_seqlens[i] > p.cu_seqlens[i + 1])
        return cpu::refused("cu_seqlens", "ascending values",
                            std::to_string(p.cu_seqlens[i]) + " before " + std::to_string(p.cu_seqlens[i + 1]));
    if (p.cu_seqlens[entries] != shape.tokens)
      return cpu::refused("cu_seqlens", "the number of tokens last, " + std::to_string(shape.tokens),
                          std::to_string(p.cu_seqlens[entries]));
  }
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t tokens = p.cu_seqlens ? p.cu_seqlens[i + 1] - p.cu_seqlens[i] : shape.tokens;
    const int64_t first = cpu::offset_of(p, i);
    if (tokens > 0 && (first < 0 || first > angles.rows - tokens))
      return cpu::refused("position_offset",
                          "positions from 0 to " + std::to_string(angles.rows - 1) + ", the rows of cos",
                          std::to_string(tokens) + " from " + std::to_string(first) +
                              (p.cu_seqlens ? " in sequence " : " in batch entry ") + std::to_string(i));
  }
  return {};
}

Status rope_cpu(const RopeParams& p, const Parallel& parallel) {
  return visit_cpu_dtypes(p.dtype, p.angles.dtype, [&]<class T, class C>() { return cpu::rotate<T, C>(p, parallel); });
}

}  // namespace warpsmith
