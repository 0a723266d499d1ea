// Candidate bodies of the norms' forward (norm_forward_candidates.cuh) beside what the package chooses and a copy of
// the same bytes; bf16. Results are compared with sums in double precision. Five programs, one for each PART, which
// tools/gpu/sweep/norm_forward.sh builds and runs.
#include "norm_forward_candidates.cuh"
#include "sweep.h"

using namespace warpsmith;
using namespace warpsmith::norm;
using namespace warpsmith::norm::candidates;
using sweep::allocate, sweep::check, sweep::random_bfloat16;

namespace {

using Kernel = void (*)(NormForwardParams, int);
using Rms = NormOp<false, false, false>;
using Layer = NormOp<true, false, false>;
using AddRms = NormOp<false, true, false>;

struct Candidate {
  std::string text;
  Kernel kernel;
  int threads;
  int64_t rows_a_block;  // 0: as many blocks as are resident, each with many rows
  int shared_bytes = 0;
  int lanes = 0;  // of a row, for bodies that ask for them; 0: as chosen
};

struct Sizes {
  int64_t rows, columns;
};

// y and residual_out of a row, in double precision.
__global__ void reference(NormForwardParams p, bfloat16* y, bfloat16* residual_out, bool layer) {
  const int64_t first = int64_t{blockIdx.x} * p.columns;
  const auto value = [&](int64_t c) {
    const float x = device::to_float(static_cast<const bfloat16*>(p.x)[first + c]);
    if (!p.residual) return x;
    return device::to_float(
        device::from_float<bfloat16>(x + device::to_float(static_cast<const bfloat16*>(p.residual)[first + c])));
  };
  __shared__ double sums[2][32];
  const auto total = [&](double x, int which) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (threadIdx.x % 32 == 0) sums[which][threadIdx.x / 32] = x;
    __syncthreads();
    double all = 0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) all += sums[which][w];
    return all;
  };
  double sum = 0, square = 0;
  for (int64_t c = threadIdx.x; c < p.columns; c += blockDim.x) sum += value(c);
  const double mean = layer ? total(sum, 0) / static_cast<double>(p.columns) : 0;
  for (int64_t c = threadIdx.x; c < p.columns; c += blockDim.x) square += (value(c) - mean) * (value(c) - mean);
  const double rstd = 1 / sqrt(total(square, 1) / static_cast<double>(p.columns) + p.eps);
  for (int64_t c = threadIdx.x; c < p.columns; c += blockDim.x) {
    const double w = device::to_float(static_cast<const bfloat16*>(p.weight)[c]);
    const double b = layer ? device::to_float(static_cast<const bfloat16*>(p.bias)[c]) : 0;
    y[first + c] = device::from_float<bfloat16>(static_cast<float>((value(c) - mean) * rstd * w + b));
    if (p.residual) residual_out[first + c] = device::from_float<bfloat16>(value(c));
    if (c == 0) static_cast<float*>(p.rstd)[blockIdx.x] = static_cast<float>(rstd);
    if (c == 0 && layer) static_cast<float*>(p.mean)[blockIdx.x] = static_cast<float>(mean);
  }
}

// Counts what is further apart than two roundings of T.
template <class T> __global__ void compare(const T* a, const T* b, int64_t count, float relative, int* wrong) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float x = device::to_float(a[i]), want = device::to_float(b[i]);
    if (!(fabsf(x - want) <= relative * fabsf(want) + 1e-4f)) atomicAdd(wrong, 1);
  }
}

