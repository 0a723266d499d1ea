// Times the backwards of the norm family (bf16): the package's choice, the ring's kernels, batches in more
// configurations than the package holds, and pairs of blocks that add up their sums before these leave the chip. Each
// beside a copy of the same bytes, its results beside those of the package's choice. An op a program; build and run all
// on a GPU machine (a minute with 5 cores):
//   for op in 0,0,0 1,0,0 0,1,0 1,1,1; do IFS=, read -r layer residual dropout <<< $op; nvcc -std=c++20 -O3 \
//     --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a -DLAYER=$layer -DRESIDUAL=$residual \
//     -DDROPOUT=$dropout tools/gpu/sweep/norm_backward.cu -o sweep$op & done; wait; \
//   for op in 0,0,0 1,0,0 0,1,0 1,1,1; do ./sweep$op 8; done
#include <cmath>

#include "kernels/norm/norm_launch.cuh"
#include "norm_pairs.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::norm;
using sweep::allocate, sweep::check, sweep::random_bfloat16;

namespace {

using Op = NormOp<LAYER, RESIDUAL, DROPOUT>;
constexpr int64_t kPartialRows = 1056;
constexpr int kGradients = LAYER ? 2 : 1;

using BatchKernel = void (*)(NormBackwardParams, int);
using RingKernel = void (*)(NormBackwardParams, int, int);

struct Candidate {
  std::string name;
  Scope scope;
  int vectors, rows, max_threads;
  bool shared_weight, pairs;
  BatchKernel batches;
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

template <int V, int U, Keep kKeep, bool kSharedWeight, int kMaxThreads, int kMinBlocks, bool kPairs = false>
void add_batches() {
  char name[80];
  std::snprintf(name, sizeof name, "%s V%d U%d keeps %s, weight %s, bounds %d,%d", kPairs ? "pairs" : "batches", V, U,
                kKeep == Keep::nothing    ? "nothing"
                : kKeep == Keep::elements ? "elements"
                                          : "products",
                kSharedWeight ? "shared" : "in registers", kMaxThreads, kMinBlocks);
  BatchKernel kernel;
  if constexpr (kPairs)
    kernel = backward_pairs<Op, bfloat16, V, U, kKeep, kSharedWeight, kMaxThreads, kMinBlocks>;
  else
    kernel = backward_batches<Op, bfloat16, V, U, kKeep, kSharedWeight, kMaxThreads, kMinBlocks>;
  add({name, Scope::block, V, U, kMaxThreads, kSharedWeight, kPairs, kernel, nullptr, {}});
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
       false,
       nullptr,
       backward_ring<Op, bfloat16, bfloat16, V, U, S, kMaxThreads, 1>,
       {}});
}

void add_all() {
  constexpr Keep kNothing = Keep::nothing, kElements = Keep::elements, kProducts = Keep::products;
  add_batches<1, 1, kProducts, false, 512, 1>(), add_batches<1, 1, kElements, false, 512, 2>();
  add_batches<1, 2, kProducts, false, 512, 1>(), add_batches<1, 2, kElements, false, 512, 1>();
  add_batches<1, 2, kElements, true, 512, 2>(), add_batches<1, 4, kElements, false, 512, 1>();
  add_batches<1, 1, kElements, true, 1024, 1>(), add_batches<2, 1, kProducts, true, 512, 1>();
  add_batches<2, 1, kProducts, false, 512, 1>(), add_batches<2, 1, kElements, true, 512, 1>();
  add_batches<2, 1, kElements, false, 512, 1>(), add_batches<2, 1, kElements, true, 768, 1>();
  add_batches<2, 1, kElements, false, 768, 1>(), add_batches<2, 2, kElements, true, 512, 1>();
  add_batches<4, 1, kElements, true, 384, 1>(), add_batches<4, 1, kElements, false, 384, 1>();
  add_batches<4, 1, kNothing, false, 512, 1>(), add_batches<4, 1, kNothing, true, 384, 1>();
  add_batches<1, 1, kProducts, false, 512, 1, true>(), add_batches<1, 2, kProducts, false, 512, 1, true>();
  add_batches<2, 1, kElements, true, 512, 1, true>(), add_batches<2, 1, kElements, true, 768, 1, true>();
  add_batches<4, 1, kElements, true, 384, 1, true>();
  add_ring<1, 1, Scope::group, 256>(), add_ring<3, 1, Scope::group, 256>();
  add_ring<2, 1, Scope::block, 768>(), add_ring<4, 1, Scope::block, 256>();
  add_ring<2, 2, Scope::cluster, 256>();
}

struct Run {
  std::string text;
  NormConfig config;
  const Candidate* candidate;  // none: the package's choice
};

