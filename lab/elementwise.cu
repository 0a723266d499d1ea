// Question: which shape of the elementwise body (threads, vectors a thread, stores) is fastest for a gated activation?
// The chosen kernel, with which the others must agree, and a copy of the same bytes stand beside. What is within 1 % is
// timed three times, in turn. Argument: an op. 15 s to build, 5 s for each op.
// runs: swiglu
#include "device/packed.h"
#include "kernels/activation/gated.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::activation;
using device::Cache, sweep::Row;

namespace {

// V vectors of each tensor a thread, a block's width apart; every load before the first use. Sizes that divide evenly.
template <class Op, int V, Cache stores> __global__ void candidate(Op op, ElementwiseParams<Op::I, Op::O> p) {
  using T = bfloat16;
  using device::Packed;
  constexpr int N = 8;
  const int64_t first = (int64_t{blockIdx.x} * V * blockDim.x + threadIdx.x) * N, step = int64_t{blockDim.x} * N;
  Packed<T, N> in[V][Op::I];
#pragma unroll
  for (int v = 0; v < V; ++v)
#pragma unroll
    for (int i = 0; i < Op::I; ++i) in[v][i] = device::load(device::packed_at<T, N>(p.in[i].data, first + v * step));
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float x[Op::I][N], y[Op::O][N];
#pragma unroll
    for (int i = 0; i < Op::I; ++i) device::unpack<T>(x[i], in[v][i]);
    op.template apply<T, N>(x, y, first);
#pragma unroll
    for (int o = 0; o < Op::O; ++o)
      device::store<stores>(device::packed_at<T, N>(const_cast<void*>(p.out[o].data), first + v * step),
                            device::rounded<T>(y[o]));
  }
}

// The package's body with a path of its own for tensors without gaps, which needs one comparison.
template <class Op, int kThreads, int kBlocks> __global__ void __launch_bounds__(kThreads, kBlocks)
    straight(Op op, ElementwiseParams<Op::I, Op::O> p, ElementwiseIndex index) {
  using T = bfloat16;
  constexpr int N = 8;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x, element = v * N;
  int64_t in[Op::I], out[Op::O];
  if (index.flat) {
    if (element + N <= index.elements) {
#pragma unroll
      for (int i = 0; i < Op::I; ++i) in[i] = element;
#pragma unroll
      for (int o = 0; o < Op::O; ++o) out[o] = element;
      elementwise_at<Op, T, N>(op, p, in, out, element);
      return;
    }
#pragma unroll 1
    for (int64_t e = element; e < index.elements; ++e) {
#pragma unroll
      for (int i = 0; i < Op::I; ++i) in[i] = e;
#pragma unroll
      for (int o = 0; o < Op::O; ++o) out[o] = e;
      elementwise_at<Op, T, 1>(op, p, in, out, e);
    }
    return;
  }
  if (v >= index.vectors) return;
  const int64_t row = index.divide.quotient(v), column = (v - row * index.row_vectors) * N;
#pragma unroll
  for (int i = 0; i < Op::I; ++i) in[i] = row * p.in[i].stride + column;
#pragma unroll
  for (int o = 0; o < Op::O; ++o) out[o] = row * p.out[o].stride + column;
  elementwise_at<Op, T, N>(op, p, in, out, element);
}

