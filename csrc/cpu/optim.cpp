#include <algorithm>
#include <iterator>
#include <type_traits>

#include "common/vectorize.h"
#include "cpu/optim_loops.h"

namespace warpsmith {
namespace cpu::optim {
namespace {

// Elements of a chunk: long enough to hide the powers that each chunk computes, short enough to share out evenly.
constexpr int32_t kChunkElems = 16 * 1024;

template <class F, unsigned kHas, class T>
WARPSMITH_HOST_DEVICE void update_variant(const typename F::template Scalars<T>& s, const Piece<T>& piece) {
  const T* __restrict__ grad = piece.grad;
  T* __restrict__ param = piece.param;
  T* __restrict__ s0 = piece.states[0];
  T* __restrict__ s1 = piece.states[1];
  T* __restrict__ s2 = piece.states[2];
  WARPSMITH_IVDEP
  for (int64_t i = 0; i < piece.count; ++i) {
    T p = param[i], x[kOptimMaxStates] = {};
    if constexpr (kHas & 1) x[0] = s0[i];
    if constexpr (kHas & 2) x[1] = s1[i];
    if constexpr (kHas & 4) x[2] = s2[i];
    F::template element<kHas, T>(s, grad[i], p, x);
    param[i] = p;
    if constexpr (kHas & 1) s0[i] = x[0];
    if constexpr (kHas & 2) s1[i] = x[1];
    if constexpr (kHas & 4) s2[i] = x[2];
  }
}

template <class F, class T, size_t kFirst = 0>
WARPSMITH_HOST_DEVICE void update_piece(const typename F::template Scalars<T>& s, const Piece<T>& piece) {
  constexpr unsigned kHas = F::kVariants[kFirst];
  if (piece.has == kHas)
    update_variant<F, kHas, T>(s, piece);
  else if constexpr (kFirst + 1 < std::size(F::kVariants))
    update_piece<F, T, kFirst + 1>(s, piece);
}

// Free functions, two per optimizer: target_clones reaches neither lambdas nor templates that are not inlined. Clones
// are exported whatever the visibility, so other files call them through functions that are not cloned.
#define WARPSMITH_ROW(optimizer, F)                                                              \
  WARPSMITH_VECTORIZE void clones(F*, const F::Scalars<float>& s, const Piece<float>& piece) {   \
    update_piece<F, float>(s, piece);                                                            \
  }                                                                                              \
  WARPSMITH_VECTORIZE void clones(F*, const F::Scalars<double>& s, const Piece<double>& piece) { \
    update_piece<F, double>(s, piece);                                                           \
  }
WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

// 16-bit arrays are widened into blocks of float32 that stay in the first cache, updated there and rounded back.
#define WARPSMITH_DTYPE(T)                                                                                    \
  WARPSMITH_VECTORIZE void widen_clones(const T* __restrict__ from, float* __restrict__ to, int64_t count) {  \
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);                                            \
  }                                                                                                           \
  WARPSMITH_VECTORIZE void narrow_clones(const float* __restrict__ from, T* __restrict__ to, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);                                       \
  }
WARPSMITH_DTYPE(bfloat16)
WARPSMITH_DTYPE(float16)
WARPSMITH_DTYPE(float)
#undef WARPSMITH_DTYPE

}  // namespace

#define WARPSMITH_ROW(optimizer, F)                                                                     \
  void update(F* row, const F::Scalars<float>& s, const Piece<float>& piece) { clones(row, s, piece); } \
  void update(F* row, const F::Scalars<double>& s, const Piece<double>& piece) { clones(row, s, piece); }
WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

#define WARPSMITH_DTYPE(T)                                                                                         \
  void widen(const T* __restrict__ from, float* __restrict__ to, int64_t count) { widen_clones(from, to, count); } \
  void narrow(const float* __restrict__ from, T* __restrict__ to, int64_t count) { narrow_clones(from, to, count); }
WARPSMITH_DTYPE(bfloat16)
WARPSMITH_DTYPE(float16)
WARPSMITH_DTYPE(float)
#undef WARPSMITH_DTYPE

void widen(const Gradient& from, int64_t first, float* to, int64_t count) {
  switch (from.dtype) {
    case Dtype::float16: return widen(static_cast<const float16*>(from.at) + first, to, count);
    case Dtype::bfloat16: return widen(static_cast<const bfloat16*>(from.at) + first, to, count);
    default: return widen(static_cast<const float*>(from.at) + first, to, count);
  }
}

