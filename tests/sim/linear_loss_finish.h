#pragma once
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "harness.h"
#include "kernels/linear_loss/linear_loss.h"

// A gradient of linear_cross_entropy that is to be finished, and what must become of it.
namespace warpsmith::test {

struct Factors {
  float factor = 1;
  float denominator = 1;
  bool divides = false;
  double value() const {
    return divides && denominator != 0 ? static_cast<double>(factor / denominator) : static_cast<double>(factor);
  }
};

template <class In, class Out> struct Finish {
  size_t count;
  Factors f;
  Buffer<In> x, before;
  Buffer<Out> out;
  Buffer<float> sum, sum_before, factor, denominator;

  Finish(size_t n, const Factors& factors, const Offsets& offset = {})
      : count(n),
        f(factors),
        x(n, offset[0]),
        before(n),
        out(n, offset[1]),
        sum(n, offset[2]),
        sum_before(n),
        factor(1),
        denominator(1) {
    fill_normal(before, 5);
    fill_normal(sum_before, 6);
    factor[0] = f.factor;
    denominator[0] = f.denominator;
  }

  LinearFinishParams params() {
    restore();
    return {x.data(),
            out.data(),
            nullptr,
            factor.data(),
            f.divides ? denominator.data() : nullptr,
            static_cast<int64_t>(count),
            kDtype<In>,
            kDtype<Out>};
  }

  void restore() {
    std::memcpy(static_cast<void*>(x.data()), before.data(), count * sizeof(In));
    std::memcpy(static_cast<void*>(sum.data()), sum_before.data(), count * sizeof(float));
    out.poison();
  }

  std::vector<double> scaled() const {
    std::vector<double> want(count);
    for (size_t i = 0; i < count; ++i) want[i] = static_cast<double>(to_float(before[i])) * f.value();
    return want;
  }

  void check_out_of_place() {
    under_every_seed([&] {
      expect_ok(linear_finish_cuda(params(), nullptr));
      expect_close("out", out, scaled(), {.ulps = 0.51, .relative = 2e-7, .absolute = 3.1e-8});
      same_bits_for_every_seed("out", out);
      same_bits_for_every_seed("x", x);
    });
  }

  void check_in_place() {
    under_every_seed([&] {
      LinearFinishParams p = params();
      p.out = p.x;
      p.out_dtype = p.dtype;
      expect_ok(linear_finish_cuda(p, nullptr));
      expect_close("x", x, scaled(), {.ulps = 0.51, .relative = 2e-7, .absolute = 3.1e-8});
      same_bits_for_every_seed("x", x);
    });
  }

  void check_sum() {
    std::vector<double> want = scaled();
    for (size_t i = 0; i < count; ++i) want[i] += static_cast<double>(sum_before[i]);
    const std::vector<double> zeros(count, 0.0);
    under_every_seed([&] {
      LinearFinishParams p = params();
      p.out = nullptr;
      p.out_dtype = p.dtype;
      p.sum = sum.data();
      expect_ok(linear_finish_cuda(p, nullptr));
      expect_close("sum", sum, want, {.ulps = 1, .relative = 2e-7, .absolute = 1e-6});
      expect_close("x", x, zeros, {});
      same_bits_for_every_seed("sum", sum);
    });
  }
};

}  // namespace warpsmith::test
