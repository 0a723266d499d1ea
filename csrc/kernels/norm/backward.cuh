#pragma once
#include "device/async_copy.h"
#include "device/programmatic_launch.h"
#include "kernels/norm/row.cuh"

// The backward kernels of the norm family: templates over the op, the storage types T (dy and dx) and R (s,
// dresidual_out and dresidual), and the threads per row. Sums are float, in a fixed order.
//
// Bytes. Per element: reads dy and s and writes dx (2 * sizeof(T) + sizeof(R)); with a residual also reads
// dresidual_out (sizeof(R)), and writes dresidual if that is another tensor than dx (sizeof(R)). Per row: reads rstd,
// and for layer_norm mean, 4 bytes each. Writes partial rows of dweight, and for layer_norm dbias. The dropout mask is
// regenerated from its seed.
//
// Parameter gradients are summed in two stages: each block (or cluster) adds up its rows in registers and writes one
// partial row; sum_partials adds the partial rows.
// writes one partial row; sum_partials adds those.
namespace warpsmith::norm {

// Rows in flight through shared memory, in slots of 16 bytes. Each thread copies its own pieces of a row
// asynchronously, up to stages - 1 steps ahead (2 to 4 stages), and reads back only its own pieces, so no barrier is
// needed. kPieces: slots per thread and stage.
template <int kPieces> struct Ring {
  static constexpr int kSlotBytes = 16;
  unsigned char* slots;  // [stages, kPieces, threads of the block]
  int stages;
  int stage = 0;  // stage of the current step

  __device__ __forceinline__ unsigned char* slot(int of_stage, int piece) const {
    return slots + ((of_stage * kPieces + piece) * static_cast<int>(blockDim.x) + threadIdx.x) * kSlotBytes;
  }

  // Copies N elements (8 or 16 bytes) to a slot; writes zeros if not `valid`.
  template <class T, int N> __device__ __forceinline__ void request(int of_stage, int piece, const void* base,
                                                                    int64_t element, bool valid) const {
    device::copy_async<N * sizeof(T)>(slot(of_stage, piece), static_cast<const T*>(base) + (valid ? element : 0),
                                      valid);
  }

  template <class T, int N> __device__ __forceinline__ Elements<T, N> read(int of_stage, int piece) const {
    Elements<T, N> all;
    const auto part = *reinterpret_cast<const Vector<uint32_t, all.kWords>*>(slot(of_stage, piece));
#pragma unroll
    for (int k = 0; k < all.kWords; ++k) all.words[k] = part.at[k];
    return all;
  }

  __device__ __forceinline__ int last_stage() const { return stage == 0 ? stages - 1 : stage - 1; }
  __device__ __forceinline__ void advance() { stage = stage + 1 == stages ? 0 : stage + 1; }

  // Waits for the oldest request. `newer` (0 to 3) requests were made after it.
  __device__ __forceinline__ void wait_for_oldest(int newer) const {
    if (newer == 0)
      device::copy_async_wait<0>();
    else if (newer == 1)
      device::copy_async_wait<1>();
    else if (newer == 2)
      device::copy_async_wait<2>();
    else
      device::copy_async_wait<3>();
  }
};

// Returns `mean`, or NaN if `other` is infinite. layer_norm subtracts the mean of the centred gradient, and there
// infinities cancel to NaN.
__device__ __forceinline__ float with_infinities_of(float other, float mean) { return mean + (other - other); }

// Stores N sums in pieces of at most 16 bytes.
template <int N> __device__ __forceinline__ void store_sums(float* to, const float (&sums)[N]) {
  Vector<float, N> all;
#pragma unroll
  for (int k = 0; k < N; ++k) all.at[k] = sums[k];
  store_elements(to, 0, rounded<float>(all));
}

// Writes one partial row for a block's groups, summed through shared memory [groups, columns], which must be free.
template <int N, int V> __device__ __forceinline__ void store_group_sums(float* partial, const float (&sums)[V][N],
                                                                         float* shared, const RowSlot<Scope::group>& at,
                                                                         int columns) {
  __syncthreads();
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = at.template column<N>(v);
    if (column < columns) store_sums(shared + at.group * columns + column, sums[v]);
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (int g = 0; g < at.groups; ++g) sum += shared[g * columns + c];
    device::store(partial + c, sum);
  }
}

