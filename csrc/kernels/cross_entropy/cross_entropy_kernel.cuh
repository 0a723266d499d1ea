#pragma once
#include <cstdint>
#include <type_traits>

#include "device/async_copy.h"
#include "device/cluster.h"
#include "device/programmatic_launch.h"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/row.cuh"

// Kernels of cross_entropy. T: storage of the logits; all arithmetic is float, in a fixed order. kGeneral: softcap,
// label smoothing or entropy are wanted. Bytes of a row of C classes: C * sizeof(T) read, as many written with a
// gradient; looped reads twice then. Beside that each thread of a row reads its target (8 bytes), and each thread once
// the denominator (4); results are 4 bytes each, argmax 8.
namespace warpsmith::cross_entropy {

constexpr int kMaxWarps = 32;

// The threads of a row: `lanes` of a warp, or blockDim.x * cluster of a cluster.
template <bool kBlock> struct Team {
  int lane, size;
  int cluster, rank;
  int64_t row, step;  // the first row, and how far to the next
  int64_t unit;       // row without the place inside a warp: the same for all lanes, which stay together

  __device__ __forceinline__ explicit Team(int lanes) {
    cluster = kBlock ? static_cast<int>(device::cluster_size()) : 1;
    rank = kBlock ? static_cast<int>(device::cluster_rank()) : 0;
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    lane = kBlock ? rank * threads + thread : thread % lanes;
    size = kBlock ? cluster * threads : lanes;
    const int side_by_side = kBlock ? 1 : 32 / lanes, units = kBlock ? 1 : threads / 32;
    unit = (int64_t{blockIdx.x} / cluster * units + (kBlock ? 0 : thread / 32)) * side_by_side;
    row = unit + (kBlock ? 0 : thread % 32 / lanes);
    step = int64_t{gridDim.x} / cluster * units * side_by_side;
  }
  __device__ __forceinline__ void next() { row += step, unit += step; }
};

// What the threads of a row exchange. Two sets, in turn, so that one barrier a row is enough.
struct Exchange {
  Sums* warps;   // [2][kMaxWarps]
  Sums* blocks;  // [2][cluster]
  int turn;
  bool met;  // all blocks of the cluster have started

