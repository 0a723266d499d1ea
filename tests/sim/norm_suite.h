#pragma once
#include "norm_problem.h"

// What every op of the norm family is held to: each kernel of its chooser against the formula in double precision, with
// few rows and short ones where a kernel's width allows it. A suite calls these from its TESTs.
namespace warpsmith::test {

struct NormSuite {
  static constexpr int kSeedsOfNumbers = 2;
  Norm op;
  NormRow has = row_of(op);

  template <class T, class R = T, class W = T> void run(const NormShape& shape) const {
    NormCase<T, R, W>(op, shape).run();
  }

  // One row length for each kernel and vector count of the chooser.
  void every_kernel() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    for (int64_t columns : {8, 16, 128, 256, 264, 512, 768, 1024, 1032}) run<bfloat16>({.rows = 2, .columns = columns});
    for (int64_t columns : {4104, 12296}) run<bfloat16>({.rows = 1, .columns = columns});
    for (int64_t columns : {4, 8, 128, 132, 256, 384, 512, 516, 2052}) run<float>({.rows = 2, .columns = columns});
  }

  void storage_types() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    for (int64_t columns : {64, 768, 1544}) {
      run<float16>({.rows = 2, .columns = columns});
      run<float16, float16, float>({.rows = 2, .columns = columns});
      run<bfloat16, bfloat16, float>({.rows = 2, .columns = columns});
      if (!has.residual) continue;
      run<bfloat16, float>({.rows = 2, .columns = columns});
      run<float16, float, float>({.rows = 2, .columns = columns});
    }
  }

  void rows_that_are_not_vectors() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    for (int64_t columns : {1, 2, 3, 7, 33, 257, 1025, 4097}) run<bfloat16>({.rows = 3, .columns = columns});
    run<float>({.rows = 3, .columns = 33});
    run<float16, float16, float>({.rows = 3, .columns = 33});
    if (has.residual) run<bfloat16, float>({.rows = 3, .columns = 33});
  }

  void misaligned_and_strided_rows() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    run<bfloat16>({.rows = 5, .columns = 768, .offset = 1});
    run<bfloat16>({.rows = 5, .columns = 768, .padding = 3});
    run<bfloat16>({.rows = 5, .columns = 768, .padding = 8});
    run<float>({.rows = 5, .columns = 260, .padding = 4, .offset = 3});
    for (int argument = 0; argument < 11; ++argument)
      for (const int64_t columns : {64, 768})
        run<bfloat16>({.rows = 2, .columns = columns, .offset = Offsets::only(argument)});
  }

  // The least length that a block cannot hold: 512 threads with 4 vectors of 8 each.
  static constexpr int64_t kClusterColumns = 512 * 4 * 8 + 8;

  void rows_of_a_cluster() const { run<bfloat16>({.rows = 1, .columns = kClusterColumns}); }

  // Of rows whose sums are exact, rstd is right to a last place though the instruction behind it is not.
  void precise_rstd() const {
    const SeedsAtMost one(1);
    const uint64_t saved = sim::options().approximation;
    for (const int64_t columns : {16, 256, 1024, 4096, 8192, 16384}) {
      NormCase<bfloat16> p(op, {.rows = 6, .columns = columns});
      for (int64_t r = 0; r < 6; ++r)
        for (int64_t c = 0; c < columns; ++c) {
          const auto size = static_cast<float>(c % 4 < 2 ? r + 1 : 2 * r + 3);
          p.x[static_cast<size_t>(r * columns + c)] = from_float<bfloat16>(c % 2 ? size : -size);
        }
      p.forward.eps = 0;
      for (int64_t r = 0; r < 6; ++r) {
        const double a = static_cast<double>(r + 1), b = static_cast<double>(2 * r + 3);
        p.want_rstd[static_cast<size_t>(r)] = 1 / std::sqrt((a * a + b * b) / 2);
      }
      for (const uint64_t approximation : {1, 2}) {  // the instruction too large, too small
        sim::options().approximation = approximation;
        under_every_seed([&] {
          p.poison_outputs();
          expect_ok(norm_forward_cuda(p.forward, nullptr));
          expect_close("rstd of " + std::to_string(columns) + " columns", p.rstd, p.want_rstd, {.ulps = 1});
        });
      }
    }
    sim::options().approximation = saved;
  }

  void rows_too_long_for_the_chip() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    on_machine(132, 80, [&] {
      run<bfloat16>({.rows = 1, .columns = kClusterColumns});
      run<float>({.rows = 1, .columns = 6148});
    });
  }

  void more_rows_than_units() const {
    on_machine(2, 90, [&] {
      for (int64_t rows : {1, 33, 130}) run<bfloat16>({.rows = rows, .columns = 16});
      run<bfloat16>({.rows = 30, .columns = 264});
      run<bfloat16>({.rows = 21, .columns = 1032});
      run<bfloat16>({.rows = 19, .columns = 33});
      run<bfloat16>({.rows = 7, .columns = 12296});
    });
    on_machine(1, 90, [&] {  // statistics are loaded for 32 rows of a block at a time
      run<bfloat16>({.rows = 40, .columns = 2056});
      run<bfloat16>({.rows = 5, .columns = 4104});
    });
    on_machine(1, 80, [&] { run<bfloat16>({.rows = 3, .columns = 4104}); });  // where there are no clusters
  }

  // Inside under_every_seed: an inference asks for no mean and rstd, and has the same y.
  template <class Case> void same_without_statistics(Case& p) const {
    NormForwardParams inference = p.forward;
    inference.mean = inference.rstd = nullptr;
    p.poison_outputs();
    expect_ok(norm_forward_cuda(inference, nullptr));
    same_bits_for_every_seed("y", p.y);
  }

  template <class Case> static void check_forward_and_statistics(Case& p) {
    p.check_forward();
    same_bits_for_every_seed("rstd", p.rstd);
    same_bits_for_every_seed("mean", p.mean);
  }

  // The kernel of short rows whose length the compiler knows: the last warp has fewer rows than it could, and a row
  // alone, or at another place in a warp, gets the same bits.
  template <class T> void in_a_warp(const NormShape& shape) const {
    NormCase<T> p(op, shape);
    expect(choose_norm_forward(p.problem()).kernel == NormKernel::warp, "the rows lie in a warp");
    const auto check = [&] { check_forward_and_statistics(p); };
    under_every_seed([&] {
      p.poison_outputs();
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      check();
      p.poison_outputs();
      for (int64_t r = 0; r < shape.rows; ++r) {
        NormForwardParams alone = p.forward;
        alone.rows = 1;
        alone.x = p.x.data() + r * p.stride(), alone.y = p.y.data() + r * shape.columns;
        alone.rstd = p.rstd.data() + r;
        if (has.layer) alone.mean = p.mean.data() + r;
        expect_ok(norm_forward_cuda(alone, nullptr));
      }
      check();
      same_without_statistics(p);
    });
  }

  void rows_of_a_warp() const {
    for (int64_t columns : {64, 128, 256, 512, 768, 1024}) {
      in_a_warp<bfloat16>({.rows = 11, .columns = columns});
      in_a_warp<float16>({.rows = 3, .columns = columns, .padding = 8});
    }
  }

  // The kernel of a row in the registers of a block. `first`: of every second row, whose sums cancel about it where it
  // lies far from the others, so that they are taken twice.
  template <class T> void in_a_block(const NormShape& shape, float first) const {
    NormCase<T> p(op, shape);
    expect(choose_norm_forward(p.problem()).kernel == NormKernel::block, "a block has the row");
    for (int64_t r = 0; r < shape.rows; r += 2) p.x[static_cast<size_t>(r * p.stride())] = from_float<T>(first);
    p.compute_oracle();
    under_every_seed([&] {
      p.poison_outputs();
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      check_forward_and_statistics(p);
      same_without_statistics(p);
    });
  }

  void rows_of_a_block() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    in_a_block<bfloat16>({.rows = 2, .columns = 1536}, 60);
    in_a_block<float16>({.rows = 3, .columns = 2560, .padding = 8}, -60);
    in_a_block<bfloat16>({.rows = 3, .columns = 1600, .padding = 8}, 1000);
    in_a_block<float16>({.rows = 2, .columns = 1032}, 3);
    in_a_block<bfloat16>({.rows = 2, .columns = 4096, .mean = 1000}, 1000);
    in_a_block<bfloat16>({.rows = 1, .columns = 2304}, -60);
    in_a_block<bfloat16>({.rows = 1, .columns = 5120}, 60);
    in_a_block<float16>({.rows = 1, .columns = 4104}, 60);
    in_a_block<bfloat16>({.rows = 1, .columns = 12296}, -60);
  }

  // The kernels of rows in shared memory, which want more rows than registers hold at once: on one multiprocessor.
  template <class T> void in_shared_memory(NormKernel kernel, const NormShape& shape) const {
    NormCase<T> p(op, shape);
    NormProblem problem = p.problem();
    problem.multiprocessors = 1;
    const NormConfig c = choose_norm_forward(problem);
    expect(c.kernel == kernel, name(c.kernel));
    const int64_t row = shape.columns * 2, sums = has.layer ? 2 : 1;
    const auto check = [&] { check_forward_and_statistics(p); };
    under_every_seed([&] {
      p.poison_outputs();
      sim::counters() = {};
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      expect_bytes({.read = (shape.rows + sums * c.blocks) * row, .written = shape.rows * (row + 4 * sums)});
      check();
      // On a larger chip other kernels take as few rows: a row's bits do not depend on how many there are.
      p.poison_outputs();
      on_machine(132, 90, [&] { expect_ok(norm_forward_cuda(p.forward, nullptr)); });
      check();
      same_without_statistics(p);
    });
  }

  void rows_in_shared_memory() const {
    on_machine(1, 90, [&] {
      in_shared_memory<bfloat16>(NormKernel::shared, {.rows = 5, .columns = 8192});
      in_shared_memory<float16>(NormKernel::shared, {.rows = 5, .columns = 8192, .padding = 8});
      in_shared_memory<bfloat16>(NormKernel::shared, {.rows = 4, .columns = 12288});
      in_shared_memory<bfloat16>(NormKernel::resident, {.rows = 5, .columns = 12288, .padding = 8});
      in_shared_memory<float16>(NormKernel::resident, {.rows = 8, .columns = 12288});
      in_shared_memory<float16>(NormKernel::shared, {.rows = 9, .columns = 12288});
    });
  }

  void no_weight_or_bias() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    for (int64_t columns : {24, 1032, 4097}) {
      run<bfloat16>({.rows = 2, .columns = columns, .weight = false});
      if (!has.layer) continue;
      run<bfloat16>({.rows = 2, .columns = columns, .bias = false});
      run<bfloat16>({.rows = 2, .columns = columns, .weight = false, .bias = false});
    }
  }

  void no_gradient_of_the_residual() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    for (int64_t columns : {24, 1032, 1033}) run<bfloat16>({.rows = 2, .columns = columns, .dresidual_out = false});
  }

  void each_gradient_alone() const {
    for (int64_t columns : {16, 1032, 1033})
      NormCase<bfloat16>(op, {.rows = 3, .columns = columns}).run_each_gradient();
  }

  // The floor of the kernels' contract, and what each adds to it: weight and bias once a group of rows (forward) or
  // once a unit (backward), the statistics by every thread of a row (batches: every warp), partial sums.
  void bytes_moved(int64_t rows, int64_t columns) const {
    const SeedsAtMost few(kSeedsOfNumbers);
    const int64_t row = columns * 2, gradients = has.layer ? 2 : 1;
    NormCase<bfloat16> p(op, {.rows = rows, .columns = columns});
    const NormConfig forward = choose_norm_forward(p.problem()), backward = choose_norm_backward(p.problem());
    const int64_t partial_rows = norm_partial_rows(backward), partials = gradients * partial_rows * columns * 4;
    const int64_t seed_reads = has.dropout ? 16 : 0;
    const bool batches = backward.kernel == NormKernel::batches;
    const int64_t statistics_readers = backward.lanes * backward.cluster / (batches ? 32 : 1);
    // The ring reads the seed once more for each vector.
    const int64_t seed_readers = batches ? backward.blocks * backward.threads : rows * columns / backward.vector_elems;
    const int64_t block_rows = int64_t{forward.rows} * forward.groups();  // its groups take rows in turn
    const bool warps = forward.kernel == NormKernel::warp;  // which start with a whole number of warps' rows
    const int64_t first_reads = forward.kernel == NormKernel::block ? forward.threads * 8 : 0;  // by every thread
    const int64_t loaded_weights =
        warps ? rows / forward.rows
              : rows / block_rows * forward.groups() + std::min<int64_t>(rows % block_rows, forward.groups());
    p.make_room(partial_rows);
    under_every_seed([&] {
      expect_ok(norm_forward_cuda(p.forward, nullptr));
      const int64_t threads = forward.blocks * forward.threads;
      expect_bytes({.read = rows * (row * (has.residual ? 2 : 1) + first_reads) + gradients * loaded_weights * row +
                            threads * seed_reads,
                    .written = rows * row * (has.residual ? 2 : 1) + gradients * rows * 4});
      sim::counters() = {};
      expect_ok(norm_backward_cuda(p.backward, nullptr));
      expect_bytes({.read = rows * row * (has.residual ? 3 : 2) + partial_rows * backward.groups() * row + partials +
                            gradients * rows * 4 * statistics_readers + seed_readers * seed_reads,
                    .written = rows * row * (p.separate_dresidual() ? 2 : 1) + partials + gradients * row});
    });
  }

  void unknown_dtype_is_refused() const {
    NormCase<float> p(op, {.rows = 1, .columns = 4});
    p.forward.dtype = p.forward.residual_dtype = p.forward.weight_dtype = Dtype::float64;
    expect_refused(norm_forward_cuda(p.forward, nullptr), "float64");
    p.forward.columns = 3;
    expect_refused(norm_forward_cuda(p.forward, nullptr), "float64");
    p.backward.dtype = p.backward.residual_dtype = p.backward.weight_dtype = Dtype::float64;
    expect_refused(norm_backward_cuda(p.backward, nullptr), "float64");
  }

  // 2^31 elements and more, in memory that is never touched but for the rows under test: row starts need 64 bits.
  void beyond_2_31_elements() const {
    const SeedsAtMost few(kSeedsOfNumbers);
    constexpr int64_t kRows = 3, kColumns = 768, kStride = int64_t{1} << 31;
    sim::SparseMemory<bfloat16> x(kRows * kStride);
    NormCase<bfloat16> near(op, {.rows = kRows, .columns = kColumns});
    for (int64_t r = 0; r < kRows; ++r) std::memcpy(x.data() + r * kStride, near.x.data() + r * kColumns, kColumns * 2);
    near.forward.x = x.data();
    near.forward.x_stride = kStride;
    under_every_seed([&] {
      near.y.poison();
      expect_ok(norm_forward_cuda(near.forward, nullptr));
      near.check_forward();
    });
  }

  // The last rows of contiguous tensors of more than 2^31 elements, by every kernel: outputs too need 64-bit offsets.
  template <class T, class R = T> void in_far_rows(int64_t columns, int resident = 0) const {
    const int64_t rows = 3, first = first_far_row(columns, rows, resident ? 2 * resident : 1);
    NormCase<T, R>(op, {.rows = rows, .columns = columns, .first_row = first}).run_far_rows(resident);
  }

  void far_rows() const {
    const SeedsAtMost one(1);
    for (int64_t columns : {64, 512, 1032, 2560, 4104, 8192, 12288}) in_far_rows<bfloat16>(columns);
    in_far_rows<bfloat16>(kClusterColumns);
    in_far_rows<bfloat16>(33);
    in_far_rows<float>(1028);
    if (!has.residual && sim::options().properties.code_capability >= kSm90) in_far_rows<bfloat16>(12288, 30'000);
    if (has.residual)
      for (int64_t columns : {256, 1032, 8192}) in_far_rows<bfloat16, float>(columns);
  }

  template <class T, class R, class W> void run_random_of(Random& random) const {
    NormShape s{.rows = random.size(1, 40), .columns = random.size(1, 2100)};
    if (random.coin()) s.columns = (s.columns + 7) / 8 * 8;
    s.padding = random.choice<int64_t>({0, 8, 1});
    s.offset = Offsets::draw(random, 11);
    s.weight = random.integer(0, 4) > 0;
    s.bias = random.integer(0, 4) > 0;
    s.dresidual_out = random.integer(0, 4) > 0;
    s.weight_offset = !has.layer && random.coin() ? 1 : 0;
    s.drop = random.choice<double>({0.25, 0.0, 0.9, 1.0});
    s.statistics = random.coin();
    NormCase<T, R, W> p(op, s, random.bits() % 1000);
    p.leave_out_gradients(random);
    p.run();
  }

  // Rows that blocks of a cluster share, several of them one after the other, and those of the kernels that have
  // lengths of their own.
  void run_random_of_few_multiprocessors(Random& random) const {
    on_machine(static_cast<int>(random.integer(1, 3)), random.integer(0, 3) ? 90 : 80, [&] {
      NormShape s{.rows = random.size(1, 12), .columns = 8 * random.size(513, 2048)};
      if (random.coin()) s.columns = random.choice<int64_t>({64, 128, 256, 512, 768, 1024, 8192, 12288});
      s.padding = random.choice<int64_t>({0, 8});
      s.dresidual_out = random.coin();
      switch (random.integer(0, 2)) {
        case 0: return NormCase<bfloat16, bfloat16, bfloat16>(op, s, random.bits() % 1000).run();
        case 1: return NormCase<float16, float16, float16>(op, s, random.bits() % 1000).run();
        default: return NormCase<float, float, float>(op, s, random.bits() % 1000).run();
      }
    });
  }

  void run_random(Random& random) const {
    switch (random.integer(0, has.residual ? 6 : 4)) {
      case 0: return run_random_of<bfloat16, bfloat16, bfloat16>(random);
      case 1: return run_random_of<float, float, float>(random);
      case 2: return run_random_of<float16, float16, float16>(random);
      case 3: return run_random_of<bfloat16, bfloat16, float>(random);
      case 4: return run_random_of<float16, float16, float>(random);
      case 5: return run_random_of<bfloat16, float, float>(random);
      default: return run_random_of<float16, float, float16>(random);
    }
  }
};

}  // namespace warpsmith::test
