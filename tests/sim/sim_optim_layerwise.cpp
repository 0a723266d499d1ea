// links: csrc/kernels/optim/optim_layerwise.cu
// LAMB's two kernels: ratios of whole tensors, whichever block of a tensor is the last.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "harness.h"
#include "kernels/optim/layerwise.h"
#include "kernels/optim/optim_config.h"

namespace warpsmith::test {
namespace {

OptimGroup group_of(double lr, double weight_decay = 0.25, bool use_nvlamb = false, double beta3 = 0.5) {
  OptimGroup g{};
  g.lr = lr;
  g.values[LAMB::beta1] = 0.5;
  g.values[LAMB::beta2] = 0.75;
  g.values[LAMB::beta3] = beta3;
  g.values[LAMB::eps] = 1e-3;
  g.values[LAMB::weight_decay] = weight_decay;
  g.values[LAMB::use_nvlamb] = use_nvlamb;
  return g;
}

// One tensor of parameters and gradients in P, as after six steps, and what a step must make of it.
template <class P> struct Layer {
  static constexpr bool kMaster = sizeof(P) == 2;
  static constexpr float kSteps = 6;
  size_t count;
  int group;
  bool has_grad = true;
  float size = 1;  // of the parameter's elements
  Buffer<P> param, grad;
  Buffer<float> master, m, v, step{1};
  std::vector<double> want_p, want_m, want_v;

  Layer(size_t elems, int in_group, const Offsets& offset)
      : count(elems),
        group(in_group),
        param(elems, offset[0]),
        grad(elems, offset[1]),
        master(kMaster ? elems : 0, offset[2]),
        m(elems, offset[3]),
        v(elems, offset[4]) {}

  float* value() {
    if constexpr (kMaster)
      return master.data();
    else
      return param.data();
  }

  void reset(uint64_t seed) {
    fill_normal(param, seed, size);
    fill_normal(grad, seed + 1);
    fill_normal(master, seed + 2, size);
    fill_normal(m, seed + 3, 0.1f);
    fill_normal(v, seed + 4, 0.1f);
    for (size_t i = 0; i < count; ++i) v[i] = std::abs(v[i]);
    step[0] = kSteps;
  }

  OptimTensor record() {
    OptimTensor r{};
    r.param = param.data();
    r.extra = kMaster ? master.data() : nullptr;
    r.states[0] = m.data(), r.states[1] = v.data();
    r.step = step.data();
    r.numel = static_cast<int64_t>(count);
    r.has = LAMB::kVariants[0];
    r.group = group;
    return r;
  }

  // The paper's formula in double.
  void expect_from(const OptimGroup& g, double scale) {
    const double* h = g.values;
    std::vector<double> u(count);
    double p2 = 0, u2 = 0;
    want_p.resize(count), want_m.resize(count), want_v.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const double x = (g.maximize ? -1.0 : 1.0) * static_cast<double>(to_float(grad[i])) / scale;
      const double p = static_cast<double>(value()[i]);
      want_m[i] = h[0] * static_cast<double>(m[i]) + h[2] * x;
      want_v[i] = h[1] * static_cast<double>(v[i]) + (1 - h[1]) * x * x;
      const double t = kSteps + 1, unbiased = want_m[i] / (1 - std::pow(h[0], t));
      u[i] = unbiased / (std::sqrt(want_v[i] / (1 - std::pow(h[1], t))) + h[3]) + h[4] * p;
      p2 += p * p, u2 += u[i] * u[i];
    }
    const bool adapts = (h[4] != 0 || h[5] != 0) && p2 != 0 && u2 != 0;
    for (size_t i = 0; i < count; ++i)
      want_p[i] = static_cast<double>(value()[i]) - g.lr * (adapts ? std::sqrt(p2 / u2) : 1) * u[i];
  }

  void expect_nothing() {
    want_p.assign(value(), value() + count);
    want_m.assign(m.data(), m.data() + count);
    want_v.assign(v.data(), v.data() + count);
  }

