// The optimizers' kernels on the host: tensors of many sizes in one launch, against the formula in double precision.
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <memory>

#include "harness.h"
#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "optim_formulas.h"
#include "sim/sparse_memory.h"

namespace warpsmith::test {
namespace {

// AdamW's; the same numbers do for the others (values_of).
OptimGroup group_of(double lr, double beta1 = 0.9, double beta2 = 0.999, bool maximize = false) {
  OptimGroup g{};
  g.lr = lr;
  g.values[AdamW::beta1] = beta1;
  g.values[AdamW::beta2] = beta2;
  g.values[AdamW::eps] = 1e-8;
  g.values[AdamW::weight_decay] = 0.1;
  g.maximize = maximize;
  return g;
}

constexpr Optimizer kAll[] = {
#define WARPSMITH_ROW(optimizer, F) Optimizer::optimizer,
    WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

// One tensor with its gradient and states, and what a step must make of them.
struct Tensor {
  static constexpr float kSteps = 6;  // taken before

  Optimizer optimizer;
  size_t count;
  int group;
  uint32_t has;
  bool counts, has_grad = true;
  float steps = kSteps;
  Buffer<float> param, grad;
  std::vector<Buffer<float>> states;
  Buffer<float> step;
  std::vector<double> want_param, want_states[kOptimMaxStates];

  Tensor(Optimizer of, size_t elems, int in_group, uint32_t states_mask, bool counted, const Offsets& offset,
         uint64_t seed)
      : optimizer(of),
        count(elems),
        group(in_group),
        has(states_mask),
        counts(counted),
        param(elems, offset[0]),
        grad(elems, offset[1]),
        step(1) {
    for (int s = 0; s < kOptimMaxStates; ++s) states.emplace_back((has >> s) & 1 ? elems : 0, offset[2 + s]);
    reset(seed);
  }

  // States as after some steps: none is negative but first moments, and a centered variance is positive.
  void reset(uint64_t seed) {
    fill_normal(param, seed);
    fill_normal(grad, seed + 1);
    for (int s = 0; s < kOptimMaxStates; ++s) fill_normal(states[s], seed + 2 + s, 0.1f);
    const bool first_is_second_moment = optimizer == Optimizer::adagrad || optimizer == Optimizer::rmsprop;
    for (size_t i = 0; i < count; ++i) {
      if (first_is_second_moment) states[0][i] = std::abs(states[0][i]) + 0.25f;
      if (optimizer == Optimizer::adamw || optimizer == Optimizer::adam) {
        states[1][i] = std::abs(states[1][i]);
        if ((has >> 2) & 1) states[2][i] = states[1][i] * (i % 2 ? 2.0f : 0.5f);
      }
    }
    step[0] = steps;
  }

  OptimTensor record() {
    OptimTensor r{};
    r.param = param.data();
    for (int s = 0; s < kOptimMaxStates; ++s) r.states[s] = (has >> s) & 1 ? states[s].data() : nullptr;
    r.step = counts ? step.data() : nullptr;
    r.numel = static_cast<int64_t>(count);
    r.has = has;
    r.group = group;
    return r;
  }

  void expect_from(const OptimGroup& g, double scale) {
    expect_nothing();
    for (size_t i = 0; i < count; ++i) {
      OptimElement e{param[i], {}, has};
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) e.x[s] = states[s][i];
      formula_of(optimizer, g, (g.maximize ? -1.0 : 1.0) * double{grad[i]} / scale, counts ? steps + 1 : kSteps, e);
      want_param[i] = e.p;
      for (int s = 0; s < kOptimMaxStates; ++s)
        if (e.holds(s)) want_states[s][i] = e.x[s];
    }
  }

  void expect_nothing() {
    want_param.assign(param.data(), param.data() + count);
    for (int s = 0; s < kOptimMaxStates; ++s)
      want_states[s].assign(states[s].data(), states[s].data() + states[s].size());
  }

  void check(const std::string& name, bool stepped) {
    // Sums of terms of size one: errors are rounding at that size, also where the terms cancel. A large state is one of
    // squares: g is rounded when decay is added, which counts twice in g * g, then the square, its factor and the sum.
    const Tolerance few_ulps{.ulps = 1, .relative = 0x1p-22, .absolute = 1e-6};
    expect_close(name + " param", param, want_param, few_ulps);
    for (int s = 0; s < kOptimMaxStates; ++s)
      expect_close(name + " state " + std::to_string(s), states[s], want_states[s], few_ulps);
    expect_equal(name + " step", step[0], steps + (stepped && counts ? 1 : 0));
  }
};

struct Problem {
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<OptimGroup> groups;
  std::vector<int64_t> words, device_words, addresses, device_addresses;
  OptimParams params{};

