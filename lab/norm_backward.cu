// Question: does a configuration that the package lacks make a norm's backward faster than the one it chooses (bf16)?
// Batches of one block or of two that share a row's columns, and groups of the ring; then the second stage, after the
// fastest of them, in other grids. Each beside a copy of the same bytes, its results beside those of the package's
// choice. Argument: rows of the table. 20 s to build and a few seconds to run each.
// runs: -DLAYER=0 -DRESIDUAL=0 -DDROPOUT=0 24
// runs: -DLAYER=1 -DRESIDUAL=0 -DDROPOUT=0 24
// runs: -DLAYER=0 -DRESIDUAL=1 -DDROPOUT=0 24
// runs: -DLAYER=1 -DRESIDUAL=1 -DDROPOUT=1 24
#include <cmath>

#include "kernels/norm/backward_launch.cuh"
#include "kernels/norm/sum_partials.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::norm;
using sweep::allocate, sweep::check, sweep::random_bfloat16;

// Named outside the unnamed namespace: nvcc writes a kernel's template arguments as they are named, and
// `using namespace warpsmith` makes that namespace's name ambiguous (device/code_probe.cu has one).
using Op = NormOp<LAYER, RESIDUAL, DROPOUT>;

// An instance that the package's lists need not have.
template <NormKernel kKernel, Scope S, int V, int U, Keep kKeep, bool kSharedWeight, int kCluster, int kMaxThreads,
          int kMinBlocks>
using Instance = Compiled<kKernel, S, V, U, /*lanes=*/0, /*fills=*/true, /*weight_with_x=*/false, kKeep, kSharedWeight,
                          kCluster, kMaxThreads, /*min_blocks_before_sm90=*/0, kMinBlocks>;

namespace {

constexpr Norm kOp = DROPOUT    ? LAYER ? Norm::dropout_add_layer_norm : Norm::dropout_add_rms_norm
                     : RESIDUAL ? LAYER ? Norm::add_layer_norm : Norm::add_rms_norm
                     : LAYER    ? Norm::layer_norm
                                : Norm::rms_norm;
constexpr int64_t kPartialRows = 1056;
constexpr int kGradients = LAYER ? 2 : 1;

struct Candidate {
  std::string name;
  Scope scope;
  int vectors, rows, max_threads;
  bool shared_weight;
  int cluster;
  BatchesKernel batches;
  RingKernel ring;
  cudaFuncAttributes attributes;