template <class Op> void run(const char* title_of_op, const Sizes& size, std::vector<Candidate> candidates) {
  const auto [rows, columns] = size;
  const int64_t count = rows * columns;
  NormForwardParams f;
  f.x = random_bfloat16(count, 1), f.weight = random_bfloat16(columns, 3);
  f.y = allocate(static_cast<size_t>(count) * 2), f.rstd = allocate(static_cast<size_t>(rows) * 4);
  if (Op::kLayer) f.bias = random_bfloat16(columns, 5), f.mean = allocate(static_cast<size_t>(rows) * 4);
  if (Op::kResidual) f.residual = random_bfloat16(count, 4), f.residual_out = allocate(static_cast<size_t>(count) * 2);
  f.rows = rows, f.columns = columns, f.x_stride = f.residual_stride = columns, f.eps = 1e-6;
  f.dtype = f.residual_dtype = f.weight_dtype = Dtype::bfloat16;

  NormForwardParams want = f;
  auto* want_y = allocate<bfloat16>(static_cast<size_t>(count) * 2);
  auto* want_sum = allocate<bfloat16>(static_cast<size_t>(count) * 2);
  auto *rstd = allocate<float>(static_cast<size_t>(rows) * 4), *mean = allocate<float>(static_cast<size_t>(rows) * 4);
  auto* wrong = allocate<int>(4);
  want.rstd = rstd, want.mean = mean;
  reference<<<static_cast<unsigned>(rows), 256>>>(want, want_y, want_sum, Op::kLayer);
  check(cudaDeviceSynchronize());

  NormProblem problem;
  problem.rows = rows, problem.columns = columns, problem.residual_bytes = Op::kResidual ? 2 : 0;
  problem.layer = Op::kLayer;
  const NormConfig chosen = choose_norm_forward(problem);
  candidates.insert(candidates.begin(),
                    {std::string("chosen: ") + name(chosen.kernel) + " of a " + name(chosen.scope),
                     forward_kernel<Op, bfloat16, bfloat16>(chosen, columns), chosen.threads,
                     norm_detail::ceil_div(rows, chosen.blocks), static_cast<int>(chosen.shared_bytes)});
  std::vector<sweep::Row> table;
  for (const Candidate& c : candidates) {
    cudaFuncAttributes attributes;
    int resident = 0;
    check(cudaFuncGetAttributes(&attributes, c.kernel));
    check(cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, c.shared_bytes));
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, c.kernel, c.threads,
                                                        static_cast<size_t>(c.shared_bytes)));
    LaunchConfig grid;
    grid.block.x = static_cast<unsigned>(c.threads);
    grid.grid.x = static_cast<unsigned>(c.rows_a_block ? norm_detail::ceil_div(rows, c.rows_a_block)
                                                       : std::min<int64_t>(rows, int64_t{resident} * 132));
    grid.dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes);
    check(cudaMemset(f.y, 255, static_cast<size_t>(count) * 2));
    check(cudaMemset(f.rstd, 255, static_cast<size_t>(rows) * 4));
    if (f.mean) check(cudaMemset(f.mean, 255, static_cast<size_t>(rows) * 4));
    if (f.residual_out) check(cudaMemset(f.residual_out, 255, static_cast<size_t>(count) * 2));
    Status status;
    const double us = sweep::time_of(
        [&] { (void)(status = launch(c.kernel, grid, nullptr, f, c.lanes ? c.lanes : chosen.lanes)); }, 21);
    check(cudaMemset(wrong, 0, 4));
    compare<<<1024, 256>>>(static_cast<const bfloat16*>(f.y), want_y, count, 0.016f, wrong);
    compare<<<1024, 256>>>(static_cast<const float*>(f.rstd), rstd, rows, 1e-5f, wrong);
    if (f.mean) compare<<<1024, 256>>>(static_cast<const float*>(f.mean), mean, rows, 1e-5f, wrong);
    if (f.residual_out)
      compare<<<1024, 256>>>(static_cast<const bfloat16*>(f.residual_out), want_sum, count, 0.f, wrong);
    int bad = 0;
    check(cudaMemcpy(&bad, wrong, 4, cudaMemcpyDeviceToHost));
    std::string text = c.text + ", " + std::to_string(c.threads) + " threads, " + std::to_string(attributes.numRegs) +
                       " registers, " + std::to_string(attributes.localSizeBytes) + " spilled, " +
                       std::to_string(resident) + " resident";
    if (!status.ok()) text += ", FAILED: " + status.what();
    if (bad) text += ", WRONG: " + std::to_string(bad);
    table.push_back({us, text});
  }
  const std::string title = std::string(title_of_op) + " " + std::to_string(rows) + "x" + std::to_string(columns);
  sweep::print(title, static_cast<double>(count) * (Op::kResidual ? 8 : 4), table, table.size());
  for (const void* p : {f.x, f.weight, f.bias, f.residual}) check(cudaFree(const_cast<void*>(p)));
  for (void* p : {f.y, f.rstd, f.mean, f.residual_out}) check(cudaFree(p));
  for (void* p : {static_cast<void*>(want_y), static_cast<void*>(want_sum), static_cast<void*>(rstd),
                  static_cast<void*>(mean), static_cast<void*>(wrong)})
    check(cudaFree(p));
}

