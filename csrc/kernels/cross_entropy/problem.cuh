#pragma once
#include <cstdint>
#include <type_traits>

#include "device/vector.h"
#include "kernels/cross_entropy/row.cuh"

// One row's problem: its label and weights, the gradient that follows from its sums, and where the results go.
namespace warpsmith::cross_entropy {

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ int64_t target_of(const CrossEntropyParams& p, int64_t r) {
  return r < p.rows ? device::load(p.target + r) : p.ignore_index;
}

__device__ __forceinline__ float total_weight(const CrossEntropyParams& p) {
  return p.class_weight ? real_at(p.class_weight_total, 0, 0.f) : static_cast<float>(p.classes);
}

// What a thread knows of its row before reading the row.
template <class T> struct Problem {
  int64_t r;
  bool exists, read;
  int64_t target;
  Label label;
  Row<T> row;

  __device__ __forceinline__ Problem(const CrossEntropyParams& p, int64_t r, int64_t target)
      : r(r),
        exists(r < p.rows),
        read(exists),
        target(target),
        label(label_of(target, p.classes, p.ignore_index)),
        row(p.logits, exists ? r * p.logits_stride : 0, static_cast<int>(p.classes)) {
    if (label == Label::ignored && p.skip_ignored) read = false;
  }

  __device__ __forceinline__ int vectors() const { return exists ? row.vectors() : 0; }
  __device__ __forceinline__ int vectors_read() const { return read ? row.vectors() : 0; }

  __device__ __forceinline__ float class_weight(const CrossEntropyParams& p) const {
    if (label == Label::bad) return not_a_number();
    return label == Label::counts ? real_at(p.class_weight, target, 1.f) : 0.f;
  }
};

// Computes the gradient's factors from a row's maximum and sum. Early or late, they have the same bits. k is not final
// yet: it is the factor of e^(z_j - m) (see set_factor).
template <class T, Terms kTerms>
__device__ __forceinline__ Gradient<T, kTerms> gradient_of(const CrossEntropyParams& p, const Options& o,
                                                           const Problem<T>& at, float m, float s, float denominator) {
  Gradient<T, kTerms> g(m);
  const float lse = kTerms != Terms::plain || o.z_loss != 0.f ? g.find_lse(at.read, m, s) : 0.f;
  // For float32 logits the factors are computed in double: each rounding here would be a rounding of the result.
  using Wide = std::conditional_t<sizeof(T) == 4, double, float>;
  // Lanes without a row compute as well, but have no upstream gradient to read.
  const void* grad_loss = at.exists ? p.grad_loss : nullptr;
  const Wide scale = Wide(real_at(grad_loss, at.r * p.grad_loss_stride, 1.f)) / denominator;
  const Wide t = scale * o.keep * at.class_weight(p), spread = scale * o.spread;
  Wide k = t + scale * 2.f * o.z_loss * lse;
  if constexpr (kTerms == Terms::general)
    if (o.spread != 0.f) k += spread * total_weight(p);
  g.t = static_cast<float>(t);
  g.s = static_cast<float>(spread);
  g.k = static_cast<float>(k / s);
  g.q = 0.f;
  g.aim(at.label, at.target, at.row.phase, Row<T>::N);
  return g;
}

// Stores a row's results; called by one thread. `hot`: the target's logit.
template <class T, Terms kTerms, Terms kGradient>
__device__ __forceinline__ void store_results(const CrossEntropyParams& p, const Options& o, const Problem<T>& at,
                                              const Sums& x, Gradient<T, kGradient>& g, float hot) {
  const float lse = g.find_lse(at.read, x.m, x.s);
  float loss = at.label == Label::bad ? not_a_number() : 0.f, log_prob = loss;
  if (at.label == Label::counts) {
    log_prob = o.capped<T, kTerms>(hot) - x.m - g.rest;
    loss = o.z_loss * lse * lse - o.keep * at.class_weight(p) * log_prob;
    if constexpr (kTerms == Terms::general)
      if (o.spread != 0.f) loss += o.spread * (total_weight(p) * g.rest - x.a);
  }
  const auto put = [&](void* result, float value) {
    if (result) device::store(static_cast<float*>(result) + at.r, value);
  };
  put(p.loss, loss);
  put(p.log_prob, log_prob);
  put(p.lse, lse);
  put(p.row_max, x.m);
  put(p.row_sum, x.s);
  if constexpr (kTerms != Terms::plain) put(p.entropy, at.read ? g.rest - x.e / x.s : 0.f);
  if (p.argmax && x.at == kNowhere) device::store(p.argmax + at.r, int64_t{0});
}

// Stores the column of a row's largest logit; called by the thread that holds vector x.at.
template <class T, Terms kTerms> __device__ __forceinline__ void store_argmax(const CrossEntropyParams& p,
                                                                              const Problem<T>& at, const Packed& held,
                                                                              const Sums& x) {
  const float top = kTerms == Terms::general ? x.top : x.m;
  int place = 0;
#pragma unroll
  for (int n = Row<T>::N - 1; n >= 0; --n) place = element<T>(held, n) == top ? n : place;
  device::store(p.argmax + at.r, int64_t{at.row.first_column(x.at)} + place);
}

}  // namespace warpsmith::cross_entropy
