#pragma once
#include <cstdint>

#include "common/dropout.h"
#include "common/dtype.h"
#include "device/cluster.h"
#include "device/convert.h"
#include "device/math.h"
#include "device/reduce.h"
#include "device/vector.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_config.h"

// The vocabulary of the norm kernels: which threads hold a row, and how they load, convert and sum it.
namespace warpsmith::norm {

using device::Vector;

constexpr int kMaxWarps = 32;

// The flags of an op's row (norm_ops.h).
template <bool kLayerNorm, bool kAddsResidual, bool kDropsOut> struct NormOp {
  static constexpr bool kLayer = kLayerNorm, kResidual = kAddsResidual, kDropout = kDropsOut;
  static constexpr int kSums = kLayer ? 2 : 1;  // sums per row, in the backward
};

// Elements of one 16-byte vector of activations. N residuals of a type twice as wide take two accesses.
template <class T> constexpr int kVector = 16 / sizeof(T);

// Elements of one 16-byte vector of the wider type. The backward's asynchronous copies bypass the L1 cache: two
// accesses per vector would fetch each 32-byte sector twice (one H200, 65536x768 bfloat16 beside float: 271 us instead
// of 199).
template <class T, class R> constexpr int kWideVector = 16 / (sizeof(T) > sizeof(R) ? sizeof(T) : sizeof(R));

// The thread's row, and its lane in that row. Rows that share a warp (scope group) advance in step, because
// the shuffles that sum a row involve the whole warp.
template <Scope S> struct RowSlot {
  int lane;         // of the row
  int row_threads;  // threads of the row
  int group;        // index among the rows that the block works on side by side; 0 except for groups
  int groups;
  int64_t unit;   // index of the block or cluster in the grid
  int64_t units;  // in the grid

  __device__ __forceinline__ explicit RowSlot(int lanes) {
    if constexpr (S == Scope::cluster) {
      const int size = static_cast<int>(device::cluster_size());
      lane = static_cast<int>(device::cluster_rank() * blockDim.x + threadIdx.x);
      row_threads = size * static_cast<int>(blockDim.x);
      unit = blockIdx.x / size, units = gridDim.x / size;
    } else {
      lane = S == Scope::block ? threadIdx.x : threadIdx.x % lanes;
      row_threads = S == Scope::block ? static_cast<int>(blockDim.x) : lanes;
      unit = blockIdx.x, units = gridDim.x;
    }
    group = S == Scope::group ? threadIdx.x / lanes : 0;
    groups = S == Scope::group ? static_cast<int>(blockDim.x) / lanes : 1;
  }

  // First column of the thread's vector v.
  template <int N> __device__ __forceinline__ int column(int v) const { return (v * row_threads + lane) * N; }
};

template <class T, int N> __device__ __forceinline__ const Vector<T, N>* vector_at(const void* base, int64_t element) {
  return reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(base) + element);
}

template <class T, int N> __device__ __forceinline__ Vector<T, N>* vector_at(void* base, int64_t element) {
  return reinterpret_cast<Vector<T, N>*>(static_cast<T*>(base) + element);
}

// N elements as stored, two 16-bit elements per register.
template <class T, int N> struct Elements {
  static constexpr int kWords = N * sizeof(T) / 4, kPiece = kWords > 4 ? 4 : kWords;
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int k) const {
    if constexpr (sizeof(T) == 4)
      return __uint_as_float(words[k]);
    else
      return k % 2 ? device::high_half<T>(words[k / 2]) : device::low_half<T>(words[k / 2]);
  }
};

// Loads in accesses of at most 16 bytes.
template <class T, int N> __device__ __forceinline__ Elements<T, N> load_elements(const void* base, int64_t element) {
  Elements<T, N> all;
  constexpr int kPiece = Elements<T, N>::kPiece;
  const auto* from = reinterpret_cast<const Vector<uint32_t, kPiece>*>(static_cast<const T*>(base) + element);
#pragma unroll
  for (int i = 0; i < all.kWords / kPiece; ++i) {
    const auto piece = device::load(from + i);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) all.words[i * kPiece + k] = piece.at[k];
  }
  return all;
}