  explicit Problem(Optimizer optimizer = Optimizer::adamw) { params.optimizer = optimizer; }

  Tensor& add(size_t elems, int group, uint32_t has, bool counts, const Offsets& offset) {
    tensors.push_back(
        std::make_unique<Tensor>(params.optimizer, elems, group, has, counts, offset, 10 * (tensors.size() + 1)));
    return *tensors.back();
  }
  Tensor& add(size_t elems, int group = 0, bool amsgrad = false, const Offsets& offset = {}) {
    return add(elems, group, amsgrad ? 0b111 : 0b011, true, offset);
  }

  // Builds the table and uploads it through the kernel, as the binding does.
  void build() {
    std::vector<OptimTensor> records;
    int64_t total = 0;
    addresses.clear();
    for (const auto& t : tensors) {
      records.push_back(t->record());
      addresses.push_back(t->has_grad ? reinterpret_cast<int64_t>(t->grad.data()) : 0);
      params.most |= t->has;
      total += static_cast<int64_t>(t->count);
    }
    int32_t chunk_elems = 0;
    expect_ok(optim_chunk_elems_cuda(total, Storage::float32, &chunk_elems));
    words = tensor_list_words(records, chunk_elems);
    device_words.assign(words.size(), -1);
    device_addresses.assign(addresses.size(), -1);
    upload();
    const size_t record_words = records.size() * sizeof(OptimTensor) / sizeof(int64_t);
    params.tensors = reinterpret_cast<OptimTensor*>(device_words.data());
    params.tensor_count = static_cast<int64_t>(records.size());
    params.chunks = reinterpret_cast<const ListChunk*>(device_words.data() + record_words);
    params.chunk_count = static_cast<int64_t>(words.size() - record_words);
    params.grads = reinterpret_cast<const void* const*>(device_addresses.data());
    params.storage = Storage::float32;
  }

  void upload() {
    expect_ok(optim_upload_cuda(words.data(), device_words.data(), static_cast<int64_t>(words.size()), nullptr));
    expect_ok(
        optim_upload_cuda(addresses.data(), device_addresses.data(), static_cast<int64_t>(addresses.size()), nullptr));
  }

  Status run() {
    for (size_t first = 0; first < groups.size(); first += kOptimMaxGroups) {
      params.first_group = static_cast<int32_t>(first);
      params.group_count = static_cast<int32_t>(std::min<size_t>(kOptimMaxGroups, groups.size() - first));
      std::copy_n(groups.begin() + static_cast<int64_t>(first), params.group_count, params.groups);
      hide_rates();
      if (Status s = optim_cuda(params, nullptr); !s.ok()) return s;
    }
    return {};
  }

  bool skips() const { return params.found_inf && *params.found_inf != 0; }

  // A group whose rate or values lie on the device has others here.
  void hide_rates() {
    for (int32_t g = 0; g < params.group_count; ++g) {
      OptimGroup& group = params.groups[g];
      if (group.lr_device) group.lr = -1;
      if (group.values_device) std::fill_n(group.values, kOptimMaxValues, -1.0);
    }
  }

  void check_all() {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string name = "tensor " + std::to_string(i);
      tensors[i]->check(name, tensors[i]->has_grad && !skips());
      same_bits_for_every_seed(name + " param", tensors[i]->param);
      same_bits_for_every_seed(name + " state 0", tensors[i]->states[0]);
      expect_equal(name + " blocks counted", params.tensors[i].chunks_done, 0u);
    }
  }

