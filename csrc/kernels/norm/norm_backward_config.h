#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/norm/norm_config.h"

// Which kernels of the backward are compiled, and which of them runs a problem.
namespace warpsmith {

// The compiled kernels. A thread's weights lie in shared memory where its vectors stay in registers: with one vector
// there is mostly room for both, with four the vectors do not stay; clusters were measured (choose_norm_batches).
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

// Of the backward's ring: vectors of the wider type.
constexpr int wide_vector_elems(const NormProblem& p) {
  return kVectorBytes / std::max(p.element_bytes, p.residual_bytes);
}

// Slots of a thread's vector in the ring: dy, s and, where there is a residual, its gradient.
constexpr int ring_pieces(const NormProblem& p) { return p.residual_bytes ? 3 : 2; }

// Blocks that a chip holds at once, `together` on a multiprocessor. Parts of a chip have no room for a last whole
// cluster: of 4 and 8 blocks an H200 holds 62 where 66 would fit its multiprocessors, and those that wait take as long
// again as all the others.
constexpr int64_t resident_blocks(const NormProblem& p, int together, int cluster) {
  return int64_t{together} * p.multiprocessors * (cluster > 2 ? 15 : 16) / 16;
}

// The first instance with `vectors` and, unless 0, `rows`, that blocks of `threads` may use.
constexpr Found backward_instance(const NormProblem& p, NormKernel kernel, norm::Scope scope, int vectors, int rows,
                                  int threads) {
  return first_of(NormBackwardInstances(), p, [&](const NormInstance& i) {
    return i.kernel == kernel && i.scope == scope && i.vectors == vectors && (rows == 0 || i.rows == rows) &&
           threads <= i.max_threads;
  });
}

// A block or a cluster a row; `together` blocks a multiprocessor or fewer, at most `stages` deep; 0 stages if not even
// one fits.
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
  const int64_t kStaticBytes = cluster > 1 ? 4096 : 1024;  // dynamic shared memory begins at a whole KiB
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

// `together` blocks a multiprocessor or fewer, at most `stages` deep; 0 stages if even two do not fit.
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

// Backward, tensors of one type: rows of more than 32 vectors in batches, where those were measured as the better. One
// H200 (2026-11-22, bf16, kernels alone in a sweep), fractions of a copy of the same bytes, in brackets other bodies:
//   columns                   768          4096         8192         12288        16384
//   rms                       0.92 (0.86)  0.95 (0.93)  0.89 (0.87)  0.78 (0.73)  0.87 (0.79)
//   layer                     0.91 (0.82)  0.93 (0.84)  0.87 (0.84)  0.71 (0.62)  0.82 (0.53)
//   rms with residual         0.95 (0.94)  0.96 (0.93)  0.91 (0.88)  0.79 (0.75)  0.90 (0.84)
//   layer, residual, dropout  0.93 (0.86)  0.94 (0.91)  0.90 (0.87)  0.74 (0.58)  0.86 (0.58)
// One block a multiprocessor, or its threads in smaller ones, beat two: each writes a row of partial sums for each
// gradient, and a megabyte of those costs 0.7 us. So do two blocks that share the columns of longer rows, or four. One
// row at a time and two where they are short, three deep without a residual; two where blocks share them, because their
// exchange takes longer.
// Between those lengths (same card, 64 M elements; what was chosen before, of an earlier run, in brackets) the threads
// of one row leave part of a multiprocessor idle: two rows together, two blocks or two vectors a thread are better.
//   columns                   1152         1600         2304         3072         4608         5376         7168
//   rms                       0.95 (0.87)  0.94 (0.82)  0.94 (0.68)  0.94 (0.84)  0.91 (0.88)  0.93 (0.90)  0.91
//   layer                     0.92 (0.86)  0.94 (0.80)  0.93 (0.68)  0.94 (0.82)  0.90 (0.68)  0.83 (0.78)  0.92 (0.86)
//   rms with residual         0.96 (0.93)  0.94 (0.90)  0.97 (0.82)  0.95 (0.90)  0.93 (0.75)  0.93 (0.83)  0.95 (0.92)
//   layer with residual       0.93         0.91         0.92 (0.77)  0.94 (0.90)  0.93 (0.72)  0.94 (0.81)  0.95 (0.90)
//   and dropout               0.92         0.85         0.95 (0.74)  0.90         0.82 (0.71)  0.94 (0.82)  0.91 (0.90)
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

// Backward. The ring: rows of up to 32 vectors, two a group (0.85 for rms, 0.83 for layer and for layer with residual
// and dropout, 0.85 for rms with residual at 128 columns), the longest that a cluster can hold, and residuals wider
// than the activation. Float beside bfloat16, layer, 768 columns: 0.97 in blocks of 96 threads with 4 stages, 0.95 in
// warps, 0.71 with vectors of 8.
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

// Rows of partial sums that a backward writes: one a block or cluster, or one a group where groups do not share theirs.
constexpr int64_t norm_partial_rows(const NormConfig& c) {
  return c.kernel == NormKernel::looped ? c.blocks * c.groups() : c.blocks / c.cluster;
}

// The second stage: so many threads that most columns' loads are all in flight at once, and so few that every block is
// at work. One H200 (2026-11-22, bf16): 0.5 to 1.5 us less than 4 loads together and 512 threads at 12,288 columns;
// within 0.3 us of the best of 72 grids and bodies for every op and number of columns.
struct NormSumConfig {
  int vector_elems = 1;
  int tile_vectors = 4;  // of a block's columns
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
