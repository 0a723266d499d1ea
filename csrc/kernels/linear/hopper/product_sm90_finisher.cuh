#pragma once
#include "device/convert.h"
#include "device/tensor_copy.h"
#include "device/vector.h"
#include "kernels/linear/hopper/product_sm90_pipeline.cuh"

// The warps that compute the epilogues of a Hopper product (product_sm90.cuh) from what its consumers hand over.
namespace warpsmith::linear {

// Eight values of a lane. Operations on all of them stand side by side in the code, so that eight are in flight: ptxas
// computes one value after the other where it finds them so, each waiting for two special functions.
struct Values {
  float at[8];
  __device__ __forceinline__ explicit Values(float x = 0) {
#pragma unroll
    for (float& v : at) v = x;
  }
  template <class T> __device__ __forceinline__ explicit Values(const device::Vector<uint32_t, 4>& packed, T) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      at[2 * i] = device::low_half<T>(packed.at[i]);
      at[2 * i + 1] = device::high_half<T>(packed.at[i]);
    }
  }
  template <class T> __device__ __forceinline__ device::Vector<uint32_t, 4> pack(T) const {
    return {device::pack<T>(at[0], at[1]), device::pack<T>(at[2], at[3]), device::pack<T>(at[4], at[5]),
            device::pack<T>(at[6], at[7])};
  }
  template <class F> __device__ __forceinline__ Values each(F&& f) const {
    Values y;
#pragma unroll
    for (int i = 0; i < 8; ++i) y.at[i] = f(at[i], i);
    return y;
  }
  __device__ __forceinline__ Values operator+(const Values& b) const {
    return each([&](float x, int i) { return x + b.at[i]; });
  }
  __device__ __forceinline__ Values operator-(const Values& b) const {
    return each([&](float x, int i) { return x - b.at[i]; });
  }
  __device__ __forceinline__ Values operator*(const Values& b) const {
    return each([&](float x, int i) { return x * b.at[i]; });
  }
};
// The activations of common/activation_functions.h for eight values, in two stages, so that the second one of a row is
// computed while the first one of the next waits for special functions.
__device__ __forceinline__ Values exp_minus(const Values& x) {
  return (x * Values(-1.44269504f)).each([](float v, int) { return device::exp2(v); });
}
__device__ __forceinline__ Values sigmoid(const Values& e) {  // of exp_minus(x)
  return (Values(1) + e).each([](float v, int) { return device::reciprocal(v); });
}
struct ValuesSilu {
  static __device__ __forceinline__ Values begin(const Values& x) { return exp_minus(x); }
  static __device__ __forceinline__ Values value(const Values& x, const Values& e) { return x * sigmoid(e); }
  static __device__ __forceinline__ Values times_derivative(const Values& x, const Values& e, const Values& g) {
    const Values s = sigmoid(e);
    return g * (s + x * s * (Values(1) - s));
  }
};
struct ValuesGeluTanh {
  static constexpr float kTwice = 1.5957691216057307117f, kCubic = 0.044715f;  // activation::GeluTanh
  static __device__ __forceinline__ Values begin(const Values& x) {
    return exp_minus(x * (Values(kTwice) + Values(kTwice * kCubic) * (x * x)));
  }
  static __device__ __forceinline__ Values value(const Values& x, const Values& e) { return x * sigmoid(e); }
  static __device__ __forceinline__ Values times_derivative(const Values& x, const Values& e, const Values& g) {
    const Values s = sigmoid(e);
    return g * (s + x * s * (Values(1) - s) * (Values(kTwice) + Values(3 * kTwice * kCubic) * (x * x)));
  }
};
template <class F> struct ValuesEach {
  static __device__ __forceinline__ Values begin(const Values&) { return Values(); }
  static __device__ __forceinline__ Values value(const Values& x, const Values&) {
    return x.each([](float v, int) { return F(v).value(); });
  }
  static __device__ __forceinline__ Values times_derivative(const Values& x, const Values&, const Values& g) {
    return x.each([&](float v, int i) { return F(v).times_derivative(g.at[i]); });
  }
};
struct NoValues {
  static __device__ __forceinline__ Values begin(const Values&) { return Values(); }
};