// Reads dy, s and dresidual_out once. Writes dx (and dresidual) once, and a partial row per block or cluster. A row has
// at most row_threads * V * N columns.
//
// Persistent units (a group, a block or a cluster, U rows at a time) step through the rows side by side. The weight and
// the sums of its gradient stay in registers.
//
// Blocks and clusters write the gradients of a row one step late: a step sums its row, sends the sums to the exchange,
// and then writes the previous row, whose sums have arrived. This hides the exchange's latency and costs one stage of
// the ring. Groups have no latency to hide and lost up to 6 % that way (one H200, 2026-11-21).
//
// Shared memory: a Ring of dy, s and dresidual_out; at the end it takes the sums of the block's groups.
template <class Op, class T, class R, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    backward_ring(NormBackwardParams p, int lanes, int stages) {
  constexpr int V = C::instance.vectors, U = C::instance.rows, kMaxThreads = C::instance.max_threads;
  constexpr int N = kWideVector<T, R>, kCount = U * Op::kSums;
  constexpr Scope S = C::instance.scope;
  constexpr int kVectorPieces = 2 + Op::kResidual, kPieces = kVectorPieces * U * V;
  using Sums = Exchange<S, kCount, kMaxThreads, 3>;
  constexpr int kScratch = Sums::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  WARPSMITH_DYNAMIC_SHARED(shared);
  const RowSlot<S> at(lanes);
  Sums exchange{scratch};
  if constexpr (S == Scope::cluster) device::cluster_arrive();
  const int columns = static_cast<int>(p.columns);
  const float inverse = 1.f / static_cast<float>(columns);
  // The rows of a warp advance together: `base` is the same in all lanes, `side` is the lane's own row among them.
  const int span = S == Scope::group ? 32 / lanes : 1, side = S == Scope::group ? at.group % span : 0;
  const int64_t base = (at.unit * at.groups + at.group - side) * U, step = at.units * at.groups * U;
  Ring<kPieces> ring{shared, stages};

  const auto row_at = [&](int64_t first_row, int u) { return first_row + u * span + side; };
  const auto request = [&](int64_t first_row, int stage) {
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t row = row_at(first_row, u);
        const int column = at.template column<N>(v), piece = (u * V + v) * kVectorPieces;
        const bool valid = row < p.rows && column < columns;
        ring.template request<T, N>(stage, piece, p.dy, row * p.dy_stride + column, valid);
        ring.template request<R, N>(stage, piece + 1, p.s, row * p.s_stride + column, valid);
        if constexpr (Op::kResidual)
          ring.template request<R, N>(stage, piece + 2, p.dresidual_out ? p.dresidual_out : p.s,
                                      row * p.dresidual_out_stride + column, valid && p.dresidual_out);
      }
    device::copy_async_commit();
  };
  Moments next[U], now[U] = {}, before[U];
  const auto request_moments = [&](int64_t first_row) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = row_at(first_row, u);
      next[u] = {};
      if (row < p.rows) {
        next[u].rstd = device::load(static_cast<const float*>(p.rstd) + row);
        if constexpr (Op::kLayer) next[u].mean = device::load(static_cast<const float*>(p.mean) + row);
      }
    }
  };

  for (int s = 0; s < stages - 1; ++s) request(base + s * step, s);
  request_moments(base);
  float dweight[V][N] = {}, dbias[V][N] = {};
  Vector<float, N> w[V];
  const float offset = static_cast<float>(p.weight_offset);
  with_weight<T, !Op::kLayer>(p.weight_dtype, offset, [&]<class W, bool kOffset>() {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = at.template column<N>(v);
      w[v] = {};
      if (column < columns) w[v] = load_affine<W, N, kOffset>(p.weight, column, offset, 1.f);
    }
  });
  if constexpr (S == Scope::cluster) device::cluster_wait();

  const bool wants_rows = p.dx || p.dresidual;
  // Writes the gradients of the rows from `first_row` on, held in `stage`. Their sums are in `sums` (group) or `all`.
  const auto write = [&](int64_t first_row, int stage, const Moments(&m)[U], const float (&sums)[kCount],
                         const float* all) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float mean_of[Op::kSums];  // means of g * s_hat and of g