  void step_under_every_seed(double scale = 1) {
    for (const auto& t : tensors)
      if (t->has_grad && !skips())
        t->expect_from(groups[static_cast<size_t>(t->group)], scale);
      else
        t->expect_nothing();
    under_every_seed([&] {
      for (size_t i = 0; i < tensors.size(); ++i) tensors[i]->reset(10 * (i + 1));
      upload();
      sim::counters() = {};
      expect_ok(run());
      check_all();
    });
  }
};

TEST(many_sizes_and_groups_in_one_launch) {
  Problem p;
  for (size_t elems : {0, 1, 3, 4, 5, 255, 1024, 2047, 2048, 2049, 5000}) p.add(elems, static_cast<int>(elems % 2));
  p.groups = {group_of(1e-2), group_of(1e-3, 0.0, 0.9, true)};
  p.build();
  p.step_under_every_seed();
  expect_equal<int64_t, int64_t>("launches", sim::counters().launches, 1);
}

TEST(misaligned_tensors_and_amsgrad) {
  Problem p;
  p.groups = {group_of(1e-2, 0.3)};
  for (size_t offset : {0, 1, 2, 3})
    for (bool amsgrad : {false, true}) p.add(2500, 0, amsgrad, offset);
  for (int argument = 0; argument < 5; ++argument) p.add(2500, 0, true, Offsets::only(argument));
  p.build();
  p.step_under_every_seed();
}

TEST(bytes_are_the_floor) {
  Problem p;
  p.groups = {group_of(1e-2)};
  const int64_t elems = 3 * kOptimTileElems;
  p.add(static_cast<size_t>(elems));
  p.build();
  under_every_seed([&] {
    p.upload();
    sim::counters() = {};
    expect_ok(p.run());
    expect_bytes({.read = 16 * elems, .written = 12 * elems});
  });
}

// Of every optimizer and every set of states: each array is read once, and all but the gradient written once.
TEST(bytes_are_the_floor_of_every_optimizer) {
  for (const Optimizer optimizer : kAll)
    for (const uint32_t has : variants_of(optimizer)) {
      Problem p(optimizer);
      p.groups = {group_of(1e-2)};
      const int64_t elems = 3 * kOptimTileElems, states = std::popcount(has);
      p.add(static_cast<size_t>(elems), 0, has, !may_lack_counter(optimizer), {});
      p.build();
      sim::counters() = {};
      expect_ok(p.run());
      expect_bytes({.read = 4 * (2 + states) * elems, .written = 4 * (1 + states) * elems});
    }
}

// Each of their sets of states, with and without a counter, aligned or not, beside tensors with another set.
TEST(every_optimizer_and_every_set_of_states) {
  const SeedsAtMost few(2);
  for (const Optimizer optimizer : kAll)
    for (const bool maximize : {false, true}) {
      Problem p(optimizer);
      p.groups = {group_of(1e-2, 0.9, 0.99, maximize), group_of(1e-3, 0.4, 0.6)};
      for (const uint32_t has : variants_of(optimizer))
        for (const bool counts : {true, false}) {
          if (!counts && !may_lack_counter(optimizer)) continue;
          p.add(2050, 0, has, counts, {});
          p.add(1030, 1, has, counts, 1);
        }
      p.build();
      p.step_under_every_seed();
    }
}

// Only a counter tells the first step, in which dampening does not apply.
TEST(the_first_step_of_sgd_takes_the_whole_gradient) {
  Problem p(Optimizer::sgd);
  p.groups = {group_of(1e-2, 0.9, 0.5)};
  p.add(3000, 0, 0b1, true, {}).steps = 0;
  p.add(3000, 0, 0b1, true, {}).steps = 1;
  for (const auto& t : p.tensors) t->step[0] = t->steps;
  p.build();
  under_every_seed([&] {
    for (const auto& t : p.tensors) {
      t->reset(7);
      for (size_t i = 0; t->steps == 0 && i < t->count; ++i) t->states[0][i] = 0;
      t->expect_from(p.groups[0], 1);
    }
    p.upload();
    expect_ok(p.run());
    p.check_all();
  });
}

TEST(a_sign_of_nothing_and_of_nan) {
  Problem p(Optimizer::lion);
  OptimGroup g = group_of(0.5, 0.9, 0.99);
  g.values[Lion::weight_decay] = 0;
  p.groups = {g};
  Tensor& t = p.add(3, 0, 0b1, false, {});
  p.build();
  under_every_seed([&] {
    for (int i = 0; i < 3; ++i) t.param[i] = 1, t.states[0][i] = 0;
    t.grad[0] = 0, t.grad[1] = NAN, t.grad[2] = -1e-30f;
    expect_ok(p.run());
    expect_equal("nothing", t.param[0], 1.0f);
    expect(std::isnan(t.param[1]) && std::isnan(t.states[0][1]), "a NaN stays visible");
    expect_equal("a tiny gradient", t.param[2], 1.5f);
  });
}

TEST(gradients_are_divided_by_the_scale) {
  Problem p;
  p.groups = {group_of(1e-2)};
  p.add(3000);
  p.build();
  Buffer<float> scale(1);
  scale[0] = 1024.0f;
  p.params.grad_scale = scale.data();
  p.step_under_every_seed(1024.0);
}

TEST(learning_rates_are_read_on_the_device) {
  for (bool is_double : {false, true}) {
    Problem p;
    Buffer<float> single(1);
    Buffer<double> wide(1);
    single[0] = 0.25f;
    wide[0] = 0.25;
    OptimGroup g = group_of(0.25);
    p.groups = {g};
    p.add(100);
    p.build();
    p.tensors[0]->expect_from(g, 1);
    p.groups[0].lr = -1;
    p.groups[0].lr_is_double = is_double;
    p.groups[0].lr_device = is_double ? static_cast<const void*>(wide.data()) : single.data();
    under_every_seed([&] {
      p.tensors[0]->reset(10);
      expect_ok(p.run());
      p.check_all();
    });
  }
}

TEST(a_skipped_step_changes_nothing) {
  Problem p;
  p.groups = {group_of(1e-2)};
  Tensor& t = p.add(3000);
  p.build();
  Buffer<float> found_inf(1);
  found_inf[0] = 2.0f;  // of two devices
  p.params.found_inf = found_inf.data();
  const std::vector<float> before(t.param.data(), t.param.data() + t.count);
  under_every_seed([&] {
    expect_ok(p.run());
    expect(std::equal(before.begin(), before.end(), t.param.data()), "parameters changed");
    expect_equal("step", t.step[0], Tensor::kSteps);
  });
}

TEST(a_tensor_without_a_gradient_is_left_alone) {
  Problem p;
  p.groups = {group_of(1e-2)};
  p.add(100);
  Tensor& idle = p.add(5000);
  idle.has_grad = false;
  p.build();
  const std::vector<float> before(idle.param.data(), idle.param.data() + idle.count);
  p.step_under_every_seed();
  expect(std::equal(before.begin(), before.end(), idle.param.data()), "parameters changed");
  expect_equal("step", idle.step[0], Tensor::kSteps);
}

TEST(more_groups_than_one_launch_takes) {
  Problem p;
  for (int g = 0; g < 2 * kOptimMaxGroups + 1; ++g) {
    p.groups.push_back(group_of(1e-3 * (g + 1)));
    p.add(10, g);
  }
  p.build();
  p.step_under_every_seed();
}

TEST(more_than_2_to_the_31_elements) {
  constexpr int64_t kElems = (int64_t{1} << 31) + 5000;
  sim::SparseMemory<float> param(kElems), grad(kElems), m(kElems), v(kElems), v_max(kElems);
  float step = 0;
  std::vector<OptimTensor> records(1);
  records[0].param = param.data();
  records[0].states[0] = m.data(), records[0].states[1] = v.data(), records[0].states[2] = v_max.data();
  records[0].step = &step;
  records[0].numel = kElems;
  records[0].has = 0b111;
  std::vector<int64_t> words = tensor_list_words(records, longest_optim_chunk(Storage::float32));
  constexpr int64_t kRecordWords = sizeof(OptimTensor) / sizeof(int64_t);
  const void* address = grad.data();
  OptimParams p{};
  p.tensors = reinterpret_cast<OptimTensor*>(words.data());
  p.chunks = reinterpret_cast<const ListChunk*>(words.data() + kRecordWords);
  p.grads = &address;
  p.tensor_count = p.group_count = 1;
  p.chunk_count = static_cast<int64_t>(words.size()) - kRecordWords;
  p.groups[0] = group_of(0.5);
  p.most = 0b111;
  grad[kElems - 1] = 1.0f;
  sim::options().block_filter = [&](uint3 block) { return block.x + 1 == p.chunk_count; };
  expect_ok(optim_cuda(p, nullptr));
  sim::options().block_filter = nullptr;
  expect(std::abs(param[kElems - 1] + 0.5f) < 1e-6f, "the last element");
  expect_equal("the element before", param[kElems - 2], 0.0f);
  expect_equal("an element 2^31 before", param[kElems - 1 - (int64_t{1} << 31)], 0.0f);
  expect(std::abs(m[kElems - 1] - 0.1f) < 1e-6f, "the first moment");
  expect(std::abs(v[kElems - 1] - 0.001f) < 1e-6f && v_max[kElems - 1] == v[kElems - 1], "the second moments");
}

TEST(uploads_longer_than_one_launch_takes) {
  std::vector<int64_t> host(5001), device(5001, -1);
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<int64_t>(i * i);
  expect_ok(optim_upload_cuda(host.data(), device.data(), 5000, nullptr));
  expect(std::equal(host.begin(), host.end() - 1, device.begin()), "words differ");
  expect_equal<int64_t, int64_t>("the word after the last", device[5000], -1);
}

TEST(the_chooser) {
  const auto chunk_of = [](int64_t total, Storage storage = Storage::float32) {
    return choose_optim(total, 132, storage).chunk_elems;
  };
  for (int storage = 0; storage < kStorages; ++storage)
    for (int64_t total : {int64_t{0}, int64_t{1}, int64_t{8'192'000}, int64_t{1} << 33}) {
      const int chunk = chunk_of(total, static_cast<Storage>(storage));
      expect(chunk % kOptimTileElems == 0 && chunk <= kOptimMaxChunkElems, "chunk of " + std::to_string(chunk));
    }
  expect_equal("small", chunk_of(1000), kOptimTileElems);
  expect_equal("2,000 tensors of 4,096", chunk_of(8'192'000), 4096);
  expect_equal("three chunks for every resident block", chunk_of(3 * 4 * 132 * 4096), 4096);
  expect_equal("one element less", chunk_of(3 * 4 * 132 * 4096 - 1), 2048);
  expect_equal("large", chunk_of(1'000'000'000), 4096);
  expect_equal("masters", chunk_of(1'000'000'000, Storage::bfloat16_master), 8192);
  expect_equal("16 bits", chunk_of(1'000'000'000, Storage::bfloat16), 16384);
  expect_equal("8 bits", chunk_of(1'000'000'000, Storage::bfloat16_8bit), kOptimMaxChunkElems);
}

TEST(float64_is_refused_on_cuda) {
  Problem p;
  p.groups = {group_of(1e-2)};
  p.add(10);
  p.build();
  p.params.storage = Storage::float64;
  expect_refused(p.run(), "no CUDA kernel for float64");
}

TEST(states_that_the_optimizer_lacks_are_refused) {
  Problem p(Optimizer::lion);
  p.groups = {group_of(1e-2)};
  p.add(10, 0, 0b11, false, {});
  p.build();
  expect_refused(p.run(), "states that the optimizer does not have");
}

// Every option with every other: all of them are drawn for each case.
RANDOM_TEST(random_lists) {
  const Optimizer optimizer = kAll[random.integer(0, std::size(kAll) - 1)];
  Problem p(optimizer);
  Buffer<float> scale(1), found_inf(1), rates(3);
  Buffer<double> wide_rates(3), values(3 * kOptimMaxValues);
  const int groups = static_cast<int>(random.integer(1, 3));
  for (int g = 0; g < groups; ++g) {
    const double lr = random.choice({0x1p-7, 0x1p-5});
    OptimGroup& group = p.groups.emplace_back(
        group_of(lr, random.choice({0.9, 0.0, 0.6, 0.3}), random.choice({0.99, 0.5}), random.coin()));
    group.values[2] = random.choice({1e-8, 1e-3});  // Lion's and SGD's decay, for the others an eps or a decay
    group.values[3] = random.choice({0.1, 0.0});
    rates[static_cast<size_t>(g)] = static_cast<float>(lr), wide_rates[static_cast<size_t>(g)] = lr;
    double* const here = &values[static_cast<size_t>(g) * kOptimMaxValues];
    std::copy_n(group.values, kOptimMaxValues, here);
    if (random.coin()) group.values_device = here;
    const int64_t on_device = random.integer(0, 2);
    group.lr_is_double = on_device == 2;
    if (on_device)
      group.lr_device = on_device == 2 ? static_cast<const void*>(&wide_rates[static_cast<size_t>(g)])
                                       : &rates[static_cast<size_t>(g)];
  }
  const std::vector<uint32_t> variants = variants_of(optimizer);
  const auto any_variant = [&] {
    return variants[static_cast<size_t>(random.integer(0, static_cast<int64_t>(variants.size()) - 1))];
  };
  const uint32_t most = any_variant();
  const int64_t count = random.integer(1, 6);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t has = any_variant();
    Tensor& t = p.add(static_cast<size_t>(random.size(0, 9000)), static_cast<int>(random.integer(0, groups - 1)),
                      (has & ~most) == 0 ? has : most, !may_lack_counter(optimizer) || random.coin(),
                      random.coin() ? Offsets(static_cast<size_t>(random.integer(0, 3))) : Offsets::draw(random, 5));
    t.has_grad = random.integer(0, 4) > 0;
  }
  scale[0] = random.choice({1.0f, 1024.0f, 0.25f});
  if (scale[0] != 1.0f || random.coin()) p.params.grad_scale = scale.data();
  found_inf[0] = random.choice({0.0f, 1.0f});
  if (random.coin()) p.params.found_inf = found_inf.data();
  p.build();
  p.step_under_every_seed(double{scale[0]});
}

}  // namespace
}  // namespace warpsmith::test
