#include "kernels/cross_entropy/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/half_host.h"
#include "common/visit_dtype.h"
#include "cpu/cross_entropy_loops.h"

namespace warpsmith {
namespace {

template <class Math> Math real_at(const void* p, int64_t i, Math otherwise) {
  return p ? static_cast<const Math*>(p)[i] : otherwise;
}
template <class Math> void put(void* p, int64_t i, Math value) {
  if (p) static_cast<Math*>(p)[i] = value;
}

bool is_class(int64_t target, int64_t classes) { return target >= 0 && target < classes; }

// One row of a forward or backward, with its thread's scratch memory.
template <class T> struct RowWork {
  using Math = Arithmetic<T>;
  static constexpr Math kNan = std::numeric_limits<Math>::quiet_NaN(),
                        kInfinity = std::numeric_limits<Math>::infinity();
  static constexpr bool kSame = sizeof(T) == sizeof(Math);
  const CrossEntropyParams& p;
  const Math* weights;
  Math total_weight;
  std::vector<Math> room;  // the row as Math, capped

  explicit RowWork(const CrossEntropyParams& params)
      : p(params), weights(static_cast<const Math*>(params.class_weight)), total_weight(Math(params.classes)) {
    if (weights && p.label_smoothing != 0)
      total_weight = sum_of_pieces<Math>(p.classes, [&](int64_t c, int64_t count) {
        Math sum = 0;
        for (int64_t j = c; j < c + count; ++j) sum += weights[j];
        return sum;
      });
  }

  const T* logits(int64_t r) const { return static_cast<const T*>(p.logits) + r * p.logits_stride; }
  T* out(int64_t r) const { return static_cast<T*>(p.dlogits) + r * p.dlogits_stride; }
  bool ignored(int64_t r) const { return p.target[r] == p.ignore_index; }
  Math keep() const { return Math(1 - p.label_smoothing); }
  Math spread() const { return Math(p.label_smoothing / static_cast<double>(p.classes)); }
  Math weight_of_target(int64_t r) const {
    if (!is_class(p.target[r], p.classes)) return kNan;
    return weights ? weights[p.target[r]] : Math(1);
  }
  const Math* piece_of_weights(int64_t c) const { return weights ? weights + c : nullptr; }

  // The row's elements: the logits themselves if they need no conversion.
  const Math* elements(int64_t r) {
    if constexpr (kSame)
      if (p.softcap == 0) return reinterpret_cast<const Math*>(logits(r));
    room.resize(static_cast<size_t>(p.classes));  // allocates once: all rows have one length
    widen(logits(r), room.data(), p.classes, Math(p.softcap));
    return room.data();
  }

  // The gradient of a row that counts.
  Gradient<Math> gradient_of(int64_t r, Math m, Math sum, Math* at_target) const {
    const Math reference = m == -kInfinity ? Math(0) : m, rest = std::log(sum), scale = row_scale(r);
    *at_target = scale * keep() * weight_of_target(r);
    const Math cap = Math(p.softcap);
    Gradient<Math> g{reference, 0, scale * spread(), 0, rest, cap, cap == 0 ? Math(0) : 1 / cap};
    g.k = (*at_target + g.s * total_weight + scale * 2 * Math(p.z_loss) * lse_of(m, rest)) / sum;
    return g;
  }
  static Math lse_of(Math m, Math rest) { return m == kInfinity ? m : m + rest; }

  // The gradient at the target, whose element is z.
  Math hot_gradient(int64_t r, const Gradient<Math>& g, Math z, Math at_target) const {
    return element_gradient(g, z, weights ? weights[p.target[r]] : Math(1)) - at_target * slope(g, z);
  }

  // Writes the gradient of a row. The row's elements may be in the place where it goes.
  void write(int64_t r, const Math* z, const Gradient<Math>& g, Math at_target) {
    const bool counts = is_class(p.target[r], p.classes);
    const Math hot = counts ? hot_gradient(r, g, z[p.target[r]], at_target) : Math(0);
    gradient(z, weights, out(r), p.classes, g);
    if (counts) out(r)[p.target[r]] = from_float<T>(hot);
  }

  void forward(int64_t r) {
    const bool skipped = ignored(r) && p.skip_ignored;
    T* dlogits = p.dlogits ? out(r) : nullptr;
    if (skipped) {
      for (void* result : {p.loss, p.log_prob, p.lse, p.entropy, p.row_max, p.row_sum}) put(result, r, Math(0));
      if (p.argmax) p.argmax[r] = 0;
      if (dlogits) std::fill_n(dlogits, p.classes, T{});
      return;
    }
    if (p.argmax) p.argmax[r] = first_of_largest(r);
    const Math* z = elements(r);
    const Math m = max_of(z, p.classes);
    const Math reference = m == -kInfinity ? Math(0) : m;
    const bool plain = p.softcap == 0 && p.label_smoothing == 0 && !p.entropy;
    // If nothing else is computed from the exponentials, they are overwritten by the gradient.
    Math* e = nullptr;
    Math hot_z = is_class(p.target[r], p.classes) ? z[p.target[r]] : Math(0);
    if (plain && dlogits && !ignored(r)) {
      if constexpr (kSame)
        e = reinterpret_cast<Math*>(dlogits);
      else
        e = room.data();
    }
    const Math sum = sum_of_pieces<Math>(
        p.classes, [&](int64_t c, int64_t count) { return sum_exp(z + c, e ? e + c : nullptr, count, reference); });
    const Math rest = std::log(sum), lse = lse_of(m, rest);  // rest = lse - m
    put(p.lse, r, lse);
    put(p.row_max, r, m);
    put(p.row_sum, r, sum);
    if (p.entropy)
      put(p.entropy, r, rest - sum_of_pieces<Math>(p.classes, [&](int64_t c, int64_t count) {
                                 return sum_product(z + c, count, reference);
                               }) / sum);
    const Math w = weight_of_target(r), nothing = ignored(r) ? Math(0) : kNan;
    Math log_prob = nothing, loss = nothing;
    if (!ignored(r) && is_class(p.target[r], p.classes)) {
      log_prob = (hot_z - m) - rest;
      loss = Math(p.z_loss) * lse * lse - keep() * w * log_prob;
      if (p.label_smoothing != 0)
        loss += spread() * (total_weight * rest - sum_of_pieces<Math>(p.classes, [&](int64_t c, int64_t count) {
                              return sum_weighted(z + c, piece_of_weights(c), count, m);
                            }));
    }
    put(p.loss, r, loss);
    put(p.log_prob, r, log_prob);
    if (!dlogits) return;
    if (ignored(r)) {
      std::fill_n(dlogits, p.classes, T{});
      return;
    }
    Math at_target;
    const Gradient<Math> g = gradient_of(r, m, sum, &at_target);
    if (!e) return write(r, z, g, at_target);
    scaled(e, dlogits, p.classes, g.k);
    if (is_class(p.target[r], p.classes)) dlogits[p.target[r]] = from_float<T>(hot_gradient(r, g, hot_z, at_target));
  }

  void backward(int64_t r) {
    if (ignored(r))
      std::fill_n(out(r), p.classes, T{});
    else
      late_gradient(r);
    if (const Math late = real_at(p.late_scale, 0, Math(1)); late != 1) scale(out(r), p.classes, late);
  }

  void late_gradient(int64_t r) {
    const Math m = static_cast<const Math*>(p.row_max)[r], sum = static_cast<const Math*>(p.row_sum)[r];
    const Math grad_log_prob = real_at(p.grad_log_prob, r, Math(0));
    Math at_target;
    Gradient<Math> g = gradient_of(r, m, sum, &at_target);
    g.k += (real_at(p.grad_lse, r, Math(0)) - grad_log_prob) / sum;
    if (p.grad_entropy) {
      g.q = -static_cast<const Math*>(p.grad_entropy)[r] / sum;
      g.k += g.q * static_cast<const Math*>(p.entropy)[r];
    }
    write(r, elements(r), g, at_target - grad_log_prob);
  }

  Math row_scale(int64_t r) const {
    return real_at(p.grad_loss, r * p.grad_loss_stride, Math(1)) / real_at(p.denominator, 0, Math(1));
  }

  int64_t first_of_largest(int64_t r) const {
    const T* x = logits(r);
    int64_t at = 0;
    Math largest = -kInfinity;
    if constexpr (kSame) {
      largest = max_of(reinterpret_cast<const Math*>(x), p.classes);
      while (at < p.classes && !(Math(to_float(x[at])) == largest)) ++at;
      return at < p.classes ? at : 0;
    }
    for (int64_t j = 0; j < p.classes; ++j)
      if (const Math v = Math(to_float(x[j])); v > largest) largest = v, at = j;
    return at;
  }
};

template <class Math> Math denominator_of(const CrossEntropyDenominatorParams& p) {
  double sum = 0;
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t t = p.target[r];
    if (t == p.ignore_index) continue;
    if (!p.class_weight)
      sum += 1;
    else
      sum += is_class(t, p.classes) ? double{static_cast<const Math*>(p.class_weight)[t]}
                                    : std::numeric_limits<double>::quiet_NaN();
  }
  return static_cast<Math>(sum);
}

// Calls each(work, row) for all rows. Each task has one `work`.
template <class Each> Status for_rows(const CrossEntropyParams& p, const Parallel& parallel, Each&& each) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    parallel(p.rows, rows_per_task(p.classes), [&](int64_t begin, int64_t end) {
      RowWork<T> work(p);
      for (int64_t r = begin; r < end; ++r) each(work, r);
    });
    return Status();
  });
}

}  // namespace

