#pragma once
#include "kernels/norm/norm_backward.cuh"

// The backward of the norm family for rows of a block whose tensors have elements of one size T, in batches of U rows:
// all the sums of a batch in one exchange, and what a row's gradients need kept in registers from its sums on, so that
// the ring's slots are asked for again before the exchange. Sums are float, in a fixed order.
namespace warpsmith::norm {

// What stays in registers of a row between its sums and its gradients: nothing, so that the ring is read twice; its
// elements as they were read; or dy * weight and s_hat, for twice the registers and fewer instructions.
enum class Keep : uint8_t { nothing, elements, products };

// Sums of kCount values (a power of two) over the warp: lane i gets that of value i / (32 / kCount). In each of the
// first steps a lane hands over half of its values and keeps the other half: kCount - 1 shuffles, and then
// log2(32 / kCount), instead of 5 kCount.
template <int kCount> __device__ __forceinline__ float distributed_sums(float (&v)[kCount]) {
#pragma unroll
  for (int n = kCount, distance = 16; n > 1; n /= 2, distance /= 2) {
    const bool upper = threadIdx.x & static_cast<unsigned>(distance);
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float handed = upper ? v[i] : v[i + n / 2], kept = upper ? v[i + n / 2] : v[i];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, handed, distance, 32);
    }
  }
  return device::group_sum<32 / kCount>(v[0]);
}

// Sums of kCount values over the block, the same bits in all its threads. Two halves of the scratch in turn, so that
// one barrier is enough.
template <int kCount, int kMaxThreads> struct BatchSums {
  static constexpr int kLanes = 32 / kCount;  // that add up the same value
  static constexpr int kWarps = (kMaxThreads / 32 + kLanes - 1) / kLanes * kLanes;
  static constexpr int kFloats = 2 * kCount * kWarps;
  float* scratch;  // kFloats of shared memory
  int turn = 0;

  // Zeros for the warps that the block does not have: the sums run over kWarps, without a branch.
  __device__ __forceinline__ explicit BatchSums(float* shared) : scratch(shared) {
    for (int i = static_cast<int>(threadIdx.x); i < kFloats; i += static_cast<int>(blockDim.x)) scratch[i] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ void operator()(float (&v)[kCount]) {
    const float of_warp = distributed_sums(v);
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    float* values = scratch + turn * kCount * kWarps + lane / kLanes * kWarps;
    turn = 1 - turn;
    if (lane % kLanes == 0) values[warp] = of_warp;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w += kLanes) {
      sum += values[lane % kLanes + w];
    }
    sum = device::group_sum<kLanes>(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = __shfl_sync(0xffffffffu, sum, i * kLanes, 32);
    }
  }
};

// Mean and rstd of a block's rows: each lane loads those of one row in 32, one load ahead, and hands them to the other
// lanes when that row comes.
template <bool kLayer> struct RowMoments {
  static constexpr int kChunk = 32;
  const float *mean, *rstd;
  int64_t row, rows, step;  // row: to be loaded next
  int count = 0;            // rows handed out
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

  // U divides the chunk.
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

// Reads dy, s and dresidual_out once and writes dx (and dresidual) once; adds the rows of the block to dweight and
// dbias. Persistent blocks step through the rows side by side, U of each together. A row has at most
// blockDim.x * V * N columns.
//
// Shared memory: `scratch` of BatchSums; `shared`: a Ring of dy, s and dresidual_out, 1 to 4 batches deep, behind which
// lie the threads' weights as floats if kSharedWeight.
template <class Op, class T, int V, int U, Keep kKeep, bool kSharedWeight, int kMaxThreads>
__device__ __forceinline__ void backward_of_batches(const NormBackwardParams& p, int stages, float* scratch,
                                                    unsigned char* shared, float (&dweight)[V][kVector<T>],
                                                    float (&dbias)[V][kVector<T>]) {
  constexpr int N = kVector<T>, kSums = Op::kSums, kPieces = 2 + Op::kResidual, kSlotBytes = 16;
  constexpr int kKeptElements = kKeep == Keep::elements ? U : 1, kKeptProducts = kKeep == Keep::products ? U : 1;
  const int columns = static_cast<int>(p.columns), lane_column = static_cast<int>(threadIdx.x) * N;
  const int threads = static_cast<int>(blockDim.x), vector_step = threads * N, slot_step = threads * kSlotBytes;
  const int64_t first_row = blockIdx.x, units = gridDim.x;
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
  // Slots of vectors and rows that are not there stay as they are: zeros would cost as much as a row.
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
  BatchSums<U * kSums, kMaxThreads> sums_of_block(scratch);

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
          // ds = rstd (g - s_hat mean(g s_hat) - mean(g)); rstd^2 would overflow before ds does.
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

// As above; writes a partial row a block.
template <class Op, class T, int V, int U, Keep kKeep, bool kSharedWeight, int kMaxThreads, int kMinBlocks>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) backward_batches(NormBackwardParams p, int stages) {
  constexpr int N = kVector<T>, kScratch = BatchSums<U * Op::kSums, kMaxThreads>::kFloats;
  WARPSMITH_SHARED(float, scratch, kScratch);
  WARPSMITH_DYNAMIC_SHARED(shared);
  float dweight[V][N], dbias[V][N];
  backward_of_batches<Op, T, V, U, kKeep, kSharedWeight, kMaxThreads>(p, stages, scratch, shared, dweight, dbias);
  const auto store_partials = [&](void* partials, const float (&sums)[V][N]) {
    if (!partials) return;
    float* partial = static_cast<float*>(partials) + blockIdx.x * p.columns;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = static_cast<int>(v * blockDim.x + threadIdx.x) * N;
      if (column < p.columns) store_sums(partial + column, sums[v]);
    }
  };
  store_partials(p.dweight_partials, dweight);
  if constexpr (Op::kLayer) {
    store_partials(p.dbias_partials, dbias);
  }
}

}  // namespace warpsmith::norm
