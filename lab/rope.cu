// Question: which heads a thread, registers and blocks make rope fastest, out of place and in place, beside a copy?
// Outputs are compared with those of the chosen configuration: a row says where its bits are others, which a few are by
// contraction, and where it is wrong. 15 s to build, 5 s to run; argument `others`: other sizes than heads of 64.
// links: csrc/kernels/rope/rope.cu
// runs:
// runs: others
#include <cmath>

#include "common/instances.h"
#include "device/launch.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rotate_heads.cuh"
#include "sweep.h"

using namespace warpsmith;
using sweep::Row;

namespace {

struct Case {
  RopeParams p;
  RopeProblem problem;
  void *want_q, *want_k;
  int64_t q_count, k_count;
  bool inplace;
  std::vector<Row> rows;

  // Times a call; its outputs must be those of the package's kernel.
  template <class Call> void add(const char* text, Call&& call) {
    std::string row = text;
    const Status status = call();
    if (!status.ok()) {
      std::printf("refused: %s: %s\n", text, status.what().c_str());
      return;
    }
    if (!inplace) {
      const auto of_q = sweep::differences(p.q_out, want_q, q_count),
                 of_k = sweep::differences(p.k_out, want_k, k_count);
      if (const unsigned n = of_q.other_bits + of_k.other_bits) row += ", other bits " + std::to_string(n);
      if (const unsigned n = of_q.wrong + of_k.wrong) row += ", WRONG " + std::to_string(n) + " <- chosen or not";
      sweep::check(cudaMemset(p.q_out, 0xff, static_cast<size_t>(q_count) * 2));
      sweep::check(cudaMemset(p.k_out, 0xff, static_cast<size_t>(k_count) * 2));
    }
    rows.push_back({sweep::time_of([&] { (void)call(); }, 41), row});
  }

  template <bool kInterleaved, int U, int kBlocks> void sweep() {
    int last = 0;
    for (const int threads : {32, 64, 96, 128, 192, 256}) {
      const RopeConfig c = rope_config_of(problem, U, threads);
      const int used = c.threads_x * c.threads_y * c.threads_z;
      if (used == last || used < 24) continue;
      last = used;
      LaunchConfig config;
      config.grid = dim3(static_cast<unsigned>(c.blocks_x), static_cast<unsigned>(c.blocks_y));
      config.block = dim3(c.threads_x, c.threads_y, c.threads_z);
      char text[160];
      std::snprintf(text, sizeof text, "heads a thread %d, %d blocks of 256, threads %d x %d x %d", U, kBlocks,
                    c.threads_x, c.threads_y, c.threads_z);
      add(text, [&] {
        using I = Instance<RopeInstance{true, kInterleaved, U, kBlocks}>;
        return launch(rope::rotate_heads<bfloat16, bfloat16, I>, config, nullptr, p, c);
      });
    }
  }
};

// cos and sin as they are, so that turning the same heads in place again and again keeps their size.
template <class Function> void* angles(int64_t tokens, int64_t dim, Function&& function) {
  std::vector<uint16_t> host(static_cast<size_t>(tokens * dim / 2));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < dim / 2; ++i) {
      const double angle =
          static_cast<double>(t) * std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
      const float x = static_cast<float>(function(angle));
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      host[static_cast<size_t>(t * dim / 2 + i)] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    }
  void* p = sweep::allocate(host.size() * 2);
  sweep::check(cudaMemcpy(p, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
  return p;
}

template <bool kInterleaved> void run(int64_t batch, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t dim) {
  const int64_t q_count = batch * tokens * q_heads * dim, k_count = batch * tokens * k_heads * dim;
  const auto bytes = [](int64_t count) { return static_cast<size_t>(count) * 2; };
  void *q = sweep::random_bfloat16(q_count, 1), *k = sweep::random_bfloat16(k_count, 2);
  void *q_out = sweep::allocate(bytes(q_count)), *k_out = sweep::allocate(bytes(k_count));
  void *want_q = sweep::allocate(bytes(q_count)), *want_k = sweep::allocate(bytes(k_count));
  void* cos = angles(tokens, dim, [](double x) { return std::cos(x); });
  void* sin = angles(tokens, dim, [](double x) { return std::sin(x); });
  const auto layout = [&](int64_t heads) { return RotaryHeads{heads, tokens * heads * dim, heads * dim, dim}; };
  for (const bool inplace : {false, true}) {
    Case c{{q,
            k,
            want_q,
            want_k,
            layout(q_heads),
            layout(k_heads),
            layout(q_heads),
            layout(k_heads),
            {cos, sin, tokens, 0, dim / 2, 1, false, Dtype::bfloat16},
            {},
            {batch, tokens, dim, dim, kInterleaved, false},
            inplace,
            Dtype::bfloat16},
           {batch * tokens, q_heads, k_heads, dim, dim, 2, true, inplace},
           want_q,
           want_k,
           q_count,
           k_count,
           inplace,
           {}};
    if (!rope_cuda(c.p, nullptr).ok()) std::printf("the launch failed\n");
    c.p.q_out = inplace ? q : q_out, c.p.k_out = inplace ? k : k_out;
    c.add("chosen", [&] { return rope_cuda(c.p, nullptr); });
    c.sweep<kInterleaved, 1, 6>();
    c.sweep<kInterleaved, 2, 3>();
    c.sweep<kInterleaved, 2, 4>();
    c.sweep<kInterleaved, 4, 2>();
    c.add("chosen, again", [&] { return rope_cuda(c.p, nullptr); });
    const auto text = [](int64_t n) { return std::to_string(n); };
    sweep::print(std::string(kInterleaved ? "interleaved " : "halves ") + text(batch) + "x" + text(tokens) + "x(" +
                     text(q_heads) + "+" + text(k_heads) + ")x" + text(dim) + (inplace ? " in place" : ""),
                 4.0 * static_cast<double>(q_count + k_count), c.rows, 12);
  }
  for (void* m : {q, k, q_out, k_out, want_q, want_k, cos, sin}) sweep::check(cudaFree(m));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    run<false>(8, 2048, 16, 16, 64);
    run<false>(8, 1024, 12, 12, 64);
    run<false>(4, 4096, 14, 2, 64);
    run<false>(8, 2048, 32, 4, 64);
    run<true>(8, 2048, 16, 16, 64);
    run<true>(8, 1024, 12, 12, 64);
  } else {
    run<false>(4, 4096, 32, 8, 80);
    run<false>(8, 2048, 12, 12, 96);
    run<false>(2, 4096, 16, 8, 256);
    run<false>(8, 4096, 32, 32, 32);
    run<false>(4, 2048, 16, 4, 128);
    run<true>(4, 4096, 32, 8, 128);
  }
}