  const void* kernel() const {
    return batches ? reinterpret_cast<const void*>(batches) : reinterpret_cast<const void*>(ring);
  }
};

std::vector<Candidate> candidates;

void add(Candidate c) {
  check(cudaFuncGetAttributes(&c.attributes, c.kernel()));
  check(cudaFuncSetAttribute(c.kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             227 * 1024 - static_cast<int>(c.attributes.sharedSizeBytes)));
  candidates.push_back(c);
}

// kBlocks: clusters of 2 to so many.
template <int V, int U, Keep kKeep, bool kSharedWeight, int kMaxThreads, int kMinBlocks, int kBlocks = 1>
void add_batches() {
  if constexpr (kBlocks == 1 || U * Op::kSums <= 4) {
    for (int cluster = kBlocks == 1 ? 1 : 2; cluster <= kBlocks; cluster *= 2) {
      char name[120];
      std::snprintf(name, sizeof name, "batches V%d U%d keeps %s, weight %s, bounds %d,%d, cluster of %d", V, U,
                    kKeep == Keep::nothing    ? "nothing"
                    : kKeep == Keep::elements ? "elements"
                                              : "products",
                    kSharedWeight ? "shared" : "in registers", kMaxThreads, kMinBlocks, cluster);
      add({name,
           kBlocks > 1 ? Scope::cluster : Scope::block,
           V,
           U,
           kMaxThreads,
           kSharedWeight,
           cluster,
           backward_batches<Op, bfloat16,
                            Instance<NormKernel::batches, kBlocks == 1 ? Scope::block : Scope::cluster, V, U, kKeep,
                                     kSharedWeight, kBlocks, kMaxThreads, kMinBlocks>>,
           nullptr,
           {}});
    }
  }
}

template <int V, int U, Scope S, int kMaxThreads> void add_ring() {
  char text[80];
  std::snprintf(text, sizeof text, "ring of a %s V%d U%d", name(S), V, U);
  add({text,
       S,
       V,
       U,
       kMaxThreads,
       false,
       S == Scope::cluster ? kMaxCluster : 1,
       nullptr,
       backward_ring<Op, bfloat16, bfloat16,
                     Instance<NormKernel::ring, S, V, U, Keep::nothing, false, 1, kMaxThreads, 1>>,
       {}});
}

void add_all() {
  constexpr Keep kElements = Keep::elements, kProducts = Keep::products;
  add_batches<1, 1, kProducts, false, 512, 1>(), add_batches<1, 1, kElements, false, 512, 2>();
  add_batches<1, 2, kProducts, false, 512, 1>(), add_batches<1, 2, kElements, false, 512, 1>();
  add_batches<2, 1, kProducts, true, 512, 1>(), add_batches<2, 1, kProducts, false, 512, 1>();
  add_batches<2, 1, kElements, true, 512, 1>(), add_batches<2, 1, kElements, true, 768, 1>();
  add_batches<2, 2, kElements, true, 512, 1>();
  add_batches<1, 2, kProducts, false, 512, 1, 4>(), add_batches<1, 2, kElements, true, 768, 1, 4>();
  add_batches<1, 2, kElements, false, 768, 1, 2>(), add_batches<1, 1, kElements, false, 768, 1, 2>();
  add_batches<2, 2, kElements, true, 512, 1, 2>(), add_batches<2, 1, kElements, true, 512, 1, 4>();
  add_batches<2, 1, kProducts, false, 512, 1, 4>(), add_batches<1, 4, kElements, false, 512, 1, 4>();
  add_ring<1, 1, Scope::group, 256>(), add_ring<1, 2, Scope::group, 256>();
  add_ring<2, 1, Scope::block, Op::kLayer ? 512 : 768>(), add_ring<2, 2, Scope::cluster, 256>();
}

// The second stage.
Status finish_with(const NormSumConfig& c, bool dependent, const NormBackwardParams& p, int64_t partial_rows) {
  if (!p.dweight_partials) return {};
  SumPartialsParams sum{{static_cast<const float*>(p.dweight_partials), static_cast<const float*>(p.dbias_partials)},
                        {p.dweight, p.dbias},
                        partial_rows,
                        p.columns,
                        p.weight_dtype};
  LaunchConfig grid;
  grid.grid.x = static_cast<unsigned>(ceil_div(p.columns, int64_t{c.tile_vectors} * c.vector_elems));
  grid.grid.y = kGradients;
  grid.block.x = static_cast<unsigned>(c.threads);
  grid.programmatic_dependent = dependent;
  return launch(sum_partials<4>, grid, nullptr, sum, c.tile_vectors);
}

struct Run {
  std::string text;
  NormConfig config;
  const Candidate* candidate;  // none: the package's choice
};

Status run(const Run& r, const NormBackwardParams& p, const NormSumConfig* sum = nullptr, bool dependent = true) {
  const NormConfig& c = r.config;
  if (!r.candidate)
    WARPSMITH_RETURN_IF_FAILED(launch_backward<bfloat16>(c, p, nullptr));
  else if (c.kernel == NormKernel::batches)
    WARPSMITH_RETURN_IF_FAILED(launch(r.candidate->batches, grid_of(c), nullptr, p, c.stages));
  else
    WARPSMITH_RETURN_IF_FAILED(launch(r.candidate->ring, grid_of(c), nullptr, p, c.lanes, c.stages));
  const NormSumConfig chosen = choose_norm_sum(p.columns);
  return finish_with(sum ? *sum : chosen, dependent, p, norm_partial_rows(r.config));
}

// Every way to launch a candidate for rows of `vectors` without much waste.
void add_runs(const Candidate& k, int64_t rows, int64_t columns, std::vector<Run>& runs) {
  const int64_t vectors = columns / kVector<bfloat16>;
  // A launch lowers the limit to what it needs itself.
  check(cudaFuncSetAttribute(k.kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             227 * 1024 - static_cast<int>(k.attributes.sharedSizeBytes)));
  NormConfig c;
  c.kernel = k.ring ? NormKernel::ring : NormKernel::batches;
  c.scope = k.scope, c.vector_elems = kVector<bfloat16>, c.vectors = k.vectors, c.rows = k.rows;
  const int share = c.cluster = k.cluster;
  c.lanes = norm_detail::threads_of(ceil_div(vectors, share), k.vectors);
  if (k.scope == Scope::group) {
    c.lanes = norm_detail::lanes_of(vectors, k.vectors);
    if (int64_t{c.lanes} * k.vectors < vectors) return;
  }
  if (int64_t{c.lanes} * k.vectors * share * 4 > vectors * 5) return;
  for (int threads : k.scope == Scope::group ? std::vector<int>{128, 256} : std::vector<int>{c.lanes}) {
    if (threads < 64 || threads > k.max_threads) continue;
    c.threads = threads;
    for (c.stages = k.ring ? 2 : 1; c.stages <= 4; ++c.stages) {
      c.shared_bytes = int64_t{2 + RESIDUAL} * 16 * k.vectors * k.rows * threads * c.stages;
      if (k.shared_weight) c.shared_bytes += int64_t{4} * c.vector_elems * k.vectors * threads;
      if (k.scope == Scope::group) c.shared_bytes = std::max(c.shared_bytes, c.groups() * columns * 4);
      if (c.shared_bytes + static_cast<int64_t>(k.attributes.sharedSizeBytes) > 227 * 1024) break;
      int fit = 0;
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, k.kernel(), threads,
                                                          static_cast<size_t>(c.shared_bytes)));
      if (k.scope == Scope::cluster) fit = std::min(fit, 4);
      for (int together = 1; together <= fit; ++together) {
        if (together > 6 && together != fit) continue;
        const int64_t blocks = int64_t{together} * 132 * (k.cluster > 2 ? 15 : 16) / 16;
        c.blocks = std::min(ceil_div(rows, c.groups()) * share, blocks) / c.cluster * c.cluster;
        if (c.blocks == 0 || norm_partial_rows(c) > kPartialRows) continue;
        char text[200];
        std::snprintf(text, sizeof text, "%s, %d threads, %lld blocks, %d stages, %d registers%s", k.name.c_str(),
                      threads, static_cast<long long>(c.blocks), c.stages, k.attributes.numRegs,
                      k.attributes.localSizeBytes ? ", SPILLS" : "");
        runs.push_back({text, c, &k});
      }
    }
  }
}