Status run(const Run& r, const NormBackwardParams& p) {
  const NormConfig& c = r.config;
  if (c.kernel == NormKernel::batches)
    WARPSMITH_RETURN_IF_FAILED(
        launch(r.candidate ? r.candidate->batches : batches_kernel<Op, bfloat16>(c), grid_of(c), nullptr, p, c.stages));
  else
    WARPSMITH_RETURN_IF_FAILED(launch(r.candidate ? r.candidate->ring : ring_kernel<Op, bfloat16, bfloat16>(c),
                                      grid_of(c), nullptr, p, c.lanes, c.stages));
  return sum_partial_rows(choose_norm_sum(p.columns), p, norm_partial_rows(r.config), nullptr);
}

// Every way to launch a candidate for rows of `vectors` without much waste.
void add_runs(const Candidate& k, int64_t rows, int64_t columns, std::vector<Run>& runs) {
  const int64_t vectors = columns / kVector<bfloat16>;
  NormConfig c;
  c.kernel = k.batches ? NormKernel::batches : NormKernel::ring;
  c.scope = k.scope, c.vector_elems = kVector<bfloat16>, c.vectors = k.vectors, c.rows = k.rows;
  c.cluster = k.scope == Scope::cluster ? 8 : k.pairs ? 2 : 1;
  const int share = k.scope == Scope::cluster ? c.cluster : 1;
  c.lanes = norm_detail::threads_of(norm_detail::ceil_div(vectors, share), k.vectors);
  if (k.scope == Scope::group) {
    c.lanes = norm_detail::lanes_of(vectors, k.vectors);
    if (int64_t{c.lanes} * k.vectors < vectors) return;
  }
  if (int64_t{c.lanes} * k.vectors * share * 4 > vectors * 5) return;
  for (int threads : k.scope == Scope::group ? std::vector<int>{128, 256} : std::vector<int>{c.lanes}) {
    if (threads < 64 || threads > k.max_threads) continue;
    c.threads = threads;
    for (c.stages = k.batches ? 1 : 2; c.stages <= 4; ++c.stages) {
      c.shared_bytes = int64_t{2 + RESIDUAL} * 16 * k.vectors * k.rows * threads * c.stages;
      if (k.shared_weight) c.shared_bytes += int64_t{4} * c.vector_elems * k.vectors * threads;
      if (k.pairs) c.shared_bytes = std::max(c.shared_bytes, kGradients * columns * 4);
      if (k.scope == Scope::group) c.shared_bytes = std::max(c.shared_bytes, c.groups() * columns * 4);
      if (c.shared_bytes + static_cast<int64_t>(k.attributes.sharedSizeBytes) > 227 * 1024) break;
      int fit = 0;
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, k.kernel(), threads,
                                                          static_cast<size_t>(c.shared_bytes)));
      if (k.scope == Scope::cluster) fit = std::min(fit, 4);
      for (int together = 1; together <= fit; ++together) {
        if (together > 6 && together != fit) continue;
        const int64_t blocks = int64_t{together} * 132 * (k.scope == Scope::cluster ? 15 : 16) / 16;
        c.blocks = std::min(norm_detail::ceil_div(rows, c.groups()) * share, blocks) / c.cluster * c.cluster;
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
  const int64_t shapes[][2] = {{16384, 4096}, {4096, 8192}, {1024, 12288}, {65536, 768}, {131072, 128}};
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
    b.kind = LAYER ? NormKind::layer : NormKind::rms;
    if (DROPOUT) b.dropout = make_dropout(seed, 0.1);
    NormProblem problem;
    problem.rows = rows, problem.columns = columns, problem.residual_bytes = RESIDUAL ? 2 : 0, problem.layer = LAYER;

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
      const int64_t units = norm_detail::ceil_div(few.rows, r.config.groups());
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
    // The best of each candidate.
    std::stable_sort(all.begin(), all.end(), [](const sweep::Row& x, const sweep::Row& y) { return x.us < y.us; });
    std::vector<sweep::Row> best;
    for (const sweep::Row& row : all) {
      const auto head = [](const std::string& text) { return text.substr(0, text.find(" threads")); };
      if (std::none_of(best.begin(), best.end(), [&](const sweep::Row& b) { return head(b.text) == head(row.text); }))
        best.push_back(row);
    }
    sweep::print(title, static_cast<double>(count) * (DROPOUT ? 10 : RESIDUAL ? 8 : 6), best, most);
    NormBackwardParams without = b;
    without.dweight_partials = without.dbias_partials = nullptr;
    Status status;
    std::printf("  %7.1f us  the package's choice without the gradients of the parameters\n",
                sweep::time_of([&] { static_cast<void>(status = run(runs[0], without)); }));
    for (void* p : {dy, s, w, dx, dw, db, static_cast<void*>(rstd), static_cast<void*>(mean),
                    static_cast<void*>(dw_partials), static_cast<void*>(db_partials), static_cast<void*>(seed)})
      check(cudaFree(p));
    if (passed) check(cudaFree(passed));
    if (dresidual) check(cudaFree(dresidual));
  }
}
