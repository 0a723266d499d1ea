// The AdamW kernel on the host: tensors of many sizes in one launch, against the formula in double precision.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "harness.h"
#include "kernels/optim/adamw.h"
#include "kernels/optim/adamw_config.h"

namespace warpsmith::test {
namespace {

AdamWGroup group_of(double lr, double beta1 = 0.9, double beta2 = 0.999, bool maximize = false) {
  AdamWGroup g{};
  g.lr = lr;
  g.beta1 = beta1;
  g.beta2 = beta2;
  g.eps = 1e-8;
  g.weight_decay = 0.1;
  g.maximize = maximize;
  return g;
}

// One tensor with its gradient and states, and what a step must make of them.
struct Tensor {
  static constexpr float kSteps = 6;  // taken before

  size_t count;
  int group;
  bool amsgrad, has_grad = true;
  Buffer<float> param, grad, m, v, v_max, step;
  std::vector<double> want_param, want_m, want_v, want_max;

  Tensor(size_t elems, int in_group, bool with_max, size_t offset, uint64_t seed)
      : count(elems),
        group(in_group),
        amsgrad(with_max),
        param(elems, offset),
        grad(elems, offset),
        m(elems, offset),
        v(elems, offset),
        v_max(with_max ? elems : 0, offset),
        step(1) {
    reset(seed);
  }

  void reset(uint64_t seed) {
    fill_normal(param, seed);
    fill_normal(grad, seed + 1);
    fill_normal(m, seed + 2, 0.1f);
    fill_normal(v, seed + 3, 0.1f);
    for (size_t i = 0; i < count; ++i) {
      v[i] = std::abs(v[i]);
      if (amsgrad) v_max[i] = v[i] * (i % 2 ? 2.0f : 0.5f);
    }
    step[0] = kSteps;
  }

  void expect_from(const AdamWGroup& g, double scale) {
    want_param.assign(count, 0);
    want_m = want_v = want_param;
    want_max.assign(v_max.size(), 0);
    const double t = kSteps + 1;
    for (size_t i = 0; i < count; ++i) {
      const double gradient = (g.maximize ? -1.0 : 1.0) * double{grad[i]} / scale;
      want_m[i] = g.beta1 * m[i] + (1 - g.beta1) * gradient;
      want_v[i] = g.beta2 * v[i] + (1 - g.beta2) * gradient * gradient;
      double second = want_v[i];
      if (amsgrad) second = want_max[i] = std::max(double{v_max[i]}, want_v[i]);
      want_param[i] =
          param[i] * (1 - g.lr * g.weight_decay) -
          g.lr / (1 - std::pow(g.beta1, t)) * want_m[i] / (std::sqrt(second / (1 - std::pow(g.beta2, t))) + g.eps);
    }
  }

  void check(const std::string& name) {
    // Sums of terms of size one: errors are rounding at that size, also where the terms cancel.
    const Tolerance few_ulps{.ulps = 2, .absolute = 1e-6};
    expect_close(name + " param", param, want_param, few_ulps);
    expect_close(name + " exp_avg", m, want_m, few_ulps);
    expect_close(name + " exp_avg_sq", v, want_v, few_ulps);
    if (amsgrad) expect_close(name + " max_exp_avg_sq", v_max, want_max, few_ulps);
    expect_equal(name + " step", step[0], kSteps + 1);
  }
};

struct Problem {
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<AdamWGroup> groups;
  std::vector<int64_t> words, device_words, addresses, device_addresses;
  AdamWParams params{};

  Tensor& add(size_t elems, int group = 0, bool amsgrad = false, size_t offset = 0) {
    tensors.push_back(std::make_unique<Tensor>(elems, group, amsgrad, offset, 10 * (tensors.size() + 1)));
    return *tensors.back();
  }

  // Builds the table and uploads it through the kernel, as the binding does.
  void build() {
    std::vector<AdamWTensor> records;
    int64_t total = 0;
    addresses.clear();
    for (const auto& t : tensors) {
      records.push_back({t->param.data(), t->m.data(), t->v.data(), t->amsgrad ? t->v_max.data() : nullptr,
                         t->step.data(), static_cast<int64_t>(t->count), t->group, 0, 0, 0});
      addresses.push_back(t->has_grad ? reinterpret_cast<int64_t>(t->grad.data()) : 0);
      params.amsgrad = params.amsgrad || t->amsgrad;
      total += static_cast<int64_t>(t->count);
    }
    int32_t chunk_elems = 0;
    expect_ok(adamw_chunk_elems_cuda(total, &chunk_elems));
    words = tensor_list_words(records, chunk_elems);
    device_words.assign(words.size(), -1);
    device_addresses.assign(addresses.size(), -1);
    upload();
    params.tensors = reinterpret_cast<AdamWTensor*>(device_words.data());
    params.tensor_count = static_cast<int64_t>(records.size());
    params.chunks = reinterpret_cast<const ListChunk*>(device_words.data() + records.size() * 8);
    params.chunk_count = static_cast<int64_t>(words.size() - records.size() * 8);
    params.grads = reinterpret_cast<const void* const*>(device_addresses.data());
    params.dtype = Dtype::float32;
  }

  void upload() {
    expect_ok(adamw_upload_cuda(words.data(), device_words.data(), static_cast<int64_t>(words.size()), nullptr));
    expect_ok(
        adamw_upload_cuda(addresses.data(), device_addresses.data(), static_cast<int64_t>(addresses.size()), nullptr));
  }

