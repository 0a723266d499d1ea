#pragma once
#include <type_traits>

#include "kernels/norm/backward.cuh"
#include "kernels/norm/batch_sums.cuh"

// The backward for rows of a block or cluster, all tensors of dtype T, in batches of U rows. All sums of a batch take
// one exchange. Keep says what stays in registers between a row's sums and its gradients: the ring's slots are then
// free for the next rows before the exchange. Sums are float, in a fixed order.
namespace warpsmith::norm {

// Mean and rstd of a block's rows. Each lane loads those of every 32nd row, one load ahead, and broadcasts them when
// that row is next.
template <bool kLayer> struct RowMoments {
  static constexpr int kChunk = 32;
  const float *mean, *rstd;
  int64_t row, rows, step;  // row: the next to load
  int count = 0;            // rows broadcast so far
  Moments loaded = {}, chunk = {};

  __device__ __forceinline__ RowMoments(const NormBackwardParams& p, int64_t first_row, int64_t units)
      : mean(static_cast<const float*>(p.mean)),
        rstd(static_cast<const float*>(p.rstd)),
        row(first_row + (threadIdx.x % 32) * units),
        rows(p.rows),
        step(kChunk * units) {
    load();
  }

  __device__ __forceinline__ void load() {
    loaded = {};
    if (row < rows) {
      loaded.rstd = device::load(rstd + row);
      if constexpr (kLayer) {
        loaded.mean = device::load(mean + row);
      }
    }
    row += step;
  }

  // U must divide the chunk.
  template <int U> __device__ __forceinline__ void next(Moments (&m)[U]) {
    static_assert(kChunk % U == 0);
    if (count % kChunk == 0) {
      chunk = loaded;
      load();
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      m[u].rstd = __shfl_sync(0xffffffffu, chunk.rstd, count % kChunk + u, 32);
      m[u].mean = kLayer ? __shfl_sync(0xffffffffu, chunk.mean, count % kChunk + u, 32) : 0.f;
    }
    count += U;
  }
};

// Which columns of which rows belong to the thread. kBlocks == 1: a block has whole rows.
template <int kBlocks> struct Share {
  int64_t unit, units;  // index of the block or cluster in the grid
  int thread;           // index of the thread's first vector in the row

  template <int V> static __device__ __forceinline__ Share of() {
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (kBlocks == 1) {
      return {blockIdx.x, gridDim.x, thread};
    } else {
      const unsigned blocks = device::cluster_size();
      return {blockIdx.x / blocks, gridDim.x / blocks,
              static_cast<int>(device::cluster_rank() * V * blockDim.x) + thread};
    }
  }
};

// Reads dy, s and dresidual_out once. Writes dx (and dresidual) once. Adds the block's rows to dweight and dbias. A row
// has at most blockDim.x * V * N columns per block that shares it.
//
// Persistent blocks step through the rows side by side, U rows at a time.
//
// Shared memory: `scratch` belongs to `sums_of_block`. `shared` holds a Ring of dy, s and dresidual_out, 1 to 4 batches
// deep, and behind it, if kSharedWeight, the threads' weights as floats.
template <class Op, class T, class C, class Sums>
__device__ __forceinline__ void backward_of_batches(const NormBackwardParams& p, int stages, Sums sums_of_block,
                                                    unsigned char* shared,
                                                    float (&dweight)[C::instance.vectors][kVector<T>],
                                                    float (&dbias)[C::instance.vectors][kVector<T>]) {
  constexpr int V = C::instance.vectors, U = C::instance.rows;
  constexpr Keep kKeep = C::instance.keep;
  constexpr bool kSharedWeight = C::instance.shared_weight;
  constexpr int N = kVector<T>, kSums = Op::kSums, kPieces = 2 + Op::kResidual, kSlotBytes = 16;
  constexpr int kKeptElements = kKeep == Keep::elements ? U : 1, kKeptProducts = kKeep == Keep::products ? U : 1;
  const auto share = Share<C::instance.cluster>::template of<V>();
  const int columns = static_cast<int>(p.columns), lane_column = share.thread * N;
  const int threads = static_cast<int>(blockDim.x), vector_step = threads * N, slot_step = threads * kSlotBytes;
  const int64_t first_row = share.unit, units = share.units;
  bool in_row[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    in_row[v] = v * vector_step + lane_column < columns;
  }

  const T* dy_next = static_cast<const T*>(p.dy) + first_row * p.dy_stride + lane_column;
  const T* s_next = static_cast<const T*>(p.s) + first_row * p.s_stride + lane_column;
  const T* passed_next = nullptr;
  if constexpr (Op::kResidual) {
    if (p.dresidual_out)
      passed_next = static_cast<const T*>(p.dresidual_out) + first_row * p.dresidual_out_stride + lane_column;
  }
  const bool passes = Op::kResidual && passed_next;
  const int64_t dy_step = units * p.dy_stride, s_step = units * p.s_stride;
  const int64_t passed_step = units * p.dresidual_out_stride;
  int64_t row_next = first_row;
  Ring<U * V * kPieces> ring{shared, stages};
  // Slots without a vector or row keep their old contents: copying zeros would take as long as copying a row.
  const auto request = [&](int stage) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row_next < p.rows) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (in_row[v]) {
            unsigned char* to = ring.slot(stage, (u * V + v) * kPieces);
            device::copy_async<kSlotBytes>(to, dy_next + v * vector_step);
            device::copy_async<kSlotBytes>(to + slot_step, s_next + v * vector_step);
            if constexpr (Op::kResidual) {
              if (passes) device::copy_async<kSlotBytes>(to + 2 * slot_step, passed_next + v * vector_step);
            }
          }
        }
      }
      row_next += units, dy_next += dy_step, s_next += s_step;
      if (passes) passed_next += passed_step;
    }
    device::copy_async_commit();
  };
  for (int s = 0; s < stages; ++s) request(s);
  RowMoments<Op::kLayer> moments(p, first_row, units);
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      dweight[v][k] = dbias[v][k] = 0;
    }
  }

  Vector<float, N> weights[kSharedWeight ? 1 : V];
  unsigned char* const weight_slots = ring.slot(stages, 0);  // behind the last stage
  const float offset = static_cast<float>(p.weight_offset);
  with_weight<T, !Op::kLayer>(p.weight_dtype, offset, [&]<class W, bool kOffset>() {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      Vector<float, N> w = {};
      if (in_row[v]) w = load_affine<W, N, kOffset>(p.weight, v * vector_step + lane_column, offset, 1.f);
      if constexpr (kSharedWeight) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
          *reinterpret_cast<Vector<float, 4>*>(weight_slots + (v * (N / 4) + i) * slot_step) = {
              {w.at[4 * i], w.at[4 * i + 1], w.at[4 * i + 2], w.at[4 * i + 3]}};
        }
      } else {
        weights[v] = w;
      }
    }
  });
  const auto weight = [&](int v) {
    if constexpr (kSharedWeight) {
      Vector<float, N> w;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const auto part = *reinterpret_cast<const Vector<float, 4>*>(weight_slots + (v * (N / 4) + i) * slot_step);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          w.at[4 * i + k] = part.at[k];
        }
      }
      return w;
    } else {
      return weights[v];
    }
  };
  const DropOut drop(Op::kDropout ? p.dropout : Dropout{});
  sums_of_block.begin();

  const bool wants_rows = p.dx || p.dresidual;
  const float inverse = 1.f / static_cast<float>(columns);
  int64_t element = first_row * p.columns + lane_column;
  for (int64_t row = first_row; row < p.rows; row += U * units) {
    Moments m[U];
    moments.next(m);
    ring.wait_for_oldest(stages - 1);
    float sums[U * kSums] = {};
    Elements<T, N> dy_kept[kKeptElements][V], s_kept[kKeptElements][V], passed[Op::kResidual ? U : 1][V];
    float g_kept[kKeptProducts][V][N], s_hat_kept[kKeptProducts][V][N];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u == 0 || row + u * units < p.rows) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (!in_row[v]) continue;
          const int piece = (u * V + v) * kPieces;
          const auto dy = ring.template read<T, N>(ring.stage, piece),
                     s = ring.template read<T, N>(ring.stage, piece + 1);
          if constexpr (Op::kResidual && kKeep != Keep::nothing) {
            passed[u][v] = ring.template read<T, N>(ring.stage, piece + 2);
          }
          if constexpr (kKeep == Keep::elements) {
            dy_kept[u][v] = dy, s_kept[u][v] = s;
          }
          const Vector<float, N> w = weight(v);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float s_hat = (Op::kLayer ? s[k] - m[u].mean : s[k]) * m[u].rstd;
            const float g = dy[k] * w.at[k];
            if constexpr (kKeep == Keep::products) {
              g_kept[u][v][k] = g, s_hat_kept[u][v][k] = s_hat;
            }
            sums[u * kSums] += g * s_hat;
            dweight[v][k] += dy[k] * s_hat;
            if constexpr (Op::kLayer) {
              sums[u * kSums + 1] += g;
              dbias[v][k] += dy[k];
            }
          }
        }
      }
    }
    if (kKeep != Keep::nothing || !wants_rows) request(ring.stage);
    if (wants_rows) {
      sums_of_block(sums);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u == 0 || row + u * units < p.rows) {
          // ds = rstd (g - s_hat mean(g s_hat) - mean(g)), without rstd^2, which would overflow before ds does.
          const float rstd = m[u].rstd, mean_along = sums[u * kSums] * inverse, along = -rstd * mean_along;
          const float less = Op::kLayer ? -with_infinities_of(mean_along, sums[u * kSums + kSums - 1] * inverse) : 0.f;
          const float shift = rstd * less;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            if (!in_row[v]) continue;
            Vector<float, N> ds;
            if constexpr (kKeep == Keep::products) {
#pragma unroll
              for (int k = 0; k < N; ++k) {
                const float rest = Op::kLayer ? s_hat_kept[u][v][k] * along + shift : s_hat_kept[u][v][k] * along;
                ds.at[k] = g_kept[u][v][k] * rstd + rest;
              }
            } else {
              Elements<T, N> dy, s;
              if constexpr (kKeep == Keep::elements) {
                dy = dy_kept[u][v], s = s_kept[u][v];
              } else {
                const int piece = (u * V + v) * kPieces;
                dy = ring.template read<T, N>(ring.stage, piece), s = ring.template read<T, N>(ring.stage, piece + 1);
                if constexpr (Op::kResidual) {
                  passed[u][v] = ring.template read<T, N>(ring.stage, piece + 2);
                }
              }
              const Vector<float, N> w = weight(v);
#pragma unroll
              for (int k = 0; k < N; ++k) {
                const float centred = Op::kLayer ? s[k] - m[u].mean : s[k];
                ds.at[k] = rstd * (dy[k] * w.at[k] + (Op::kLayer ? centred * along + less : centred * along));
              }
            }
            const int64_t to = element + v * vector_step;
            if constexpr (Op::kResidual) {
              if (passes) {
#pragma unroll
                for (int k = 0; k < N; ++k) {
                  ds.at[k] += passed[u][v][k];
                }
              }
              if (p.dresidual) store_elements(p.dresidual, to, rounded<T>(ds));
              if constexpr (Op::kDropout) {
                drop(ds, to);
              }
            }
            if (p.dx) store_elements(p.dx, to, rounded<T>(ds));
          }
        }
        element += units * p.columns;
      }
    }
    if (kKeep == Keep::nothing && wants_rows) request(ring.stage);
    ring.advance();
  }
  device::launch_dependents();
  device::copy_async_wait<0>();
}