template <class T, int N>
__device__ __forceinline__ void store_elements(void* base, int64_t element, const Elements<T, N>& all) {
  constexpr int kPiece = Elements<T, N>::kPiece;
  auto* to = reinterpret_cast<Vector<uint32_t, kPiece>*>(static_cast<T*>(base) + element);
#pragma unroll
  for (int i = 0; i < all.kWords / kPiece; ++i) {
    Vector<uint32_t, kPiece> piece;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) piece.at[k] = all.words[i * kPiece + k];
    device::store(to + i, piece);
  }
}

// Rounds to the storage type; 16-bit types two values per instruction.
template <class T, int N> __device__ __forceinline__ Elements<T, N> rounded(const Vector<float, N>& x) {
  Elements<T, N> y;
#pragma unroll
  for (int i = 0; i < y.kWords; ++i) {
    if constexpr (sizeof(T) == 4)
      y.words[i] = __float_as_uint(x.at[i]);
    else
      y.words[i] = device::pack<T>(x.at[2 * i], x.at[2 * i + 1]);
  }
  return y;
}

template <class T, int N> __device__ __forceinline__ void keep_packed(Elements<T, N>& all) {
#pragma unroll
  for (int i = 0; i < all.kWords; ++i) device::keep_packed(all.words[i]);
}

// A register full of ones, in the storage type.
template <class T> constexpr uint32_t kOnes = 0x3f800000;
template <> constexpr uint32_t kOnes<float16> = 0x3c003c00;
template <> constexpr uint32_t kOnes<bfloat16> = 0x3f803f80;

// N weights or biases from `column` on, as stored. Without a pointer, or past the row's end, ones or zeros: the code
// that uses them needs no branch per element.
template <class W, int N>
__device__ __forceinline__ Elements<W, N> load_stored(const void* base, int64_t column, bool here, bool ones) {
  Elements<W, N> stored;
#pragma unroll
  for (int i = 0; i < stored.kWords; ++i) stored.words[i] = ones ? kOnes<W> : 0;
  if (base && here) stored = load_elements<W, N>(base, column);
  return stored;
}

// The same as floats, plus `offset` if kOffset. Without a pointer: `otherwise`, which is 1 or 0.
template <class W, int N, bool kOffset>
__device__ __forceinline__ Vector<float, N> load_affine(const void* base, int64_t column, float offset,
                                                        float otherwise) {
  const Elements<W, N> stored = load_stored<W, N>(base, column, true, otherwise != 0);
  Vector<float, N> w;
#pragma unroll
  for (int k = 0; k < N; ++k) w.at[k] = kOffset && base ? stored[k] + offset : stored[k];
  return w;
}

// Calls visit.operator()<W, kOffset>() for the weight's storage type and for whether an offset is added to it. One
// branch for all of a thread's columns; a branch per column would serialise their loads.
template <class T, bool kMayHaveOffset, class Visit>
__device__ __forceinline__ void with_weight(Dtype weight_dtype, float offset, Visit&& visit) {
  if (sizeof(T) == 4 || weight_dtype == Dtype::float32) {
    if (kMayHaveOffset && offset != 0)
      visit.template operator()<float, kMayHaveOffset>();
    else
      visit.template operator()<float, false>();
  } else if constexpr (sizeof(T) < 4) {
    if (kMayHaveOffset && offset != 0)
      visit.template operator()<T, kMayHaveOffset>();
    else
      visit.template operator()<T, false>();
  }
}

// Loads N elements whose dtype is known only at run time (load_as). For the `looped` kernels, whose rows do not fit on
// chip.
template <class T, int N> __device__ __forceinline__ Vector<float, N> load_floats(const void* base, int64_t element) {
  const Vector<T, N> stored = device::load(vector_at<T, N>(base, element));
  Vector<float, N> x;
#pragma unroll
  for (int k = 0; k < N; ++k) x.at[k] = device::to_float(stored.at[k]);
  return x;
}

template <int N> __device__ __forceinline__ Vector<float, N> load_as(const void* base, int64_t element, Dtype dtype) {
  if (dtype == Dtype::float32) return load_floats<float, N>(base, element);
  if (dtype == Dtype::float16) return load_floats<float16, N>(base, element);
  return load_floats<bfloat16, N>(base, element);
}