std::vector<float> floats_of(const void* p, int64_t count) {
  std::vector<uint16_t> host(static_cast<size_t>(count));
  check(cudaMemcpy(host.data(), p, host.size() * 2, cudaMemcpyDeviceToHost));
  std::vector<float> out(host.size());
  for (size_t i = 0; i < host.size(); ++i) {
    const uint32_t word = static_cast<uint32_t>(host[i]) << 16;
    std::memcpy(&out[i], &word, 4);
  }
  return out;
}

// Statistics of rows: `base` and a little that differs from row to row.
float* statistics(int64_t rows, float base) {
  std::vector<float> host(static_cast<size_t>(rows));
  for (size_t i = 0; i < host.size(); ++i) host[i] = base + 0.1f * static_cast<float>(i % 64) / 64;
  float* p = allocate<float>(host.size() * 4);
  check(cudaMemcpy(p, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  return p;
}

// Whether results of two bodies are equal but for rounding.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::fabs(a[i] - b[i]) <= 0.02f * std::max(1.f, std::fabs(a[i])))) return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t most = argc > 1 ? static_cast<size_t>(std::atoi(argv[1])) : 8;
  add_all();
  const int64_t shapes[][2] = {{16384, 4096}, {4096, 8192}, {1024, 12288}, {2048, 16384}, {65536, 768}, {131072, 128}};
  for (const auto& [rows, columns] : shapes) {
    const int64_t count = rows * columns;
    void *dy = random_bfloat16(count, 1), *s = random_bfloat16(count, 2), *w = random_bfloat16(columns, 3);
    void *passed = RESIDUAL ? random_bfloat16(count, 4) : nullptr, *dx = allocate(count * 2);
    void *dresidual = DROPOUT ? allocate(count * 2) : nullptr, *dw = allocate(columns * 2), *db = allocate(columns * 2);
    float *rstd = statistics(rows, 0.8f), *mean = statistics(rows, -0.05f);
    float *dw_partials = allocate<float>(kPartialRows * columns * 4),
          *db_partials = allocate<float>(kPartialRows * columns * 4);
    auto* seed = allocate<int64_t>(16);
    check(cudaMemset(seed, 1, 16));
    NormBackwardParams b;
    b.dy = dy, b.s = s, b.weight = w, b.rstd = rstd, b.mean = LAYER ? mean : nullptr, b.dx = dx, b.dweight = dw;
    b.dbias = LAYER ? db : nullptr, b.dresidual_out = passed, b.dresidual = dresidual;
    b.dweight_partials = dw_partials, b.dbias_partials = LAYER ? db_partials : nullptr;
    b.rows = rows, b.columns = b.dy_stride = b.s_stride = b.dresidual_out_stride = columns;
    b.dtype = b.residual_dtype = b.weight_dtype = Dtype::bfloat16;
    b.op = kOp;
    if (DROPOUT) b.dropout = make_dropout(seed, 0.1);
    NormProblem problem;
    problem.rows = rows, problem.columns = columns, problem.residual_bytes = RESIDUAL ? 2 : 0;
    problem.layer = LAYER, problem.dropout = DROPOUT;

    const NormConfig chosen = choose_norm_backward(problem);
    std::vector<Run> runs{{std::string("chosen by the package: ") + name(chosen.kernel) + " of a " + name(chosen.scope),
                           chosen, nullptr}};
    for (const Candidate& k : candidates) add_runs(k, rows, columns, runs);

    // Right? Each candidate once, over as many rows as leave every block more than one batch.
    NormBackwardParams few = b;
    few.rows = std::min<int64_t>(rows, 1500);
    std::vector<float> first_dx, first_dw, first_db;
    const Candidate* last = nullptr;
    int wrong = 0, refused = 0;
    for (const Run& r : runs) {
      if (r.candidate && r.candidate == last) continue;
      last = r.candidate;
      Run small = r;
      const int64_t units = ceil_div(few.rows, r.config.groups());
      small.config.blocks = std::min(r.config.blocks, units * r.config.cluster);
      for (void* p : {dw, db}) check(cudaMemset(p, 0xff, columns * 2));
      check(cudaMemset(dx, 0xff, few.rows * columns * 2));
      if (const Status status = run(small, few); !status.ok()) {
        std::printf("  REFUSED %s: %s\n", r.text.c_str(), status.what().c_str()), ++refused;
        continue;
      }
      check(cudaDeviceSynchronize());
      auto got_dx = floats_of(dx, few.rows * columns), got_dw = floats_of(dw, columns), got_db = floats_of(db, columns);
      if (!r.candidate)
        first_dx = got_dx, first_dw = got_dw, first_db = got_db;
      else if (!same(first_dx, got_dx) || !same(first_dw, got_dw) || (LAYER && !same(first_db, got_db)))
        std::printf("  WRONG %s\n", r.text.c_str()), ++wrong;
    }

    std::vector<sweep::Row> all;
    for (const Run& r : runs) {
      Status status;
      const double us = sweep::time_of([&] { static_cast<void>(status = run(r, b)); }, 7, 2);
      if (status.ok()) all.push_back({us, r.text});
    }
    const std::string title = std::to_string(rows) + "x" + std::to_string(columns) + " layer " + std::to_string(LAYER) +
                              " residual " + std::to_string(RESIDUAL) + " dropout " + std::to_string(DROPOUT) + ", " +
                              std::to_string(all.size()) + " configurations, " + std::to_string(wrong) + " wrong, " +
                              std::to_string(refused) + " refused";
    // The best of each candidate and depth of the ring.
    std::stable_sort(all.begin(), all.end(), [](const sweep::Row& x, const sweep::Row& y) { return x.us < y.us; });
    std::vector<sweep::Row> best;
    for (const sweep::Row& row : all) {
      const auto head = [](const std::string& text) {
        return text.substr(0, text.find(" threads")) + text.substr(std::min(text.size(), text.find(" blocks")));
      };
      if (std::none_of(best.begin(), best.end(), [&](const sweep::Row& b) { return head(b.text) == head(row.text); }))
        best.push_back(row);
    }
    sweep::print(title, static_cast<double>(count) * (DROPOUT ? 10 : RESIDUAL ? 8 : 6), best, most);
    NormBackwardParams without = b;
    without.dweight_partials = without.dbias_partials = nullptr;
    const auto run_of = [&](const std::string& text) {
      return std::find_if(runs.begin(), runs.end(), [&](const Run& r) { return r.text == text; });
    };
    // The package's choice and the fastest of the blocks and of the clusters.
    std::vector<const Run*> fastest{&runs[0]};
    for (int cluster : {1, 2})
      for (const sweep::Row& row : best)
        if (const Run& r = *run_of(row.text); r.candidate && r.config.cluster == cluster) {
          fastest.push_back(&r);
          break;
        }
    for (const Run* r : fastest) {
      Status status;
      const auto timed = [&](const NormBackwardParams& p, const NormSumConfig* sum, bool dependent = true) {
        return sweep::time_of([&] { static_cast<void>(status = run(*r, p, sum, dependent)); }, 11, 2);
      };
      std::printf("  %s:\n    %.1f us as it is, %.1f without the gradients of the parameters; second stage:\n",
                  r->text.c_str(), timed(b, nullptr), timed(without, nullptr));
      const auto text_of = [](const NormSumConfig& c) {
        return "tiles of " + std::to_string(c.tile_vectors) + " vectors, " + std::to_string(c.threads) + " threads";
      };
      std::vector<sweep::Row> sums;
      for (int tile : {4, 8, 16})
        for (int threads : {128, 256, 512}) {
          const NormSumConfig c{4, tile, threads};
          sums.push_back({timed(b, &c), text_of(c)});
        }
      const NormSumConfig chosen_sum = choose_norm_sum(columns);
      sums.push_back({timed(b, &chosen_sum, false), text_of(chosen_sum) + ", waits for the whole first stage"});
      std::sort(sums.begin(), sums.end(), [](const auto& x, const auto& y) { return x.us < y.us; });
      for (const sweep::Row& row : sums)
        std::printf("    %7.1f us  %s%s\n", row.us, row.text.c_str(),
                    row.text == text_of(chosen_sum) ? ", chosen" : "");
    }
    for (void* p : {dy, s, w, dx, dw, db, static_cast<void*>(rstd), static_cast<void*>(mean),
                    static_cast<void*>(dw_partials), static_cast<void*>(db_partials), static_cast<void*>(seed)})
      check(cudaFree(p));
    if (passed) check(cudaFree(passed));
    if (dresidual) check(cudaFree(dresidual));
  }
}
