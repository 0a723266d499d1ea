#pragma once
#include <algorithm>
#include <limits>

#include "attention_sm90_fixture.cuh"
#include "harness.h"

// Inputs of the attention fixture and what it must give, in double precision.
namespace warpsmith::test {

struct AttentionCase {
  int batch, queries, keys, heads, key_heads;
  bool causal;

  int seen(int query) const {  // keys that a query sees
    return causal ? std::clamp(query + 1 + keys - queries, 0, keys) : keys;
  }
};

struct AttentionData {
  AttentionCase shape;
  Buffer<bfloat16> q, k, v, o;
  Buffer<float> lse;
  Buffer<int> workspace;
  std::vector<double> expected_o, expected_lse;

  explicit AttentionData(const AttentionCase& c, uint64_t seed)
      : shape(c),
        q(elements(c.queries, c.heads)),
        k(elements(c.keys, c.key_heads)),
        v(elements(c.keys, c.key_heads)),
        o(elements(c.queries, c.heads)),
        lse(static_cast<size_t>(c.batch) * c.heads * c.queries),
        workspace(2) {
    fill_normal(q, seed);
    fill_normal(k, seed + 1);
    fill_normal(v, seed + 2);
    workspace[0] = workspace[1] = 0;
  }

  size_t elements(int length, int heads) const {
    return static_cast<size_t>(shape.batch) * length * heads * attention_sm90::kHeadDim;
  }
  size_t at(int b, int i, int h, int length, int heads) const {
    return ((static_cast<size_t>(b) * length + i) * heads + h) * attention_sm90::kHeadDim;
  }
  static constexpr float scale() { return 0.08838834764831845f; }  // 1 / sqrt(128)

  void solve() {
    constexpr int kDim = attention_sm90::kHeadDim;
    const auto wide = [](const Buffer<bfloat16>& x) {
      std::vector<double> y(x.size());
      for (size_t i = 0; i < x.size(); ++i) y[i] = static_cast<double>(to_float(x[i]));
      return y;
    };
    const std::vector<double> wide_q = wide(q), wide_k = wide(k), wide_v = wide(v);
    expected_o.assign(o.size(), 0.0);
    expected_lse.assign(lse.size(), -std::numeric_limits<double>::infinity());
    std::vector<double> scores(static_cast<size_t>(shape.keys));
    for (int b = 0; b < shape.batch; ++b)
      for (int h = 0; h < shape.heads; ++h)
        for (int i = 0; i < shape.queries; ++i) {
          const int seen = shape.seen(i), key_head = h / (shape.heads / shape.key_heads);
          if (seen == 0) continue;
          const size_t row = at(b, i, h, shape.queries, shape.heads);
          double largest = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int j = 0; j < seen; ++j) {
            const double* x = wide_q.data() + row;
            const double* y = wide_k.data() + at(b, j, key_head, shape.keys, shape.key_heads);
            double dot = 0;
            for (int d = 0; d < kDim; ++d) dot += x[d] * y[d];
            scores[static_cast<size_t>(j)] = dot * scale();
            largest = std::max(largest, dot * scale());
          }
          for (int j = 0; j < seen; ++j) {
            const double p = std::exp(scores[static_cast<size_t>(j)] - largest);
            const double* y = wide_v.data() + at(b, j, key_head, shape.keys, shape.key_heads);
            double* out = expected_o.data() + row;
            sum += p;
            for (int d = 0; d < kDim; ++d) out[d] += p * y[d];
          }
          for (int d = 0; d < kDim; ++d) expected_o[row + static_cast<size_t>(d)] /= sum;
          expected_lse[(static_cast<size_t>(b) * shape.heads + h) * shape.queries + i] = largest + std::log(sum);
        }
  }

  template <attention_sm90::Bug bug = attention_sm90::Bug::none> Status run(int* cycles = nullptr) {
    const attention_sm90::Problem problem{q.data(),         k.data(),        v.data(),    o.data(),      lse.data(),
                                          workspace.data(), cycles,          shape.batch, shape.queries, shape.keys,
                                          shape.heads,      shape.key_heads, scale()};
    return shape.causal ? attention_sm90::run<true, bug>(problem, nullptr)
                        : attention_sm90::run<false, bug>(problem, nullptr);
  }
};

// P is rounded to bf16 before it is summed up with v, the quotient after: 2^-8 of values about 1, and the last bit.
constexpr Tolerance kOutputTolerance{.ulps = 1, .relative = 0, .absolute = 0x1p-8};
constexpr Tolerance kLseTolerance{.ulps = 0, .relative = 1e-5, .absolute = 1e-5};

}  // namespace warpsmith::test