  template <bool kBlock, bool kGeneral> __device__ __forceinline__ Sums over_row(Sums x, const Team<kBlock>& team) {
    x = combine<kGeneral>(x, kBlock ? 32 : team.size);
    if constexpr (!kBlock) return x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps_of_block = blockDim.x / 32;
    Sums* mine = warps + turn * kMaxWarps;
    if (lane == 0) mine[warp] = x;
    __syncthreads();
    x = combine<kGeneral>(lane < warps_of_block ? mine[lane] : no_elements(), 32);
    if (team.cluster > 1) {
      if (!met) device::cluster_wait();
      met = true;
      Sums* slots = blocks + turn * team.cluster;
      if (static_cast<int>(threadIdx.x) < team.cluster)
        *device::cluster_shared(slots + team.rank, static_cast<unsigned>(threadIdx.x)) = x;
      device::cluster_barrier();
      x = combine<kGeneral>(lane < team.cluster ? slots[lane] : no_elements(), 32);
    }
    turn ^= 1;
    return x;
  }
};

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ int64_t target_of(const CrossEntropyParams& p, int64_t r) {
  return r < p.rows ? device::load(p.target + r) : p.ignore_index;
}

__device__ __forceinline__ float total_weight(const CrossEntropyParams& p) {
  return p.class_weight ? real_at(p.class_weight_total, 0, 0.f) : static_cast<float>(p.classes);
}

// What a thread knows of its row before it reads it.
template <class T> struct Problem {
  int64_t r;
  bool exists, read;
  int64_t target;
  Label label;
  Row<T> row;

  __device__ __forceinline__ Problem(const CrossEntropyParams& p, int64_t r, int64_t target)
      : r(r),
        exists(r < p.rows),
        read(exists),
        target(target),
        label(label_of(target, p.classes, p.ignore_index)),
        row(p.logits, exists ? r * p.logits_stride : 0, static_cast<int>(p.classes)) {
    if (label == Label::ignored && p.skip_ignored) read = false;
  }

  __device__ __forceinline__ int vectors() const { return exists ? row.vectors() : 0; }
  __device__ __forceinline__ int vectors_read() const { return read ? row.vectors() : 0; }

  __device__ __forceinline__ float class_weight(const CrossEntropyParams& p) const {
    if (label == Label::bad) return not_a_number();
    return label == Label::counts ? real_at(p.class_weight, target, 1.f) : 0.f;
  }
};

// The gradient that follows from a row's maximum and sum; early or late, the same bits. Gives lse as well.
template <class T, bool kGeneral>
__device__ __forceinline__ Gradient gradient_of(const CrossEntropyParams& p, const Options& o, const Problem<T>& at,
                                                float m, float s, float denominator, float& lse) {
  Gradient g;
  g.c = reference_of(m);
  g.rest = logf(s);
  lse = !at.read ? 0.f : m == -kMinusInfinity ? m : m + g.rest;
  // The row's factors are rounded once for float32 logits, where each rounding would be one of the result's.
  using Wide = std::conditional_t<sizeof(T) == 4, double, float>;
  const Wide scale = Wide(real_at(p.grad_loss, at.r * p.grad_loss_stride, 1.f)) / denominator;
  const Wide t = scale * o.keep * at.class_weight(p), spread = scale * o.spread;
  Wide k = t + scale * 2.f * o.z_loss * lse;
  if constexpr (kGeneral)
    if (o.spread != 0.f) k += spread * total_weight(p);
  g.t = static_cast<float>(t);
  g.s = static_cast<float>(spread);
  g.k = static_cast<float>(k / s);
  g.q = 0.f;
  g.aim(at.label, at.target, at.row.phase, Row<T>::N);
  return g;
}

// A row's results, stored by one thread. `hot`: the target's logit.
template <class T, bool kGeneral>
__device__ __forceinline__ void store_results(const CrossEntropyParams& p, const Options& o, const Problem<T>& at,
                                              const Sums& x, const Gradient& g, float lse, float hot) {
  float loss = at.label == Label::bad ? not_a_number() : 0.f, log_prob = loss;
  if (at.label == Label::counts) {
    log_prob = o.capped<T, kGeneral>(hot) - x.m - g.rest;
    loss = o.z_loss * lse * lse - o.keep * at.class_weight(p) * log_prob;
    if constexpr (kGeneral)
      if (o.spread != 0.f) loss += o.spread * (total_weight(p) * g.rest - x.a);
  }
  const auto put = [&](void* result, float value) {
    if (result) device::store(static_cast<float*>(result) + at.r, value);
  };
  put(p.loss, loss);
  put(p.log_prob, log_prob);
  put(p.lse, lse);
  put(p.row_max, x.m);
  put(p.row_sum, x.s);
  if constexpr (kGeneral) put(p.entropy, at.read ? g.rest - x.e / x.s : 0.f);
  if (p.argmax && x.at == kNowhere) device::store(p.argmax + at.r, int64_t{0});
}

// The column of a row's largest logit, stored by the thread that holds vector x.at.
template <class T, bool kGeneral> __device__ __forceinline__ void store_argmax(const CrossEntropyParams& p,
                                                                               const Problem<T>& at, const Packed& held,
                                                                               const Sums& x) {
  const float top = kGeneral ? x.top : x.m;
  int place = 0;
#pragma unroll
  for (int n = Row<T>::N - 1; n >= 0; --n) place = element<T>(held, n) == top ? n : place;
  device::store(p.argmax + at.r, int64_t{at.row.first_column(x.at)} + place);
}

// The lane that stores a row's results: it holds the target's logit.
template <bool kBlock> __device__ __forceinline__ bool stores_results(const Gradient& g, const Team<kBlock>& team) {
  return g.hot < 0 ? team.lane == 0 : g.hot % team.size == team.lane;
}

// A row in the shared memory of its threads, each of which copies, and later reads, only its own vectors: no barrier
// but for the sums. Vector i belongs to thread i % size, slot i / size. With two stages the next row is on its way
// while one is worked on; the targets come a row earlier still.
template <class T, bool kBlock, bool kGeneral> __global__ void __launch_bounds__(kBlock ? 512 : 128, kBlock ? 2 : 6)
    forward_resident(CrossEntropyParams p, int lanes, int slots, int stages) {
  constexpr int N = Row<T>::N;
  WARPSMITH_SHARED(Sums, warps, 2 * kMaxWarps);
  WARPSMITH_SHARED(Sums, blocks, 2 * cross_entropy_detail::kMaxCluster);
  WARPSMITH_DYNAMIC_SHARED(shared);
  Team<kBlock> team(lanes);
  Exchange exchange{warps, blocks, 0, false};
  const Options o(p);
  const int slot_step = static_cast<int>(blockDim.x);
  Packed* stage = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  Packed* other = stage + (stages - 1) * slots * slot_step;
  // Calls visit(i, slot) for each vector of this thread.
  const auto for_slots = [&](int vectors, Packed* slot, auto&& visit) {
    for (int i = team.lane; i < vectors; i += team.size, slot += slot_step) visit(i, slot);
  };
  // Calls visit(i, vector); several are loaded before the first is used.
  const auto for_vectors = [&](int vectors, const Packed* slot, auto&& visit) {
    constexpr int kBatch = kGeneral ? 1 : 4;
    int i = team.lane;
    for (; i + (kBatch - 1) * team.size < vectors; i += kBatch * team.size, slot += kBatch * slot_step) {
      Packed x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) x[b] = device::load(slot + b * slot_step);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) visit(i + b * team.size, x[b]);
    }
    for (; i < vectors; i += team.size, slot += slot_step) visit(i, device::load(slot));
  };
  const auto request = [&](const Problem<T>& at, Packed* to) {
    for_slots(at.vectors_read(), to, [&](int i, Packed* slot) {
      const int column = at.row.first_column(i);
      if (at.row.whole(column))
        device::copy_async<16>(slot, at.row.base + column);
      else
        *slot = at.row.load(i);
    });
    device::copy_async_commit();
  };
  if (team.cluster > 1) device::cluster_arrive_relaxed();
  int64_t target = target_of(p, team.row), next_target = target_of(p, team.row + team.step);
  request(Problem<T>(p, team.row, target), stage);
  device::wait_for_previous_kernel();
  const float denominator = real_at(p.denominator, 0, 1.f);
  for (; team.unit < p.rows; team.next()) {
    const Problem<T> at(p, team.row, target);
    target = next_target;
    next_target = target_of(p, team.row + 2 * team.step);
    if (stages == 2) {
      request(Problem<T>(p, team.row + team.step, target), other);
      device::copy_async_wait<1>();
    } else {
      device::copy_async_wait<0>();
    }

    Sums x = no_elements();
    for_vectors(at.vectors_read(), stage, [&](int i, const Packed& held) {
      const float m = max_of<T>(held);
      if (m > x.m) x.m = m, x.at = i;
    });
    if constexpr (kGeneral) {
      x.top = x.m;
      if (team.lane < at.vectors_read()) x.m = o.capped<T, true>(x.m);
    }
    share_max<kGeneral>(x, kBlock ? 32 : team.size);
    for_vectors(at.vectors_read(), stage, [&](int i, const Packed& held) {
      float z[N];
      unpack<T, kGeneral>(held, i, at.row, o, z);
      add<T, kGeneral>(x, z, i, at.row, o, p.class_weight);
    });
    x = exchange.over_row<kBlock, kGeneral>(x, team);
    float lse;
    const Gradient g = gradient_of<T, kGeneral>(p, o, at, x.m, x.s, denominator, lse);
    if (at.exists && stores_results(g, team)) {
      const T* hot = reinterpret_cast<const T*>(stage + g.hot / team.size * slot_step) + g.place;
      store_results<T, kGeneral>(p, o, at, x, g, lse, g.hot < 0 ? 0.f : device::to_float(device::load(hot)));
    }
    if (p.argmax && x.at != kNowhere && x.at % team.size == team.lane && at.exists)
      store_argmax<T, kGeneral>(p, at, device::load(stage + x.at / team.size * slot_step), x);
    if (p.dlogits) {
      const Row<T> out(p.dlogits, at.r * p.dlogits_stride, at.row.columns);
      if (g.zero)
        for_slots(at.vectors(), stage, [&](int i, Packed*) { out.store(at.row.first_column(i), Packed{}); });
      else
        for_vectors(at.vectors(), stage, [&](int i, const Packed& held) {
          float z[N];
          unpack<T, kGeneral>(held, i, at.row, o, z);
          out.store(at.row.first_column(i), g.of<T, kGeneral>(z, i, at.row, o, p.class_weight));
        });
    }
    if (stages == 2) {
      Packed* const done = stage;
      stage = other;
      other = done;
    } else {
      request(Problem<T>(p, team.row + team.step, target), stage);
    }
  }
  device::copy_async_wait<0>();
  device::launch_dependents();
}

