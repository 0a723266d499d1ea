// Times the kernels of rms_norm's backward over their configurations, beside a copy of the same bytes. Build and run on
// a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     tools/gpu/sweep/rms_norm.cu csrc/kernels/norm/rms_norm.cu -o sweep && ./sweep
#include "kernels/norm/rms_norm.h"
#include "kernels/norm/rms_norm_config.h"
#include "sweep.h"

using namespace warpsmith;
using sweep::Row;

namespace {

std::string text_of(const RmsNormConfig& c, bool chosen) {
  char s[160];
  std::snprintf(s, sizeof s, "%s lanes %d vectors %d threads %d blocks %lld stages %d%s", name(c.kernel), c.lanes,
                c.vectors, c.threads, (long long)c.blocks, c.stages, chosen ? "  <- chosen" : "");
  return s;
}

int round_up(int64_t a, int to) { return static_cast<int>((a + to - 1) / to * to); }

// Every ring that fits.
template <class Visit> void for_rings(const RmsNormProblem& p, Visit&& visit) {
  const int64_t vectors = p.columns / 8;
  for (int v : {1, 2, 3, 4})
    for (int narrow : {0, 1})
      for (int threads : {128, 256})
        for (int stages : {2, 3, 4})
          for (int together : {1, 2, 3, 4, 6, 8}) {
            RmsNormConfig c;
            c.kernel = RmsNormKernel::ring, c.vector_elems = 8, c.vectors = v, c.stages = stages;
            if (narrow) {
              c.lanes = 1;
              while (c.lanes * v < vectors) c.lanes *= 2;
              if (c.lanes > 32 || (c.lanes / 2) * v >= vectors) continue;
              c.threads = threads;
            } else {
              c.threads = c.lanes = round_up((vectors + v - 1) / v, 32);
              if (c.lanes <= 32 || c.lanes > ring_threads(v) || threads == 128) continue;
            }
            c.shared_bytes = int64_t{stages} * 2 * 16 * v * c.threads;
            if ((c.shared_bytes + 1536) * together > 228 * 1024 || together * c.threads > 2048) continue;
            c.blocks = std::min<int64_t>(int64_t{together} * p.multiprocessors, (p.rows + c.groups() - 1) / c.groups());
            visit(c);
          }
}

}  // namespace

int main() {
  const int64_t shapes[][2] = {{16384, 4096}, {4096, 8192}, {1024, 12288}, {65536, 768}, {131072, 128}, {32768, 2048}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t count = rows * columns;
    void *x = sweep::random_bfloat16(count, 1), *dy = sweep::random_bfloat16(count, 2),
         *w = sweep::random_bfloat16(columns, 3), *y = sweep::allocate(count * 2);
    void *rstd = sweep::allocate(rows * 4), *dw = sweep::allocate(columns * 2),
         *partials = sweep::allocate(size_t{2048} * columns * 4);
    NormBackwardParams b;
    b.dy = dy, b.s = x, b.weight = w, b.rstd = rstd, b.dx = y, b.dweight = dw, b.dweight_partials = partials;
    b.rows = rows, b.columns = b.dy_stride = b.s_stride = columns;
    b.dtype = b.residual_dtype = b.weight_dtype = Dtype::bfloat16;
    RmsNormProblem problem{rows, columns, 2, true, 132, 227 * 1024};

    const std::string shape = std::to_string(rows) + "x" + std::to_string(columns);
    std::vector<Row> all;
    const auto backward = [&](RmsNormConfig c, bool chosen) {
      if (rms_norm_partial_rows(c) > 2048) return;
      Status status;
      const double us = sweep::time_of([&] { status = rms_norm_backward_cuda_with(c, b, nullptr); });
      if (status.ok()) all.push_back({us, text_of(c, chosen)});
    };
    backward(choose_rms_norm_backward(problem), true);
    for_rings(problem, [&](const RmsNormConfig& ring) { backward(ring, false); });
    sweep::print("backward " + shape, count * 6.0, all);
    for (void* p : {x, dy, w, y, rstd, dw, partials}) sweep::check(cudaFree(p));
  }
}
