#pragma once
#include <algorithm>

#include "dtypes.h"
#include "far.h"
#include "harness.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/activation_config.h"

// The sim tests of the gated activations.
namespace warpsmith::test {

// An op, with its function and derivative in double.
struct GatedOp {
  Gated row;
  double (*value)(double);
  double (*derivative)(double);
  bool tanh = false;
  Status forward(const GatedFwdParams& p, void* stream) const { return gated_forward_cuda(row, p, stream); }
  Status backward(const GatedBwdParams& p, void* stream) const { return gated_backward_cuda(row, p, stream); }
};

struct GatedShape {
  int64_t rows, columns;
  int64_t padding = 0;  // elements between rows of the inputs
  Offsets offset = {};  // of the arguments
  bool packed = false;  // gate, up and their gradients are halves of one tensor
};

template <class T> struct GatedProblem {
  GatedOp op;
  GatedShape s;
  Buffer<T> gate, up, dy, y, dgate, dup;  // packed: gate and dgate hold both
  std::vector<double> want_y, want_dgate, want_dup;
  GatedFwdParams forward{};
  GatedBwdParams backward{};

  static size_t count(int64_t n) { return static_cast<size_t>(n); }
  int64_t in_columns() const { return s.packed ? 2 * s.columns : s.columns; }
  int64_t in_stride() const { return in_columns() + s.padding; }
  int64_t out_stride() const { return in_columns(); }
  double at(const Buffer<T>& b, int64_t i) const { return static_cast<double>(to_float(b[count(i)])); }

  GatedProblem(const GatedOp& o, const GatedShape& shape, uint64_t seed = 1)
      : op(o),
        s(shape),
        gate(count(shape.rows * in_stride()), shape.offset[0]),
        up(shape.packed ? 0 : count(shape.rows * in_stride()), shape.offset[1]),
        dy(count(shape.rows * shape.columns), shape.offset[2]),
        y(count(shape.rows * shape.columns), shape.offset[3]),
        dgate(count(shape.rows * in_columns()), shape.offset[4]),
        dup(shape.packed ? 0 : count(shape.rows * shape.columns), shape.offset[5]) {
    fill_normal(gate, seed, 2.0f);
    fill_normal(up, seed + 1);
    fill_normal(dy, seed + 2);
    const T* up_data = s.packed ? gate.data() + s.columns : up.data();
    T* dup_data = s.packed ? dgate.data() + s.columns : dup.data();
    forward = {gate.data(), up_data, y.data(), s.rows, s.columns, in_stride(), in_stride(), op.tanh, kDtype<T>};
    backward = {dy.data(), gate.data(), up_data,     dgate.data(), dup_data,     s.rows,  s.columns,
                s.columns, in_stride(), in_stride(), out_stride(), out_stride(), op.tanh, kDtype<T>};
    compute_oracle();
  }

  void compute_oracle() {
    want_y.resize(y.size());
    want_dgate.resize(dgate.size());
    want_dup.resize(dup.size());
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t c = 0; c < s.columns; ++c) {
        const double g = at(gate, r * in_stride() + c), d = at(dy, r * s.columns + c);
        const double u = s.packed ? at(gate, r * in_stride() + s.columns + c) : at(up, r * in_stride() + c);
        want_y[count(r * s.columns + c)] = op.value(g) * u;
        want_dgate[count(r * out_stride() + c)] = d * u * op.derivative(g);
        (s.packed ? want_dgate[count(r * out_stride() + s.columns + c)] : want_dup[count(r * s.columns + c)]) =
            d * op.value(g);
      }
  }

  // Half a rounding step of the storage type, and a few of float.
  static Tolerance rounding() { return {.ulps = 0.51, .relative = 4e-6, .absolute = 1e-6}; }

  void check_backward() {
    if (backward.dgate) expect_close("dgate", dgate, want_dgate, rounding());
    if (backward.dup) expect_close("dup", dup, want_dup, rounding());
    same_bits_for_every_seed("dgate", dgate);
    same_bits_for_every_seed("dup", dup);
  }

