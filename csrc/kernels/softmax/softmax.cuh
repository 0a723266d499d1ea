#pragma once
#include <type_traits>

#include "device/packed.h"
#include "kernels/softmax/softmax.h"
#include "tiles/row_team.cuh"

// softmax and log_softmax, forward and backward. I: storage type of what is read; O: of the result. Sums are float, in
// a fixed order.
//
// Each element that is read and each of the result is moved once, by `looped` what is read twice. A team has one row.
namespace warpsmith::softmax {

using namespace tiles;

// How `resident` shares out a row.
struct Schedule {
  int lanes, part, slots;
  bool bulk;
};

// The sums of some elements of a row.
struct Sums {
  float m;    // forward: their maximum; backward: 0
  float s;    // forward: sum of exp(x - m); backward: the sum
  float low;  // float: what rounding has lost of s

  __device__ __forceinline__ Sums whole() const { return {m, s + low, 0.f}; }
  __device__ __forceinline__ void rebase(float largest) {
    if (m == largest) return;
    const float f = m == kMinusInfinity ? 0.f : expf(m - largest);
    *this = {largest, s * f, low * f};
  }
};

// As tiles::Exchange wants them. A: the type whose accuracy the sums have.
template <class A> struct SumsOfRow {
  using Sums = softmax::Sums;
  static constexpr int kPieces = 1;

  __device__ __forceinline__ static Sums none() { return {kMinusInfinity, 0.f, 0.f}; }
  __device__ __forceinline__ static Packed piece(const Sums& x, int) {
    return {{__float_as_uint(x.m), __float_as_uint(x.s), __float_as_uint(x.low), 0u}};
  }
  __device__ __forceinline__ static void take(Sums& x, int, const Packed& y) {
    x = {__uint_as_float(y.at[0]), __uint_as_float(y.at[1]), __uint_as_float(y.at[2])};
  }
  template <bool kShared> __device__ __forceinline__ Sums combine(Sums x, int lanes) const {
    if constexpr (!kShared) x.rebase(max_of_lanes(x.m, lanes));
    for_distances(lanes, [&](int d) {
      const float lost = add_exactly(x.s, __shfl_xor_sync(0xffffffffu, x.s, d));
      if constexpr (sizeof(A) == 4) x.low = x.low + __shfl_xor_sync(0xffffffffu, x.low, d) + lost;
    });
    return x;
  }
};

// What is added up of a row, and its results. x: a vector of x, or backward of y.
template <class I, class O, bool kBackward> struct Function {
  using A = std::conditional_t<sizeof(O) == 4, float, I>;
  static constexpr int N = Row<I>::N;
  static constexpr float kOutside = kBackward ? 0.f : kMinusInfinity;  // adds nothing
  bool log;
  float m;
  Exponential<A, true> exponential;
  ExponentialSum<A> sum = {};
  float s = 0.f, k = 0.f, rest = 0.f;  // of the whole row: the sum, the factor of results, log s

  __device__ __forceinline__ Function(bool log, float m) : log(log), m(m), exponential(m) {}

  __device__ __forceinline__ void add(const Packed& x, const Packed& dy) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (kBackward)
        sum.add(element<I>(dy, n) * (log ? 1.f : element<I>(x, n)), n);
      else
        sum.add(exponential(element<I>(x, n)), n);
    }
  }
  __device__ __forceinline__ Sums sums() const {
    if constexpr (sizeof(A) == 4) return {m, sum.s, sum.other};
    return {m, (sum.s + sum.other) / (kBackward ? 1.f : exponential.unit(m)), 0.f};
  }
  // Goes on from these sums.
  __device__ __forceinline__ void resume(const Sums& x) {
    *this = Function(log, x.m);
    sum.s = x.s * exponential.unit(m), sum.other = x.low;
  }
  // For write(). `row`: the sums of the whole row.
  __device__ __forceinline__ void finish(const Sums& row) {
    *this = Function(log, row.m);
    s = row.s;
    k = 1.f / s / exponential.unit(m);
    rest = logf(s);
  }
  __device__ __forceinline__ void results(const Packed& x, const Packed& dy, float (&y)[N]) const {
    const auto each = [&](auto&& result) {
#pragma unroll
      for (int n = 0; n < N; ++n) y[n] = result(element<I>(x, n), element<I>(dy, n));
    };
    if (kBackward && log)
      each([&](float z, float g) { return g - Exponential<A, false>::of_argument(z) * s; });
    else if (kBackward)
      each([&](float z, float g) { return z * (g - s); });
    else if (log)
      each([&](float z, float) { return z - m - rest; });
    else
      each([&](float z, float) {
        const float e = exponential(z), quotient = e * k;
        return sizeof(A) == 4 ? fmaf(fmaf(-quotient, s, e), k, quotient) : quotient;  // without the rounding of k
      });
  }
};