// What the package has for rows of any length.
template <class Op, int kThreads> Candidate registers_of() {
  return {"registers, any length", forward_registers<Op, bfloat16, bfloat16, 4, 1, Scope::block, 384, 3>, kThreads, 1};
}

template <class Op, int kColumns> Candidate group_of() {
  constexpr int kVectors = kColumns / 8, V = kVectors <= 32 ? 1 : kVectors / 32, kLanes = kVectors / V;
  constexpr int U = V == 1 ? 4 : V == 3 ? norm_rows_of_three_vectors(Op::kLayer, false) : 1;
  return {"registers of a group, any length",
          forward_registers < Op,
          bfloat16,
          bfloat16,
          V,
          U,
          Scope::group,
          64,
          V == 4 || (V == 3 && U == 2) ? 12 : 16 >
          , 64, U * 64 / kLanes, 0, kLanes};
}

// Rows of a warp in blocks of kThreads.
template <class Op, int kColumns, int kLanes, int U, int kMinBlocks, int kThreads = 64> Candidate warp_of() {
  return {"warp: " + std::to_string(kLanes) + " lanes a row, " + std::to_string(U) + " rows a lane",
          forward_warp<Op, bfloat16, kLanes, kColumns / (kLanes * 8), U, kThreads, kMinBlocks>, kThreads,
          int64_t{kThreads} / kLanes * U};
}

// Rows of 12,288 columns that all lie on the chip at once, in blocks of kSlots.
template <class Op, int kThreads, int kSlots, int kMinBlocks> Candidate resident_of() {
  return {"resident, " + std::to_string(kSlots) + " rows a block",
          forward_resident<Op, bfloat16, 12288 / 8 / kThreads, kThreads, kSlots, kMinBlocks>, kThreads, kSlots,
          kSlots * 12288 * 2};
}

template <class Op, int kColumns, int kThreads, int kAhead, bool kLateSum, int kMinBlocks> Candidate wide_rows_of() {
  return {std::string("block, ") + (kAhead ? "weights " + std::to_string(kAhead) + " ahead" : "weights with x") +
              (kLateSum ? ", the sum leaves with y" : ""),
          wide_rows<Op, kColumns, kThreads, kAhead, kLateSum, kThreads, kMinBlocks>, kThreads, 1};
}

template <class Op, int kColumns, int V, bool kWeightWithX, int kMinBlocks> Candidate shared_rows_of() {
  constexpr int kThreads = kColumns / 8 / V;
  return {std::string("shared memory, weights ") + (kWeightWithX ? "with x" : "late"),
          forward_shared<Op, bfloat16, V, kWeightWithX, kThreads, kThreads, kMinBlocks>, kThreads, 1, kColumns * 2};
}

template <class Op> void rows_of_768(const char* op) {
  constexpr bool kLayer = Op::kLayer;
  run<Op>(op, {65536, 768},
          {group_of<Op, 768>(), warp_of<Op, 768, 32, 1, kLayer ? 14 : 18>(), warp_of<Op, 768, 32, 1, 32, 32>(),
           warp_of<Op, 768, 32, 1, kLayer ? 8 : 10, 128>(), warp_of<Op, 768, 16, 1, kLayer ? 8 : 12>(),
           warp_of<Op, 768, 32, 2, kLayer ? 8 : 12>(), warp_of<Op, 768, 32, 2, kLayer ? 16 : 24, 32>()});
}

template <class Op> void rows_of_128(const char* op) {
  constexpr bool kLayer = Op::kLayer;
  run<Op>(op, {131072, 128},
          {group_of<Op, 128>(), warp_of<Op, 128, 16, 4, kLayer ? 14 : 16>(),
           warp_of<Op, 128, 16, 4, kLayer ? 16 : 18>(), warp_of<Op, 128, 16, 4, kLayer ? 28 : 32, 32>(),
           warp_of<Op, 128, 16, 4, kLayer ? 7 : 8, 128>(), warp_of<Op, 128, 16, 8, kLayer ? 8 : 10>(),
           warp_of<Op, 128, 8, 2, kLayer ? 12 : 18>(), warp_of<Op, 128, 8, 2, kLayer ? 28 : 32, 32>(),
           warp_of<Op, 128, 8, 4, kLayer ? 8 : 10>(), warp_of<Op, 128, 4, 1, kLayer ? 10 : 16>()});
}