  // The gradients take the place of gate and up.
  void run_in_place() {
    const Buffer<T>&gate_before = gate, &up_before = up;
    backward.gate = dgate.data(), backward.up = backward.dup;
    backward.gate_stride = backward.dgate_stride, backward.up_stride = backward.dup_stride;
    under_every_seed([&] {
      for (int64_t r = 0; r < s.rows; ++r) {
        std::memcpy(dgate.data() + r * out_stride(), gate_before.data() + r * in_stride(),
                    count(in_columns()) * sizeof(T));
        if (!s.packed)
          std::memcpy(dup.data() + r * s.columns, up_before.data() + r * in_stride(), count(s.columns) * sizeof(T));
      }
      expect_ok(op.backward(backward, nullptr));
      check_backward();
    });
  }

  void run() {
    under_every_seed([&] {
      y.poison(), dgate.poison(), dup.poison();
      expect_ok(op.forward(forward, nullptr));
      expect_close("y", y, want_y, rounding());
      same_bits_for_every_seed("y", y);
      expect_ok(op.backward(backward, nullptr));
      check_backward();
    });
  }
};

// Every path of the elementwise body: flat with and without a last vector that is not full, rows of vectors, single
// elements; each dtype.
inline void gated_paths(const GatedOp& op) {
  GatedProblem<bfloat16>(op, {.rows = 3, .columns = 1032}).run();
  GatedProblem<bfloat16>(op, {.rows = 3, .columns = 33}).run();
  GatedProblem<float16>(op, {.rows = 2, .columns = 264}).run();
  GatedProblem<float>(op, {.rows = 2, .columns = 514}).run();
  for (const int64_t columns : {1, 33, 264}) {
    GatedProblem<bfloat16>(op, {.rows = 5, .columns = columns, .packed = true}).run();
    GatedProblem<float>(op, {.rows = 5, .columns = columns, .packed = true}).run();
  }
  GatedProblem<float16>(op, {.rows = 2, .columns = 264, .packed = true}).run();
  GatedProblem<bfloat16>(op, {.rows = 1, .columns = 264, .packed = true}).run();
}

inline void gated_layouts(const GatedOp& op) {
  GatedProblem<bfloat16>(op, {.rows = 5, .columns = 64, .offset = 1}).run();
  for (int argument = 0; argument < 6; ++argument)
    GatedProblem<bfloat16>(op, {.rows = 5, .columns = 64, .offset = Offsets::only(argument)}).run();
  GatedProblem<bfloat16>(op, {.rows = 5, .columns = 64, .padding = 3}).run();
  GatedProblem<bfloat16>(op, {.rows = 5, .columns = 64, .padding = 8}).run();
  GatedProblem<float>(op, {.rows = 5, .columns = 60, .padding = 4, .offset = 3}).run();
  GatedProblem<float16>(op, {.rows = 5, .columns = 60, .padding = 1, .packed = true}).run();
}

// The gradients over their inputs, and each gradient alone.
inline void gated_gradients(const GatedOp& op) {
  for (const bool packed : {false, true}) {
    GatedProblem<bfloat16> p(op, {.rows = 3, .columns = 136, .packed = packed});
    Buffer<bfloat16> gate(p.gate.size()), up(p.up.size());
    std::memcpy(gate.data(), p.gate.data(), gate.size() * sizeof(bfloat16));
    std::memcpy(up.data(), p.up.data(), up.size() * sizeof(bfloat16));
    GatedBwdParams b = p.backward;
    b.gate = b.dgate = p.dgate.data();
    b.up = b.dup = packed ? p.dgate.data() + p.s.columns : p.dup.data();
    under_every_seed([&] {
      std::memcpy(p.dgate.data(), gate.data(), gate.size() * sizeof(bfloat16));
      std::memcpy(p.dup.data(), up.data(), up.size() * sizeof(bfloat16));
      expect_ok(op.backward(b, nullptr));
      p.check_backward();
    });
  }
  GatedProblem<float> p(op, {.rows = 3, .columns = 136});
  under_every_seed([&] {
    GatedBwdParams one = p.backward;
    one.dup = nullptr;
    expect_ok(op.backward(one, nullptr));
    expect_close("dgate", p.dgate, p.want_dgate, p.rounding());
    expect_bytes({.read = 3 * 3 * 136 * 4, .written = 3 * 136 * 4});
    one = p.backward;
    one.dgate = nullptr;
    expect_ok(op.backward(one, nullptr));
    expect_close("dup", p.dup, p.want_dup, p.rounding());
  });
}