// Writes the results of a row. for_vectors(visit) calls visit(vector, of x, of dy). Vectors that are stored whole have
// a loop of their own, and addresses from a vector on: else the compiler would store their elements one by one.
template <class F, class I, class O, class ForVectors>
__device__ __forceinline__ void write_row(const F& f, const Row<I>& x, const Row<O>& out, ForVectors&& for_vectors) {
  constexpr int N = F::N, M = N < Row<O>::N ? N : Row<O>::N;  // elements of a vector and of a store
  const bool alike = (x.phase - out.phase) % M == 0;
  const int first = alike ? x.first_whole() : 0, end = alike ? x.end_whole() : 0;
  auto* const to = device::packed_at<O, M>(out.base - x.phase, 0);
  float y[N];
  for_vectors([&](int i, const Packed& of_x, const Packed& of_dy) {
    if (i < first || i >= end) return;
    f.results(of_x, of_dy, y);
#pragma unroll
    for (int n = 0; n < N; n += M) {
      float piece[M];
#pragma unroll
      for (int k = 0; k < M; ++k) piece[k] = y[n + k];
      device::store(to + i * (N / M) + n / M, device::rounded<O>(piece));
    }
  });
  if (first == 0 && end == x.vectors()) return;
  for_vectors([&](int i, const Packed& of_x, const Packed& of_dy) {
    if (i >= first && i < end) return;
    f.results(of_x, of_dy, y);
    const int column = x.first_column(i);
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (out.has(column + n)) device::store(out.base + column + n, device::from_float<O>(y[n]));
  });
}