template <class Op> void other_short_rows(const char* op) {
  constexpr bool kLayer = Op::kLayer;
  run<Op>(op, {262144, 64},
          {group_of<Op, 64>(), warp_of<Op, 64, 8, 2, kLayer ? 16 : 24>(), warp_of<Op, 64, 8, 4, 12>(),
           warp_of<Op, 64, 8, 4, kLayer ? 28 : 32, 32>(), warp_of<Op, 64, 8, 4, kLayer ? 7 : 8, 128>()});
  run<Op>(op, {131072, 256},
          {group_of<Op, 256>(), warp_of<Op, 256, 16, 2, 12>(), warp_of<Op, 256, 32, 4, kLayer ? 14 : 16>(),
           warp_of<Op, 256, 16, 2, kLayer ? 28 : 32, 32>(), warp_of<Op, 256, 16, 2, kLayer ? 7 : 8, 128>()});
  run<Op>(op, {98304, 512},
          {group_of<Op, 512>(), warp_of<Op, 512, 32, 1, 20>(), warp_of<Op, 512, 16, 1, kLayer ? 10 : 14>(),
           warp_of<Op, 512, 32, 2, kLayer ? 28 : 32, 32>()});
  run<Op>(op, {65536, 1024}, {group_of<Op, 1024>(), warp_of<Op, 1024, 32, 1, kLayer ? 24 : 32, 32>()});
}

template <class Op> void rows_of_12288(const char* op) {
  for (const int64_t rows : {1024, 8192, 512, 768, 1056, 128})
    run<Op>(op, {rows, 12288},
            {shared_rows_of<Op, 12288, 6, true, 4>(), registers_of<Op, 384>(), resident_of<Op, 256, 4, 2>(),
             resident_of<Op, 384, 4, 2>(), resident_of<Op, 192, 4, 2>(), resident_of<Op, 256, 8, 1>()});
}

template <class Op> void rows_of_8192(const char* op) {
  constexpr bool kLayer = Op::kLayer;
  run<Op>(op, {4096, 8192},
          {registers_of<Op, 256>(), shared_rows_of<Op, 8192, 4, kLayer, kLayer ? 4 : 8>(),
           wide_rows_of<Op, 8192, 256, 1, false, kLayer ? 4 : 5>()});
}

template <class Op> void rows_of_4096(const char* op) {
  constexpr bool kLayer = Op::kLayer;
  run<Op>(op, {16384, 4096}, {wide_rows_of<Op, 4096, 128, 2, false, 8>()});
}

}  // namespace

int main() {
#if PART == 0
  rows_of_768<Layer>("layer_norm");
  rows_of_768<Rms>("rms_norm");
#elif PART == 1
  rows_of_128<Rms>("rms_norm");
  rows_of_128<Layer>("layer_norm");
  other_short_rows<Rms>("rms_norm");
  other_short_rows<Layer>("layer_norm");
#elif PART == 2
  run<AddRms>("add_rms_norm", {16384, 4096},
              {wide_rows_of<AddRms, 4096, 128, 4, true, 9>(), wide_rows_of<AddRms, 4096, 128, 2, true, 10>(),
               wide_rows_of<AddRms, 4096, 128, 1, true, 10>()});
  run<AddRms>("add_rms_norm", {4096, 8192},
              {wide_rows_of<AddRms, 8192, 256, 4, true, 5>(), wide_rows_of<AddRms, 8192, 256, 2, true, 5>(),
               wide_rows_of<AddRms, 8192, 256, 1, true, 5>()});
  run<AddRms>("add_rms_norm", {1024, 12288},
              {wide_rows_of<AddRms, 12288, 384, 4, true, 3>(), wide_rows_of<AddRms, 12288, 384, 4, false, 3>(),
               wide_rows_of<AddRms, 12288, 384, 2, true, 3>()});
#elif PART == 3
  rows_of_12288<Rms>("rms_norm");
  rows_of_12288<Layer>("layer_norm");
#else
  rows_of_8192<Rms>("rms_norm");
  rows_of_8192<Layer>("layer_norm");
  rows_of_4096<Rms>("rms_norm");
  rows_of_4096<Layer>("layer_norm");
#endif
}