template <class Op> void run(const char* name, int64_t rows, int64_t columns, char* (&memory)[5], char* (&wanted)[2]) {
  const int64_t count = rows * columns;
  ElementwiseParams<Op::I, Op::O> p{};
  p.rows = rows, p.columns = columns, p.dtype = Dtype::bfloat16;
  for (int i = 0; i < Op::I; ++i) p.in[i] = {memory[i], columns};
  for (int o = 0; o < Op::O; ++o) p.out[o] = {memory[Op::I + o], columns};
  std::vector<Row> all;
  const auto add = [&](const std::string& text, const std::function<void()>& call) {
    const double us = sweep::time_of(call, 41);
    all.push_back({us, text});
  };
  add("chosen", [&] {
    if (!launch_elementwise(Op{}, p, nullptr).ok()) std::printf("the launch failed\n");
  });
  // gate and up, and their gradients, as halves of one tensor
  auto packed = p;
  const int gate = Op::I == 3 ? 1 : 0;
  packed.in[gate] = {memory[gate], 2 * columns};
  packed.in[gate + 1] = {memory[gate] + columns * 2, 2 * columns};
  if (Op::O == 2) packed.out[0] = {memory[3], 2 * columns}, packed.out[1] = {memory[3] + columns * 2, 2 * columns};
  add("chosen, packed", [&] {
    if (!launch_elementwise(Op{}, packed, nullptr).ok()) std::printf("the launch failed\n");
  });
  // What was chosen, as the law for the others.
  for (int o = 0; o < Op::O; ++o) {
    if (!launch_elementwise(Op{}, p, nullptr).ok()) std::printf("the launch failed\n");
    sweep::check(cudaMemcpy(wanted[o], memory[Op::I + o], static_cast<size_t>(count) * 2, cudaMemcpyDeviceToDevice));
  }
  const auto shapes = [&]<int V, Cache stores> {
    for (const int threads : {64, 128, 256}) {
      const int64_t block = int64_t{threads} * V * 8;
      if (count % block) continue;
      const auto call = [&, threads, block] {
        candidate<Op, V, stores><<<static_cast<unsigned>(count / block), threads>>>(Op{}, p);
      };
      std::string text = std::to_string(threads) + " threads, " + std::to_string(V) + " vectors, " +
                         (stores == Cache::keep ? "plain" : "stores st.cs");
      for (int o = 0; o < Op::O; ++o) sweep::check(cudaMemset(memory[Op::I + o], 0xff, static_cast<size_t>(count) * 2));
      call();
      for (int o = 0; o < Op::O; ++o)
        if (const unsigned n = sweep::differences(memory[Op::I + o], wanted[o], count).wrong)
          text += ", WRONG " + std::to_string(n) + " <- chosen or not";
      add(text, call);
    }
  };
  const auto whole = [&]<int kThreads, int kBlocks> {
    const int64_t vectors = count / 8;
    const auto call = [&] {
      straight<Op, kThreads, kBlocks><<<static_cast<unsigned>((vectors + kThreads - 1) / kThreads), kThreads>>>(
          Op{}, p, ElementwiseIndex{true, count, vectors, vectors, device::FastDivide(vectors)});
    };
    std::string text = std::to_string(kThreads) + " threads, straight";
    add(text + ", packed", [&] {
      straight<Op, kThreads, kBlocks><<<static_cast<unsigned>((vectors + kThreads - 1) / kThreads), kThreads>>>(
          Op{}, packed, ElementwiseIndex{false, count, vectors, columns / 8, device::FastDivide(columns / 8)});
    });
    for (int o = 0; o < Op::O; ++o) sweep::check(cudaMemset(memory[Op::I + o], 0xff, static_cast<size_t>(count) * 2));
    call();
    for (int o = 0; o < Op::O; ++o)
      if (const unsigned n = sweep::differences(memory[Op::I + o], wanted[o], count).wrong)
        text += ", WRONG " + std::to_string(n) + " <- chosen or not";
    add(text, call);
  };
  const auto chosen = [&] {
    if (!launch_elementwise(Op{}, p, nullptr).ok()) std::printf("the launch failed\n");
  };
  for (int round = 0; round < 3; ++round) {
    add("chosen, again", chosen);
    whole.template operator()<64, 32>();
    whole.template operator()<128, 16>();
    whole.template operator()<256, 8>();
    shapes.template operator()<1, Cache::keep>();
  }
  shapes.template operator()<2, Cache::keep>();
  shapes.template operator()<1, Cache::streaming>();
  sweep::print(std::string(name) + " " + std::to_string(rows) + "x" + std::to_string(columns),
               static_cast<double>(count) * 2 * (Op::I + Op::O), all, 12);
}

}  // namespace

// An argument: the beginning of the names of those to run.
int main(int argc, char** argv) {
  const int64_t shapes[][2] = {{8192, 14336}, {65536, 768}, {16384, 4096}, {1024, 12288}};
  const int64_t most = 2 * shapes[0][0] * shapes[0][1];
  char* memory[5];
  for (int i = 0; i < 5; ++i) memory[i] = static_cast<char*>(sweep::random_bfloat16(most, static_cast<unsigned>(i)));
  char* wanted[2];
  for (char*& w : wanted) w = sweep::allocate<char>(static_cast<size_t>(most) * 2);
  for (const auto& [rows, columns] : shapes) {
    const auto measure = [&]<class Op>(const char* name) {
      if (argc < 2 || std::string(name).rfind(argv[1], 0) == 0) run<Op>(name, rows, columns, memory, wanted);
    };
    measure.template operator()<GatedForward<Silu>>("swiglu forward");
    measure.template operator()<GatedBackward<Silu>>("swiglu backward");
    measure.template operator()<GatedForward<GeluTanh>>("geglu tanh forward");
    measure.template operator()<GatedBackward<GeluTanh>>("geglu tanh backward");
    measure.template operator()<GatedForward<Gelu>>("geglu exact forward");
    measure.template operator()<GatedBackward<Gelu>>("geglu exact backward");
    measure.template operator()<GatedForward<Relu>>("reglu forward");
    measure.template operator()<GatedBackward<Relu>>("reglu backward");
  }
  return 0;
}
