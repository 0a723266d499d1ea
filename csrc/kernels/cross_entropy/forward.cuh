#pragma once
#include <cstdint>
#include <type_traits>

#include "device/async_copy.h"
#include "device/bulk_copy.h"
#include "device/fence.h"
#include "device/programmatic_launch.h"
#include "kernels/cross_entropy/problem.cuh"
#include "kernels/cross_entropy/row.cuh"
#include "kernels/cross_entropy/team.cuh"

// The forward kernels. T: storage type of the logits. Arithmetic is float, in a fixed order.
//
// Bytes per row of C classes: reads C * sizeof(T), and with a gradient writes as many; `looped` reads the row twice
// then. Each thread of a row also reads the target (8 bytes); every thread reads the denominator once (4 bytes). Each
// result is 4 bytes, argmax 8.
namespace warpsmith::cross_entropy {

// A row in the shared memory of its threads. Each thread reads only its own vectors, so barriers are needed only for
// the sums and before the next row's bulk copy. A block's vectors arrive by one bulk copy, or each thread copies its
// own. A target is loaded one row ahead.
template <class T, bool kBlock, Terms kTerms>
__global__ void __launch_bounds__(kBlock ? 512 : 128, kBlock                     ? 2
                                                      : kTerms == Terms::general ? 6
                                                                                 : 8)
    forward_resident(CrossEntropyParams p, Options o, Schedule schedule) {
  constexpr int N = Row<T>::N;
  constexpr bool kGeneral = kTerms == Terms::general;
  constexpr Terms kGradient = kGeneral ? kTerms : Terms::plain;  // a forward has no gradient of the entropy
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
  // Calls visit(vector) for this block's `count` vectors. Loads kBatch vectors before it uses the first.
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
    tiles::request_row(at.row, team, at.vectors_read(), stage, bulk, arrived);
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
      if (team.lane < count) x.m = o.capped<T, kTerms>(x.m);
    x.m = max_of_lanes(x.m, kBlock ? 32 : team.size);
    if (p.argmax && x.top != kMinusInfinity && (kGeneral || x.top == x.m)) {
      Packed* slot = stage;
      for (x.at = team.begin + team.lane; max_of<T>(device::load(slot)) != x.top; slot += slot_step) x.at += team.size;
    }
    if constexpr (kTerms == Terms::entropy) {
      EntropySums<T> sums(x.m);
      const auto add = [&]<bool kFinite>(std::bool_constant<kFinite>) {
        for_vectors.template operator()<4>(count, stage,
                                           [&](int, const Packed& held) { sums.template add<kFinite>(held); });
      };
      const bool whole = at.row.first_whole() == 0 && at.row.end_whole() == at.row.vectors();
      if (whole) add(std::true_type());
      if (!whole || sums.undefined()) {
        sums = EntropySums<T>(x.m);
        add(std::false_type());
      }
      sums.store(x);
    } else {
      const Exponential<T, kTerms> exponential(x.m);
      ExponentialSum<T> sum;
      for_vectors.template operator()<kGeneral ? 1 : 4>(count, stage, [&](int i, const Packed& held) {
        float z[N];
        unpack<T, kTerms>(held, i, at.row, o, z);
        add<T, kTerms>(x, sum, exponential, z, i, at.row, o, p.class_weight);
      });
      x.set(sum);
      x.s /= exponential.unit(x.m);
    }
    x = exchange.over_row<true>(x, team, SumsOfRow<T, kTerms>{p.argmax != nullptr});
    auto g = gradient_of<T, kGradient>(p, o, at, x.m, x.s, denominator);
    g.set_factor(g.k, x.m);
    if (at.exists && (g.hot < 0 ? team.lane == 0 && team.begin == 0 : team.owns(g.hot, schedule.by_lanes))) {
      const T* hot = reinterpret_cast<const T*>(stage + team.slot_of(g.hot, schedule.by_lanes) * slot_step) + g.place;
      store_results<T, kTerms>(p, o, at, x, g, g.hot < 0 ? 0.f : device::to_float(device::load(hot)));
    }
    if (p.argmax && x.at != kNowhere && at.exists && team.owns(x.at, schedule.by_lanes))
      store_argmax<T, kTerms>(p, at, device::load(stage + team.slot_of(x.at, schedule.by_lanes) * slot_step), x);
    if (p.dlogits) {
      const Row<T> out(p.dlogits, at.r * p.dlogits_stride, at.row.columns);
      const auto gradient = [&]<bool aimed>(int i, const Packed& held, std::bool_constant<aimed>) {
        float z[N];
        unpack<T, kGradient>(held, i, at.row, o, z);
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
        device::fence_async_shared();  // the first and last vectors were written by ordinary stores
        __syncthreads();
      }
      request(Problem<T>(p, team.row + team.step, target));
    }
  }
  device::copy_async_wait<0>();
  device::launch_dependents();
}

// A row of any length. One block reads it once for the sums, which are rescaled whenever a larger element appears, and
// once more for the gradient.
template <class T, Terms kTerms> __global__ void __launch_bounds__(512, 1)
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
    Exponential<T, kTerms> exponential(x.m);
    ExponentialSum<T> sum;
    for (int i = team.lane; i < at.vectors_read(); i += team.size) {
      const Packed held = at.row.load(i);
      const float m = max_of<T>(held);
      if (m > x.top || x.m == kMinusInfinity) {
        if (m > x.top) x.top = m, x.at = i;
        x.set(sum);
        x.s /= exponential.unit(x.m);
        x.rebase<kTerms>(o.capped<T, kTerms>(x.top));
        exponential = Exponential<T, kTerms>(x.m);
        sum.s = x.s * exponential.unit(x.m), sum.other = x.low;
      }
      float z[N];
      unpack<T, kTerms>(held, i, at.row, o, z);
      add<T, kTerms>(x, sum, exponential, z, i, at.row, o, p.class_weight);
    }
    x.set(sum);
    x.s /= exponential.unit(x.m);
    x = exchange.over_row<false>(x, team, SumsOfRow<T, kTerms>{p.argmax != nullptr});
    auto g = gradient_of<T, kTerms>(p, o, at, x.m, x.s, denominator);
    g.set_factor(g.k, x.m);
    if (g.hot < 0 ? team.lane == 0 : team.owns(g.hot, schedule.by_lanes)) {
      const float hot = g.hot < 0 ? 0.f : device::to_float(device::load(at.row.base + at.target));
      store_results<T, kTerms>(p, o, at, x, g, hot);
    }
    if (p.argmax && x.at != kNowhere && team.owns(x.at, schedule.by_lanes))
      store_argmax<T, kTerms>(p, at, at.row.load(x.at), x);
    if (!p.dlogits) continue;
    const Row<T> out(p.dlogits, at.r * p.dlogits_stride, at.row.columns);
    for (int i = team.lane; i < at.row.vectors(); i += team.size) {
      float z[N];
      if (!g.zero) unpack<T, kTerms>(at.row.load(i), i, at.row, o, z);
      out.store(at.row.first_column(i), g.of(z, i, at.row, o, p.class_weight));
    }
  }
  device::launch_dependents();
}

}  // namespace warpsmith::cross_entropy
