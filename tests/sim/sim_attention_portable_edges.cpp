// The portable kernels of attention on the host: far and wrong offsets, strides of 0, what is hidden, what is refused.
// links: csrc/kernels/attention/portable/attention_portable.cu
// links: csrc/kernels/attention/portable/portable_bfloat16.cu
// links: csrc/kernels/attention/portable/portable_float16.cu
// links: csrc/kernels/attention/portable/portable_float32.cu
#include "attention_portable_runs.h"
#include "far.h"

namespace warpsmith::test {
namespace {

// Offsets beyond 2^31 elements along tokens and sequences: the tensor as it lies in a larger one.
template <class T> struct FarHeads {
  static constexpr int64_t kToken = int64_t{1} << 27;
  HeadBuffer<T>& near;
  int64_t batch, length, heads;
  AttentionStrides strides;
  sim::SparseMemory<T> memory;

  FarHeads(HeadBuffer<T>& from, int64_t sequences, int64_t tokens, int64_t all_heads)
      : near(from),
        batch(sequences),
        length(tokens),
        heads(all_heads),
        strides{tokens * kToken, kToken, from.dim},
        memory(static_cast<size_t>(sequences * tokens * kToken)) {
    for_rows([&](T* here, T* there) { std::copy_n(here, near.dim, there); });
  }
  void fetch() {
    for_rows([&](T* here, T* there) { std::copy_n(there, near.dim, here); });
  }

 private:
  template <class F> void for_rows(F&& f) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < length; ++i)
        for (int64_t h = 0; h < heads; ++h)
          f(&near.data[near.at(b, i, h, 0)], memory.data() + b * strides.batch + i * strides.seq + h * strides.head);
  }
};

TEST(offsets_beyond_32_bits) {
  SeedsAtMost few(1);
  AttentionData<bfloat16> data({.batch = 2, .queries = 18, .keys = 17, .heads = 2, .key_heads = 2, .head_dim = 16});
  solve_gradients(data);
  FarHeads q(data.q, 2, 18, 2), k(data.k, 2, 17, 2), v(data.v, 2, 17, 2), out(data.out, 2, 18, 2);
  FarHeads dout(data.dout, 2, 18, 2), dq(data.dq, 2, 18, 2), dk(data.dk, 2, 17, 2), dv(data.dv, 2, 17, 2);
  under_every_seed([&] {
    AttentionFwdParams f = data.forward();
    f.q = q.memory.data(), f.k = k.memory.data(), f.v = v.memory.data(), f.out = out.memory.data();
    f.q_strides = q.strides, f.k_strides = k.strides, f.v_strides = v.strides, f.out_strides = out.strides;
    expect_ok(attention_forward_portable(f, nullptr));
    data.out.data.poison();
    out.fetch();
    compare_forward(data);
    AttentionBwdParams b = data.backward();
    data.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(b)));
    b.workspace = data.workspace.data();
    b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.dout = dout.memory.data();
    b.dq = dq.memory.data(), b.dk = dk.memory.data(), b.dv = dv.memory.data();
    b.q_strides = q.strides, b.k_strides = k.strides, b.v_strides = v.strides, b.out_strides = out.strides;
    b.dout_strides = dout.strides, b.dq_strides = dq.strides, b.dk_strides = dk.strides, b.dv_strides = dv.strides;
    expect_ok(attention_backward_portable(b, nullptr));
    data.poison_gradients();
    dq.fetch(), dk.fetch(), dv.fetch();
    compare_gradients(data);
  });
}

// One query, key and head of each of 70,000 sequences, of which the last 20 run. They are those of a small problem.
TEST(more_sequences_than_a_grid_has_rows) {
  SeedsAtMost few(1);
  constexpr int64_t kAll = 70000, kRun = 20;
  AttentionData<float16> data({.batch = kRun, .head_dim = 8}), all({.batch = kAll, .head_dim = 8});
  solve_gradients(data);
  const auto to_all = [](auto& small, auto& large) {
    std::copy_n(small.data(), small.size(), large.data() + large.size() - small.size());
  };
  const auto from_all = [](auto& small, auto& large) {
    std::copy_n(large.data() + large.size() - small.size(), small.size(), small.data());
  };
  to_all(data.q.data, all.q.data), to_all(data.k.data, all.k.data), to_all(data.v.data, all.v.data);
  to_all(data.dout.data, all.dout.data), to_all(data.dlse, all.dlse);
  const FarMachine machine(kRun);
  under_every_seed([&] {
    expect_ok(attention_forward_portable(all.forward(), nullptr));
    from_all(data.out.data, all.out.data), from_all(data.lse, all.lse);
    compare_forward(data);
    AttentionBwdParams p = all.backward();
    all.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(p)));
    p.workspace = all.workspace.data();
    expect_ok(attention_backward_portable(p, nullptr));
    from_all(data.dq.data, all.dq.data), from_all(data.dk.data, all.dk.data), from_all(data.dv.data, all.dv.data);
    compare_gradients(data);
  });
}

