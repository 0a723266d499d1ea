// Times shapes of the elementwise body (threads of a block, vectors a thread, cache hints) for the gated activations,
// beside the kernel that is chosen, which the others must agree with, and a copy of the same bytes. Build (15 s) and
// run on a GPU machine (5 s for each name of an op):
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a
//     tools/gpu/sweep/elementwise.cu -o sweep && ./sweep swiglu
#include "device/packed.h"
#include "hints.cuh"
#include "kernels/activation/gated.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::activation;
using sweep::Hint, sweep::Row;

namespace {

// V vectors of each tensor a thread, a block's width apart; every load before the first use. Sizes that divide evenly.
template <class Op, int V, Hint hint> __global__ void candidate(Op op, ElementwiseParams<Op::I, Op::O> p) {
  using T = bfloat16;
  using device::Packed;
  constexpr int N = 8;
  const int64_t first = (int64_t{blockIdx.x} * V * blockDim.x + threadIdx.x) * N, step = int64_t{blockDim.x} * N;
  Packed<T, N> in[V][Op::I];
#pragma unroll
  for (int v = 0; v < V; ++v)
#pragma unroll
    for (int i = 0; i < Op::I; ++i)
      in[v][i] = sweep::load<hint>(device::packed_at<T, N>(p.in[i].data, first + v * step));
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float x[Op::I][N], y[Op::O][N];
#pragma unroll
    for (int i = 0; i < Op::I; ++i) device::unpack<T>(x[i], in[v][i]);
    op.template apply<T, N>(x, y, first);
#pragma unroll
    for (int o = 0; o < Op::O; ++o)
      sweep::store<hint>(device::packed_at<T, N>(const_cast<void*>(p.out[o].data), first + v * step),
                         device::rounded<T>(y[o]));
  }
}

template <class Op> void run(const char* name, int64_t rows, int64_t columns, char* (&memory)[5], char* (&wanted)[2]) {
  const int64_t count = rows * columns;
  ElementwiseParams<Op::I, Op::O> p{};
  p.rows = rows, p.columns = columns, p.dtype = Dtype::bfloat16;
  for (int i = 0; i < Op::I; ++i) p.in[i] = {memory[i], columns};
  for (int o = 0; o < Op::O; ++o) p.out[o] = {memory[Op::I + o], columns};
  std::vector<Row> all;
  const auto add = [&](const std::string& text, const std::function<void()>& call) {
    const double us = sweep::time_of(call);
    all.push_back({us, text});
  };
  add("chosen", [&] {
    if (!launch_elementwise(Op{}, p, nullptr).ok()) std::printf("the launch failed\n");
  });
  {  // gate and up, and their gradients, as halves of one tensor
    auto q = p;
    const int gate = Op::I == 3 ? 1 : 0;
    q.in[gate] = {memory[gate], 2 * columns};
    q.in[gate + 1] = {memory[gate] + columns * 2, 2 * columns};
    if (Op::O == 2) q.out[0] = {memory[3], 2 * columns}, q.out[1] = {memory[3] + columns * 2, 2 * columns};
    add("chosen, packed", [&, q] {
      if (!launch_elementwise(Op{}, q, nullptr).ok()) std::printf("the launch failed\n");
    });
  }
  // What was chosen, as the law for the others.
  for (int o = 0; o < Op::O; ++o) {
    if (!launch_elementwise(Op{}, p, nullptr).ok()) std::printf("the launch failed\n");
    sweep::check(cudaMemcpy(wanted[o], memory[Op::I + o], static_cast<size_t>(count) * 2, cudaMemcpyDeviceToDevice));
  }
  const auto shapes = [&]<int V, Hint hint> {
    for (const int threads : {64, 128, 256, 512}) {
      const int64_t block = int64_t{threads} * V * 8;
      if (count % block) continue;
      const auto call = [&, threads, block] {
        candidate<Op, V, hint><<<static_cast<unsigned>(count / block), threads>>>(Op{}, p);
      };
      std::string text = std::to_string(threads) + " threads, " + std::to_string(V) + " vectors, " + sweep::name(hint);
      for (int o = 0; o < Op::O; ++o) sweep::check(cudaMemset(memory[Op::I + o], 0xff, static_cast<size_t>(count) * 2));
      call();
      for (int o = 0; o < Op::O; ++o)
        if (const unsigned n = sweep::differences(memory[Op::I + o], wanted[o], count).wrong)
          text += ", WRONG " + std::to_string(n) + " <- chosen or not";
      add(text, call);
    }
  };
  shapes.template operator()<1, Hint::none>();
  shapes.template operator()<2, Hint::none>();
  shapes.template operator()<4, Hint::none>();
  shapes.template operator()<1, Hint::both_once>();
  shapes.template operator()<1, Hint::load_once>();
  shapes.template operator()<1, Hint::store_once>();
  shapes.template operator()<1, Hint::fetch_256>();
  shapes.template operator()<1, Hint::give_up_first>();
  shapes.template operator()<2, Hint::load_once>();
  shapes.template operator()<2, Hint::fetch_256>();
  shapes.template operator()<2, Hint::give_up_first>();

  sweep::print(std::string(name) + " " + std::to_string(rows) + "x" + std::to_string(columns),
               static_cast<double>(count) * 2 * (Op::I + Op::O), all, 4);
}

}  // namespace

// An argument: the beginning of the names of those to run.
int main(int argc, char** argv) {
  const int64_t shapes[][2] = {{8192, 14336}, {65536, 768}, {1024, 12288}};
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
  }
  return 0;
}
