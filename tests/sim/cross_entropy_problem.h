#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "dtypes.h"
#include "far.h"
#include "harness.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_config.h"

// A problem of cross_entropy: its inputs, its outputs, what they must be in double precision, and how far off they may.
namespace warpsmith::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity(),
                        kNan = std::numeric_limits<double>::quiet_NaN();

struct Shape {
  int64_t rows, classes;
  int64_t padding = 0;  // elements between rows
  Offsets offset = {};  // of the arguments
  bool in_place = false;
  bool weights = false;
  double smoothing = 0, z_loss = 0, softcap = 0;
  bool entropy = false;
  float scale = 2, mean = 0;  // of the logits
  bool skip_ignored = false;
  bool mean_reduction = true;
};

// A problem with its inputs, outputs and oracle.
template <class T> struct Problem {
  static constexpr int64_t kIgnore = -100;
  Shape s;
  Buffer<T> logits, original, separate;
  Buffer<int64_t> target, argmax;
  Buffer<float> weight, weight_total, loss, log_prob, lse, entropy, denominator, total, accuracy, partials, rows_grad,
      row_max, row_sum;
  std::vector<double> want_loss, want_log_prob, want_lse, want_entropy, want_gradient, want_argmax;
  double want_denominator = 0, want_right = 0, want_counted = 0;

  explicit Problem(const Shape& shape, uint64_t seed = 1)
      : s(shape),
        logits(static_cast<size_t>(shape.rows * (shape.classes + shape.padding)), shape.offset[0]),
        original(logits.size(), shape.offset[1]),
        separate(static_cast<size_t>(shape.rows * shape.classes), shape.offset[2]),
        target(static_cast<size_t>(shape.rows)),
        argmax(target.size()),
        weight(static_cast<size_t>(shape.classes), shape.offset[3]),
        weight_total(1),
        loss(target.size()),
        log_prob(target.size()),
        lse(target.size()),
        entropy(target.size()),
        denominator(1),
        total(1),
        accuracy(1),
        partials(kCrossEntropyPartials),
        rows_grad(target.size()),
        row_max(target.size()),
        row_sum(target.size()) {
    fill_normal(original, seed, s.scale, s.mean);
    fill_normal(rows_grad, seed + 3);
    Random random(seed + 1);
    for (size_t r = 0; r < target.size(); ++r) {
      const uint64_t draw = random.bits();
      target[r] = draw % 4 == 3 ? kIgnore : static_cast<int64_t>(draw / 4 % static_cast<uint64_t>(s.classes));
    }
    for (size_t c = 0; c < weight.size(); ++c) weight[c] = static_cast<float>(random.bits() % 64) / 32;
    restore();
  }

  int64_t stride() const { return s.classes + s.padding; }
  void restore() { std::memcpy(logits.data(), original.data(), logits.size() * sizeof(T)); }
  double w(int64_t c) const { return s.weights ? static_cast<double>(weight[static_cast<size_t>(c)]) : 1.0; }
  double logit(int64_t r, int64_t c) const {
    return static_cast<double>(to_float(original[static_cast<size_t>(r * stride() + c)]));
  }
  double capped(double u) const { return s.softcap ? s.softcap * std::tanh(u / s.softcap) : u; }

  // With grad_rows, the gradient of sum over rows of loss * grad_rows[r], and of the others' products with the same.
  void compute_oracle(bool all_gradients = false) {
    const size_t rows = static_cast<size_t>(s.rows);
    want_loss.assign(rows, 0), want_log_prob.assign(rows, 0), want_lse.assign(rows, 0), want_entropy.assign(rows, 0);
    want_argmax.assign(rows, 0), want_gradient.assign(static_cast<size_t>(s.rows * s.classes), 0);
    want_denominator = want_right = want_counted = 0;
    double sum_w = 0;
    for (int64_t c = 0; c < s.classes; ++c) sum_w += w(c);
    for (size_t r = 0; r < rows; ++r)
      if (target[r] != kIgnore) want_denominator += bad(r) ? (s.weights ? kNan : 1) : w(target[r]);
    std::vector<double> z(static_cast<size_t>(s.classes));
    for (size_t r = 0; r < rows; ++r) {
      const bool ignored = target[r] == kIgnore;
      if (ignored && s.skip_ignored) continue;
      double m = -kInfinity, top = m, sum = 0, product = 0, smooth = 0;
      for (size_t c = 0; c < z.size(); ++c) {
        z[c] = capped(logit(static_cast<int64_t>(r), static_cast<int64_t>(c)));
        const double u = logit(static_cast<int64_t>(r), static_cast<int64_t>(c));
        if (u > top) top = u, want_argmax[r] = static_cast<double>(c);
        m = std::max(m, z[c]);
      }
      for (const double v : z) sum += std::exp(v - m);
      const double lse_r = m == -kInfinity ? m : m + std::log(sum);
      for (size_t c = 0; c < z.size(); ++c) {
        const double p = std::exp(z[c] - lse_r);
        if (p > 0) product += p * (z[c] - lse_r);
        smooth += w(static_cast<int64_t>(c)) * (lse_r - z[c]);
      }
      want_lse[r] = lse_r, want_entropy[r] = -product;
      if (ignored) continue;
      const bool is_bad = bad(r);
      const double spread = s.smoothing / static_cast<double>(s.classes), keep = 1 - s.smoothing;
      const double w_t = is_bad ? kNan : w(target[r]);
      want_counted += 1, want_right += static_cast<double>(target[r]) == want_argmax[r];
      want_log_prob[r] = is_bad ? kNan : z[static_cast<size_t>(target[r])] - lse_r;
      want_loss[r] = -keep * w_t * want_log_prob[r] + s.z_loss * lse_r * lse_r;
      if (s.smoothing) want_loss[r] += spread * smooth;
      const double g = all_gradients ? static_cast<double>(rows_grad[r]) : s.mean_reduction ? 1 / want_denominator : 1;
      const double others = all_gradients ? g : 0;  // of log_prob, lse and entropy
      for (size_t c = 0; c < z.size(); ++c) {
        const double p = std::exp(z[c] - lse_r), hot = static_cast<int64_t>(c) == target[r] ? 1 : 0;
        double d = g * (p * (keep * w_t + spread * sum_w + 2 * s.z_loss * lse_r) - hot * keep * w_t -
                        spread * w(static_cast<int64_t>(c)));
        d += others * (hot - p) + others * p;
        if (p > 0 && s.entropy) d -= others * p * (z[c] - lse_r - product);
        const double h = s.softcap ? z[c] / s.softcap : 0;
        want_gradient[r * z.size() + c] = d * (1 - h * h);
      }
    }
  }
  bool bad(size_t r) const { return target[r] != kIgnore && (target[r] < 0 || target[r] >= s.classes); }

  CrossEntropyParams params(bool gradient) {
    CrossEntropyParams p{};
    p.logits = logits.data(), p.target = target.data(), p.class_weight = s.weights ? weight.data() : nullptr;
    p.loss = loss.data(), p.log_prob = log_prob.data(), p.lse = lse.data(), p.argmax = argmax.data();
    p.entropy = s.entropy ? entropy.data() : nullptr;
    p.row_max = row_max.data(), p.row_sum = row_sum.data();
    if (gradient) p.dlogits = s.in_place ? static_cast<void*>(logits.data()) : separate.data();
    p.denominator = s.mean_reduction ? denominator.data() : nullptr;
    p.rows = s.rows, p.classes = s.classes, p.logits_stride = stride();
    p.dlogits_stride = s.in_place ? stride() : s.classes;
    p.ignore_index = kIgnore;
    p.softcap = s.softcap, p.label_smoothing = s.smoothing, p.z_loss = s.z_loss;
    p.skip_ignored = s.skip_ignored, p.follows_denominator = true, p.dtype = kDtype<T>;
    p.class_weight_total = weight_total.data();
    return p;
  }

  void run_denominator() {
    CrossEntropyDenominatorParams d{};
    d.target = target.data(), d.class_weight = s.weights ? weight.data() : nullptr, d.denominator = denominator.data();
    d.class_weight_total = s.weights ? weight_total.data() : nullptr;
    d.partials = partials.data(), d.rows = s.rows, d.classes = s.classes, d.ignore_index = kIgnore;
    d.dtype = kDtype<T>;
    expect_ok(cross_entropy_denominator_cuda(d, nullptr));
  }
  void run_reduce() {
    CrossEntropyReduceParams r{};
    r.loss = loss.data(), r.denominator = s.mean_reduction ? denominator.data() : nullptr, r.target = target.data();
    r.argmax = argmax.data(), r.total = total.data(), r.accuracy = accuracy.data(), r.partials = partials.data();
    r.rows = s.rows, r.ignore_index = kIgnore, r.follows_forward = true, r.dtype = kDtype<T>;
    expect_ok(cross_entropy_reduce_cuda(r, nullptr));
  }

  void check_rows() {
    const double largest = std::abs(s.mean) + 6 * std::abs(static_cast<double>(s.scale));
    const Tolerance close{.relative = 2e-6, .absolute = 4e-7 * (1 + largest / 8)};
    expect_close(
        "loss", loss, want_loss,
        {.relative = 4e-6,
         .absolute = 4e-7 * (1 + largest) * (1 + s.smoothing * largest) + 3e-7 * s.z_loss * largest * largest});
    expect_close("log_prob", log_prob, want_log_prob, close);
    expect_close("lse", lse, want_lse, close);
    if (s.entropy) expect_close("entropy", entropy, want_entropy, {.relative = 4e-6, .absolute = 2e-6});
    for (size_t r = 0; r < target.size(); ++r) expect_equal("argmax", argmax[r], static_cast<int64_t>(want_argmax[r]));
    same_bits_for_every_seed("loss", loss), same_bits_for_every_seed("lse", lse);
  }
  // Half a rounding step of the storage type, and what float arithmetic loses of the largest term.
  void check_gradient(double largest_scale) {
    const Tolerance rounding{.ulps = 0.51, .relative = 6e-6, .absolute = 2e-6 * largest_scale};
    if (!s.in_place) {
      expect_close("dlogits", separate, want_gradient, rounding);
      same_bits_for_every_seed("dlogits", separate);
      return;
    }
    same_bits_for_every_seed("dlogits", logits);
    Buffer<T> inside(separate.size());
    for (int64_t r = 0; r < s.rows; ++r) {
      std::memcpy(inside.data() + r * s.classes, logits.data() + r * stride(),
                  static_cast<size_t>(s.classes) * sizeof(T));
      for (int64_t c = s.classes; c < stride(); ++c)
        expect(std::memcmp(logits.data() + r * stride() + c, original.data() + r * stride() + c, sizeof(T)) == 0,
               "the padding of row " + std::to_string(r) + " was changed");
    }
    expect_close("dlogits in place", inside, want_gradient, rounding);
  }

  void poison_rows() {
    loss.poison(), log_prob.poison(), lse.poison(), entropy.poison(), argmax.poison();
    row_max.poison(), row_sum.poison();
    restore_gradient();
  }
  void restore_gradient() { separate.poison(), restore(); }
  void poison() {
    poison_rows();
    denominator.poison(), total.poison(), accuracy.poison(), partials.poison(), weight_total.poison();
  }

  void run() {
    compute_oracle();
    const double unit = s.mean_reduction ? 1 / want_denominator : 1;
    double sum = 0;
    for (const double l : want_loss) sum += l;
    const std::vector<double> want_total{sum * unit}, want_accuracy{want_right / want_counted};
    under_every_seed([&] {
      poison();
      run_denominator();
      expect_close("denominator", denominator, std::vector<double>{want_denominator}, {.relative = 1e-6});
      expect_ok(cross_entropy_forward_cuda(params(true), nullptr));
      run_reduce();
      check_rows();
      check_gradient(std::isfinite(unit) ? unit : 1);
      expect_close("total", total, want_total,
                   {.relative = 4e-6, .absolute = 1e-6 * (1 + std::abs(s.mean) + std::abs(s.scale))});
      expect_close("accuracy", accuracy, want_accuracy, {.relative = 1e-6});
    });
    const Buffer<T>& place = s.in_place ? logits : separate;
    std::vector<T> early(place.data(), place.data() + place.size());
    compute_oracle(true);
    under_every_seed([&] {  // the denominator is there; the early and the late gradient have the same bits
      poison_rows();
      CrossEntropyParams p = params(false);
      p.follows_denominator = false;
      expect_ok(cross_entropy_forward_cuda(p, nullptr));
      check_rows();
      p = params(true);
      expect_ok(cross_entropy_backward_cuda(p, nullptr));
      expect(std::memcmp(early.data(), place.data(), early.size() * sizeof(T)) == 0,
             "the late gradient has other bits");
      restore_gradient();
      p.denominator = nullptr;
      p.grad_loss = p.grad_log_prob = p.grad_lse = rows_grad.data();
      p.grad_loss_stride = 1;
      if (s.entropy) p.grad_entropy = rows_grad.data();
      expect_ok(cross_entropy_backward_cuda(p, nullptr));
      check_gradient(4 * (1 + s.z_loss * 40));
    });
  }

  // With 2^31 elements between rows, which take the place of the logits: forward in place, and the late scaling.
  void run_rows_far_apart() {
    constexpr int64_t kStride = int64_t{1} << 31;
    sim::SparseMemory<T> far(static_cast<size_t>(s.rows * kStride));
    const size_t row = static_cast<size_t>(s.classes);
    compute_oracle();
    under_every_seed([&] {
      poison();
      run_denominator();
      CrossEntropyParams p = params(true);
      for (int64_t r = 0; r < s.rows; ++r)
        std::memcpy(far.data() + r * kStride, original.data() + r * s.classes, row * sizeof(T));
      p.logits = p.dlogits = far.data(), p.logits_stride = p.dlogits_stride = kStride;
      expect_ok(cross_entropy_forward_cuda(p, nullptr));
      check_rows();
      for (int64_t r = 0; r < s.rows; ++r)
        std::memcpy(separate.data() + r * s.classes, far.data() + r * kStride, row * sizeof(T));
      check_gradient(1);
      denominator[0] = 2;
      expect_ok(
          cross_entropy_scale_cuda({far.data(), denominator.data(), s.rows, s.classes, kStride, kDtype<T>}, nullptr));
      const size_t last = static_cast<size_t>((s.rows - 1) * kStride) + row - 1;
      expect_equal("scaled", to_float(far[last]), 2 * to_float(separate[separate.size() - 1]));
    });
  }

  // As the last rows of contiguous tensors of more than 2^31 elements.
  void run_far_rows() {
    compute_oracle();
    const int64_t first = first_far_row(s.classes);
    Far<T> far_logits(logits, first, s.classes), far_gradient(separate, first, s.classes);
    Far<int64_t> far_target(target, first, 1), far_argmax(argmax, first, 1);
    Far<float> far_loss(loss, first, 1), far_log_prob(log_prob, first, 1), far_lse(lse, first, 1);
    Far<float> far_max(row_max, first, 1), far_sum(row_sum, first, 1);
    CrossEntropyParams p = params(true);
    p.rows = first + s.rows, p.target = far_target.data();
    p.logits = far_logits.data(), p.dlogits = far_gradient.data();
    p.loss = far_loss.data(), p.log_prob = far_log_prob.data(), p.lse = far_lse.data(), p.argmax = far_argmax.data();
    p.row_max = far_max.data(), p.row_sum = far_sum.data();
    const FarMachine machine(s.rows);
    under_every_seed([&] {
      poison(), far_gradient.poison();
      expect_ok(cross_entropy_forward_cuda(p, nullptr));
      far_loss.fetch(), far_log_prob.fetch(), far_lse.fetch(), far_argmax.fetch(), far_gradient.fetch();
      check_rows();
      check_gradient(1);
      far_gradient.poison();
      expect_ok(cross_entropy_backward_cuda(p, nullptr));
      far_gradient.fetch();
      check_gradient(1);
    });
  }
};

}  // namespace warpsmith::test