// With what the forward gave over dy, bit for bit, and the gradients over gate and up: one tensor and two; full
// vectors, a last one that is not, single elements; 3 elements read and 3 written.
inline void gated_output_again(const GatedOp& op) {
  const auto run = [&]<class T>(T, const GatedShape& shape) {
    GatedProblem<T> p(op, shape);
    const int64_t unit = shape.rows * shape.columns * int64_t{sizeof(T)};
    Buffer<T> gate(p.gate.size()), up(p.up.size()), dy(p.dy.size());
    const auto copy = [](Buffer<T>& to, const Buffer<T>& from) {
      std::memcpy(to.data(), from.data(), from.size() * sizeof(T));
    };
    copy(gate, p.gate), copy(up, p.up), copy(dy, p.dy);
    GatedBwdParams b = p.backward;
    b.gate = b.dgate = p.dgate.data();
    b.up = b.dup = shape.packed ? p.dgate.data() + shape.columns : p.dup.data();
    b.dy = b.y = dy.data();
    under_every_seed([&] {
      copy(p.dgate, gate), copy(p.dup, up), copy(dy, p.dy);
      expect_ok(op.forward(p.forward, nullptr));
      sim::counters() = {};
      expect_ok(op.backward(b, nullptr));
      expect_bytes({.read = 3 * unit, .written = 3 * unit});
      p.check_backward();
      if (std::memcmp(dy.data(), p.y.data(), dy.size() * sizeof(T)) != 0) fail("y: other bits than the forward's");
    });
  };
  for (const bool packed : {false, true}) {
    run(bfloat16{}, {.rows = 3, .columns = 1032, .packed = packed});
    run(bfloat16{}, {.rows = 3, .columns = 33, .packed = packed});
    run(float{}, {.rows = 2, .columns = 514, .packed = packed});
    run(float16{}, {.rows = 2, .columns = 264, .packed = packed});
  }
}

// Exactly the floor: 3 elements forward, 5 backward; one tensor and two, full vectors and not.
inline void gated_bytes(const GatedOp& op) {
  for (const GatedShape& shape : {GatedShape{.rows = 6, .columns = 1032}, GatedShape{.rows = 7, .columns = 33},
                                  GatedShape{.rows = 6, .columns = 264, .packed = true}}) {
    GatedProblem<bfloat16> p(op, shape);
    const int64_t unit = shape.rows * shape.columns * 2;
    under_every_seed([&] {
      expect_ok(op.forward(p.forward, nullptr));
      expect_bytes({.read = 2 * unit, .written = unit});
      sim::counters() = {};
      expect_ok(op.backward(p.backward, nullptr));
      expect_bytes({.read = 3 * unit, .written = 2 * unit});
    });
  }
}

