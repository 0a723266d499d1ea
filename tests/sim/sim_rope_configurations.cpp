// Configurations of rope and qk_norm_rope that the choosers never pick: those that are compiled give the same bits, the
// others are refused.
// links: csrc/kernels/rope/rope.cu
// links: csrc/kernels/rope/qk_norm_rope.cu
#include "harness.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_config.h"

namespace warpsmith::test {
namespace {

constexpr int64_t kBatch = 2, kTokens = 7, kDim = 64, kHeads[] = {6, 2};
constexpr RotaryHeads layout(int i) { return {kHeads[i], kHeads[i] * kTokens * kDim, kHeads[i] * kDim, kDim}; }

struct Tensors {
  Buffer<bfloat16> x[2], dy[2], y[2], dx[2], weight[2], dweight[2], cos, sin;
  Buffer<float> partials;
  RotaryAngles angles{};
  RotaryShape shape{kBatch, kTokens, kDim, kDim, false, false};

  static Buffer<bfloat16> heads(int i) {
    return Buffer<bfloat16>(static_cast<size_t>(kBatch * layout(i).batch_stride));
  }
  Tensors()
      : x{heads(0), heads(1)},
        dy{heads(0), heads(1)},
        y{heads(0), heads(1)},
        dx{heads(0), heads(1)},
        weight{Buffer<bfloat16>(kDim), Buffer<bfloat16>(kDim)},
        dweight{Buffer<bfloat16>(kDim), Buffer<bfloat16>(kDim)},
        cos(kTokens * kDim / 2),
        sin(cos.size()),
        partials(1 << 20) {
    uint64_t seed = 0;
    for (Buffer<bfloat16>* t : {x, x + 1, dy, dy + 1, weight, weight + 1, &cos, &sin}) fill_normal(*t, ++seed);
    angles = {cos.data(), sin.data(), kTokens, 0, kDim / 2, 1, false, Dtype::bfloat16};
  }
  RopeProblem problem() const { return {kBatch * kTokens, kHeads[0], kHeads[1], kDim, kDim, 2}; }
};

// Runs `launch` with the first configuration, then with the others: the same bits of the tensors.
template <class Config, class Launch>
void same_bits(const std::vector<Config>& configs, std::vector<Buffer<bfloat16>*> tensors, Launch&& launch) {
  std::vector<std::vector<bfloat16>> first;
  for (const Config& c : configs) {
    for (auto* t : tensors) t->poison();
    expect_ok(launch(c));
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& t = *tensors[i];
      if (first.size() == i) first.emplace_back(t.data(), t.data() + t.size());
      expect(std::memcmp(first[i].data(), t.data(), t.size() * 2) == 0, "other bits of tensor " + std::to_string(i));
    }
  }
}

TEST(rope_configurations) {
  Tensors t;
  RopeParams p{t.x[0].data(), t.x[1].data(), t.y[0].data(),  t.y[1].data(), layout(0),
               layout(1),     layout(0),     layout(1),      t.angles,      {},
               t.shape,       false,         Dtype::bfloat16};
  p.positions.sequences = -1;
  std::vector<RopeConfig> configs{choose_rope(t.problem())};
  for (const int heads : {1, 2, 4})
    for (const int threads : {4, 16, 32, 64, 128}) configs.push_back(rope_config_of(t.problem(), heads, threads));
  same_bits(configs, {t.y, t.y + 1}, [&](const RopeConfig& c) { return rope_cuda_with(c, p, nullptr); });
  RopeConfig c = choose_rope(t.problem());
  c.heads_a_thread = 3;
  expect_refused(rope_cuda_with(c, p, nullptr), "3 heads a thread");
  c = rope_config_of(t.problem(), 1, 64);
  c.vector_elems = 1;
  expect_refused(rope_cuda_with(c, p, nullptr), "1 heads a thread and vectors of 1");
  c = choose_rope(t.problem());
  c.blocks_x = INT64_C(1) << 32;
  expect_refused(rope_cuda_with(c, p, nullptr), "more than a grid may have");
}

TEST(qk_norm_rope_configurations) {
  Tensors t;
  const RopeProblem problem = t.problem();
  RotaryPositions positions{};
  positions.sequences = -1;
  const QkNormRopeFwdParams f{t.x[0].data(), t.x[1].data(), t.weight[0].data(), t.weight[1].data(),
                              t.y[0].data(), t.y[1].data(), layout(0),          layout(1),
                              layout(0),     layout(1),     t.angles,           positions,
                              t.shape,       1e-5,          Dtype::bfloat16,    Dtype::bfloat16};
  std::vector<QkNormRopeConfig> configs{choose_qk_norm_rope_forward(problem)};
  for (const int threads : {32, 64, 160})
    configs.push_back(qk_norm_rope_forward_config(problem, kQkNormRopeForward[0].heads, threads));
  same_bits(configs, {t.y, t.y + 1}, [&](const auto& c) { return qk_norm_rope_forward_cuda_with(c, f, nullptr); });

  RotaryShape back = t.shape;
  back.inverse = true;
  const QkNormRopeBwdParams b{t.dy[0].data(),
                              t.dy[1].data(),
                              t.x[0].data(),
                              t.x[1].data(),
                              t.weight[0].data(),
                              t.weight[1].data(),
                              t.dx[0].data(),
                              t.dx[1].data(),
                              t.dweight[0].data(),
                              t.dweight[1].data(),
                              t.partials.data(),
                              layout(0),
                              layout(1),
                              layout(0),
                              layout(1),
                              layout(0),
                              layout(1),
                              t.angles,
                              positions,
                              back,
                              1e-5,
                              Dtype::bfloat16,
                              Dtype::bfloat16};
  configs = {choose_qk_norm_rope_backward(problem)};
  for (const int heads : {4, 8})
    for (const int threads : {32, 64, 160}) configs.push_back(qk_norm_rope_backward_config(problem, heads, threads));
  same_bits(configs, {t.dx, t.dx + 1}, [&](const auto& c) { return qk_norm_rope_backward_cuda_with(c, b, nullptr); });

  QkNormRopeConfig c = choose_qk_norm_rope_forward(problem);
  c.heads_a_thread = 3;
  expect_refused(qk_norm_rope_forward_cuda_with(c, f, nullptr), "3 heads a thread");
  c.blocks = INT64_C(1) << 32;
  expect_refused(qk_norm_rope_forward_cuda_with(c, f, nullptr), "more than a grid may have");
  c = choose_qk_norm_rope_backward(problem);
  c.heads_a_thread = 5;
  expect_refused(qk_norm_rope_backward_cuda_with(c, b, nullptr), "5 heads a thread");
  c = choose_qk_norm_rope_backward(problem);
  c.stages = 5;
  expect_refused(qk_norm_rope_backward_cuda_with(c, b, nullptr), "5 stages");
}

}  // namespace
}  // namespace warpsmith::test
