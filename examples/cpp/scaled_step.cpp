// Trains a small network in float16 from C++ alone: the loss is scaled, gradients are checked and clipped, AdamW skips
// a step whose gradients overflow, and the scale adapts. On a GPU the host would wait only for what it prints.
#include <ATen/ops/_amp_update_scale.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>
#include <warpsmith/optim.h>

#include <cstdio>
#include <exception>
#include <limits>
#include <vector>

namespace {

constexpr int kSteps = 60, kPoisoned = 30;
constexpr int64_t kRows = 256, kInputs = 8, kHidden = 64;

torch::Tensor parameter(const torch::Tensor& value) { return value.detach().requires_grad_(); }

// Parameters stay float32; products are float16.
struct Network {
  torch::Tensor up = parameter(torch::randn({kHidden, kInputs}) * 0.5);
  torch::Tensor down = parameter(torch::randn({1, kHidden}) * 0.1);

  std::vector<torch::Tensor> parameters() const { return {up, down}; }

  torch::Tensor operator()(const torch::Tensor& x) const {
    const torch::Tensor hidden = at::silu(at::linear(x.to(torch::kHalf), up.to(torch::kHalf)));
    return at::linear(hidden, down.to(torch::kHalf)).to(torch::kFloat);
  }
};

// The scale of a loss: it halves when gradients overflow, and doubles after 10 good steps.
struct LossScale {
  torch::Tensor scale = torch::full({}, 1024.0), good_steps = torch::zeros({}, torch::kInt);

  void update(const torch::Tensor& found_inf) {
    at::_amp_update_scale_(scale, good_steps, found_inf, /*growth=*/2.0, /*backoff=*/0.5, /*growth_interval=*/10);
  }
};

struct Optimizer {
  std::vector<torch::Tensor> params, exp_avgs, exp_avg_sqs, steps;
  LossScale loss_scale;
  torch::Tensor skipped = torch::zeros({});

  explicit Optimizer(std::vector<torch::Tensor> given) : params(std::move(given)) {
    for (const torch::Tensor& p : params) {
      exp_avgs.push_back(torch::zeros_like(p.detach()));
      exp_avg_sqs.push_back(torch::zeros_like(p.detach()));
      steps.push_back(torch::zeros({}));
    }
  }

  // A scaled, clipped step. The gradients are read twice: to check them, and by AdamW.
  void step(const torch::Tensor& loss, double max_norm) {
    const std::vector<torch::Tensor> grads = torch::autograd::grad({loss * loss_scale.scale}, params);
    const warpsmith::CheckedGradients checked = warpsmith::check_gradients(grads, loss_scale.scale, max_norm);
    warpsmith::adamw(params, grads, exp_avgs, exp_avg_sqs, {}, steps, {.lr = 2e-2}, checked.grad_scale,
                     checked.found_inf);
    loss_scale.update(checked.found_inf);
    skipped += checked.found_inf;
  }
};

int train() {
  at::manual_seed(0);
  const torch::Tensor x = torch::randn({kRows, kInputs});
  const torch::Tensor target = at::sin(at::linear(x, torch::randn({1, kInputs}) * 0.5));
  torch::Tensor poisoned = x.clone();
  poisoned[3][5] = std::numeric_limits<float>::infinity();
  const Network network;
  Optimizer optimizer(network.parameters());

  double first = 0, last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const torch::Tensor loss = at::mse_loss(network(step == kPoisoned ? poisoned : x), target);
    optimizer.step(loss, /*max_norm=*/1.0);
    if (step != kPoisoned) last = loss.item<double>();
    if (step == 1) first = last;
    if (step == 1 || step % 10 == 0)
      std::printf("step %2d  loss %.4f  scale %g\n", step, loss.item<double>(),
                  optimizer.loss_scale.scale.item<double>());
  }
  const float taken = optimizer.steps[0].item<float>(), skipped = optimizer.skipped.item<float>();
  if (taken != kSteps - 1 || skipped != 1) {
    std::printf("expected %d steps and 1 skipped, got %g and %g\n", kSteps - 1, taken, skipped);
    return 1;
  }
  if (!(last < 0.5 * first)) {
    std::printf("the loss did not fall to half: %.4f to %.4f\n", first, last);
    return 1;
  }
  std::printf("the loss fell from %.4f to %.4f, 1 step was skipped\n", first, last);
  return 0;
}

}  // namespace

int main() {
  try {
    return train();
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
