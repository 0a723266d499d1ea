#pragma once
#include <cstdint>
#include <utility>

#include "common/alignment.h"
#include "common/visit_dtype.h"
#include "device/fast_divide.h"
#include "device/launch.h"
#include "device/packed.h"
#include "kernels/activation/activation_config.h"
#include "tiles/activation_math.cuh"

// The body of every op that computes outputs element by element from inputs of the same shape. Reads each input once
// and writes each output once, in accesses of 16 bytes if the layout allows. An output may be one of the inputs: a
// thread reads all of its elements before it writes any.
namespace warpsmith::activation {

using device::Packed;

// A tensor read or written by rows, `stride` elements apart.
struct Strided {
  const void* data;
  int64_t stride;
};

template <int I, int O> struct ElementwiseParams {
  Strided in[I];
  Strided out[O];  // null: not wanted
  int64_t rows, columns;
  Dtype dtype;
};

struct ElementwiseIndex {
  bool flat;
  int64_t elements, vectors;
  int64_t row_vectors;
  device::FastDivide divide;  // by row_vectors
};

template <class T, int N> __device__ __forceinline__ Packed<T, N> load_at(const Strided& t, int64_t offset) {
  return device::load(device::packed_at<T, N>(t.data, offset));
}

template <class T, int N>
__device__ __forceinline__ void store_at(const Strided& t, int64_t offset, const Packed<T, N>& v) {
  device::store(device::packed_at<T, N>(const_cast<void*>(t.data), offset), v);
}

// Op: I and O are the numbers of inputs and outputs; `template <class T, int N> apply(x, y, element)` computes the
// floats y[O][N] from x[I][N]. `element` is the linear index of the first one.
template <class Op, class T, int N, int I = Op::I, int O = Op::O>
__device__ __forceinline__ void elementwise_at(const Op& op, const ElementwiseParams<I, O>& p,
                                               const int64_t (&in_offset)[I], const int64_t (&out_offset)[O],
                                               int64_t element) {
  Packed<T, N> in[I];
#pragma unroll
  for (int i = 0; i < I; ++i) in[i] = load_at<T, N>(p.in[i], in_offset[i]);
  float x[I][N], y[O][N];
#pragma unroll
  for (int i = 0; i < I; ++i) device::unpack<T>(x[i], in[i]);
  op.template apply<T, N>(x, y, element);
#pragma unroll
  for (int o = 0; o < O; ++o) {
    if (p.out[o].data) store_at<T, N>(p.out[o], out_offset[o], device::rounded<T>(y[o]));
  }
}

template <class Op, class T, int N> __global__ void __launch_bounds__(128, Op::O > 2 ? 12 : 16)
    elementwise(Op op, ElementwiseParams<Op::I, Op::O> p, ElementwiseIndex index) {
  const int64_t v = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (v >= index.vectors) return;
  const int64_t element = v * N;
  int64_t in[Op::I], out[Op::O];
  if (index.flat) {
#pragma unroll
    for (int i = 0; i < Op::I; ++i) in[i] = element;
#pragma unroll
    for (int o = 0; o < Op::O; ++o) out[o] = element;
    if (N > 1 && element + N > index.elements) {  // the last, partial vector of a tensor
      for (int64_t e = element; e < index.elements; ++e) {
        for (int64_t& offset : in) offset = e;
        for (int64_t& offset : out) offset = e;
        elementwise_at<Op, T, 1>(op, p, in, out, e);
      }
      return;
    }
  } else {
    const int64_t row = index.divide.quotient(v), column = (v - row * index.row_vectors) * N;
#pragma unroll
    for (int i = 0; i < Op::I; ++i) in[i] = row * p.in[i].stride + column;
#pragma unroll
    for (int o = 0; o < Op::O; ++o) out[o] = row * p.out[o].stride + column;
  }
  elementwise_at<Op, T, N>(op, p, in, out, element);
}

template <int I, int O> ElementwiseProblem problem_of(const ElementwiseParams<I, O>& p) {
  ElementwiseProblem problem{p.rows, p.columns, size_bytes(p.dtype), true, true};
  const auto look = [&](const Strided& t) {
    if (!t.data || p.rows == 1) return;
    problem.contiguous = problem.contiguous && t.stride == p.columns;
  };
  for (const Strided& t : p.in) look(t);
  for (const Strided& t : p.out) look(t);
  const auto align = [&](const Strided& t) {
    problem.aligned = problem.aligned && rows_on_16_bytes(t.data, t.stride, problem.contiguous ? 1 : p.rows, p.dtype);
  };
  for (const Strided& t : p.in) align(t);
  for (const Strided& t : p.out) align(t);
  return problem;
}

template <class Op, class T>
Status launch_elementwise_as(const Op& op, const ElementwiseParams<Op::I, Op::O>& p, void* stream) {
  const ElementwiseConfig c = choose_elementwise(problem_of(p));
  constexpr int kVector = 16 / sizeof(T);
  const int64_t row_vectors = c.flat ? c.vectors : p.columns / c.vector_elems;
  const ElementwiseIndex index{c.flat, p.rows * p.columns, c.vectors, row_vectors, device::FastDivide(row_vectors)};
  const LaunchConfig config{.grid = static_cast<unsigned>(c.blocks), .block = static_cast<unsigned>(c.threads)};
  return launch(c.vector_elems == 1 ? elementwise<Op, T, 1> : elementwise<Op, T, kVector>, config, stream, op, p,
                index);
}

template <class Op> Status launch_elementwise(const Op& op, const ElementwiseParams<Op::I, Op::O>& p, void* stream) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() { return launch_elementwise_as<Op, T>(op, p, stream); });
}

}  // namespace warpsmith::activation