  void check(const std::string& name, bool stepped) {
    const Tolerance few_ulps{.ulps = 2, .absolute = 2e-6};
    if constexpr (kMaster) {
      expect_close(name + " master", master, want_p, few_ulps);
      for (size_t i = 0; i < count && stepped; ++i)
        expect_equal(name + " rounded", to_float(param[i]), to_float(from_float<P>(master[i])));
    } else {
      expect_close(name + " param", param, want_p, few_ulps);
    }
    expect_close(name + " m", m, want_m, few_ulps);
    expect_close(name + " v", v, want_v, few_ulps);
    expect_equal(name + " step", step[0], kSteps + (stepped ? 1 : 0));
    same_bits_for_every_seed(name + " param", param);
    same_bits_for_every_seed(name + " m", m);
  }
};

template <class P> struct Layers {
  std::vector<std::unique_ptr<Layer<P>>> layers;
  std::vector<OptimGroup> groups;
  std::vector<int64_t> words, device_words, addresses;
  Buffer<float> scale{1}, found_inf{1};
  LayerwiseParams params{};
  std::function<void(size_t)> after_reset = [](size_t) {};  // of a layer

  Layer<P>& add(size_t elems, int group = 0, const Offsets& offset = {}) {
    layers.push_back(std::make_unique<Layer<P>>(elems, group, offset));
    return *layers.back();
  }

  void build() {
    std::vector<OptimTensor> records;
    addresses.clear();
    for (const auto& t : layers) {
      records.push_back(t->record());
      addresses.push_back(t->has_grad ? reinterpret_cast<int64_t>(t->grad.data()) : 0);
    }
    words = tensor_list_words(records, kOptimTileElems);
    OptimParams& p = params.step;
    p.optimizer = Optimizer::lamb;
    p.storage = Layer<P>::kMaster ? (std::is_same_v<P, bfloat16> ? Storage::bfloat16_master : Storage::float16_master)
                                  : Storage::float32;
    const size_t record_words = records.size() * sizeof(OptimTensor) / sizeof(int64_t);
    device_words = words;
    p.tensors = reinterpret_cast<OptimTensor*>(device_words.data());
    p.tensor_count = static_cast<int64_t>(records.size());
    p.chunks = reinterpret_cast<const ListChunk*>(device_words.data() + record_words);
    p.chunk_count = static_cast<int64_t>(words.size() - record_words);
    p.grads = reinterpret_cast<const void* const*>(addresses.data());
    p.group_count = static_cast<int32_t>(groups.size());
    std::copy(groups.begin(), groups.end(), p.groups);
    for (OptimGroup& g : p.groups)  // one whose values lie on the device has others here
      if (g.values_device) std::fill_n(g.values, kOptimMaxValues, -1.0);
  }

  Status run() {
    Buffer<double> partials(static_cast<size_t>(2 * params.step.chunk_count));
    Buffer<double> ratios(static_cast<size_t>(params.step.tensor_count));
    params.partials = partials.data(), params.ratios = ratios.data();
    return layerwise_cuda(params, nullptr);
  }

  void step_under_every_seed() {
    const OptimParams& p = params.step;
    const bool skips = p.found_inf && *p.found_inf != 0;
    under_every_seed([&] {
      uint64_t seed = 0;
      for (size_t i = 0; i < layers.size(); ++i) {
        const auto& t = layers[i];
        t->reset(seed += 10);
        after_reset(i);
        if (t->has_grad && !skips && t->group >= p.first_group && t->group < p.first_group + p.group_count)
          t->expect_from(groups[static_cast<size_t>(t->group)], p.grad_scale ? static_cast<double>(*p.grad_scale) : 1);
        else
          t->expect_nothing();
      }
      device_words = words;
      sim::counters() = {};
      expect_ok(run());
      for (size_t i = 0; i < layers.size(); ++i) {
        const bool here = layers[i]->group >= p.first_group && layers[i]->group < p.first_group + p.group_count;
        layers[i]->check("tensor " + std::to_string(i), layers[i]->has_grad && !skips && here);
        expect_equal("blocks counted", p.tensors[i].chunks_done, 0u);
      }
    });
  }
};

template <class P> void many_sizes() {
  Layers<P> n;
  for (const size_t elems : {0, 1, 3, 4, 5, 255, 1024, 2047, 5000, 9001}) n.add(elems, static_cast<int>(elems % 2));
  n.groups = {group_of(0.1), group_of(0.2, 0.125, true, 1.0)};
  n.groups[1].maximize = true;
  n.build();
  n.step_under_every_seed();
  expect_equal<int64_t, int64_t>("launches", sim::counters().launches, 2);
}

TEST(many_sizes_and_groups_in_two_launches) { many_sizes<float>(); }
TEST(many_sizes_with_bfloat16_masters) { many_sizes<bfloat16>(); }
TEST(many_sizes_with_float16_masters) { many_sizes<float16>(); }

template <class P> void misaligned() {
  Layers<P> n;
  n.groups = {group_of(0.1)};
  for (const size_t offset : {1, 2, 3}) n.add(2500, 0, offset);
  for (int argument = 0; argument < 5; ++argument) n.add(2500, 0, Offsets::only(argument));
  n.build();
  n.step_under_every_seed();
}
TEST(misaligned_tensors) { misaligned<float>(); }
TEST(misaligned_tensors_with_masters) { misaligned<bfloat16>(); }

// Gradients in G hold the values that P holds too.
template <class P, class G> void other_gradients(Dtype dtype) {
  Layers<P> n;
  n.groups = {group_of(0.1)};
  std::vector<std::unique_ptr<Buffer<G>>> grads;
  for (const size_t offset : {0, 0, 1}) {
    n.add(grads.empty() ? 9001 : 2500, 0, offset);
    grads.push_back(std::make_unique<Buffer<G>>(n.layers.back()->count, offset));
  }
  n.add(2500);  // of the own dtype
  n.build();
  n.params.step.mixed_grads = true;
  for (size_t i = 0; i < grads.size(); ++i)
    n.addresses[i] = reinterpret_cast<int64_t>(grads[i]->data()) | gradient_mark(dtype);
  n.after_reset = [&](size_t i) {
    Layer<P>& t = *n.layers[i];
    for (size_t k = 0; i < grads.size() && k < t.count; ++k) {
      (*grads[i])[k] = from_float<G>(to_float(from_float<bfloat16>(to_float(t.grad[k]))));
      t.grad[k] = from_float<P>(to_float((*grads[i])[k]));
    }
  };
  n.step_under_every_seed();
}
TEST(float32_gradients_beside_masters) { other_gradients<bfloat16, float>(Dtype::float32); }
TEST(bfloat16_gradients_beside_float32) { other_gradients<float, bfloat16>(Dtype::bfloat16); }

TEST(ratios_are_one_without_a_norm_or_decay) {
  Layers<float> n;
  n.groups = {group_of(0.1), group_of(0.1, 0), group_of(0.1, 0, true)};
  for (const int group : {0, 1, 2})
    for (const float size : {0.0f, 1e-3f, 4.0f}) n.add(3000, group).size = size;
  n.build();
  n.step_under_every_seed();
}

TEST(scales_skips_and_missing_gradients) {
  Layers<float> n;
  n.groups = {group_of(0.1)};
  n.add(3000);
  n.add(3000).has_grad = false;
  n.build();
  n.scale[0] = 1024;
  n.params.step.grad_scale = n.scale.data();
  n.params.step.found_inf = n.found_inf.data();
  for (const float found : {0.0f, 1.0f}) {
    n.found_inf[0] = found;
    n.step_under_every_seed();
  }
}

// A group whose values lie on the device has others in the launch.
TEST(values_are_read_on_the_device) {
  Layers<float> n;
  n.groups = {group_of(0.1, 0.25, true, 1.0)};
  n.add(9001);
  n.build();
  Buffer<double> values(kOptimMaxValues);
  std::copy_n(n.groups[0].values, kOptimMaxValues, values.data());
  OptimGroup& launched = n.params.step.groups[0];
  launched.values_device = values.data();
  std::fill_n(launched.values, kOptimMaxValues, 0.0);
  n.step_under_every_seed();
}

TEST(tensors_of_other_groups_are_left_alone) {
  Layers<float> n;
  n.groups = {group_of(0.1), group_of(0.2)};
  n.add(3000, 0);
  n.add(3000, 1);
  n.build();
  n.params.step.group_count = 1;
  n.step_under_every_seed();
}

TEST(bytes_are_the_documented_ones) {
  const int64_t elems = 3 * kOptimTileElems;
  const auto check = [&]<class P>(int64_t read, int64_t written) {
    Layers<P> n;
    n.groups = {group_of(0.1)};
    n.add(static_cast<size_t>(elems));
    n.build();
    n.layers[0]->reset(1);
    under_every_seed([&] {
      n.device_words = n.words;
      sim::counters() = {};
      expect_ok(n.run());
      // Beside the arrays: two sums a chunk, which the last block reads again, and a ratio for every thread.
      const int64_t chunks = n.params.step.chunk_count;
      expect_bytes({.read = read * elems + 16 * chunks + 8 * kOptimThreads * chunks,
                    .written = written * elems + 16 * chunks + 8});
    });
  };
  check.operator()<float>(28, 12);
  check.operator()<bfloat16>(26, 14);
}

TEST(other_storages_are_refused) {
  Layers<float> n;
  n.groups = {group_of(0.1)};
  n.add(10);
  n.build();
  n.params.step.storage = Storage::bfloat16;
  expect_refused(n.run(), "a storage other than float32 and masters");
  n.params.step.storage = Storage::float64;
  expect_refused(n.run(), "float64");
  n.params.step.storage = Storage::float32;
  n.params.step.optimizer = Optimizer::sgd;
  expect_refused(n.run(), "an optimizer that is not layerwise");
}

template <class P> void random_layers_of(Random& random) {
  Layers<P> n;
  n.groups = {group_of(0.1), group_of(0.05, 0.0, random.integer(0, 1) != 0)};
  Buffer<double> values(2 * kOptimMaxValues);
  for (size_t g = 0; g < 2; ++g) {
    double* const here = &values[g * kOptimMaxValues];
    std::copy_n(n.groups[g].values, kOptimMaxValues, here);
    if (random.coin()) n.groups[g].values_device = here;
  }
  const int64_t tensors = random.integer(1, 4);
  for (int64_t i = 0; i < tensors; ++i)
    n.add(static_cast<size_t>(random.size(0, 6000)), static_cast<int>(random.integer(0, 1)),
          static_cast<size_t>(random.integer(0, 3)))
        .has_grad = random.integer(0, 4) > 0;
  n.build();
  n.step_under_every_seed();
}
RANDOM_TEST(random_layers) {
  if (random.integer(0, 1) != 0)
    random_layers_of<float>(random);
  else
    random_layers_of<bfloat16>(random);
}

}  // namespace
}  // namespace warpsmith::test
