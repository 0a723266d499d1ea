#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/norm/norm_config.h"

// Which backward kernels are compiled, and which one runs a problem.
namespace warpsmith {

// The compiled kernels. If a thread keeps its vectors in registers, its weights go to shared memory. With one vector
// there is mostly room for both in registers; with four, the vectors are not kept. For clusters the choice was measured
// (choose_norm_batches).
struct NormBackwardInstances {
  template <class Use> constexpr void operator()(const NormProblem& p, Use&& use) const {
    using norm::Keep;
    using norm::Scope;
    const bool layer = p.layer, residual = p.residual_bytes != 0, wide = p.residual_bytes > p.element_bytes;
    const bool rms = !layer && !residual;
    const auto ring = [&](Scope scope, int vectors, int rows, int threads) {
      use({.kernel = NormKernel::ring, .scope = scope, .vectors = vectors, .rows = rows, .max_threads = threads});
    };
    if (wide)
      for (const int vectors : {1, 2, 3, 4}) ring(Scope::group, vectors, 1, 256);
    else
      ring(Scope::group, 1, 2, 256);
    if (wide || (!layer && residual)) ring(Scope::block, 2, 1, layer ? 512 : 768);
    ring(Scope::cluster, 2, 2, 256);
    if (wide) return;

    const auto batches = [&](int vectors, int rows, Keep keep, int threads, int blocks) {
      use({.kernel = NormKernel::batches,
           .scope = Scope::block,
           .vectors = vectors,
           .rows = rows,
           .keep = keep,
           .shared_weight = vectors == 2,
           .max_threads = threads,
           .min_blocks = blocks});
    };
    const auto shared_batches = [&](int vectors, int rows, Keep keep, int threads) {
      use({.kernel = NormKernel::batches,
           .scope = Scope::cluster,
           .vectors = vectors,
           .rows = rows,
           .keep = keep,
           .shared_weight = rms,
           .cluster = 4,
           .max_threads = threads,
           .min_blocks = 1});
    };
    if (layer) batches(1, 1, Keep::products, 512, 1);
    if (rms) batches(1, 1, Keep::elements, 512, 2);
    if (!layer || !residual) batches(1, 2, Keep::products, 512, 1);
    if (layer || !residual) batches(2, 1, Keep::elements, residual ? 512 : 768, 1);
    if (rms) batches(4, 1, Keep::nothing, 512, 1);
    shared_batches(1, 2, rms ? Keep::elements : Keep::products, rms ? 768 : 512);
    if (layer && !residual) shared_batches(2, 1, Keep::products, 512);
  }
};

namespace norm_detail {

// Elements of a vector in the backward's ring, in the wider type.
constexpr int wide_vector_elems(const NormProblem& p) {
  return kVectorBytes / std::max(p.element_bytes, p.residual_bytes);
}

// Slots per vector in the ring: dy, s, and with a residual dresidual_out.
constexpr int ring_pieces(const NormProblem& p) { return p.residual_bytes ? 3 : 2; }

// Blocks that the chip holds at once, with `together` per multiprocessor. Parts of the chip lack room for a last whole
// cluster: an H200 holds 62 clusters of 4 or 8 blocks where its multiprocessors would fit 66. The clusters left over
// would run after all others and double the time.
constexpr int64_t resident_blocks(const NormProblem& p, int together, int cluster) {
  return int64_t{together} * p.multiprocessors * (cluster > 2 ? 15 : 16) / 16;
}

// The first instance with `vectors` and `rows` (0: any number of rows) that can run blocks of `threads`.
constexpr Found backward_instance(const NormProblem& p, NormKernel kernel, norm::Scope scope, int vectors, int rows,
                                  int threads) {
  return first_of(NormBackwardInstances(), p, [&](const NormInstance& i) {
    return i.kernel == kernel && i.scope == scope && i.vectors == vectors && (rows == 0 || i.rows == rows) &&
           threads <= i.max_threads;
  });
}

// One block or cluster per row. Takes at most `together` blocks per multiprocessor and `stages` stages; returns 0
// stages if not even one fits.
constexpr NormConfig batches(const NormProblem& p, int vectors, int rows, int together, int stages, int cluster = 1) {
  NormConfig c;
  const norm::Scope scope = cluster > 1 ? norm::Scope::cluster : norm::Scope::block;
  const int threads = threads_of(ceil_div(p.columns / vector_elems(p), cluster), vectors);
  const Found found = backward_instance(p, NormKernel::batches, scope, vectors, rows, threads);
  if (!found) return c;
  c.kernel = NormKernel::batches, c.instance = found.place;
  c.scope = scope;
  c.vector_elems = vector_elems(p);
  c.vectors = vectors, c.rows = rows, c.cluster = cluster;
  c.threads = c.lanes = threads;
  const int64_t stage_bytes = int64_t{ring_pieces(p)} * kVectorBytes * vectors * rows * threads;
  const int64_t weight_bytes = found.instance.shared_weight ? int64_t{4} * c.vector_elems * vectors * threads : 0;
  const int64_t kStaticBytes = cluster > 1 ? 4096 : 1024;  // dynamic shared memory starts at a multiple of 1 KiB
  const auto room = [&](int blocks) { return shared_bytes_a_block(p, blocks, kStaticBytes) - weight_bytes; };
  while (together > 1 && room(together) < stage_bytes) --together;
  c.stages = static_cast<int>(std::clamp<int64_t>(room(together) / stage_bytes, 0, stages));
  c.shared_bytes = c.stages * stage_bytes + weight_bytes;
  const int64_t units = std::max<int64_t>(1, resident_blocks(p, together, cluster) / cluster);
  c.blocks = std::min(p.rows, units) * cluster;
  c.why = cluster > 1 ? "a cluster a row: each block takes a part of the columns of batches of rows"
                      : "one block a row: batches of rows stream through shared memory and stay in registers";
  return c;
}

// Takes at most `together` blocks per multiprocessor and `stages` stages; returns 0 stages if fewer than two fit.
constexpr NormConfig ring(const NormProblem& p, norm::Scope scope, int lanes, int vectors, int threads, int cluster,
                          int together, int stages, const char* why) {
  NormConfig c;
  const Found found = backward_instance(p, NormKernel::ring, scope, vectors, 0, threads);
  if (!found) return c;
  c.kernel = NormKernel::ring, c.instance = found.place;
  c.scope = scope;
  c.vector_elems = wide_vector_elems(p);
  const int rows = found.instance.rows;
  c.lanes = lanes, c.vectors = vectors, c.rows = rows, c.threads = threads, c.cluster = cluster;
  const int64_t stage_bytes = int64_t{ring_pieces(p)} * kVectorBytes * vectors * rows * threads;
  const int64_t static_bytes = (scope == norm::Scope::cluster ? 1536 : 384) * int64_t{rows} * (p.layer ? 2 : 1);
  while (together > 1 && shared_bytes_a_block(p, together, static_bytes) / stage_bytes < 2) --together;
  c.stages = static_cast<int>(std::min<int64_t>(stages, shared_bytes_a_block(p, together, static_bytes) / stage_bytes));
  if (c.stages < 2) c.stages = 0;
  c.shared_bytes = c.stages * stage_bytes;
  const int64_t units = std::max<int64_t>(1, resident_blocks(p, together, cluster) / cluster);
  c.blocks = std::min(ceil_div(p.rows, int64_t{rows} * c.groups()), units) * cluster;
  c.why = why;
  return c;
}

}  // namespace norm_detail

// Backward of tensors of one type: rows of more than 32 vectors in batches, wherever batches were faster. Measurements:
// docs/design/norm.md. What they showed:
//
// - One block per multiprocessor, or its threads in several smaller blocks, beats two. Each block writes a row of
//   partial sums for each parameter gradient, and a megabyte of these costs 0.7 us.
// - Two or four blocks that share the columns of longer rows are faster, for the same reason.
// - Long rows one at a time, short rows two at a time.
// - Three stages without a residual. Two stages where blocks share rows, because their exchange takes longer.
// - At lengths where the threads of one row leave part of a multiprocessor idle: two rows together, two blocks, or two
//   vectors per thread.
constexpr NormConfig choose_norm_batches(const NormProblem& p) {
  using namespace norm_detail;
  const int64_t vectors = p.columns / vector_elems(p);
  const bool residual = p.residual_bytes != 0;
  if (vectors <= 128) {
    const int threads = threads_of(vectors, 1);
    if (p.layer) return residual ? batches(p, 1, 1, 384 / threads, 3) : batches(p, 1, 2, 384 / threads, 2);
    if (residual) return batches(p, 1, 2, 480 / threads, 1);
    return batches(p, 1, 2, static_cast<int>(ceil_div(288, threads)), 3);
  }
  const int threads = threads_of(vectors, 1);
  if (vectors <= 512 && 512 % threads == 0) {
    const int together = 512 / threads;
    if (!p.layer && residual) return batches(p, 1, 2, together, 1);
    return batches(p, 1, 1, together, residual ? 2 : 3);
  }
  if (vectors <= 256) {
    if (p.layer && residual) return threads <= 160 ? batches(p, 1, 1, 3, 2) : batches(p, 1, 1, 2, 3);
    if (p.layer && threads <= 160) return batches(p, 1, 2, 3, 2);
    return batches(p, 1, 2, 2, residual || threads > 160 ? 2 : 3);
  }
  if (vectors <= 512) {
    if (p.layer && residual) {
      if (vectors <= 320) return batches(p, 2, 1, 3, 1);
      return vectors < 384 ? batches(p, 2, 1, 2, 2) : batches(p, 1, 1, 1, 3);
    }
    if (p.layer && vectors <= 320) return batches(p, 1, 1, 2, 3);
    return batches(p, 1, 2, 1, !residual && !p.layer && vectors <= 320 ? 3 : 2);
  }
  if (p.clusters() && vectors <= 2048) {
    const int threads_of_four = threads_of(ceil_div(vectors, 4), 1), together = 768 / threads_of_four;
    if (!p.layer && !residual)
      return vectors <= 768 ? batches(p, 1, 2, 2, 1, 2) : batches(p, 1, 2, together, together > 1 ? 1 : 2, 4);
    if (vectors < 1024) {
      if (!residual) return batches(p, 2, 1, 512 / threads_of_four, 2, 2);
      if (p.layer && vectors <= 832) return batches(p, 2, 1, 1, 2);
      return !p.layer && vectors <= 640 ? batches(p, 1, 2, 3, 2, 4) : batches(p, 1, 2, 1, 2, 2);
    }
    if (vectors == 1024) return batches(p, 1, 2, 1, residual ? 1 : 2, 2);
    if (residual) return batches(p, 1, 2, 1, 2, 4);
    return batches(p, 2, 1, std::max(2, 512 / threads_of(ceil_div(vectors, 4), 2)), 2, 4);
  }
  if (const NormConfig c = batches(p, 2, 1, 1, residual ? 1 : 2); c.instance >= 0) return c;
  if (!p.layer && !residual && vectors <= 2048) return batches(p, 4, 1, 1, 2);
  return {};
}

// Chooses the backward kernel. The ring takes rows of up to 32 vectors, two per group (128 columns: 0.83 to 0.85 of a
// copy of the same bytes), the longest rows that a cluster can hold, and residuals wider than the activation. For float
// beside bfloat16, layer_norm, 768 columns: 0.97 in blocks of 96 threads with 4 stages, 0.95 in warps, 0.71 with
// vectors of 8.
constexpr NormConfig choose_norm_backward(const NormProblem& p) {
  using namespace norm_detail;
  using norm::Scope;
  const int64_t looped_blocks = int64_t{4} * p.multiprocessors;
  if (!vectors_fit(p)) return looped(p, looped_blocks, kNormNotVectors);
  const int64_t vectors = p.columns / wide_vector_elems(p);
  const bool wide = p.residual_bytes > p.element_bytes;
  if (vectors <= 32 || (wide && vectors <= 128)) {
    const bool narrow = vectors <= 32, large = !narrow || (p.layer && p.residual_bytes && !wide);
    const int lanes = narrow ? lanes_of(vectors, 1) : 32, threads = large ? 256 : 128;
    const int together = !narrow ? 1 : wide ? 6 : large ? 2 : p.residual_bytes ? 3 : 5;
    const NormConfig c = ring(p, Scope::group, lanes, static_cast<int>(ceil_div(vectors, lanes)), threads, 1, together,
                              2, "a row fits in one warp: rows stream through shared memory without a barrier");
    if (c.stages) return c;
  }
  if (!wide && vectors > 32) {
    const NormConfig c = choose_norm_batches(p);
    if (c.stages) return c;
  }
  const int block_threads = threads_of(vectors, 2);
  if (const NormConfig c =
          ring(p, Scope::block, block_threads, 2, block_threads, 1, std::clamp(512 / block_threads, 1, 4), wide ? 4 : 3,
               "one block a row: rows stream through shared memory");
      c.stages)
    return c;
  const int threads = threads_of(ceil_div(vectors, norm::kMaxCluster), 2);
  if (p.clusters()) {
    const NormConfig c = ring(p, Scope::cluster, threads, 2, threads, norm::kMaxCluster, std::max(1, 384 / threads), 3,
                              "a cluster a row: each block takes a part of the columns of its rows");
    if (c.stages) return c;
  }
  return looped(p, looped_blocks, "a row of the inputs does not fit on the chip: each is read twice");
}

// Rows of partial sums that a backward writes: one per block or cluster, or one per group in `looped`.
constexpr int64_t norm_partial_rows(const NormConfig& c) {
  return c.kernel == NormKernel::looped ? c.blocks * c.groups() : c.blocks / c.cluster;
}

// The second stage: enough threads that most columns have all their loads in flight, few enough that every block runs
// at once. One H200 (2026-11-22, bf16): 0.5 to 1.5 us less at 12,288 columns than 4 loads per thread and blocks of 512
// threads; within 0.3 us of the best of 72 grids and bodies for every op and length.
struct NormSumConfig {
  int vector_elems = 1;
  int tile_vectors = 4;  // vectors of columns per block
  int threads = 256;
};

constexpr NormSumConfig choose_norm_sum(int64_t columns) {
  NormSumConfig c;
  c.vector_elems = columns % 4 == 0 ? 4 : 1;
  const int64_t vectors = columns / c.vector_elems;
  c.tile_vectors = vectors <= 256 ? 4 : vectors <= 2048 ? 8 : 16;
  c.threads = c.tile_vectors == 4 ? 512 : 256;
  return c;
}

}  // namespace warpsmith