// Runs backward_of_batches and writes a partial row per block or cluster.
template <class Op, class T, class C> __global__ void __launch_bounds__(C::instance.max_threads, kMinBlocks<C>)
    backward_batches(NormBackwardParams p, int stages) {
  constexpr int V = C::instance.vectors, kMaxThreads = C::instance.max_threads, kBlocks = C::instance.cluster;
  constexpr int N = kVector<T>, kCount = C::instance.rows * Op::kSums;
  using Slot = Vector<float, 4>;
  using Sums =
      std::conditional_t<kBlocks == 1, BatchSums<kCount, kMaxThreads>, ClusterSums<kCount, kMaxThreads, kBlocks>>;
  constexpr int kSlots = Sums::kFloats / 4;
  WARPSMITH_SHARED(Slot, scratch, kSlots);
  WARPSMITH_DYNAMIC_SHARED(shared);
  float* const floats = reinterpret_cast<float*>(scratch);
  float dweight[V][N], dbias[V][N];
  if constexpr (kBlocks == 1) {
    backward_of_batches<Op, T, C>(p, stages, Sums{floats}, shared, dweight, dbias);
  } else {
    WARPSMITH_SHARED(device::Mbarrier, complete, 2);
    backward_of_batches<Op, T, C>(p, stages, Sums{floats, complete}, shared, dweight, dbias);
  }
  const auto share = Share<kBlocks>::template of<V>();
  const int column = share.thread * N, vector_step = static_cast<int>(blockDim.x) * N;
  const auto store_partials = [&](void* partials, const float (&sums)[V][N]) {
    if (!partials) return;
    float* partial = static_cast<float*>(partials) + share.unit * p.columns + column;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (column + v * vector_step < p.columns) store_sums(partial + v * vector_step, sums[v]);
    }
  };
  store_partials(p.dweight_partials, dweight);
  if constexpr (Op::kLayer) {
    store_partials(p.dbias_partials, dbias);
  }
}

}  // namespace warpsmith::norm
