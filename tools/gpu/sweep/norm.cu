// Times the kernels of the norm family over more configurations than the package holds, beside a copy of the same bytes
// (bf16). An op and a direction a program; build and run on a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a \
//     -DLAYER=0 -DRESIDUAL=0 -DDROPOUT=0 -DFORWARD=1 tools/gpu/sweep/norm.cu -o sweep && ./sweep
#include "kernels/norm/norm_launch.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::norm;
using sweep::allocate, sweep::check, sweep::random_bfloat16;

namespace {

using Op = NormOp<LAYER, RESIDUAL, DROPOUT>;

// Thousands of configurations: few calls of each.
double time_of(const std::function<void()>& call) { return sweep::time_of(call, 9, 2); }

struct Result {
  double us;
  std::string text;
  NormConfig config;
  size_t kernel = 0;
};

// Kernels by scope, vectors a thread, rows together and launch bounds.
template <class Kernel> struct Candidate {
  Kernel kernel;
  Scope scope;
  int vectors, rows, max_threads, min_blocks;
};

using Forward = void (*)(NormForwardParams, int);
using Backward = void (*)(NormBackwardParams, int, int);
std::vector<Candidate<Forward>> forwards;
std::vector<Candidate<Backward>> backwards;

template <int V, int U, Scope S, int kMaxThreads, int kMinBlocks> void add() {
#if FORWARD
  forwards.push_back(
      {forward_registers<Op, bfloat16, bfloat16, V, U, S, kMaxThreads, kMinBlocks>, S, V, U, kMaxThreads, kMinBlocks});
#else
  backwards.push_back(
      {backward_ring<Op, bfloat16, bfloat16, V, U, S, kMaxThreads, kMinBlocks>, S, V, U, kMaxThreads, kMinBlocks});
#endif
}

void add_all() {
#if FORWARD
  add<1, 1, Scope::group, 256, 1>(), add<1, 2, Scope::group, 256, 1>(), add<1, 4, Scope::group, 256, 1>();
  add<2, 1, Scope::group, 256, 1>(), add<2, 2, Scope::group, 256, 1>(), add<2, 4, Scope::group, 256, 1>();
  add<3, 1, Scope::group, 256, 1>(), add<3, 2, Scope::group, 256, 1>(), add<4, 1, Scope::group, 256, 1>();
  add<4, 2, Scope::group, 256, 1>(), add<8, 1, Scope::group, 256, 1>();
  add<1, 1, Scope::block, 512, 2>(), add<1, 1, Scope::block, 1024, 1>();
  add<2, 1, Scope::block, 512, 2>(), add<2, 1, Scope::block, 512, 3>(), add<2, 1, Scope::block, 1024, 1>();
  add<3, 1, Scope::block, 512, 2>(), add<3, 1, Scope::block, 512, 3>(), add<3, 1, Scope::block, 256, 5>();
  add<4, 1, Scope::block, 512, 2>(), add<4, 1, Scope::block, 512, 3>(), add<4, 1, Scope::block, 256, 5>();
  add<6, 1, Scope::block, 256, 3>(), add<8, 1, Scope::block, 256, 3>(), add<8, 1, Scope::block, 256, 2>();
  add<2, 1, Scope::cluster, 512, 2>(), add<4, 1, Scope::cluster, 512, 2>();
#else
  add<1, 1, Scope::group, 256, 1>(), add<1, 2, Scope::group, 256, 1>(), add<1, 4, Scope::group, 256, 1>();
  add<2, 1, Scope::group, 256, 1>(), add<2, 2, Scope::group, 256, 1>(), add<3, 1, Scope::group, 256, 1>();
  add<3, 1, Scope::group, 256, 2>(), add<3, 2, Scope::group, 256, 1>(), add<4, 1, Scope::group, 256, 1>();
  add<1, 1, Scope::group, 256, 3>(), add<1, 2, Scope::group, 256, 3>();
  add<1, 1, Scope::block, 1024, 1>(), add<1, 2, Scope::block, 1024, 1>(), add<1, 4, Scope::block, 512, 1>();
  add<2, 1, Scope::block, 768, 1>(), add<2, 2, Scope::block, 768, 1>(), add<2, 4, Scope::block, 512, 1>();
  add<3, 1, Scope::block, 512, 1>(), add<3, 2, Scope::block, 512, 1>(), add<4, 1, Scope::block, 384, 1>();
  add<4, 2, Scope::block, 384, 1>();
  add<1, 1, Scope::cluster, 512, 1>(), add<1, 2, Scope::cluster, 512, 1>(), add<1, 4, Scope::cluster, 512, 1>();
  add<2, 1, Scope::cluster, 512, 1>(), add<2, 2, Scope::cluster, 512, 1>(), add<3, 1, Scope::cluster, 512, 1>();
  add<3, 2, Scope::cluster, 512, 1>();
#endif
}

std::string text_of(const NormConfig& c, int max_threads, int min_blocks) {
  char s[200];
  std::snprintf(s, sizeof s, "%s V%d U%d lanes %d threads %d cluster %d blocks %lld stages %d bounds %d,%d",
                name(c.scope), c.vectors, c.rows, c.lanes, c.threads, c.cluster, (long long)c.blocks, c.stages,
                max_threads, min_blocks);
  return s;
}

// Lanes, threads and clusters with which a candidate can hold rows of `vectors` without much waste.
template <class K, class Visit> void for_shapes(const Candidate<K>& k, int64_t vectors, Visit&& visit) {
  if (k.scope == Scope::group) {
    int lanes = 1;
    while (lanes * k.vectors < vectors) lanes *= 2;
    if (lanes > 32 || lanes / 2 * k.vectors >= vectors || (lanes < 32 && lanes * k.vectors > vectors * 5 / 4)) return;
    for (int threads : {32, 64, 128, 256}) visit(lanes, threads, 1);
  } else {
    for (int cluster : {1, 2, 4, 8}) {
      if ((k.scope == Scope::block) != (cluster == 1)) continue;
      const int threads = norm_detail::threads_of(norm_detail::ceil_div(vectors, cluster), k.vectors);
      if (threads < 64 || threads > k.max_threads || int64_t{threads} * k.vectors * cluster * 4 > vectors * 5) continue;
      visit(threads, threads, cluster);
    }
  }
}

Status run_forward(const Result& r, const NormForwardParams& p) {
  return launch(forwards[r.kernel].kernel, grid_of(r.config), nullptr, p, r.config.lanes);
}

Status run_backward(const Result& r, const NormBackwardParams& p, const NormSumConfig& sum) {
  WARPSMITH_RETURN_IF_FAILED(
      launch(backwards[r.kernel].kernel, grid_of(r.config), nullptr, p, r.config.lanes, r.config.stages));
  return sum_partial_rows(sum, p, norm_partial_rows(r.config), nullptr);
}

void print(const char* direction, int64_t rows, int64_t columns, double bytes, double copy_us, std::vector<Result>& all,
           size_t most) {
  std::sort(all.begin(), all.end(), [](const Result& a, const Result& b) { return a.us < b.us; });
  std::printf("%s %lldx%lld: copy %.1f us (%.2f TB/s), %zu configurations\n", direction, (long long)rows,
              (long long)columns, copy_us, bytes / copy_us * 1e-6, all.size());
  for (size_t i = 0; i < all.size() && i < most; ++i)
    std::printf("  %7.1f us %.2f TB/s %.3f %s\n", all[i].us, bytes / all[i].us * 1e-6, copy_us / all[i].us,
                all[i].text.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const size_t most = argc > 1 ? static_cast<size_t>(std::atoi(argv[1])) : 4;
  add_all();
  const int64_t shapes[][2] = {{16384, 4096}, {4096, 8192}, {1024, 12288}, {65536, 768}, {131072, 128}, {32768, 2048}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t count = rows * columns, vectors = columns / 8;
    void *x = random_bfloat16(count, 1), *dy = random_bfloat16(count, 2), *w = random_bfloat16(columns, 3);
    void *y = allocate(count * 2), *s = RESIDUAL ? random_bfloat16(count, 4) : x;
    void* s_out = RESIDUAL ? allocate(count * 2) : nullptr;
    void *rstd = allocate(rows * 4), *mean = allocate(rows * 4), *dw = allocate(columns * 4);
    void *partials = allocate(size_t{2112} * columns * 4), *dbias_partials = allocate(size_t{2112} * columns * 4);
    auto* seed = allocate<int64_t>(16);
    check(cudaMemset(seed, 1, 16));
    check(cudaMemset(rstd, 0, rows * 4)), check(cudaMemset(mean, 0, rows * 4));
    NormForwardParams f;
    f.x = x, f.weight = w, f.y = y, f.rstd = rstd, f.mean = LAYER ? mean : nullptr, f.bias = LAYER ? w : nullptr;
    if (RESIDUAL) f.residual = s, f.residual_out = s_out;
    f.rows = rows, f.columns = columns, f.x_stride = f.residual_stride = columns, f.eps = 1e-6;
    f.dtype = f.residual_dtype = f.weight_dtype = Dtype::bfloat16;
    if (DROPOUT) f.dropout = make_dropout(seed, 0.1);
    NormBackwardParams b;
    b.dy = dy, b.s = s, b.weight = w, b.rstd = rstd, b.mean = mean, b.dx = y, b.dweight = dw,
    b.dbias = LAYER ? dw : nullptr;
    b.dresidual_out = RESIDUAL ? x : nullptr, b.dresidual = DROPOUT ? s_out : nullptr;
    b.dweight_partials = partials, b.dbias_partials = LAYER ? dbias_partials : nullptr;
    b.rows = rows, b.columns = columns, b.dy_stride = b.s_stride = b.dresidual_out_stride = columns;
    b.dtype = b.residual_dtype = b.weight_dtype = Dtype::bfloat16, b.dropout = f.dropout;
    NormProblem problem;
    problem.rows = rows, problem.columns = columns, problem.residual_bytes = RESIDUAL ? 2 : 0, problem.layer = LAYER;

    std::vector<Result> all;
    const auto measure = [&](const NormConfig& c, size_t kernel, int max_threads, int min_blocks) {
      Result r{0, text_of(c, max_threads, min_blocks), c, kernel};
      Status status;
      const NormSumConfig sum = choose_norm_sum(columns);
      r.us = time_of([&] { status = FORWARD ? run_forward(r, f) : run_backward(r, b, sum); });
      if (status.ok()) all.push_back(r);
    };
#if FORWARD
    for (size_t i = 0; i < forwards.size(); ++i)
      for_shapes(forwards[i], vectors, [&](int lanes, int threads, int cluster) {
        measure(norm_detail::registers(problem, forwards[i].scope, lanes, forwards[i].vectors, forwards[i].rows,
                                       threads, cluster, ""),
                i, forwards[i].max_threads, forwards[i].min_blocks);
      });
    const double bytes = count * (RESIDUAL ? 8.0 : 4.0);
    print("forward", rows, columns, bytes, sweep::copy_time_of(bytes), all, most);
#else
    for (size_t i = 0; i < backwards.size(); ++i)
      for_shapes(backwards[i], vectors, [&](int lanes, int threads, int cluster) {
        for (int together : {1, 2, 3, 4, 6, 8})
          for (int stages : {2, 3, 4}) {
            if (together * threads > 2048) continue;
            NormConfig c = norm_detail::ring(problem, backwards[i].scope, lanes, backwards[i].vectors,
                                             backwards[i].rows, threads, cluster, together, stages, "");
            int resident = 0;
            check(cudaFuncSetAttribute(reinterpret_cast<const void*>(backwards[i].kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 - 16384));
            check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, backwards[i].kernel, threads,
                                                                static_cast<size_t>(c.shared_bytes)));
            if (c.stages != stages || resident < together || norm_partial_rows(c) > 2112) continue;
            measure(c, i, backwards[i].max_threads, backwards[i].min_blocks);
          }
      });
    const double bytes = count * (DROPOUT ? 10.0 : RESIDUAL ? 8.0 : 6.0);
    print("backward", rows, columns, bytes, sweep::copy_time_of(bytes), all, most);
    if (all.empty()) continue;
    Result best = all[0];
    NormBackwardParams without = b;
    without.dweight_partials = without.dbias_partials = nullptr;
    NormSumConfig sum = choose_norm_sum(columns);
    Status status;
    const double alone = time_of([&] { status = run_backward(best, without, sum); });
    std::printf("  %7.1f us without the gradients of the parameters; their second stage:", alone);
    all.clear();
    for (int tile : {4, 8, 16})
      for (int threads : {128, 256, 512}) {
        NormSumConfig c{4, tile, threads};
        Result r{0, "tile " + std::to_string(tile) + " threads " + std::to_string(threads), best.config, best.kernel};
        Status status;
        r.us = time_of([&] { status = run_backward(r, b, c); });
        if (status.ok()) all.push_back(r);
      }
    std::sort(all.begin(), all.end(), [](const Result& p, const Result& q) { return p.us < q.us; });
    for (size_t i : {size_t{0}, size_t{1}, size_t{2}, all.size() - 1})
      std::printf(" %s %.1f;", all[i].text.c_str(), all[i].us);
    std::printf(" chosen tile %d threads %d\n", sum.tile_vectors, sum.threads);
#endif
    for (void* p : {x, dy, w, y, rstd, mean, dw, partials, dbias_partials, static_cast<void*>(seed)})
      check(cudaFree(p));
    if (RESIDUAL) check(cudaFree(s)), check(cudaFree(s_out));
  }
}
