// Trains a small network on a made-up function with Warpsmith's rms_norm and AdamW, from C++ alone.
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>
#include <warpsmith/norm.h>
#include <warpsmith/optim.h>

#include <cstdio>
#include <exception>
#include <vector>

namespace {

constexpr int kSteps = 50;
constexpr int64_t kRows = 512, kInputs = 8, kHidden = 64;

// linear, rms_norm, silu, linear
struct Network {
  torch::Tensor up = parameter(torch::randn({kHidden, kInputs}));
  torch::Tensor norm = parameter(torch::ones({kHidden}));
  torch::Tensor down = parameter(torch::randn({1, kHidden}) * 0.1);

  static torch::Tensor parameter(const torch::Tensor& value) { return value.detach().requires_grad_(); }

  std::vector<torch::Tensor> parameters() const { return {up, norm, down}; }

  torch::Tensor operator()(const torch::Tensor& x) const {
    return at::linear(at::silu(warpsmith::rms_norm(at::linear(x, up), norm)), down);
  }
};

// What AdamW keeps for each parameter.
struct AdamWState {
  std::vector<torch::Tensor> exp_avgs, exp_avg_sqs, steps;

  explicit AdamWState(const std::vector<torch::Tensor>& params) {
    for (const torch::Tensor& p : params) {
      exp_avgs.push_back(torch::zeros_like(p.detach()));
      exp_avg_sqs.push_back(torch::zeros_like(p.detach()));
      steps.push_back(torch::zeros({}));
    }
  }
};

int train() {
  at::manual_seed(0);
  const torch::Tensor x = torch::randn({kRows, kInputs});
  const torch::Tensor target = at::sin(at::linear(x, torch::randn({1, kInputs}) * 0.5));
  const Network network;
  const std::vector<torch::Tensor> params = network.parameters();
  AdamWState state(params);
  const warpsmith::AdamWOptions options{.lr = 2e-2};

  double first = 0, last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const torch::Tensor loss = at::mse_loss(network(x), target);
    last = loss.item<double>();
    if (step == 1) first = last;
    if (step == 1 || step % 10 == 0) std::printf("step %2d  loss %.4f\n", step, last);
    const std::vector<torch::Tensor> grads = torch::autograd::grad({loss}, params);
    warpsmith::adamw(params, grads, state.exp_avgs, state.exp_avg_sqs, {}, state.steps, options);
  }
  for (const torch::Tensor& taken : state.steps) {
    if (taken.item<float>() != kSteps) {
      std::printf("expected %d steps, counted %g\n", kSteps, taken.item<float>());
      return 1;
    }
  }
  if (!(last < 0.5 * first)) {
    std::printf("the loss did not fall to half: %.4f to %.4f\n", first, last);
    return 1;
  }
  std::printf("the loss fell from %.4f to %.4f\n", first, last);
  return 0;
}

}  // namespace

int main() {
  try {
    return train();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