  Status run() {
    for (size_t first = 0; first < groups.size(); first += kAdamWMaxGroups) {
      params.first_group = static_cast<int32_t>(first);
      params.group_count = static_cast<int32_t>(std::min<size_t>(kAdamWMaxGroups, groups.size() - first));
      std::copy_n(groups.begin() + static_cast<int64_t>(first), params.group_count, params.groups);
      if (Status s = adamw_cuda(params, nullptr); !s.ok()) return s;
    }
    return {};
  }

  void check_all() {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string name = "tensor " + std::to_string(i);
      if (tensors[i]->has_grad) tensors[i]->check(name);
      same_bits_for_every_seed(name + " param", tensors[i]->param);
      same_bits_for_every_seed(name + " exp_avg", tensors[i]->m);
      expect_equal(name + " blocks counted", params.tensors[i].chunks_done, 0u);
    }
  }

  void step_under_every_seed(double scale = 1) {
    for (const auto& t : tensors) t->expect_from(groups[static_cast<size_t>(t->group)], scale);
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
  p.build();
  p.step_under_every_seed();
}

TEST(bytes_are_the_floor) {
  Problem p;
  p.groups = {group_of(1e-2)};
  const int64_t elems = 3 * kAdamWTileElems;
  p.add(static_cast<size_t>(elems));
  p.build();
  under_every_seed([&] {
    p.upload();
    sim::counters() = {};
    expect_ok(p.run());
    expect_bytes({.read = 16 * elems, .written = 12 * elems});
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
    AdamWGroup g = group_of(0.25);
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
  for (int g = 0; g < 2 * kAdamWMaxGroups + 1; ++g) {
    p.groups.push_back(group_of(1e-3 * (g + 1)));
    p.add(10, g);
  }
  p.build();
  p.step_under_every_seed();
}

// Address space without memory behind what is not touched.
struct SparseFloats {
  size_t bytes;
  float* data;
  explicit SparseFloats(int64_t elems) : bytes(static_cast<size_t>(elems) * sizeof(float)) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    expect(at != MAP_FAILED, "no address space");
    data = static_cast<float*>(at);
  }
  ~SparseFloats() { munmap(data, bytes); }
};

TEST(more_than_2_to_the_31_elements) {
  constexpr int64_t kElems = (int64_t{1} << 31) + 5000;
  SparseFloats param(kElems), grad(kElems), m(kElems), v(kElems);
  float step = 0;
  std::vector<AdamWTensor> records{{param.data, m.data, v.data, nullptr, &step, kElems, 0, 0, 0, 0}};
  std::vector<int64_t> words = tensor_list_words(records, kAdamWMaxChunkElems);
  const void* address = grad.data;
  AdamWParams p{};
  p.tensors = reinterpret_cast<AdamWTensor*>(words.data());
  p.chunks = reinterpret_cast<const ListChunk*>(words.data() + 8);
  p.grads = &address;
  p.tensor_count = p.group_count = 1;
  p.chunk_count = static_cast<int64_t>(words.size()) - 8;
  p.groups[0] = group_of(0.5);
  grad.data[kElems - 1] = 1.0f;
  sim::options().block_filter = [&](uint3 block) { return block.x + 1 == p.chunk_count; };
  expect_ok(adamw_cuda(p, nullptr));
  sim::options().block_filter = nullptr;
  expect(std::abs(param.data[kElems - 1] + 0.5f) < 1e-6f, "the last element");
  expect_equal("the element before", param.data[kElems - 2], 0.0f);
  expect_equal("an element 2^31 before", param.data[kElems - 1 - (int64_t{1} << 31)], 0.0f);
}

TEST(uploads_longer_than_one_launch_takes) {
  std::vector<int64_t> host(5001), device(5001, -1);
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<int64_t>(i * i);
  expect_ok(adamw_upload_cuda(host.data(), device.data(), 5000, nullptr));
  expect(std::equal(host.begin(), host.end() - 1, device.begin()), "words differ");
  expect_equal<int64_t, int64_t>("the word after the last", device[5000], -1);
}

TEST(the_chooser) {
  for (int64_t total : {int64_t{0}, int64_t{1}, int64_t{8'192'000}, int64_t{1} << 33}) {
    const int chunk = choose_adamw(total, 132).chunk_elems;
    expect(chunk % kAdamWTileElems == 0 && chunk <= kAdamWMaxChunkElems, "chunk of " + std::to_string(chunk));
  }
  expect_equal("small", choose_adamw(1000, 132).chunk_elems, kAdamWTileElems);
  expect_equal("2,000 tensors of 4,096", choose_adamw(8'192'000, 132).chunk_elems, 4096);
  expect_equal("three chunks for every resident block", choose_adamw(3 * 4 * 132 * 4096, 132).chunk_elems, 4096);
  expect_equal("one element less", choose_adamw(3 * 4 * 132 * 4096 - 1, 132).chunk_elems, 2048);
  expect_equal("large", choose_adamw(1'000'000'000, 132).chunk_elems, kAdamWMaxChunkElems);
}

RANDOM_TEST(random_lists) {
  Problem p;
  const int groups = static_cast<int>(random.integer(1, 3));
  for (int g = 0; g < groups; ++g)
    p.groups.push_back(group_of(1e-2, random.choice({0.9, 0.0, 0.6, 0.3}), 0.99, random.coin()));
  const int64_t count = random.integer(1, 6);
  for (int64_t i = 0; i < count; ++i) {
    Tensor& t = p.add(static_cast<size_t>(random.size(0, 9000)), static_cast<int>(random.integer(0, groups - 1)),
                      random.coin(), static_cast<size_t>(random.integer(0, 3)));
    t.has_grad = random.integer(0, 4) > 0;
  }
  p.build();
  p.step_under_every_seed();
}

}  // namespace
}  // namespace warpsmith::test