// The row in the shared memory of its threads. Each reads only its own vectors, so that the only barrier is that of the
// sums.
template <class I, class O, bool kBackward, bool kBlock>
__global__ void __launch_bounds__(kBlock ? 512 : 128, kBlock ? 2 : 8) resident(SoftmaxParams p, Schedule schedule) {
  using F = Function<I, O, kBackward>;
  WARPSMITH_SHARED(Exchange::Slot, warps, Exchange::kMaxWarps);
  WARPSMITH_SHARED(device::Mbarrier, barriers, 2);
  WARPSMITH_DYNAMIC_SHARED(shared);
  const Team<kBlock> team(schedule.lanes, schedule.part);
  Exchange exchange{warps, barriers, 0, 0, false};
  device::Mbarrier* const arrived = barriers + 1;
  const bool bulk = kBlock && schedule.bulk;
  if (bulk) {
    if (threadIdx.x == 0) {
      device::mbarrier_init(exchange.filled, 1);
      device::mbarrier_init(arrived, kBackward ? 2 : 1);
      device::mbarrier_init_fence();
    }
    __syncthreads();
    if (team.cluster > 1) device::cluster_arrive_relaxed();
  }
  const bool exists = team.row < p.rows;
  const int64_t r = exists ? team.row : 0;
  const int columns = static_cast<int>(p.columns), slot_step = static_cast<int>(blockDim.x);
  const int to_dy = schedule.slots * slot_step;  // from a vector of x to that of dy
  Packed* const stage = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  const Row<I> x(p.x, r * p.x_stride, columns), dy(p.dy, r * p.dy_stride, columns);
  const int vectors = exists ? x.vectors() : 0, count = team.count(vectors);
  request_row(x, team, vectors, stage, bulk, arrived, F::kOutside);
  if constexpr (kBackward) request_row(dy, team, vectors, stage + to_dy, bulk, arrived, F::kOutside);

  // Calls visit(vector, of x, of dy) for this thread's vectors. Loads kBatch vectors before it uses the first.
  constexpr int kBatch = kBackward || sizeof(O) > sizeof(I) ? 2 : 4;
  const auto for_vectors = [&](auto&& visit) {
    const Packed* slot = stage;
    const auto batch = [&]<int K>(int i, std::integral_constant<int, K>) {
      Packed of_x[K], of_dy[K] = {};
#pragma unroll
      for (int b = 0; b < K; ++b) {
        of_x[b] = device::load(slot + b * slot_step);
        if constexpr (kBackward) of_dy[b] = device::load(slot + to_dy + b * slot_step);
      }
#pragma unroll
      for (int b = 0; b < K; ++b) visit(team.begin + i + b * team.size, of_x[b], of_dy[b]);
      slot += K * slot_step;
    };
    int i = team.lane;
    for (; i + (kBatch - 1) * team.size < count; i += kBatch * team.size)
      batch(i, std::integral_constant<int, kBatch>());
    for (; i < count; i += team.size) batch(i, std::integral_constant<int, 1>());
  };
  if (bulk)
    device::mbarrier_wait(arrived, 0);
  else
    device::copy_async_wait<0>();
  float m = 0.f;
  if constexpr (!kBackward) {
    Largest<I> largest;
    for_vectors([&](int, const Packed& of_x, const Packed&) { largest.add(of_x); });
    m = max_of_lanes(largest.value(), kBlock ? 32 : team.size);
  }
  F f(p.log, m);
  for_vectors([&](int, const Packed& of_x, const Packed& of_dy) { f.add(of_x, of_dy); });
  f.finish(exchange.over_row<true>(f.sums(), team, SumsOfRow<typename F::A>()));
  const Row<O> out(p.result, r * p.columns, columns);
  write_row(f, x, out, for_vectors);
}

// A row of any length: a block reads it for the sums, which are rescaled where a larger element appears, and again for
// the results.
template <class I, class O, bool kBackward> __global__ void __launch_bounds__(512, 2)
    looped(SoftmaxParams p, Schedule schedule) {
  using F = Function<I, O, kBackward>;
  WARPSMITH_SHARED(Exchange::Slot, warps, Exchange::kMaxWarps);
  const Team<true> team(schedule.lanes, schedule.part);
  Exchange exchange{warps, nullptr, 0, 0, true};
  const int columns = static_cast<int>(p.columns);
  const Row<I> x(p.x, team.row * p.x_stride, columns), dy(p.dy, team.row * p.dy_stride, columns);
  const Row<O> out(p.result, team.row * p.columns, columns);
  const auto for_vectors = [&](auto&& visit) {
    for (int i = team.lane; i < x.vectors(); i += team.size)
      visit(i, x.load(i, F::kOutside), kBackward ? dy.load(i, F::kOutside) : Packed{});
  };
  F f(p.log, kBackward ? 0.f : kMinusInfinity);
  for_vectors([&](int, const Packed& of_x, const Packed& of_dy) {
    if constexpr (!kBackward)
      if (const float top = max_of<I>(of_x); top > f.m) {
        Sums sums = f.sums();
        sums.rebase(top);
        f.resume(sums);
      }
    f.add(of_x, of_dy);
  });
  f.finish(exchange.over_row<false>(f.sums(), team, SumsOfRow<typename F::A>()));
  write_row(f, x, out, for_vectors);
}

}  // namespace warpsmith::softmax
