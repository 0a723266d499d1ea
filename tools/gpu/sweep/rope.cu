// Times rope's kernel over heads a thread, registers and block sizes, beside a copy of the same bytes. Build and run on
// a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     tools/gpu/sweep/rope.cu -o sweep && ./sweep
#include "common/launch.h"
#include "kernels/rope/rope_config.h"
#include "kernels/rope/rope_kernel.cuh"
#include "sweep.h"

using namespace warpsmith;
using sweep::Row;

namespace {

template <bool kInterleaved, int U, int kBlocks>
void measure(const RopeParams& p, const RopeProblem& problem, std::vector<Row>& rows) {
  for (const int threads : {32, 64, 96, 128, 160, 192, 256}) {
    const RopeConfig c = rope_config_of(problem, U, threads);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(c.blocks_x), static_cast<unsigned>(c.blocks_y));
    config.block = dim3(c.threads_x, c.threads_y, c.threads_z);
    Status status;
    const auto kernel = rope::rotate_heads<bfloat16, bfloat16, 8, kInterleaved, U, kBlocks>;
    const double us = sweep::time_of([&] { status = launch(kernel, config, nullptr, p, c); });
    char text[160];
    std::snprintf(text, sizeof text, "heads a thread %d, %d blocks of 256, threads %d x %d x %d", U, kBlocks,
                  c.threads_x, c.threads_y, c.threads_z);
    if (status.ok()) rows.push_back({us, text});
  }
}

template <bool kInterleaved> void run(int64_t batch, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t dim) {
  const int64_t q_count = batch * tokens * q_heads * dim, k_count = batch * tokens * k_heads * dim;
  void *q = sweep::random_bfloat16(q_count, 1), *k = sweep::random_bfloat16(k_count, 1),
       *q_out = sweep::allocate(q_count * 2), *k_out = sweep::allocate(k_count * 2);
  void *cos = sweep::random_bfloat16(tokens * dim / 2, 1), *sin = sweep::random_bfloat16(tokens * dim / 2, 1);
  const auto layout = [&](int64_t heads) { return RotaryHeads{heads, tokens * heads * dim, heads * dim, dim}; };
  const RopeParams p{q,
                     k,
                     q_out,
                     k_out,
                     layout(q_heads),
                     layout(k_heads),
                     layout(q_heads),
                     layout(k_heads),
                     {cos, sin, tokens, 0, dim / 2, 1, false, Dtype::bfloat16},
                     {},
                     {batch, tokens, dim, dim, kInterleaved, false},
                     false,
                     Dtype::bfloat16};
  const RopeProblem problem{batch * tokens, q_heads, k_heads, dim, dim, 2};
  std::vector<Row> rows;
  measure<kInterleaved, 1, 4>(p, problem, rows);
  measure<kInterleaved, 1, 5>(p, problem, rows);
  measure<kInterleaved, 1, 6>(p, problem, rows);
  measure<kInterleaved, 2, 2>(p, problem, rows);
  measure<kInterleaved, 2, 3>(p, problem, rows);
  measure<kInterleaved, 2, 4>(p, problem, rows);
  measure<kInterleaved, 4, 2>(p, problem, rows);
  measure<kInterleaved, 4, 3>(p, problem, rows);
  const auto text = [](int64_t n) { return std::to_string(n); };
  sweep::print(std::string(kInterleaved ? "interleaved " : "halves ") + text(batch) + "x" + text(tokens) + "x(" +
                   text(q_heads) + "+" + text(k_heads) + ")x" + text(dim),
               4.0 * static_cast<double>(q_count + k_count), rows, 8);
  for (void* m : {q, k, q_out, k_out, cos, sin}) sweep::check(cudaFree(m));
}

}  // namespace

int main() {
  run<false>(4, 4096, 32, 8, 128);
  run<true>(4, 4096, 32, 8, 128);
  run<false>(1, 8192, 64, 8, 128);
  run<false>(8, 2048, 16, 16, 64);
  run<false>(8, 1024, 12, 12, 64);
}