// Keys, values and gradients of stride 0: one row for all tokens and sequences. The same bits as of tensors that hold
// the row for every token. With a mask the kernels are others.
void check_expanded(const std::string& mask) {
  AttentionData<bfloat16> data(
      {.batch = 2, .queries = 40, .keys = 30, .heads = 2, .key_heads = 2, .head_dim = 16, .mask = mask});
  std::fill_n(data.mask.data(), data.mask.size(), static_cast<unsigned char>(1));
  const auto spread = [](HeadBuffer<bfloat16>& x, int64_t tokens) {
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t h = 0; h < 2; ++h) std::copy_n(&x.data[x.at(0, 0, h, 0)], x.dim, &x.data[x.at(b, i, h, 0)]);
  };
  spread(data.k, 30), spread(data.v, 30), spread(data.dout, 40);
  solve_gradients(data);
  const auto bits = [&] {
    run_forward(data);
    AttentionBwdParams p = data.backward();
    data.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(p)));
    p.workspace = data.workspace.data();
    data.poison_gradients();
    expect_ok(attention_backward_portable(p, nullptr));
    // Equal keys have equal errors. The law of kernels that take delta from out holds for independent ones.
    if (!data.delta_of_rounded_out) compare_gradients(data);
    std::vector<uint16_t> all;
    for (const auto* x : {&data.dq, &data.dk, &data.dv})
      for (size_t i = 0; i < x->data.size(); ++i) all.push_back(x->data[i].bits);
    return all;
  };
  const AttentionStrides of_k = data.k.strides, of_v = data.v.strides, of_dout = data.dout.strides;
  under_every_seed([&] {
    data.k.strides = of_k, data.v.strides = of_v, data.dout.strides = of_dout;
    const auto want = bits();
    data.k.strides.batch = data.k.strides.seq = data.v.strides.batch = data.v.strides.seq = 0;
    data.dout.strides.batch = data.dout.strides.seq = 0;
    expect(bits() == want, "expanded tensors have other gradients");
  });
}
TEST(expanded_tensors) {
  SeedsAtMost few(2);
  check_expanded("");
  check_expanded("0011");
}

TEST(no_tokens_and_results_that_nobody_wants) {
  SeedsAtMost few(1);
  check<bfloat16>({.queries = 40, .keys = 0, .head_dim = 16, .sink = true});
  check<bfloat16>({.queries = 0, .keys = 40, .head_dim = 16, .sink = true, .bias = "0101"});
  check<bfloat16>({.queries = 0, .keys = 300, .head_dim = 16});
  AttentionData<bfloat16> data({.queries = 40, .keys = 30, .sink = true, .bias = "0011"});
  solve_gradients(data);
  under_every_seed([&] {
    AttentionFwdParams f = data.forward();
    f.lse = nullptr;
    expect_ok(attention_forward_portable(f, nullptr));
    expect_within("out", data.out.data, data.want_out, data.of_out);
    AttentionBwdParams b = data.backward();
    data.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(b)));
    b.workspace = data.workspace.data(), b.dbias = nullptr, b.dsink = nullptr;
    expect_ok(attention_backward_portable(b, nullptr));
    expect_within("dq", data.dq.data, data.want_dq, data.of_dq);
  });
  const std::vector<double> with = data.want_dq;
  solve_gradients(data, /*with_dlse=*/false);
  under_every_seed([&] {
    AttentionBwdParams b = data.backward();
    b.workspace = data.workspace.data(), b.dlse = nullptr;
    data.poison_gradients();
    expect_ok(attention_backward_portable(b, nullptr));
    compare_gradients(data);
  });
  expect(with != data.want_dq, "the gradient of lse counts for nothing");
}

// What is hidden may hold anything.
TEST(hidden_elements_that_are_not_finite) {
  SeedsAtMost few(2);
  AttentionData<float16> data({.queries = 70, .keys = 90, .window_right = 0, .bias = "0011", .mask = "0011"});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  solve_gradients(data);
  for (int64_t i = 0; i < 70; ++i)
    for (int64_t j = 0; j < 90; ++j)
      if (j > i + 20 || data.mask[data.mask_shape.at(0, 0, i, j)] == 0)
        data.narrow_bias[data.bias_shape.at(0, 0, i, j)] = from_float<float16>(nan);
  under_every_seed([&] {
    run_forward(data);
    run_backward(data);
  });
}

// Offsets that fall, lie outside of the tensors or make sequences too long lead to no access out of bounds, which the
// address sanitizer would see. No token here belongs to two sequences: it would be written twice.
TEST(offsets_of_sequences_that_are_wrong) {
  SeedsAtMost few(2);
  const std::pair<std::vector<int32_t>, std::vector<int32_t>> offsets[] = {
      {{30, -7, 90, 21}, {40, 90, -7, 61}},
      {{-2000000000, 2000000000, 30, 51}, {100, 2000000000, 2000000000, 0}},
      {{70, 0, 61, 300}, {0, -5, 61, 30}}};
  for (const auto& [of_q, of_k] : offsets) {
    AttentionData<bfloat16> data({.heads = 2,
                                  .head_dim = 16,
                                  .sink = true,
                                  .lengths_q = {20, 21, 20},
                                  .lengths_k = {20, 21, 20},
                                  .bias = "0011",
                                  .dropout = 0.5});
    solve_gradients(data);
    std::copy(of_q.begin(), of_q.end(), data.cu_q.data());
    std::copy(of_k.begin(), of_k.end(), data.cu_k.data());
    under_every_seed([&] {
      expect_ok(attention_forward_portable(data.forward(), nullptr));
      AttentionBwdParams p = data.backward();
      data.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(p)));
      p.workspace = data.workspace.data();
      expect_ok(attention_backward_portable(p, nullptr));
    });
  }
}