// Any length: a block reads its row once for the sums, which follow the largest element seen so far, and again for the
// gradient.
template <class T, bool kGeneral> __global__ void __launch_bounds__(512, 1)
    forward_looped(CrossEntropyParams p, int lanes, int, int) {
  constexpr int N = Row<T>::N;
  WARPSMITH_SHARED(Sums, warps, 2 * kMaxWarps);
  Team<true> team(lanes);
  Exchange exchange{warps, nullptr, 0, true};
  const Options o(p);
  device::wait_for_previous_kernel();
  const float denominator = real_at(p.denominator, 0, 1.f);
  for (; team.unit < p.rows; team.next()) {
    const Problem<T> at(p, team.row, target_of(p, team.row));
    Sums x = no_elements();
    for (int i = team.lane; i < at.vectors_read(); i += team.size) {
      const Packed held = at.row.load(i);
      const float m = max_of<T>(held);
      if (m > x.top || x.m == kMinusInfinity) {
        if (m > x.top) x.top = m, x.at = i;
        x.rebase<kGeneral>(o.capped<T, kGeneral>(x.top));
      }
      float z[N];
      unpack<T, kGeneral>(held, i, at.row, o, z);
      add<T, kGeneral>(x, z, i, at.row, o, p.class_weight);
    }
    x = exchange.over_row<true, kGeneral>(x, team);
    float lse;
    const Gradient g = gradient_of<T, kGeneral>(p, o, at, x.m, x.s, denominator, lse);
    if (stores_results(g, team)) {
      const float hot = g.hot < 0 ? 0.f : device::to_float(device::load(at.row.base + at.target));
      store_results<T, kGeneral>(p, o, at, x, g, lse, hot);
    }
    if (p.argmax && x.at != kNowhere && x.at % team.size == team.lane)
      store_argmax<T, kGeneral>(p, at, at.row.load(x.at), x);
    if (!p.dlogits) continue;
    const Row<T> out(p.dlogits, at.r * p.dlogits_stride, at.row.columns);
    for (int i = team.lane; i < at.row.vectors(); i += team.size) {
      float z[N];
      if (!g.zero) unpack<T, kGeneral>(at.row.load(i), i, at.row, o, z);
      out.store(at.row.first_column(i), g.of<T, kGeneral>(z, i, at.row, o, p.class_weight));
    }
  }
  device::launch_dependents();
}