// Rows 2^31 elements apart, in memory that is never touched but for the rows under test; and the last elements of a
// flat tensor of more than 2^31.
inline void gated_beyond_2_31(const GatedOp& op) {
  constexpr int64_t kRows = 3, kColumns = 264, kStride = int64_t{1} << 31;
  GatedProblem<bfloat16> near(op, {.rows = kRows, .columns = kColumns});
  sim::SparseMemory<bfloat16> gate(kRows * kStride);
  for (int64_t r = 0; r < kRows; ++r)
    std::memcpy(gate.data() + r * kStride, near.gate.data() + r * kColumns, kColumns * 2);
  near.forward.gate = gate.data();
  near.forward.gate_stride = kStride;
  under_every_seed([&] {
    near.y.poison();
    expect_ok(op.forward(near.forward, nullptr));
    expect_close("y", near.y, near.want_y, near.rounding());
  });

  constexpr int64_t kElements = (int64_t{1} << 31) + 5, kBlock = ElementwiseConfig{}.threads * 8,
                    kFirst = kElements / kBlock * kBlock;
  sim::SparseMemory<bfloat16> flat_gate(kElements), flat_up(kElements), flat_y(kElements);
  GatedProblem<bfloat16> last(op, {.rows = 1, .columns = kElements - kFirst});
  std::memcpy(flat_gate.data() + kFirst, last.gate.data(), last.gate.size() * 2);
  std::memcpy(flat_up.data() + kFirst, last.up.data(), last.up.size() * 2);
  const GatedFwdParams p{flat_gate.data(), flat_up.data(), flat_y.data(),  1, kElements, kElements,
                         kElements,        op.tanh,        Dtype::bfloat16};
  sim::options().block_filter = [](uint3 block) { return block.x == kFirst / kBlock; };
  under_every_seed([&] {
    expect_ok(op.forward(p, nullptr));
    std::memcpy(last.y.data(), flat_y.data() + kFirst, last.y.size() * 2);
    expect_close("y", last.y, last.want_y, last.rounding());
  });
  sim::options().block_filter = {};
}

// The last rows of tensors of more than 2^31 elements: flat, and halves of one tensor.
inline void gated_far_rows(const GatedOp& op) {
  const SeedsAtMost one(1);
  for (const bool packed : {false, true}) {
    constexpr int64_t kRows = 3, kColumns = 264;
    GatedProblem<bfloat16> near(op, {.rows = kRows, .columns = kColumns, .packed = packed});
    const int64_t first = first_far_row(kColumns), in = near.in_columns();
    Far<bfloat16> gate(near.gate, first, in), up(near.up, first, kColumns), dy(near.dy, first, kColumns);
    Far<bfloat16> y(near.y, first, kColumns), dgate(near.dgate, first, in), dup(near.dup, first, kColumns);
    GatedFwdParams f = near.forward;
    GatedBwdParams b = near.backward;
    f.rows = b.rows = first + kRows;
    f.gate = b.gate = gate.data(), b.dgate = dgate.data(), b.dy = dy.data(), f.y = y.data();
    f.up = b.up = packed ? gate.data() + kColumns : up.data();
    b.dup = packed ? dgate.data() + kColumns : dup.data();
    const FarMachine machine(kRows);
    under_every_seed([&] {
      for (auto* t : {&y, &dgate, &dup}) t->poison();
      expect_ok(op.forward(f, nullptr));
      y.fetch();
      expect_close("y", near.y, near.want_y, near.rounding());
      expect_ok(op.backward(b, nullptr));
      dgate.fetch(), dup.fetch();
      near.check_backward();
    });
  }
}

inline void gated_refuses_float64(const GatedOp& op) {
  GatedProblem<float> p(op, {.rows = 1, .columns = 4});
  p.forward.dtype = p.backward.dtype = Dtype::float64;
  expect_refused(op.forward(p.forward, nullptr), "float64");
  expect_refused(op.backward(p.backward, nullptr), "float64");
}

inline void gated_random(const GatedOp& op, Random& random) {
  GatedShape s{.rows = random.size(1, 20), .columns = random.size(1, 300)};
  if (random.coin()) s.columns = (s.columns + 7) / 8 * 8;
  s.padding = random.choice<int64_t>({0, 8, 1});
  s.offset = Offsets::draw(random, 6);
  s.packed = random.coin();
  const uint64_t seed = random.bits() % 1000;
  const int64_t left_out = s.packed ? 0 : random.integer(0, 2);
  const bool in_place = !left_out && random.coin();
  const auto run = [&]<class T>(T) {
    GatedProblem<T> p(op, s, seed);
    if (left_out) (left_out == 1 ? p.backward.dgate : p.backward.dup) = nullptr;
    in_place ? p.run_in_place() : p.run();
  };
  switch (random.integer(0, 2)) {
    case 0: return run(bfloat16{});
    case 1: return run(float{});
    default: return run(float16{});
  }
}

}  // namespace warpsmith::test