Status cross_entropy_forward_cpu(const CrossEntropyParams& p, const Parallel& parallel) {
  return for_rows(p, parallel, [](auto& work, int64_t r) { work.forward(r); });
}

Status cross_entropy_backward_cpu(const CrossEntropyParams& p, const Parallel& parallel) {
  return for_rows(p, parallel, [](auto& work, int64_t r) { work.backward(r); });
}

// These sums over rows and classes are short: one thread, in double.
Status cross_entropy_denominator_cpu(const CrossEntropyDenominatorParams& p, const Parallel&) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    using Math = Arithmetic<T>;
    if (p.denominator) put(p.denominator, 0, denominator_of<Math>(p));
    if (!p.class_weight_total) return Status();
    double sum = 0;
    for (int64_t c = 0; c < p.classes; ++c) sum += double{real_at(p.class_weight, c, Math(1))};
    put(p.class_weight_total, 0, static_cast<Math>(sum));
    return Status();
  });
}

Status cross_entropy_reduce_cpu(const CrossEntropyReduceParams& p, const Parallel&) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    using Math = Arithmetic<T>;
    double sum = 0, right = 0, counted = 0;
    for (int64_t r = 0; r < p.rows; ++r) {
      if (p.total) sum += double{static_cast<const Math*>(p.loss)[r]};
      if (!p.argmax || p.target[r] == p.ignore_index) continue;
      counted += 1;
      right += p.target[r] == p.argmax[r] ? 1 : 0;
    }
    put(p.total, 0, static_cast<Math>(sum / double{real_at(p.denominator, 0, Math(1))}));
    put(p.accuracy, 0, static_cast<Math>(right / counted));
    return Status();
  });
}

Status cross_entropy_scale_cpu(const CrossEntropyScaleParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    const auto factor = *static_cast<const Arithmetic<T>*>(p.factor);
    if (factor == 1) return Status();
    parallel(p.rows, rows_per_task(p.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) scale(static_cast<T*>(p.x) + r * p.stride, p.columns, factor);
    });
    return Status();
  });
}

int64_t cross_entropy_first_bad_target_cpu(const int64_t* target, int64_t rows, int64_t classes, int64_t ignore_index) {
  for (int64_t r = 0; r < rows; ++r)
    if (target[r] != ignore_index && !is_class(target[r], classes)) return r;
  return -1;
}

}  // namespace warpsmith