template <class T, int N>
__device__ __forceinline__ void store_floats(void* base, int64_t element, const Vector<float, N>& x) {
  Vector<T, N> stored;
#pragma unroll
  for (int k = 0; k < N; ++k) stored.at[k] = device::from_float<T>(x.at[k]);
  device::store(vector_at<T, N>(base, element), stored);
}

template <int N>
__device__ __forceinline__ void store_as(void* base, int64_t element, const Vector<float, N>& x, Dtype dtype) {
  if (dtype == Dtype::float32)
    store_floats<float>(base, element, x);
  else if (dtype == Dtype::float16)
    store_floats<float16>(base, element, x);
  else
    store_floats<bfloat16>(base, element, x);
}

template <int N> __device__ __forceinline__ Vector<float, N> load_affine_as(const void* base, int64_t column,
                                                                            Dtype dtype, float offset,
                                                                            float otherwise) {
  Vector<float, N> w;
  if (base) w = load_as<N>(base, column, dtype);
#pragma unroll
  for (int k = 0; k < N; ++k) w.at[k] = base ? w.at[k] + offset : otherwise;
  return w;
}

// Sums over the threads of a row: a warp (lanes == 32) or the block. `scratch` is double-buffered.
struct LoopedSum {
  float* scratch;  // 2 * kMaxWarps floats
  int lanes;
  int turn = 0;

  __device__ __forceinline__ float operator()(float x) {
    if (lanes == 32) return device::warp_sum(x);
    return device::block_sum(x, scratch + (turn++ % 2) * kMaxWarps);
  }
};

// Applies dropout to the elements [element, element + N), which lie within one Philox call: scales the kept elements
// and zeroes the others.
template <int N> __device__ __forceinline__ void drop_out(Vector<float, N>& x, const Dropout& d, int64_t element) {
  if (!d.seed) return;
  const PhiloxCounter lanes =
      dropout_lanes(static_cast<uint64_t>(device::load(d.seed)), static_cast<uint64_t>(device::load(d.seed + 1)),
                    static_cast<uint64_t>(element) / kDropoutLanes);
  const float scale = static_cast<float>(d.scale);
  const int first = N == kDropoutLanes ? 0 : static_cast<int>(element % kDropoutLanes);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    bool keeps = dropout_keeps(lanes, k, d.threshold);
    if constexpr (N < kDropoutLanes) {
#pragma unroll
      for (int from = N; from < kDropoutLanes; from += N)
        if (first == from) keeps = dropout_keeps(lanes, from + k, d.threshold);
    }
    x.at[k] = keeps ? x.at[k] * scale : 0.f;
  }
}

// A kernel's dropout mask; the seed is read once. Scales the kept ones of 8 elements (one Philox call) and zeroes the
// others. An element takes two instructions beside the call: its 16 random bits are compared in the upper half of a
// word, where the lower half does not change the result.
struct DropOut {
  Dropout mask;
  uint64_t seed = 0, offset = 0;

  __device__ __forceinline__ explicit DropOut(const Dropout& d) : mask(d) {
    if (!d.seed) return;
    seed = static_cast<uint64_t>(device::load(d.seed));
    offset = static_cast<uint64_t>(device::load(d.seed + 1));
  }

  template <int N> __device__ __forceinline__ void operator()(Vector<float, N>& x, int64_t element) const {
    if constexpr (N != kDropoutLanes) {
      drop_out(x, mask, element);
    } else if (mask.seed) {
      const PhiloxCounter lanes = dropout_lanes(seed, offset, static_cast<uint64_t>(element) / N);
      const float scale = static_cast<float>(mask.scale);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const uint32_t lane = k % 2 ? lanes.word[k / 2] : lanes.word[k / 2] << 16;
        x.at[k] = lane >= mask.threshold << 16 ? x.at[k] * scale : 0.f;
      }
      if (mask.threshold > 0xffff) x = {};
    }
  }
};

struct Moments {
  float mean, rstd;
};

// 1 / sqrt(x) to little more than half an ulp: rsqrtf and one Newton step. Gives 0 for infinity and infinity for 0.
__device__ __forceinline__ float precise_rsqrt(float x) {
  const float y = device::rsqrt(x);
  const float error = fmaf(-x * y, y, 1.f);  // NaN where x is 0 or infinite
  return error == error ? fmaf(0.5f * y, error, y) : y;
}