// Finishers share out the panels, 16 rows by 64 columns, of the consumer warps: of panel 0 finisher 0 takes those of
// warps 0, 3 and 6, of the next panel finisher 1 does. A lane has 8 adjacent columns of every fourth row. z comes by
// TMA as soon as the panel before is finished, and has been brought to the second-level cache before. Results go to
// global memory.
template <class T, ProductKernel kernel> struct ProductFinisher {
  static constexpr int kPanels = kernel.tile.columns / kPanelColumns, kBlocks = kernel.tile.rows / 128;
  static constexpr int kParts = 4;  // of a lane in a panel
  static constexpr bool kSums = kernel.epilogue == ProductEpilogue::derivative;
  static_assert(!kSums || kBlocks == 1, "partial_rows()");
  using Eight = device::Vector<uint32_t, 4>;  // values of T

  struct Place {
    int row, column;  // of the first consumer warp's panel
    int index;        // of the panel in a pair of tiles
    __device__ __forceinline__ int panel() const { return index % kernel.panels(); }
  };

  const ProductArguments& p;
  const ProductMaps& maps;
  const ProductShared<kernel>& shared;
  const ProductPlace<kernel> tiles;
  const int lane, finisher;
  const uint32_t lane_offset;  // of its first row in a buffer
  ProductShares<false> shares;
  int index = 0;  // of the next panel

  __device__ __forceinline__ ProductFinisher(const ProductArguments& arguments, const ProductMaps& tensors,
                                             const ProductShared<kernel>& memory, int warp)
      : p(arguments),
        maps(tensors),
        shared(memory),
        tiles(arguments, 0),
        lane(threadIdx.x % 32),
        finisher(warp),
        lane_offset(device::swizzled(Swizzle::bytes128, static_cast<uint32_t>(lane / 8 * kRowBytes + lane % 8 * 16))),
        shares(arguments, tiles.cluster, tiles.clusters) {}

  __device__ __forceinline__ bool next(Place* place) {
    Share share;
    if (index % kernel.panels() == 0 && !shares.next(&share)) return false;
    const TilePlace tile = tiles.tile(shares.unit - shares.clusters);  // the last one of `shares`
    *place = {tile.row, tile.column, index};
    place->row += place->panel() / kPanels * 64;
    place->column += place->panel() % kPanels * kPanelColumns;
    index = (index + 1) % (2 * kernel.panels());
    return true;
  }
  static __device__ __forceinline__ int row_of(int warp) { return warp / 4 * kBlocks * 64 + warp % 4 * 16; }
  __device__ __forceinline__ unsigned char* z_buffer(int warp) const { return shared.staging(warp) + kBufferBytes; }
  __device__ __forceinline__ void load_z(const Place& at, int warp) const {
    if (lane == 0) {
      device::mbarrier_arrive_expect(shared.z_full + warp, kBufferBytes);
      device::tensor_load(z_buffer(warp), &maps.z, shared.z_full + warp, {at.column, at.row + row_of(warp)});
    }
    __syncwarp(0xffffffffu);
  }
  __device__ __forceinline__ int first_warp(int of) const { return (finisher + 2 * of) % kFinishers; }
  // Half of the warp for each panel.
  __device__ __forceinline__ void prefetch_z(const Place& at) const {
#pragma unroll
    for (int first = 0; first < kConsumerWarps; first += 2 * kFinishers) {
      const int warp = first + first_warp(at.panel()) + lane / 16 * kFinishers, row = at.row + row_of(warp) + lane % 16;
      if (warp < kConsumerWarps && row < p.rows && at.column < p.columns)
        device::prefetch_to_l2(static_cast<const T*>(p.read) + row * p.z_stride + at.column);
    }
  }

  template <class Use> __device__ __forceinline__ void with_function(Use&& use) const {
    using Math = activation::DeviceMath<T>;
    if constexpr (kernel.epilogue == ProductEpilogue::residual)
      use.template operator()<NoValues>();
    else if (p.activation == LinearActivation::gelu_tanh)
      use.template operator()<ValuesGeluTanh>();
    else if (p.activation == LinearActivation::gelu)
      use.template operator()<ValuesEach<activation::Gelu<Math>>>();
    else if (p.activation == LinearActivation::silu)
      use.template operator()<ValuesSilu>();
    else
      use.template operator()<ValuesEach<activation::Relu<Math>>>();
  }
  // A panel; its first row and this lane's first column.
  template <class F> __device__ __forceinline__ void finish_rows(const unsigned char* sums_at,
                                                                 const unsigned char* z_at, int row, int column,
                                                                 Values& column_sums) const {
    row += lane / 8;
    const auto load = [&](const unsigned char* from, int part) {
      return device::load(
          reinterpret_cast<const Eight*>(from + part * 4 * kRowBytes + (lane_offset ^ part % 2 * 4 * 16)));
    };
    const unsigned char* const argument_at = kernel.reads() ? z_at : sums_at;
    T* to = static_cast<T*>(p.written) + row * int64_t{p.columns} + column;
    const auto end = [&](int part, const Values& begun) {
      const bool inside = row + part * 4 < p.rows;
      Eight packed = load(sums_at, part);
      if (kSums && !inside) packed = {};  // an infinite factor would make it NaN
      const Values sums(packed, T());
      Values y;
      if constexpr (kernel.epilogue == ProductEpilogue::activate)
        y = F::value(sums, begun);
      else if constexpr (kSums)
        y = F::times_derivative(Values(load(z_at, part), T()), begun, sums);
      else
        y = sums + Values(load(z_at, part), T());
      if constexpr (kSums) column_sums = column_sums + y;
      if (!kernel.reads() && p.kept != nullptr && inside && column < p.columns)
        device::store(reinterpret_cast<Eight*>(static_cast<T*>(p.kept) + (row + part * 4) * p.z_stride + column),
                      packed);
      if (inside && column < p.columns) device::store(reinterpret_cast<Eight*>(to), y.pack(T()));
      to += 4 * int64_t{p.columns};
    };
    Values begun = F::begin(Values(load(argument_at, 0), T()));
    Eight ahead = load(argument_at, 1);
#pragma unroll 1
    for (int part = 0; part < kParts - 1; ++part) {
      const Values next = F::begin(Values(ahead, T()));
      ahead = load(argument_at, (part + 2) % kParts);
      end(part, begun);
      begun = next;
    }
    end(kParts - 1, begun);
  }
  // Sums of a turn's rows, over the lanes that have the same columns.
  __device__ __forceinline__ void store_sums(const Place& at, Values& sums) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums.at[i] += __shfl_xor_sync(0xffffffffu, sums.at[i], 8);
      sums.at[i] += __shfl_xor_sync(0xffffffffu, sums.at[i], 16);
    }
    const int column = at.column + lane * 8;
    if (lane >= 8 || at.row >= p.rows || column >= p.columns) return;
    float* const to = p.partials + int64_t{at.row / 128 * kFinishers + finisher} * p.columns + column;
    device::store_vector(to, device::Vector<float, 4>{sums.at[0], sums.at[1], sums.at[2], sums.at[3]});
    device::store_vector(to + 4, device::Vector<float, 4>{sums.at[4], sums.at[5], sums.at[6], sums.at[7]});
  }

  __device__ __forceinline__ void run() {
    Place at, after;
    bool more = next(&at);
    if (kernel.reads() && more)
      for (int warp = first_warp(0); warp < kConsumerWarps; warp += kFinishers) load_z(at, warp);
    while (more) {
      more = next(&after);
      if (kernel.reads() && more) prefetch_z(after);
      Values column_sums;
#pragma unroll 1
      for (int warp = first_warp(at.panel()); warp < kConsumerWarps; warp += kFinishers) {
        // This finisher alone waits for this barrier, so that the parity is no older phase's. The panel is there when
        // the one before is finished, and z has been asked for then.
        device::mbarrier_wait(shared.panel_full + at.panel() * kConsumerWarps + warp, at.index / kernel.panels());
        if constexpr (kernel.reads()) device::mbarrier_wait(shared.z_full + warp, at.index & 1);
        const auto finish = [&]<class F>() {
          finish_rows<F>(shared.staging(warp), z_buffer(warp), at.row + row_of(warp), at.column + lane % 8 * 8,
                         column_sums);
        };
        with_function(finish);
        __syncwarp(0xffffffffu);
        device::mbarrier_arrive_if(lane == 0, shared.panel_empty + warp);
        if (kernel.reads() && more) load_z(after, warp);
      }
      if constexpr (kSums)
        if (p.partials != nullptr) store_sums(at, column_sums);
      at = after;
    }
  }
};

}  // namespace warpsmith::linear