// Its weight is 1 whatever q and k are: the difference that their gradients are made of is 0 to the last bit.
TEST(queries_that_see_one_key_in_float32) {
  SeedsAtMost few(2);
  AttentionData<float> data({.queries = 40, .keys = 40, .head_dim = 40, .window_left = 0, .window_right = 0});
  solve_gradients(data);
  under_every_seed([&] {
    sim::options().approximation = 0;  // 2^0 is 1
    run_forward(data);
    AttentionBwdParams p = data.backward();
    data.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(p)));
    p.workspace = data.workspace.data(), p.dlse = nullptr;
    expect_ok(attention_backward_portable(p, nullptr));
    for (size_t i = 0; i < data.dq.data.size(); ++i)
      expect(data.dq.data[i] == 0 && data.dk.data[i] == 0, "a gradient is not 0");
  });
}

// What the law of attention_law.h sees: kernels that run a problem which differs a little from the one that is
// compared.
template <class T> bool within_the_law(AttentionData<T>& data, const AttentionFwdParams& f, AttentionBwdParams b) {
  expect_ok(attention_forward_portable(f, nullptr));
  data.workspace = Buffer<unsigned char>(static_cast<size_t>(attention_backward_workspace_portable(b)));
  b.workspace = data.workspace.data();
  expect_ok(attention_backward_portable(b, nullptr));
  return is_within(data.dq.data, data.want_dq, data.of_dq) && is_within(data.dk.data, data.want_dk, data.of_dk) &&
         is_within(data.dv.data, data.want_dv, data.of_dv);
}
template <class T> void check_that_the_law_sees_small_faults() {
  AttentionData<T> data({.queries = 64, .keys = 64, .head_dim = 64, .mask = "0011"});
  std::fill_n(data.mask.data(), data.mask.size(), static_cast<unsigned char>(1));
  solve_gradients(data);
  under_every_seed([&] {
    AttentionFwdParams f = data.forward();
    AttentionBwdParams b = data.backward();
    expect(within_the_law(data, f, b), "no fault is outside of the law");

    f.problem.softmax_scale *= 1 + 0x1p-8;
    b.problem.softmax_scale = f.problem.softmax_scale;
    expect(!within_the_law(data, f, b), "another scale is within the law");
    f = data.forward(), b.problem = f.problem;

    data.mask[data.mask_shape.at(0, 0, 20, 30)] = 0;  // one key of 64, for one query
    expect(!within_the_law(data, f, b), "a key that is left out is within the law");
    data.mask[data.mask_shape.at(0, 0, 20, 30)] = 1;

    double delta = 0;
    for (int64_t d = 0; d < 64; ++d)
      delta += static_cast<double>(to_float(data.dout.data[data.dout.at(0, 20, 0, d)])) *
               data.want_out[data.out.at(0, 20, 0, d)];
    const float dlse = data.dlse[20];
    data.dlse[20] += static_cast<float>(delta);  // dP - (delta - dlse) is dP
    expect(!within_the_law(data, f, b), "a row without delta is within the law");
    data.dlse[20] = dlse;
  });
}
TEST(small_faults_are_outside_of_the_law) {
  SeedsAtMost few(1);
  check_that_the_law_sees_small_faults<bfloat16>();
  check_that_the_law_sees_small_faults<float16>();
  check_that_the_law_sees_small_faults<float>();
}

TEST(what_no_kernel_takes) {
  AttentionData<bfloat16> data({.queries = 20, .keys = 20, .head_dim = 16});
  AttentionFwdParams f = data.forward();
  f.problem.dtype = Dtype::float64;
  expect_refused(attention_forward_supported_portable(f), "no portable kernel for float64");
  f = data.forward();
  f.k = data.k.data.data() + 1;
  expect_refused(attention_forward_supported_portable(f), "no multiples of 16 bytes");
  f = data.forward();
  f.out_strides.seq += 1;
  expect_refused(attention_forward_supported_portable(f), "no multiples of 16 bytes");
  f = data.forward();
  f.problem.batch = int64_t{1} << 31;
  expect_refused(attention_forward_supported_portable(f), "more than 2^31 - 1 tiles");
  AttentionBwdParams b = data.backward();
  b.dv = data.dv.data.data() + 4;
  expect_refused(attention_backward_supported_portable(b), "no multiples of 16 bytes");
  b = data.backward();
  b.problem.seqlen_k = int64_t{1} << 28;
  expect_refused(attention_backward_supported_portable(b), "sequences of 2^28 tokens or more");
}

}  // namespace
}  // namespace warpsmith::test