namespace {

// Updates the last elements of a chunk, fewer than kBlock, in a block padded with zeros.
template <class F, class T> void update_rest(const typename F::template Scalars<T>& scalars, const Piece<T>& rest) {
  T grad[kBlock] = {}, param[kBlock] = {}, states[kOptimMaxStates][kBlock] = {};
  Piece<T> block{kBlock, grad, param, {states[0], states[1], states[2]}, rest.has};
  const auto each = [&](auto&& copy) {
    copy(rest.param, param);
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((rest.has >> s) & 1) copy(rest.states[s], states[s]);
  };
  std::copy_n(rest.grad, rest.count, grad);
  each([&](const T* from, T* to) { std::copy_n(from, rest.count, to); });
  update(static_cast<F*>(nullptr), scalars, block);
  each([&](T* to, const T* from) { std::copy_n(from, rest.count, to); });
}

// Updates a chunk whose arrays are all of type T.
template <class F, class T> void update_chunk(const typename F::template Scalars<T>& scalars, Piece<T> piece) {
  const int64_t count = piece.count, whole = count / kBlock * kBlock;
  piece.count = whole;
  update(static_cast<F*>(nullptr), scalars, piece);
  if (whole == count) return;
  piece.count = count - whole;
  piece.grad += whole;
  piece.param += whole;
  for (int s = 0; s < kOptimMaxStates; ++s)
    if ((piece.has >> s) & 1) piece.states[s] += whole;
  update_rest<F>(scalars, piece);
}

// Updates a chunk whose arrays differ from float32 in dtype: parameters P, states S.
template <class F, class P, class S, bool kMaster>
void update_stored(const typename F::template Scalars<float>& scalars, const OptimTensor& t, const Gradient& grad,
                   int64_t begin, int64_t count) {
  float* master = kMaster ? static_cast<float*>(t.extra) : nullptr;
  float g[kWideElems] = {}, p[kWideElems] = {}, x[kOptimMaxStates][kWideElems] = {};
  const auto each_state = [&](int64_t at, auto&& visit) {
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((t.has >> s) & 1) visit(static_cast<S*>(t.states[s]) + at, x[s]);
  };
  for (int64_t at = begin; at < begin + count; at += kWideElems) {
    const int64_t elems = std::min(kWideElems, begin + count - at), blocks = whole_blocks(elems);
    P* param = static_cast<P*>(t.param) + at;
    widen(grad, at, g, elems);
    if constexpr (kMaster)
      widen(master + at, p, elems);
    else
      widen(param, p, elems);
    each_state(at, [&](const S* from, float* to) { widen(from, to, elems); });
    update(static_cast<F*>(nullptr), scalars, Piece<float>{blocks, g, p, {x[0], x[1], x[2]}, t.has});
    if constexpr (kMaster) narrow(p, master + at, elems);
    narrow(p, param, elems);
    each_state(at, [&](S* to, const float* from) { narrow(from, to, elems); });
  }
}

template <class F, class T> void step(const OptimParams& p, const Parallel& parallel) {
  for_chunks(p, parallel, [&](const OptimTensor& t, const Gradient& grad, int64_t first, int64_t count) {
    if constexpr (std::is_same_v<T, float>)
      if (grad.dtype != Dtype::float32)
        return update_stored<F, float, float, false>(scalars_of<F, float>(p, t), t, grad, first, count);
    Piece<T> piece{count, static_cast<const T*>(grad.at) + first, static_cast<T*>(t.param) + first, {}, t.has};
    for (int s = 0; s < kOptimMaxStates; ++s)
      if ((t.has >> s) & 1) piece.states[s] = static_cast<T*>(t.states[s]) + first;
    update_chunk<F>(scalars_of<F, T>(p, t), piece);
  });
}

template <class F, class P, class S, bool kMaster = false>
void step_stored(const OptimParams& p, const Parallel& parallel) {
  for_chunks(p, parallel, [&](const OptimTensor& t, const Gradient& grad, int64_t first, int64_t count) {
    update_stored<F, P, S, kMaster>(scalars_of<F, float>(p, t), t, grad, first, count);
  });
}

}  // namespace
}  // namespace cpu::optim

int32_t optim_chunk_elems_cpu() { return cpu::optim::kChunkElems; }

Status optim_cpu(const OptimParams& p, const Parallel& parallel) {
  using namespace cpu::optim;
  if (p.found_inf && *p.found_inf != 0) {
    for (int64_t i = 0; p.zero_grads && i < p.tensor_count; ++i)
      if (takes_part(p, i)) do_extras(p, i, 0, p.tensors[i].numel, true);
    return {};
  }
  visit_optimizer(p.optimizer, [&]<class F>() {
    switch (p.storage) {
      case Storage::float32: step<F, float>(p, parallel); break;
      case Storage::float64: step<F, double>(p, parallel); break;
      case Storage::bfloat16: step_stored<F, bfloat16, bfloat16>(p, parallel); break;
      case Storage::float16: step_stored<F, float16, float16>(p, parallel); break;
      case Storage::bfloat16_master: step_stored<F, bfloat16, float, true>(p, parallel); break;
      case Storage::float16_master: step_stored<F, float16, float, true>(p, parallel); break;
      case Storage::bfloat16_states: step_stored<F, float, bfloat16>(p, parallel); break;
      case Storage::bfloat16_stochastic:
      case Storage::bfloat16_compensated:
      case Storage::bfloat16_remainder: step_refined(p, parallel); break;
      case Storage::float32_8bit:
      case Storage::bfloat16_8bit:
      case Storage::float16_8bit: step_8bit(p, parallel); break;
    }
  });
  return p.casts ? cast_weights(p, parallel) : Status();
}

}  // namespace warpsmith