// x * factor, rounded again.
template <class T> __device__ __forceinline__ Packed times(const Packed& x, float factor) {
  constexpr int N = Row<T>::N;
  float y[N];
#pragma unroll
  for (int n = 0; n < N; ++n) y[n] = element<T>(x, n) * factor;
  return packed<T>(y);
}

// dlogits from row_max and row_sum: reads C * sizeof(T) a row and writes as many.
template <class T, bool kGeneral> __global__ void __launch_bounds__(512, 1)
    backward_streaming(CrossEntropyParams p, int lanes) {
  constexpr int N = Row<T>::N;
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = static_cast<int>(blockDim.x) / lanes;
  const Options o(p);
  const float late = real_at(p.late_scale, 0, 1.f), denominator = real_at(p.denominator, 0, 1.f);
  for (int64_t r = int64_t{blockIdx.x} * groups + threadIdx.x / lanes; r < p.rows; r += int64_t{gridDim.x} * groups) {
    const Problem<T> at(p, r, target_of(p, r));
    const float m = device::load(static_cast<const float*>(p.row_max) + r);
    const float s = device::load(static_cast<const float*>(p.row_sum) + r);
    float lse;
    Gradient g = gradient_of<T, kGeneral>(p, o, at, m, s, denominator, lse);
    const float grad_log_prob = real_at(p.grad_log_prob, r, 0.f);
    g.t -= grad_log_prob;
    g.k += (real_at(p.grad_lse, r, 0.f) - grad_log_prob) / s;
    if constexpr (kGeneral)
      if (p.grad_entropy) {
        g.q = -real_at(p.grad_entropy, r, 0.f) / s;
        g.k += g.q * real_at(p.entropy, r, 0.f);
      }
    const Row<T> out(p.dlogits, r * p.dlogits_stride, at.row.columns);
    for (int i = lane; i < at.row.vectors(); i += lanes) {
      float z[N];
      if (!g.zero) unpack<T, kGeneral>(at.row.load(i), i, at.row, o, z);
      const Packed y = g.of<T, kGeneral>(z, i, at.row, o, p.class_weight);
      out.store(at.row.first_column(i), late == 1.f ? y : times<T>(y, late));
    }
  }
}

// x *= factor, unless it is 1.
template <class T> __global__ void __launch_bounds__(512, 1) scale_rows(CrossEntropyScaleParams p, int lanes) {
  const float factor = device::load(static_cast<const float*>(p.factor));
  if (factor == 1.f) return;
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = static_cast<int>(blockDim.x) / lanes;
  for (int64_t r = int64_t{blockIdx.x} * groups + threadIdx.x / lanes; r < p.rows; r += int64_t{gridDim.x} * groups) {
    const Row<T> row(p.x, r * p.stride, static_cast<int>(p.columns));
    for (int i = lane; i < row.vectors(); i += lanes) {
      row.store(row.first_column(i), times<T>(row.load(i), factor));
    }
  }
}

}  // namespace warpsmith::cross_entropy
