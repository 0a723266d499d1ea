#pragma once
#include <cstdint>
#include <type_traits>

#include "device/async_copy.h"
#include "device/bulk_copy.h"
#include "device/fence.h"
#include "device/programmatic_launch.h"
#include "kernels/cross_entropy/row.cuh"
#include "kernels/cross_entropy/team.cuh"

// Kernels of cross_entropy. T: storage of the logits; all arithmetic is float, in a fixed order. kGeneral: softcap,
// label smoothing or entropy are wanted. Bytes of a row of C classes: C * sizeof(T) read, as many written with a
// gradient; looped reads twice then. Beside that each thread of a row reads its target (8 bytes), and each thread once
// the denominator (4); results are 4 bytes each, argmax 8.
namespace warpsmith::cross_entropy {

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

// The gradient that follows from a row's maximum and sum; early or late, the same bits. k is still
// the factor of e^(z_j - m): see set_factor.
template <class T, bool kGeneral>
__device__ __forceinline__ Gradient<T, kGeneral> gradient_of(const CrossEntropyParams& p, const Options& o,
                                                             const Problem<T>& at, float m, float s,
                                                             float denominator) {
  Gradient<T, kGeneral> g(m);
  const float lse = kGeneral || o.z_loss != 0.f ? g.find_lse(at.read, m, s) : 0.f;
  // The row's factors are rounded once for float32 logits, where each rounding would be one of the result's.
  using Wide = std::conditional_t<sizeof(T) == 4, double, float>;
  // Lanes without a row go through the motions: there is no gradient of theirs to read.
  const void* grad_loss = at.exists ? p.grad_loss : nullptr;
  const Wide scale = Wide(real_at(grad_loss, at.r * p.grad_loss_stride, 1.f)) / denominator;
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
                                              const Sums& x, Gradient<T, kGeneral>& g, float hot) {
  const float lse = g.find_lse(at.read, x.m, x.s);
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

// A row in the shared memory of its threads, each of which reads only its own vectors: no barrier but for the sums.
// They come by a bulk copy for each block, or copied by the threads themselves. With two stages (lanes of a warp alone)
// the next row is on its way while one is worked on; the targets come a row earlier still.
template <class T, bool kBlock, bool kGeneral> __global__ void __launch_bounds__(kBlock ? 512 : 128, kBlock     ? 2
                                                                                                     : kGeneral ? 6
                                                                                                                : 8)
    forward_resident(CrossEntropyParams p, Options o, Schedule schedule) {
  constexpr int N = Row<T>::N;
  WARPSMITH_SHARED(Exchange::Slot, warps, 2 * Exchange::kMaxWarps);
  WARPSMITH_SHARED(device::Mbarrier, barriers, 3);
  WARPSMITH_DYNAMIC_SHARED(shared);
  Team<kBlock> team(schedule.lanes, schedule.part);
  Exchange exchange{warps, barriers, 0, 0, false};
  device::Mbarrier* const arrived = barriers + 2;
  unsigned arrived_parity = 0;
  const bool bulk = kBlock && schedule.bulk;
  const int slot_step = static_cast<int>(blockDim.x);
  Packed* const stage = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  // Calls visit(vector) for the `count` vectors that are this block's; kBatch are loaded before the first is used.
  const auto for_vectors = [&]<int kBatch, class Visit>(int count, const Packed* slot, Visit&& visit) {
    int i = team.lane;
    for (; i + (kBatch - 1) * team.size < count; i += kBatch * team.size, slot += kBatch * slot_step) {
      Packed x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) x[b] = device::load(slot + b * slot_step);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) visit(team.begin + i + b * team.size, x[b]);
    }
    for (; i < count; i += team.size, slot += slot_step) visit(team.begin + i, device::load(slot));
  };
  const auto request = [&](const Problem<T>& at) {
    const int count = team.count(at.vectors_read());
    const int first = max(at.row.first_whole() - team.begin, 0), end = min(at.row.end_whole() - team.begin, count);
    const Packed* from = reinterpret_cast<const Packed*>(at.row.base - at.row.phase) + team.begin;
    if (bulk && threadIdx.x == 0) {
      const int bytes = max(end - first, 0) * 16;
      device::mbarrier_arrive_expect(arrived, bytes);
      if (bytes > 0) device::bulk_load(stage + first, from + first, bytes, arrived);
    }
    if (bulk && first == 0 && end == count) return;
    Packed* slot = stage;
    for (int i = team.lane; i < count; i += team.size, slot += slot_step) {
      if (i < first || i >= end)
        *slot = at.row.load(team.begin + i);
      else if (!bulk)
        device::copy_async<16>(slot, from + i);
    }
    if (!bulk) device::copy_async_commit();
  };
  if (kBlock && (bulk || team.cluster > 1)) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 3; ++i) device::mbarrier_init(barriers + i, 1);
      device::mbarrier_init_fence();
    }
    __syncthreads();
    if (team.cluster > 1) device::cluster_arrive_relaxed();
  }
  int64_t target = target_of(p, team.row), next_target = target_of(p, team.row + team.step);
  request(Problem<T>(p, team.row, target));
  device::wait_for_previous_kernel();
  const float denominator = real_at(p.denominator, 0, 1.f);
  for (; team.unit < p.rows; team.next()) {
    const Problem<T> at(p, team.row, target);
    target = next_target;
    next_target = target_of(p, team.row + 2 * team.step);
    if (bulk) {
      device::mbarrier_wait(arrived, arrived_parity);
      arrived_parity ^= 1;
    } else {
      device::copy_async_wait<0>();
    }

    const int count = team.count(at.vectors_read());
    Sums x = no_elements();
    Largest<T> largest;
    for_vectors.template operator()<4>(count, stage, [&](int, const Packed& held) { largest.add(held); });
    x.top = x.m = largest.value();
    if constexpr (kGeneral)
      if (team.lane < count) x.m = o.capped<T, true>(x.m);
    share_max<kGeneral>(x, kBlock ? 32 : team.size);
    if (p.argmax && x.top != kMinusInfinity && (kGeneral || x.top == x.m)) {
      Packed* slot = stage;
      for (x.at = team.begin + team.lane; max_of<T>(device::load(slot)) != x.top; slot += slot_step) x.at += team.size;
    }
    if (kGeneral && o.entropy_alone()) {
      EntropySums<T> sums(x.m);
      for_vectors.template operator()<4>(count, stage, [&](int, const Packed& held) { sums.add(held); });
      sums.store(x);
    } else {
      const Exponential<T, kGeneral> exponential(x.m);
      ExponentialSum<T> sum;
      for_vectors.template operator()<kGeneral ? 1 : 4>(count, stage, [&](int i, const Packed& held) {
        float z[N];
        unpack<T, kGeneral>(held, i, at.row, o, z);
        add<T, kGeneral>(x, sum, exponential, z, i, at.row, o, p.class_weight);
      });
      x.set(sum);
      x.s /= exponential.unit(x.m);
    }
    x = exchange.over_row<T, kBlock, kGeneral, true>(x, team, p.argmax);
    auto g = gradient_of<T, kGeneral>(p, o, at, x.m, x.s, denominator);
    g.set_factor(g.k, x.m);
    if (at.exists && (g.hot < 0 ? team.lane == 0 && team.begin == 0 : team.owns(g.hot, schedule.by_lanes))) {
      const T* hot = reinterpret_cast<const T*>(stage + team.slot_of(g.hot, schedule.by_lanes) * slot_step) + g.place;
      store_results<T, kGeneral>(p, o, at, x, g, g.hot < 0 ? 0.f : device::to_float(device::load(hot)));
    }
    if (p.argmax && x.at != kNowhere && at.exists && team.owns(x.at, schedule.by_lanes))
      store_argmax<T, kGeneral>(p, at, device::load(stage + team.slot_of(x.at, schedule.by_lanes) * slot_step), x);
    if (p.dlogits) {
      const Row<T> out(p.dlogits, at.r * p.dlogits_stride, at.row.columns);
      const auto gradient = [&]<bool aimed>(int i, const Packed& held, std::bool_constant<aimed>) {
        float z[N];
        unpack<T, kGeneral>(held, i, at.row, o, z);
        return g.template of<aimed>(z, i, at.row, o, p.class_weight);
      };
      int i = team.begin + team.lane;
      const int end = team.begin + team.count(at.vectors());
      const int end_whole = out.phase == at.row.phase ? min(end, at.row.end_whole()) : 0;
      const Packed* slot = stage;
      Packed* const to = reinterpret_cast<Packed*>(out.base - out.phase);
      const auto store_one = [&] {
        out.store(at.row.first_column(i), g.zero ? Packed{} : gradient(i, device::load(slot), std::true_type()));
        i += team.size, slot += slot_step;
      };
      if (!kGeneral && !g.zero) {
        constexpr int kBatch = 4;
        if (i < at.row.first_whole() && i < end) store_one();
        while (i + (kBatch - 1) * team.size < end_whole) {
          if (kBlock && static_cast<unsigned>(g.hot - i) < static_cast<unsigned>(kBatch * team.size)) {
#pragma unroll 1
            for (int b = 0; b < kBatch; ++b) store_one();
            continue;
          }
          Packed x[kBatch];
#pragma unroll
          for (int b = 0; b < kBatch; ++b) x[b] = device::load(slot + b * slot_step);
#pragma unroll
          for (int b = 0; b < kBatch; ++b)
            device::store(to + i + b * team.size, gradient(i + b * team.size, x[b], std::bool_constant<!kBlock>()));
          i += kBatch * team.size, slot += kBatch * slot_step;
        }
        for (; i < end_whole && i != g.hot; i += team.size, slot += slot_step)
          device::store(to + i, gradient(i, device::load(slot), std::false_type()));
      }
      while (i < end) store_one();
    }
    if (team.unit + team.step < p.rows) {
      if (bulk) {
        device::fence_async_shared();  // a row's first and last vectors were stored as others are
        __syncthreads();
      }
      request(Problem<T>(p, team.row + team.step, target));
    }
  }
  device::copy_async_wait<0>();
  device::launch_dependents();
}