// The instance's min_blocks for the architecture being compiled.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <class C> constexpr int kMinBlocks =
    C::instance.min_blocks_before_sm90 ? C::instance.min_blocks_before_sm90 : C::instance.min_blocks;
#else
template <class C> constexpr int kMinBlocks = C::instance.min_blocks;
#endif

// Sums over aligned groups of `lanes` lanes (a power of two up to 32). Sums several values at once to overlap
// latencies.
template <int kCount> __device__ __forceinline__ void group_sums(float (&v)[kCount], int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], distance, 32);
  }
}

// Gives every thread of a row the values of all the row's warps, through the shared memory of the block or of every
// block of the cluster. arrive() and wait() are the two halves of one barrier; other work fits between them. Buffers
// alternate, so no second barrier is needed. kBuffers: 1 for a single exchange, 3 if a thread may still read one
// exchange after it has arrived at the next.
template <Scope S, int kCount, int kBlockThreads, int kBuffers> struct Exchange {
  static constexpr int kRowWarps = kBlockThreads / 32 * (S == Scope::cluster ? kMaxCluster : 1);
  static constexpr int kFloats = S == Scope::group ? 1 : kBuffers * kCount * kRowWarps;
  float* scratch;  // kFloats of shared memory
  int turn = 0;

  // Takes a warp's values (the same in all lanes). Returns where the values of all warps will be, [kCount][kRowWarps],
  // to be read after wait(). In a cluster, every block must have started: call it after a cluster barrier.
  __device__ __forceinline__ const float* arrive(const float (&v)[kCount]) {
    float* to = scratch + turn * kCount * kRowWarps;
    turn = turn + 1 == kBuffers ? 0 : turn + 1;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if constexpr (S == Scope::cluster) {
      const unsigned at = device::cluster_rank() * (blockDim.x / 32) + warp;
      if (lane < device::cluster_size()) {
        float* remote = device::cluster_shared(to, lane);
#pragma unroll
        for (int i = 0; i < kCount; ++i) remote[i * kRowWarps + at] = v[i];
      }
      device::cluster_arrive();
    } else if constexpr (S == Scope::block) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i * kRowWarps + warp] = v[i];
      }
    }
    return to;
  }

  __device__ __forceinline__ void wait() const {
    if constexpr (S == Scope::cluster)
      device::cluster_wait();
    else if constexpr (S == Scope::block)
      __syncthreads();
  }
};

// Sums over the row's warps in a fixed order, the same bits in every lane. add(w, here, sum) adds the value of warp w
// to `sum`, or nothing if `here` is false. Up to kFew warps every lane adds by itself, which is faster than shuffles,
// and without branches, so that the reads overlap.
template <int kCount, class Add>
__device__ __forceinline__ void sums_of_warps(float (&sum)[kCount], int warps, Add&& add) {
  constexpr int kFew = 8;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0;
  if (warps <= kFew) {
#pragma unroll
    for (int w = 0; w < kFew; ++w) add(w < warps ? w : 0, w < warps, sum);
    return;
  }
  const int lanes = warps <= 16 ? 16 : 32;
  for (int first = 0; first < warps; first += lanes) {
    const int w = first + threadIdx.x % lanes;
    add(w < warps ? w : 0, w < warps, sum);
  }
  group_sums(sum, lanes);
}

// Sum of value(w) over the row's warps in a fixed order, the same bits in every lane. Up to kFew warps every lane adds
// by itself, which is faster than shuffles.
template <class Value> __device__ __forceinline__ float sum_of_warps(int warps, Value&& value) {
  constexpr int kFew = 8;
  float sum = 0;
  if (warps <= kFew) {
#pragma unroll
    for (int w = 0; w < kFew; ++w)
      if (w < warps) sum += value(w);
    return sum;
  }
  const int lanes = warps <= 16 ? 16 : 32;
  for (int w = threadIdx.x % lanes; w < warps; w += lanes) sum += value(w);
  return device::group_sum(sum, lanes);
}

}  // namespace warpsmith::norm