#pragma unroll
      for (int i = 0; i < Op::kSums; ++i) {
        const int value = u * Op::kSums + i;
        const float sum = S == Scope::group ? sums[value] : sum_of_warps(at.row_threads / 32, [&](int warp) {
          return all[value * Sums::kRowWarps + warp];
        });
        mean_of[i] = sum * inverse;
      }
      const float shift = Op::kLayer ? with_infinities_of(mean_of[0], mean_of[Op::kSums - 1]) : 0.f;
      const int64_t row = row_at(first_row, u);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int column = at.template column<N>(v), piece = (u * V + v) * kVectorPieces;
        if (row >= p.rows || column >= columns) continue;
        const auto dy = ring.template read<T, N>(stage, piece);
        const auto s = ring.template read<R, N>(stage, piece + 1);
        Vector<float, N> ds;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float s_hat = (Op::kLayer ? s[k] - m[u].mean : s[k]) * m[u].rstd;
          const float along = Op::kLayer ? s_hat * mean_of[0] + shift : s_hat * mean_of[0];
          ds.at[k] = m[u].rstd * (dy[k] * w[v].at[k] - along);
        }
        const int64_t element = row * p.columns + column;
        if constexpr (Op::kResidual) {
          const auto passed = ring.template read<R, N>(stage, piece + 2);
#pragma unroll
          for (int k = 0; k < N; ++k) ds.at[k] += passed[k];
          if (p.dresidual) store_elements(p.dresidual, element, rounded<R>(ds));
          if constexpr (Op::kDropout) drop_out(ds, p.dropout, element);
        }
        if (p.dx) store_elements(p.dx, element, rounded<T>(ds));
      }
    }
  };

  constexpr bool kLater = S != Scope::group;  // gradients are written one step late
  float sums[kCount] = {}, sums_before[kCount] = {};
  const float *all = nullptr, *all_before = nullptr;
  const int64_t end = kLater ? p.rows + step : p.rows;
  for (int64_t first_row = base; first_row < end; first_row += step) {
    const bool summing = first_row < p.rows;
    if constexpr (!kLater) request(first_row + (stages - 1) * step, ring.last_stage());
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums_before[i] = sums[i], sums[i] = 0;
    all_before = all;
#pragma unroll
    for (int u = 0; u < U; ++u) before[u] = now[u], now[u] = next[u];
    if (summing) {
      request_moments(first_row + step);
      ring.wait_for_oldest(kLater ? stages - 2 : stages - 1);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const auto dy = ring.template read<T, N>(ring.stage, (u * V + v) * kVectorPieces);
          const auto s = ring.template read<R, N>(ring.stage, (u * V + v) * kVectorPieces + 1);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float s_hat = (Op::kLayer ? s[k] - now[u].mean : s[k]) * now[u].rstd;
            const float g = dy[k] * w[v].at[k];
            sums[u * Op::kSums] += g * s_hat;
            dweight[v][k] += dy[k] * s_hat;
            if constexpr (Op::kLayer) {
              sums[u * Op::kSums + 1] += g;
              dbias[v][k] += dy[k];
            }
          }
        }
      if (wants_rows) {
        group_sums(sums, S == Scope::group ? lanes : 32);
        all = exchange.arrive(sums);
      }
    }
    if constexpr (kLater) {
      if (wants_rows && first_row != base) write(first_row - step, ring.last_stage(), before, sums_before, all_before);
      if (!summing) break;
      request(first_row + (stages - 1) * step, ring.last_stage());
    } else {
      if (wants_rows) write(first_row, ring.stage, now, sums, all);
    }
    ring.advance();
    if (wants_rows) exchange.wait();
  }
  device::copy_async_wait<0>();
  device::launch_dependents();

  const auto store_partials = [&](void* partials, const float (&sums)[V][N]) {
    if (!partials) return;
    float* partial = static_cast<float*>(partials) + at.unit * p.columns;
    if constexpr (S == Scope::group) {
      store_group_sums<N, V>(partial, sums, reinterpret_cast<float*>(shared), at, columns);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int column = at.template column<N>(v);
        if (column < columns) store_sums(partial + column, sums[v]);
      }
    }
  };
  store_partials(p.dweight_partials, dweight);
  if constexpr (Op::kLayer) store_partials(p.dbias_partials, dbias);
}