// Any length: a block reads its row once for the sums, which follow the largest element seen so far, and again for the
// gradient.
template <class T, bool kGeneral> __global__ void __launch_bounds__(512, 1)
    forward_looped(CrossEntropyParams p, Options o, Schedule schedule) {
  constexpr int N = Row<T>::N;
  WARPSMITH_SHARED(Exchange::Slot, warps, 2 * Exchange::kMaxWarps);
  Team<true> team(schedule.lanes, schedule.part);
  Exchange exchange{warps, nullptr, 0, 0, true};
  device::wait_for_previous_kernel();
  const float denominator = real_at(p.denominator, 0, 1.f);
  for (; team.unit < p.rows; team.next()) {
    const Problem<T> at(p, team.row, target_of(p, team.row));
    Sums x = no_elements();
    Exponential<T, kGeneral> exponential(x.m);
    ExponentialSum<T> sum;
    for (int i = team.lane; i < at.vectors_read(); i += team.size) {
      const Packed held = at.row.load(i);
      const float m = max_of<T>(held);
      if (m > x.top || x.m == kMinusInfinity) {
        if (m > x.top) x.top = m, x.at = i;
        x.set(sum);
        x.s /= exponential.unit(x.m);
        x.rebase<kGeneral>(o.capped<T, kGeneral>(x.top));
        exponential = Exponential<T, kGeneral>(x.m);
        sum.s = x.s * exponential.unit(x.m), sum.other = x.low;
      }
      float z[N];
      unpack<T, kGeneral>(held, i, at.row, o, z);
      add<T, kGeneral>(x, sum, exponential, z, i, at.row, o, p.class_weight);
    }
    x.set(sum);
    x.s /= exponential.unit(x.m);
    x = exchange.over_row<T, true, kGeneral, false>(x, team, p.argmax);
    auto g = gradient_of<T, kGeneral>(p, o, at, x.m, x.s, denominator);
    g.set_factor(g.k, x.m);
    if (g.hot < 0 ? team.lane == 0 : team.owns(g.hot, schedule.by_lanes)) {
      const float hot = g.hot < 0 ? 0.f : device::to_float(device::load(at.row.base + at.target));
      store_results<T, kGeneral>(p, o, at, x, g, hot);
    }
    if (p.argmax && x.at != kNowhere && team.owns(x.at, schedule.by_lanes))
      store_argmax<T, kGeneral>(p, at, at.row.load(x.at), x);
    if (!p.dlogits) continue;
    const Row<T> out(p.dlogits, at.r * p.dlogits_stride, at.row.columns);
    for (int i = team.lane; i < at.row.vectors(); i += team.size) {
      float z[N];
      if (!g.zero) unpack<T, kGeneral>(at.row.load(i), i, at.row, o, z);
      out.store(at.row.first_column(i), g.of(z, i, at.row, o, p.class_weight));
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

// dlogits from row_max and row_sum: reads C * sizeof(T) a row and writes as many. Several whole vectors are on their
// way before the first is used; without them too few bytes are. kGeneral has no registers for that.
template <class T, bool kGeneral> __global__ void __launch_bounds__(512, kGeneral ? 1 : 2)
    backward_streaming(CrossEntropyParams p, Options o, int lanes) {
  constexpr int N = Row<T>::N, kBatch = sizeof(T) == 4 ? 3 : 4;  // float32's factors are doubles
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = static_cast<int>(blockDim.x) / lanes;
  const float late = real_at(p.late_scale, 0, 1.f), denominator = real_at(p.denominator, 0, 1.f);
  for (int64_t r = int64_t{blockIdx.x} * groups + threadIdx.x / lanes; r < p.rows; r += int64_t{gridDim.x} * groups) {
    const Problem<T> at(p, r, target_of(p, r));
    const Row<T> out(p.dlogits, r * p.dlogits_stride, at.row.columns);
    const bool in_batches = !kGeneral && at.label != Label::ignored && out.phase == at.row.phase;
    const int end = at.row.vectors(), end_whole = in_batches ? at.row.end_whole() : 0;
    const int first = lane < at.row.first_whole() ? lane + lanes : lane;
    const Packed* const from = reinterpret_cast<const Packed*>(at.row.base - at.row.phase);
    Packed* const to = reinterpret_cast<Packed*>(out.base - out.phase);
    Packed x[kBatch];
    const auto request = [&](int i) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (i + b * lanes < end_whole) x[b] = device::load(from + i + b * lanes);
    };
    if (in_batches) request(first);
    const float m = device::load(static_cast<const float*>(p.row_max) + r);
    const float s = device::load(static_cast<const float*>(p.row_sum) + r);
    auto g = gradient_of<T, kGeneral>(p, o, at, m, s, denominator);
    const float grad_log_prob = real_at(p.grad_log_prob, r, 0.f);
    g.t -= grad_log_prob;
    g.k += (real_at(p.grad_lse, r, 0.f) - grad_log_prob) / s;
    if constexpr (kGeneral)
      if (p.grad_entropy) {
        g.q = -real_at(p.grad_entropy, r, 0.f) / s;
        g.k += g.q * real_at(p.entropy, r, 0.f);
      }
    g.set_factor(g.k, m);
    const auto gradient = [&](int i, const Packed& held) {
      float z[N];
      unpack<T, kGeneral>(held, i, at.row, o, z);
      const Packed y = g.of(z, i, at.row, o, p.class_weight);
      return late == 1.f ? y : times<T>(y, late);
    };
    const auto store_one = [&](int i) {
      out.store(at.row.first_column(i), gradient(i, g.zero ? Packed{} : at.row.load(i)));
    };
    if (in_batches) {
      for (int i = first; i < end_whole; request(i)) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
          if (i + b * lanes < end_whole) device::store(to + i + b * lanes, gradient(i + b * lanes, x[b]));
        i += kBatch * lanes;
      }
      if (lane == 0 && at.row.first_whole() > 0) store_one(0);
      if (lane == lanes - 1 && at.row.first_whole() <= end_whole && end_whole < end) store_one(end_whole);
    } else {
      for (int i = lane; i < end; i += lanes) store_one(i);
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
