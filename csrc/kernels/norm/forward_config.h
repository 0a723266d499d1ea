#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/norm/norm_config.h"

// Which forward kernels are compiled, and which one runs a problem.
namespace warpsmith {

// The compiled kernels, in the order in which the chooser tries them. `min_blocks` was measured: higher values spill.
struct NormForwardInstances {
  template <class Use> constexpr void operator()(const NormProblem& p, Use&& use) const {
    using enum NormKernel;
    using norm::Scope;
    const bool layer = p.layer, residual = p.residual_bytes != 0, wide = p.residual_bytes > p.element_bytes;
    const int few = wide ? 1 : p.dropout ? 8 : 16, many = wide ? 1 : 12;
    const int three_rows = layer && !residual ? 2 : 1, three = three_rows == 1 ? few : many;
    const int small = wide ? 1 : p.dropout || (layer && residual) ? 2 : 3, large = wide || p.dropout ? 1 : 2;
    const int small_before = layer && p.dropout ? 1 : small;
    const auto in_registers = [&](Scope scope, int vectors, int rows, int threads, int blocks, int before = 0) {
      use({.kernel = registers,
           .scope = scope,
           .vectors = vectors,
           .rows = rows,
           .fills = false,
           .max_threads = threads,
           .min_blocks_before_sm90 = before,
           .min_blocks = blocks});
    };
    in_registers(Scope::group, 1, 4, 64, few);
    in_registers(Scope::group, 2, 1, 64, few);
    in_registers(Scope::group, 3, three_rows, 64, three);
    in_registers(Scope::group, 4, 1, 64, many);
    if (!layer && !residual) in_registers(Scope::block, 2, 1, 256, 6);
    if (layer && p.element_bytes == 2 && !wide) in_registers(Scope::block, 3, 1, 384, 3);
    in_registers(Scope::block, 4, 1, 384, small, small_before);
    in_registers(Scope::block, 4, 1, 512, large);
    in_registers(Scope::cluster, 4, 1, 512, 1);
    if (p.element_bytes != 2 || residual) return;

    // 64, 128, 256, 512, 768 and 1,024 columns.
    const auto in_a_warp = [&](int lanes, int vectors, int rows, int blocks) {
      use({.kernel = warp, .vectors = vectors, .rows = rows, .lanes = lanes, .max_threads = 64, .min_blocks = blocks});
    };
    in_a_warp(8, 1, 4, layer ? 14 : 16);
    in_a_warp(16, 1, 4, layer ? 14 : 16);
    in_a_warp(32, 1, 4, layer ? 14 : 16);
    in_a_warp(32, 2, 2, layer ? 14 : 16);
    in_a_warp(32, 3, 2, layer ? 8 : 12);
    in_a_warp(32, 4, 1, layer ? 12 : 16);

    // 8,192 and 12,288 columns. max_threads exceeds the threads that are launched where the compiler then grants more
    // registers.
    use({.kernel = shared,
         .scope = Scope::block,
         .vectors = 4,
         .lanes = 256,
         .weight_with_x = layer,
         .max_threads = 384,
         .min_blocks_before_sm90 = 1,
         .min_blocks = layer ? 3 : 4});
    use({.kernel = shared,
         .scope = Scope::block,
         .vectors = 6,
         .lanes = 256,
         .weight_with_x = true,
         .max_threads = 256,
         .min_blocks_before_sm90 = 1,
         .min_blocks = 4});
    use({.kernel = resident,
         .scope = Scope::block,
         .vectors = 6,
         .rows = 4,
         .lanes = 256,
         .max_threads = 256,
         .min_blocks = 2});

    // Instances whose rows fill their threads first, then by capacity. min_blocks follows from 40 registers per thread
    // (two vectors), 48 (three) or 64 (four).
    if (!layer) return;
    const auto in_a_block = [&](int vectors, bool fills, std::initializer_list<int> threads_of) {
      for (const int threads : threads_of) {
        const int blocks = (vectors == 2 ? 1536 : vectors == 3 ? 1280 : 1024) / threads;
        use({.kernel = block,
             .scope = Scope::block,
             .vectors = vectors,
             .lanes = threads,
             .fills = fills,
             .max_threads = threads,
             .min_blocks_before_sm90 = blocks * 5 / 6,
             .min_blocks = blocks});
      }
    };
    in_a_block(2, true, {96, 128, 160, 192, 224, 256});
    in_a_block(3, true, {96, 160});
    in_a_block(4, true, {160, 192, 224, 288, 320, 352, 416, 448, 512});
    in_a_block(2, false, {96, 128, 160, 192, 224, 256});
    in_a_block(4, false, {192, 256, 320, 384, 512});
  }
};

// Whether a kernel, of a config or of an instance, has a form that writes y's cast too: `registers`, where a block
// holds a row of 16-bit elements.
constexpr bool norm_casts(const NormProblem& p, const auto& kernel) {
  return !p.dropout && p.element_bytes == 2 && p.residual_bytes <= 2 && kernel.kernel == NormKernel::registers &&
         kernel.scope == norm::Scope::block;
}

namespace norm_detail {

// Fills a config from the instance that runs it. Without an instance: a default config, instance -1.

constexpr NormConfig forward_config(const NormProblem& p, const Found& found, int lanes, int threads, int cluster,
                                    const char* why) {
  NormConfig c;
  if (!found) return c;
  c.kernel = found.instance.kernel;
  c.instance = found.place;
  c.scope = found.instance.scope;
  c.vector_elems = vector_elems(p);
  c.vectors = found.instance.vectors, c.rows = found.instance.rows;
  c.lanes = lanes, c.threads = threads, c.cluster = cluster;
  c.blocks = ceil_div(p.rows, int64_t{c.rows} * c.groups()) * cluster;
  c.why = why;
  return c;
}

constexpr NormConfig in_registers(const NormProblem& p, norm::Scope scope, int lanes, int vectors, int threads,
                                  int cluster, const char* why) {
  const Found found = first_of(NormForwardInstances(), p, [&](const NormInstance& i) {
    return i.kernel == NormKernel::registers && i.scope == scope && i.vectors == vectors && threads <= i.max_threads;
  });
  return forward_config(p, found, lanes, threads, cluster, why);
}

// Rows of a length that has an instance. The number of rows plays no part, so it changes none of a row's bits.
constexpr NormConfig in_a_warp(const NormProblem& p, int64_t vectors) {
  if (!p.affine_as_x) return {};
  const Found found = first_of(NormForwardInstances(), p, [&](const NormInstance& i) {
    return i.kernel == NormKernel::warp && i.capacity() == vectors;
  });
  return forward_config(p, found, found.instance.lanes, 64, 1,
                        "several rows fill the lanes of a warp, in registers: their length is known to the compiler");
}

constexpr Found in_shared_memory(const NormProblem& p, NormKernel kernel, int64_t vectors) {
  return first_of(NormForwardInstances(), p,
                  [&](const NormInstance& i) { return i.kernel == kernel && i.capacity() == vectors; });
}

// layer_norm, rows of 129 to 2,048 vectors. The lengths of `shared` are left out: those kernels add in another order.
constexpr NormConfig in_a_block(const NormProblem& p, int64_t vectors) {
  if (!p.affine_as_x || vectors <= 128 || in_shared_memory(p, NormKernel::shared, vectors)) return {};
  const Found found = first_of(NormForwardInstances(), p, [&](const NormInstance& i) {
    return i.kernel == NormKernel::block && (i.fills ? i.capacity() == vectors : i.capacity() >= vectors);
  });
  return forward_config(p, found, found.instance.lanes, found.instance.lanes, 1,
                        "a row fits in the registers of one block, whose threads are known to the compiler");
}

// Rows in shared memory, at the lengths where a sweep found that faster than registers (choose_norm_forward).
//
// A row's bits must not depend on the number of rows. At 8,192 columns few rows go to registers, whose kernel adds in
// the same order. At 12,288 columns the registers' kernel adds in another order, so all rows are here: several per
// block if there are more than four per multiprocessor and the chip holds all of them at once.
constexpr NormConfig shared(const NormProblem& p, int64_t vectors) {
  if (!p.affine_as_x || !p.clusters()) return {};
  const Found found = in_shared_memory(p, NormKernel::shared, vectors);
  const Found resident = in_shared_memory(p, NormKernel::resident, vectors);
  const int64_t row_bytes = vectors * kVectorBytes, many = int64_t{4} * p.multiprocessors;
  if (!found || (!resident && p.rows <= many)) return {};
  if (shared_bytes_a_block(p, resident || p.layer ? 4 : 8, 128) < row_bytes) return {};
  const int threads = found.instance.lanes;
  constexpr int kTogether = 2;
  const int64_t blocks = int64_t{kTogether} * p.multiprocessors, block_bytes = resident.instance.rows * row_bytes;
  if (resident && p.rows > many && p.rows <= blocks * resident.instance.rows &&
      shared_bytes_a_block(p, kTogether, 1024) >= block_bytes) {
    NormConfig c = forward_config(p, resident, threads, threads, 1,
                                  "all rows lie in shared memory at once, each block's asked for together");
    c.blocks = std::min(p.rows, blocks);
    c.shared_bytes = block_bytes;
    return c;
  }
  NormConfig c = forward_config(p, found, threads, threads, 1,
                                "a row lies in shared memory, which holds more of them at once than registers");
  c.shared_bytes = row_bytes;
  return c;
}

}  // namespace norm_detail

// Chooses the forward kernel. Measurements, and what lost: docs/design/norm.md. For rms_norm up to
// 4,096 columns two vectors per thread beat four (0.98 and 0.96 of a copy of the same bytes); for layer_norm they lose
// (0.83). Six vectors in registers lost everywhere. Clusters lost 5 % and more where a block can hold the row.
constexpr NormConfig choose_norm_forward(const NormProblem& p) {
  using namespace norm_detail;
  using norm::Scope;
  if (p.as_added) {
    NormProblem added = p;
    added.residual_bytes = p.element_bytes, added.as_added = false;
    const NormConfig c = choose_norm_forward(added);
    return c.instance < 0 ? c : in_registers(p, c.scope, c.lanes, c.vectors, c.threads, c.cluster, c.why);
  }
  if (!vectors_fit(p)) return looped(p, kMaxBlocks, kNormNotVectors);
  const int64_t vectors = p.columns / vector_elems(p);
  if (const NormConfig c = in_a_warp(p, vectors); c.instance >= 0) return c;
  if (vectors <= 32)
    return in_registers(p, Scope::group, lanes_of(vectors, 1), 1, 64, 1,
                        "several short rows a group of lanes, in registers");
  if (vectors <= 128)
    return in_registers(p, Scope::group, 32, static_cast<int>(ceil_div(vectors, 32)), 64, 1,
                        "a row fits in the registers of one warp: no barrier");
  if (const NormConfig c = shared(p, vectors); c.instance >= 0) return c;
  if (const NormConfig c = in_a_block(p, vectors); c.instance >= 0) return c;
  for (const int each : {2, 3, 4}) {
    // Three vectors if that leaves a tenth fewer idle places than four. Measured for layer_norm, 16-bit.
    if (each == 3 && 11 * 3 * threads_of(vectors, 3) > 10 * 4 * threads_of(vectors, 4)) continue;
    const int threads = threads_of(vectors, each);
    const NormConfig c =
        in_registers(p, Scope::block, threads, each, threads, 1, "a row fits in the registers of one block");
    if (c.instance >= 0) return c;
  }
  for (int cluster = 2; p.clusters() && cluster <= norm::kMaxCluster; cluster *= 2) {
    const int threads = threads_of(ceil_div(vectors, cluster), 4);
    const NormConfig c = in_registers(p, Scope::cluster, threads, 4, threads, cluster,
                                      "a row fits in the registers of a cluster of blocks");
    if (c.instance >= 0) return c;
  }
  return looped(p, kMaxBlocks, "a row is longer than the registers of its blocks: it is read more than once");
}

}  // namespace warpsmith