// Any length, alignment and dtype, N elements at a time. Reads dy and s twice. Each group (a warp, or the block) keeps
// its sums in its own partial row; each column of it belongs to one thread.
template <class Op, int N> __global__ void __launch_bounds__(1024, 1) backward_looped(NormBackwardParams p, int lanes) {
  WARPSMITH_SHARED(float, scratch, 2 * kMaxWarps);
  LoopedSum row_sum{scratch, lanes};
  const int lane = threadIdx.x % lanes;
  const int64_t group = int64_t{blockIdx.x} * (blockDim.x / lanes) + threadIdx.x / lanes;
  const int64_t groups = int64_t{gridDim.x} * (blockDim.x / lanes);
  const int64_t step = int64_t{lanes} * N, first = int64_t{lane} * N;
  const float inverse = 1.f / static_cast<float>(p.columns);
  float* dweight = p.dweight_partials ? static_cast<float*>(p.dweight_partials) + group * p.columns : nullptr;
  float* dbias = p.dbias_partials ? static_cast<float*>(p.dbias_partials) + group * p.columns : nullptr;
  for (int64_t c = first; c < p.columns; c += step) {
    if (dweight) store_floats<float>(dweight, c, Vector<float, N>{});
    if (dbias) store_floats<float>(dbias, c, Vector<float, N>{});
  }

  for (int64_t r = group; r < p.rows; r += groups) {
    const float rstd = device::load(static_cast<const float*>(p.rstd) + r);
    const float mean = Op::kLayer ? device::load(static_cast<const float*>(p.mean) + r) : 0.f;
    Vector<float, N> dy, g, s_hat;
    const auto read = [&](int64_t c) {
      dy = load_as<N>(p.dy, r * p.dy_stride + c, p.dtype);
      s_hat = load_as<N>(p.s, r * p.s_stride + c, p.residual_dtype);
      const auto w = load_affine_as<N>(p.weight, c, p.weight_dtype, static_cast<float>(p.weight_offset), 1.f);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        s_hat.at[k] = (s_hat.at[k] - mean) * rstd;
        g.at[k] = dy.at[k] * w.at[k];
      }
    };
    float along = 0, shift = 0;
    if (p.dx || p.dresidual) {
      for (int64_t c = first; c < p.columns; c += step) {
        read(c);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          along += g.at[k] * s_hat.at[k];
          if constexpr (Op::kLayer) shift += g.at[k];
        }
      }
      along = row_sum(along) * inverse;
      if constexpr (Op::kLayer) shift = with_infinities_of(along, row_sum(shift) * inverse);
    }
    for (int64_t c = first; c < p.columns; c += step) {
      read(c);
      const auto add_to = [&](float* partial, const Vector<float, N>& x) {
        if (!partial) return;
        auto sum = load_floats<float, N>(partial, c);
#pragma unroll
        for (int k = 0; k < N; ++k) sum.at[k] += x.at[k];
        store_floats<float>(partial, c, sum);
      };
      Vector<float, N> ds, product;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        product.at[k] = dy.at[k] * s_hat.at[k];
        ds.at[k] = rstd * (g.at[k] - s_hat.at[k] * along - shift);
      }
      add_to(dweight, product);
      add_to(dbias, dy);
      const int64_t element = r * p.columns + c;
      if constexpr (Op::kResidual) {
        if (p.dresidual_out) {
          const auto passed = load_as<N>(p.dresidual_out, r * p.dresidual_out_stride + c, p.residual_dtype);
#pragma unroll
          for (int k = 0; k < N; ++k) ds.at[k] += passed.at[k];
        }
        if (p.dresidual) store_as(p.dresidual, element, ds, p.residual_dtype);
        if constexpr (Op::kDropout) drop_out(ds, p.dropout, element);
      }
      if (p.dx) store_as(p.dx, element, ds, p.dtype);
    }
  }
  device::launch_dependents();
}

}  // namespace warpsmith::norm
