#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "common/dropout.h"
#include "dtypes.h"
#include "far.h"
#include "harness.h"
#include "kernels/norm/backward_config.h"
#include "kernels/norm/forward_config.h"
#include "kernels/norm/norm.h"

// A problem of the norm family with its inputs, outputs and oracle in double precision, for the suites of its ops.
namespace warpsmith::test {

struct NormShape {
  int64_t rows, columns;
  int64_t padding = 0;  // elements between rows
  Offsets offset = {};  // of the arguments
  bool weight = true, bias = true;
  bool dresidual_out = true;
  double weight_offset = 0;
  double drop = 0.25;      // probability
  float mean = 0;          // of x
  bool statistics = true;  // false: also without the statistics, which only a backward needs
  int64_t first_row = 0;   // number of the first row, which the mask depends on
};

template <class T, class R = T, class W = T> struct NormCase {
  static constexpr double kEps = 1e-5;
  static constexpr int64_t kSeed[2] = {0x123456789abcdef, 77};
  Norm op;
  NormRow has;
  NormShape shape;
  Buffer<T> x, dy, y, dx;
  Buffer<R> residual, residual_out, s, dresidual_out, dresidual;
  Buffer<W> weight, bias, dweight, dbias;
  Buffer<float> mean, rstd, dweight_partials, dbias_partials;
  std::vector<double> want_y, want_s, want_mean, want_rstd, want_dx, want_dresidual, want_dweight, want_dbias;
  double mean_rounding = 0;  // what a float mean may change a normalised value by, in the worst row
  NormForwardParams forward;
  NormBackwardParams backward;

  int64_t stride() const { return shape.columns + shape.padding; }
  bool separate_dresidual() const { return has.residual && (has.dropout || sizeof(R) != sizeof(T)); }

  NormCase(Norm under_test, const NormShape& of, uint64_t seed = 1)
      : op(under_test),
        has(row_of(under_test)),
        shape(of),
        x(static_cast<size_t>(of.rows * (of.columns + of.padding)), of.offset[0]),
        dy(x.size(), of.offset[1]),
        y(static_cast<size_t>(of.rows * of.columns), of.offset[2]),
        dx(y.size(), of.offset[3]),
        residual(x.size(), of.offset[4]),
        residual_out(y.size(), of.offset[5]),
        s(x.size(), of.offset[6]),
        dresidual_out(x.size(), of.offset[7]),
        dresidual(y.size(), of.offset[8]),
        weight(static_cast<size_t>(of.columns), of.offset[9]),
        bias(weight.size(), of.offset[10]),
        dweight(weight.size()),
        dbias(weight.size()),
        mean(static_cast<size_t>(of.rows)),
        rstd(mean.size()),
        dweight_partials(0),
        dbias_partials(0) {
    fill_normal(x, seed, 1.f, of.mean);
    fill_normal(dy, seed + 1);
    fill_normal(residual, seed + 2);
    fill_normal(dresidual_out, seed + 3);
    fill_normal(weight, seed + 4, 0.3f, 1.0f);
    fill_normal(bias, seed + 5);
    const bool has_bias = has.layer && of.bias;
    forward.x = x.data(), forward.y = y.data();
    forward.weight = of.weight ? weight.data() : nullptr;
    forward.bias = has_bias ? bias.data() : nullptr;
    forward.rstd = rstd.data(), forward.mean = has.layer ? mean.data() : nullptr;
    if (has.residual) forward.residual = residual.data(), forward.residual_out = residual_out.data();
    forward.rows = of.rows, forward.columns = of.columns;
    forward.x_stride = forward.residual_stride = stride();
    forward.eps = kEps, forward.weight_offset = of.weight_offset;
    if (has.dropout) forward.dropout = make_dropout(kSeed, of.drop);
    forward.op = op;
    forward.dtype = kDtype<T>, forward.residual_dtype = kDtype<R>, forward.weight_dtype = kDtype<W>;

    backward.dy = dy.data(), backward.s = s.data();
    backward.dresidual_out = has.residual && of.dresidual_out ? dresidual_out.data() : nullptr;
    backward.weight = forward.weight;
    backward.mean = forward.mean, backward.rstd = rstd.data();
    backward.dx = dx.data(), backward.dresidual = separate_dresidual() ? dresidual.data() : nullptr;
    backward.dweight = of.weight ? dweight.data() : nullptr;
    backward.dbias = has_bias ? dbias.data() : nullptr;
    backward.rows = of.rows, backward.columns = of.columns;
    backward.dy_stride = backward.s_stride = backward.dresidual_out_stride = stride();
    backward.weight_offset = of.weight_offset;
    backward.dropout = forward.dropout, backward.op = op;
    backward.dtype = kDtype<T>, backward.residual_dtype = kDtype<R>, backward.weight_dtype = kDtype<W>;
    compute_oracle();
  }

  float scale() const { return static_cast<float>(make_dropout(kSeed, shape.drop).scale); }

  bool kept(int64_t element) const {
    if (!has.dropout) return true;
    element += shape.first_row * shape.columns;
    const auto lanes = dropout_lanes(static_cast<uint64_t>(kSeed[0]), static_cast<uint64_t>(kSeed[1]),
                                     static_cast<uint64_t>(element) / kDropoutLanes);
    return dropout_keeps(lanes, static_cast<int>(element % kDropoutLanes), make_dropout(kSeed, shape.drop).threshold);
  }

  void compute_oracle() {
    const size_t count = y.size(), columns = static_cast<size_t>(shape.columns);
    for (auto* v : {&want_y, &want_s, &want_dx, &want_dresidual}) v->resize(count);
    for (auto* v : {&want_mean, &want_rstd}) v->resize(static_cast<size_t>(shape.rows));
    for (auto* v : {&want_dweight, &want_dbias}) v->assign(columns, 0);
    const double n = static_cast<double>(shape.columns);
    for (int64_t r = 0; r < shape.rows; ++r) {
      const auto in = [&](size_t c) { return static_cast<size_t>(r * stride()) + c; };
      const auto out = [&](size_t c) { return static_cast<size_t>(r * shape.columns) + c; };
      const float factor = has.dropout ? scale() : 1.f;
      double sum = 0, size = 0, squares = 0, along = 0, shift = 0;
      for (size_t c = 0; c < columns; ++c) {
        float value = to_float(x[in(c)]);
        if (has.dropout) value = kept(static_cast<int64_t>(out(c))) ? value * factor : 0.f;
        if (has.residual) value += to_float(residual[in(c)]);
        s[in(c)] = from_float<R>(value);
        want_s[out(c)] = static_cast<double>(to_float(s[in(c)]));
        sum += want_s[out(c)], size += std::fabs(want_s[out(c)]);
      }
      const double m = has.layer ? sum / n : 0;
      for (size_t c = 0; c < columns; ++c) squares += (want_s[out(c)] - m) * (want_s[out(c)] - m);
      const double inverse = 1 / std::sqrt(squares / n + kEps);
      want_mean[static_cast<size_t>(r)] = m, want_rstd[static_cast<size_t>(r)] = inverse;
      // Three roundings, of the sum, of 1 / n and of their product, each by half a step of the mean magnitude.
      if (has.layer) mean_rounding = std::max(mean_rounding, 3 * 0x1p-24 * size / n * inverse);
      const auto w = [&](size_t c) {
        return shape.weight ? static_cast<double>(to_float(weight[c])) + shape.weight_offset : 1.0;
      };
      const auto gradient = [&](size_t c) { return static_cast<double>(to_float(dy[in(c)])); };
      for (size_t c = 0; c < columns; ++c) {
        const double hat = (want_s[out(c)] - m) * inverse;
        want_y[out(c)] = hat * w(c) + (forward.bias ? static_cast<double>(to_float(bias[c])) : 0);
        along += gradient(c) * w(c) * hat, shift += gradient(c) * w(c);
        want_dweight[c] += gradient(c) * hat, want_dbias[c] += gradient(c);
      }
      for (size_t c = 0; c < columns; ++c) {
        const double hat = (want_s[out(c)] - m) * inverse;
        double ds = inverse * (gradient(c) * w(c) - hat * along / n - (has.layer ? shift / n : 0));
        if (backward.dresidual_out) ds += static_cast<double>(to_float(dresidual_out[in(c)]));
        want_dresidual[out(c)] = ds;
        want_dx[out(c)] =
            has.dropout ? (kept(static_cast<int64_t>(out(c))) ? ds * static_cast<double>(factor) : 0) : ds;
      }
    }
  }

  // The same for the gradients of s, whose terms have the size of rstd before they cancel.
  Tolerance gradient_rounding() const {
    Tolerance t = normalised_rounding(16);
    t.absolute *= std::max(1.0, *std::max_element(want_rstd.begin(), want_rstd.end()));
    return t;
  }

  // Of values that (s - mean) rstd is a factor of: its own error comes on top.
  Tolerance normalised_rounding(double terms) const {
    Tolerance t = rounding(terms);
    t.absolute += mean_rounding * std::sqrt(terms);
    return t;
  }

  // Half a rounding step of the storage type, and a few of float for the arithmetic; sums of terms of size one may
  // cancel.
  static Tolerance rounding(double terms) {
    return {.ulps = 0.51, .relative = 4e-6, .absolute = 1e-6 * std::sqrt(terms)};
  }

  void poison_outputs() {
    y.poison(), residual_out.poison(), mean.poison(), rstd.poison(), dx.poison(), dresidual.poison();
    dweight.poison(), dbias.poison(), dweight_partials.poison(), dbias_partials.poison();
  }

  void check_forward() {
    expect_close("rstd", rstd, want_rstd, {.relative = 1e-6 + 1e-7 * std::fabs(double{shape.mean})});
    if (has.layer) expect_close("mean", mean, want_mean, {.relative = 1e-6, .absolute = 2e-7});
    if (has.residual) expect_close("residual_out", residual_out, want_s, {});
    expect_close("y", y, want_y, normalised_rounding(has.layer ? 4 : 1));
    same_bits_for_every_seed("y", y);
  }

  void check_backward() {
    if (backward.dx) {
      expect_close("dx", dx, want_dx, gradient_rounding());
      same_bits_for_every_seed("dx", dx);
    }
    if (backward.dresidual) expect_close("dresidual", dresidual, want_dresidual, gradient_rounding());
    check_parameters();
  }

  void check_parameters() {
    if (backward.dweight) {
      expect_close("dweight", dweight, want_dweight, normalised_rounding(4.0 * static_cast<double>(shape.rows)));
      same_bits_for_every_seed("dweight", dweight);
    }
    if (backward.dbias) {
      expect_close("dbias", dbias, want_dbias, rounding(4.0 * static_cast<double>(shape.rows)));
      same_bits_for_every_seed("dbias", dbias);
    }
  }

  void make_room(int64_t partial_rows) {
    const auto count = static_cast<size_t>(partial_rows * shape.columns);
    if (backward.dweight) dweight_partials = Buffer<float>(count), backward.dweight_partials = dweight_partials.data();
    if (backward.dbias) dbias_partials = Buffer<float>(count), backward.dbias_partials = dbias_partials.data();
  }

  void leave_out_gradients(Random& random) {
    if (random.integer(0, 3) == 3) backward.dx = nullptr;
    if (random.integer(0, 3) == 3) backward.dresidual = nullptr;
    if (random.integer(0, 3) == 3) backward.dweight = nullptr;
    if (random.integer(0, 3) == 3) backward.dbias = nullptr;
    if (!backward.dresidual && !backward.dweight && !backward.dbias) backward.dx = dx.data();
  }

  void run() {
    int64_t partial_rows = 0;
    expect_ok(norm_partial_rows_cuda(backward, &partial_rows));
    make_room(partial_rows);
    under_every_seed([&] {
      poison_outputs();
      if (!shape.statistics) {
        NormForwardParams alone = forward;
        alone.rstd = alone.mean = nullptr;
        expect_ok(norm_forward_cuda(alone, nullptr));
        expect_close("y", y, want_y, normalised_rounding(has.layer ? 4 : 1));
        poison_outputs();
      }
      expect_ok(norm_forward_cuda(forward, nullptr));
      check_forward();
      expect_ok(norm_backward_cuda(backward, nullptr));
      check_backward();
    });
  }

  // As the last rows of contiguous tensors. `resident`: multiprocessors for the kernel of resident rows, whose blocks,
  // two on each, have as many rows each.
  void run_far_rows(int resident) {
    const int64_t first = shape.first_row, columns = shape.columns;
    const auto far = [&]<class E>(Buffer<E>& b, int64_t row) { return Far<E>(b, first, row); };
    auto far_x = far(x, columns), far_dy = far(dy, columns), far_y = far(y, columns), far_dx = far(dx, columns);
    auto far_residual = far(residual, columns), far_out = far(residual_out, columns), far_s = far(s, columns);
    auto far_passed = far(dresidual_out, columns), far_dresidual = far(dresidual, columns);
    auto far_mean = far(mean, 1), far_rstd = far(rstd, 1);
    forward.rows = backward.rows = first + shape.rows;
    forward.x = far_x.data(), forward.y = far_y.data();
    backward.rstd = forward.rstd = far_rstd.data();
    if (has.layer) backward.mean = forward.mean = far_mean.data();
    if (has.residual) forward.residual = far_residual.data(), forward.residual_out = far_out.data();
    backward.dy = far_dy.data(), backward.s = far_s.data(), backward.dx = far_dx.data();
    if (backward.dresidual_out) backward.dresidual_out = far_passed.data();
    if (backward.dresidual) backward.dresidual = far_dresidual.data();
    backward.dweight = backward.dbias = nullptr;  // sums of all rows
    const FarMachine machine(shape.rows, resident ? resident : 1 << 24);
    under_every_seed([&] {
      far_y.poison(), far_dx.poison(), far_out.poison(), far_dresidual.poison(), far_mean.poison(), far_rstd.poison();
      expect_ok(norm_forward_cuda(forward, nullptr));
      far_y.fetch(), far_out.fetch(), far_mean.fetch(), far_rstd.fetch();
      check_forward();
      if (resident) return;
      expect_ok(norm_backward_cuda(backward, nullptr));
      far_dx.fetch(), far_dresidual.fetch();
      check_backward();
    });
  }

  // One of the outputs of the backward at a time.
  void run_each_gradient() {
    int64_t partial_rows = 0;
    expect_ok(norm_partial_rows_cuda(backward, &partial_rows));
    make_room(partial_rows);
    under_every_seed([&] {
      for (int wanted = 0; wanted < 4; ++wanted) {
        NormBackwardParams one = backward;
        if (wanted != 0) one.dx = nullptr;
        if (wanted != 1) one.dresidual = nullptr;
        if (wanted != 2) one.dweight = one.dweight_partials = nullptr;
        if (wanted != 3) one.dbias = one.dbias_partials = nullptr;
        poison_outputs();
        expect_ok(norm_forward_cuda(forward, nullptr));
        expect_ok(norm_backward_cuda(one, nullptr));
        if (one.dx) expect_close("dx", dx, want_dx, gradient_rounding());
        if (one.dresidual) expect_close("dresidual", dresidual, want_dresidual, gradient_rounding());
        if (one.dweight) expect_close("dweight", dweight, want_dweight, rounding(4.0 * double(shape.rows)));
        if (one.dbias) expect_close("dbias", dbias, want_dbias, rounding(4.0 * double(shape.rows)));
      }
    });
  }

  NormProblem problem() const {
    NormProblem p;
    p.rows = shape.rows, p.columns = shape.columns, p.element_bytes = sizeof(T);
    p.residual_bytes = has.residual ? sizeof(R) : 0;
    p.layer = has.layer, p.dropout = has.dropout;
    p.multiprocessors = sim::options().properties.multiprocessors;
    p.code_capability = sim::options().properties.code_capability;
    return p;
  }
};

}  // namespace warpsmith::test
