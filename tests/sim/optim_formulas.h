#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/optim/optim.h"

// One step of each optimizer in double precision, written from its paper's formula and not from the functors.
namespace warpsmith::test {

// One element; `x`: its states, of those that `has` names; `t`: the number of this step.
struct OptimElement {
  double p, x[kOptimMaxStates];
  uint32_t has;

  bool holds(int state) const { return (has >> state) & 1; }
};

inline void formula_of(Optimizer optimizer, const OptimGroup& group, double g, double t, OptimElement& e) {
  const double* v = group.values;
  const double lr = group.lr;
  switch (optimizer) {
    case Optimizer::adamw:
    case Optimizer::adam: {
      const double beta1 = v[0], beta2 = v[1], eps = v[2], weight_decay = v[3];
      if (optimizer == Optimizer::adamw)
        e.p -= lr * weight_decay * e.p;
      else
        g += weight_decay * e.p;
      e.x[0] = beta1 * e.x[0] + (1 - beta1) * g;
      e.x[1] = beta2 * e.x[1] + (1 - beta2) * g * g;
      double second = e.x[1];
      if (e.holds(2)) second = e.x[2] = std::max(e.x[2], second);
      e.p -= lr * (e.x[0] / (1 - std::pow(beta1, t))) / (std::sqrt(second / (1 - std::pow(beta2, t))) + eps);
      return;
    }
    case Optimizer::sgd: {
      const double momentum = v[0], dampening = v[1], weight_decay = v[2], nesterov = v[3];
      g += weight_decay * e.p;
      if (e.holds(0)) {
        e.x[0] = t == 1 ? g : momentum * e.x[0] + (1 - dampening) * g;
        g = nesterov != 0 ? g + momentum * e.x[0] : e.x[0];
      }
      e.p -= lr * g;
      return;
    }
    case Optimizer::lion: {
      const double beta1 = v[0], beta2 = v[1], weight_decay = v[2];
      const double update = beta1 * e.x[0] + (1 - beta1) * g;
      e.p -= lr * weight_decay * e.p + lr * (update > 0 ? 1 : update < 0 ? -1 : 0);
      e.x[0] = beta2 * e.x[0] + (1 - beta2) * g;
      return;
    }
    case Optimizer::adagrad: {
      const double lr_decay = v[0], weight_decay = v[1], eps = v[2];
      g += weight_decay * e.p;
      e.x[0] += g * g;
      e.p -= lr / (1 + (t - 1) * lr_decay) * g / (std::sqrt(e.x[0]) + eps);
      return;
    }
    case Optimizer::rmsprop: {
      const double alpha = v[0], eps = v[1], weight_decay = v[2], momentum = v[3];
      g += weight_decay * e.p;
      e.x[0] = alpha * e.x[0] + (1 - alpha) * g * g;
      double second = e.x[0];
      if (e.holds(2)) {
        e.x[2] = alpha * e.x[2] + (1 - alpha) * g;
        second -= e.x[2] * e.x[2];
      }
      double update = g / (std::sqrt(second) + eps);
      if (e.holds(1)) update = e.x[1] = momentum * e.x[1] + update;
      e.p -= lr * update;
      return;
    }
    default: return;  // layerwise: not a function of one element
  }
}

// The masks of states that a tensor of an optimizer may have.
inline std::vector<uint32_t> variants_of(Optimizer optimizer) {
  return visit_optimizer(
      optimizer, []<class F>() { return std::vector<uint32_t>(std::begin(F::kVariants), std::end(F::kVariants)); });
}

// Whether a tensor's steps need not be counted.
inline bool may_lack_counter(Optimizer optimizer) {
  return optimizer == Optimizer::sgd || optimizer == Optimizer::lion || optimizer == Optimizer::rmsprop;
}

}  // namespace warpsmith::test
