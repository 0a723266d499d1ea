// Question: which chunk, vectors a thread and blocks a multiprocessor make AdamW's step fastest, beside a copy?
// 1e9 parameters in 256 tensors and 2,000 x 4,096; 45 GB of memory, under a minute.
// links: csrc/kernels/optim/optim.cu
// links: csrc/kernels/optim/optim_16bit.cu
// links: csrc/kernels/optim/optim_mixed.cu
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>

#include "kernels/optim/optim.h"
#include "kernels/optim/optim_config.h"
#include "kernels/optim/step.cuh"
#include "sweep.h"

using namespace warpsmith;
using sweep::check, sweep::Row;

namespace {

using device::Cache;
using device::Vector;
using In = optim::Stored<float, float, false>;

// Scattered values in (0, 1): what the memory and the divisions see in training, unlike zeros.
__global__ void fill(float* x, int64_t count, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    x[i] = (static_cast<float>((h ^ (h >> 13)) >> 8) + 0.5f) * 0x1p-24f;
  }
}

struct Knobs {
  int threads, blocks, vectors;
  Cache load, store;   // of the gradient and the moments; the parameter is kept
  bool approximate;    // division and root, to see what the exact ones cost
  bool all_streaming;  // the parameter too
};

template <Knobs k> struct Body {
  using V = Vector<float, 4>;
  static constexpr Cache kParamLoad = k.all_streaming ? k.load : Cache::keep;
  static constexpr Cache kParamStore = k.all_streaming ? k.store : Cache::keep;
  V grad[k.vectors], param[k.vectors], exp_avg[k.vectors], exp_avg_sq[k.vectors];

  __device__ __forceinline__ static int place(int begin, int v) {
    return begin + (v * k.threads + static_cast<int>(threadIdx.x)) * 4;
  }

  __device__ __forceinline__ void load(const optim::Chunk<In, 3>& c, int begin, int end) {
#pragma unroll
    for (int v = 0; v < k.vectors; ++v) {
      const int i = place(begin, v);
      if (i >= end) continue;
      grad[v] = device::load_vector<4, k.load>(c.grad + i);
      param[v] = device::load_vector<4, kParamLoad>(c.param + i);
      exp_avg[v] = device::load_vector<4, k.load>(c.states[0] + i);
      exp_avg_sq[v] = device::load_vector<4, k.load>(c.states[1] + i);
    }
  }

  __device__ __forceinline__ static void element(const AdamW::Scalars<float>& s, float g, float& p, float& m,
                                                 float& v) {
    if constexpr (!k.approximate) {
      float states[] = {m, v};
      AdamW::element<3, float>(s, g, p, states);
      m = states[0], v = states[1];
    } else {
      g *= s.grad_factor;
      p *= s.decay;
      m += s.weight1 * (g - m);
      v = v * s.beta2 + s.weight2 * g * g;
      p -= __fdividef(s.step_size * m, __fdividef(__fsqrt_rn(v), s.bias2_sqrt) + s.eps);
    }
  }

  __device__ __forceinline__ void update_and_store(const AdamW::Scalars<float>& s, const optim::Chunk<In, 3>& c,
                                                   int begin, int end) {
#pragma unroll
    for (int v = 0; v < k.vectors; ++v) {
      const int i = place(begin, v);
      if (i >= end) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) element(s, grad[v].at[e], param[v].at[e], exp_avg[v].at[e], exp_avg_sq[v].at[e]);
      device::store_vector<kParamStore>(c.param + i, param[v]);
      device::store_vector<k.store>(c.states[0] + i, exp_avg[v]);
      device::store_vector<k.store>(c.states[1] + i, exp_avg_sq[v]);
    }
  }
};

// optim::step of AdamW for aligned tensors whose sizes are multiples of 4, without amsgrad.
template <int threads, int blocks, int vectors, Cache load, Cache store, bool approximate, bool all_streaming>
__global__ void __launch_bounds__(threads, blocks) step(const __grid_constant__ OptimParams p) {
  constexpr Knobs k{threads, blocks, vectors, load, store, approximate, all_streaming};
  __shared__ optim::Constants<AdamW, In> constants;
  const ListChunk at = p.chunks[blockIdx.x];
  OptimTensor* t = p.tensors + at.tensor;
  const optim::Chunk<In, 3> c(*t, static_cast<const float*>(p.grads[at.tensor]), int64_t{at.chunk} * t->chunk_elems);
  Body<k> body;
  body.load(c, 0, c.elems);
  if (threadIdx.x < 32) optim::prepare<AdamW>(p, t, &constants);
  __syncthreads();
  const AdamW::Scalars<float> s = constants.scalars;
  for (int begin = 0; begin < c.elems; begin += k.threads * k.vectors * 4) {
    if (begin != 0) body.load(c, begin, c.elems);
    body.update_and_store(s, c, begin, c.elems);
  }
}

struct Variant {
  Knobs knobs;
  void (*kernel)(OptimParams);
};

template <int threads, int blocks, int vectors> void add_caches(std::vector<Variant>& all) {
  constexpr Cache keep = Cache::keep, streaming = Cache::streaming;
#define VARIANT(load, store, approximate, all_streaming)                              \
  all.push_back({{threads, blocks, vectors, load, store, approximate, all_streaming}, \
                 &step<threads, blocks, vectors, load, store, approximate, all_streaming>});
  VARIANT(keep, keep, false, false)
  VARIANT(streaming, streaming, false, false)
  VARIANT(streaming, streaming, false, true)
  VARIANT(keep, streaming, false, false)
  VARIANT(keep, streaming, false, true)
  VARIANT(streaming, keep, false, false)
  VARIANT(keep, keep, true, false)
#undef VARIANT
}

std::vector<Variant> variants() {
  std::vector<Variant> all;
  add_caches<128, 4, 1>(all);
  add_caches<128, 8, 1>(all);
  add_caches<128, 6, 2>(all);
  add_caches<256, 2, 2>(all);
  add_caches<256, 3, 2>(all);
  add_caches<256, 4, 1>(all);
  add_caches<256, 5, 1>(all);
  add_caches<256, 3, 1>(all);
  add_caches<512, 1, 2>(all);
  add_caches<512, 2, 1>(all);
  add_caches<256, 1, 4>(all);
  return all;
}

// Tensors of equal size side by side, and their table for one length of chunks.
class Tensors {
 public:
  Tensors(int64_t count, int64_t elems) : count_(count), elems_(elems) {
    for (int i = 0; i < 4; ++i) {
      arrays_[i] = sweep::allocate<float>(static_cast<size_t>(count * elems) * sizeof(float));
      fill<<<2048, 256>>>(arrays_[i], count * elems, 17 * i + 1);
    }
    steps_ = sweep::allocate<float>(static_cast<size_t>(count) * sizeof(float));
    check(cudaMemset(steps_, 0, count * sizeof(float)));
    std::vector<float*> grads;
    for (int64_t t = 0; t < count; ++t) grads.push_back(arrays_[3] + t * elems);
    grads_ = sweep::allocate<float*>(static_cast<size_t>(count) * sizeof(float*));
    check(cudaMemcpy(grads_, grads.data(), count * sizeof(float*), cudaMemcpyHostToDevice));
  }

  Tensors(const Tensors&) = delete;

  ~Tensors() {
    for (float* a : arrays_) check(cudaFree(a));
    for (void* a : {static_cast<void*>(steps_), static_cast<void*>(grads_), static_cast<void*>(table_)})
      check(cudaFree(a));
  }

  int64_t total() const { return count_ * elems_; }
  double bytes() const { return 28.0 * static_cast<double>(total()); }

  OptimParams with_chunks(int chunk_elems) {
    std::vector<OptimTensor> records;
    for (int64_t t = 0; t < count_; ++t)
      records.push_back({arrays_[0] + t * elems_,
                         nullptr,
                         {arrays_[1] + t * elems_, arrays_[2] + t * elems_},
                         steps_ + t,
                         elems_,
                         3,
                         0,
                         0,
                         0,
                         0,
                         0});
    const std::vector<int64_t> words = tensor_list_words(records, chunk_elems);
    check(cudaFree(table_));
    table_ = sweep::allocate<int64_t>(words.size() * sizeof(int64_t));
    check(cudaMemcpy(table_, words.data(), words.size() * sizeof(int64_t), cudaMemcpyHostToDevice));
    OptimParams p{};
    p.tensors = reinterpret_cast<OptimTensor*>(table_);
    const int64_t record_words = count_ * static_cast<int64_t>(sizeof(OptimTensor) / sizeof(int64_t));
    p.chunks = reinterpret_cast<const ListChunk*>(table_ + record_words);
    p.grads = reinterpret_cast<const void* const*>(grads_);
    p.tensor_count = count_;
    p.chunk_count = static_cast<int64_t>(words.size()) - record_words;
    p.group_count = 1;
    p.optimizer = Optimizer::adamw;
    p.storage = Storage::float32;
    p.most = 3;
    p.groups[0].lr = 1e-6;
    const double values[] = {0.9, 0.999, 1e-8, 1e-2};
    std::copy(std::begin(values), std::end(values), p.groups[0].values);
    return p;
  }

 private:
  int64_t count_, elems_;
  float *arrays_[4], *steps_;
  float** grads_;
  int64_t* table_ = nullptr;
};

std::string text_of(const Knobs& k) {
  const auto cache = [](Cache c) { return c == Cache::keep ? "keep" : "streaming"; };
  char s[160];
  std::snprintf(s, sizeof s, "threads %d blocks %d vectors %d load %s store %s%s%s", k.threads, k.blocks, k.vectors,
                cache(k.load), cache(k.store), k.all_streaming ? " param too" : "",
                k.approximate ? " APPROXIMATE" : "");
  return s;
}

const char* const kChosen = "the library's kernel and chunks  <- chosen";

// The best chunk of each variant, fastest first; `of_copy` collects each one's share of the copy rate.
void run(const char* title, int64_t count, int64_t elems, int samples,
         std::map<std::string, std::vector<double>>& of_copy) {
  Tensors tensors(count, elems);
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  std::map<std::string, Row> best;
  const auto note = [&](double us, const std::string& name, int chunk) {
    const Row row{us, name + ", chunk " + std::to_string(chunk)};
    const auto [at, first] = best.try_emplace(name, row);
    if (!first && us < at->second.us) at->second = row;
  };
  const int chosen_chunk = choose_optim(tensors.total(), device.multiProcessorCount, Storage::float32).chunk_elems;
  {
    const OptimParams p = tensors.with_chunks(chosen_chunk);
    bool ok = true;
    const double us = sweep::time_of([&] { ok = ok && optim_cuda(p, nullptr).ok(); }, 2 * samples);
    if (!ok) std::printf("the library's kernel failed\n"), std::exit(1);
    note(us, kChosen, chosen_chunk);
  }
  const std::vector<Variant> all = variants();
  for (int chunk = 1024; chunk <= 65536; chunk *= 2) {
    if (chunk > elems && chunk / 2 >= elems) break;
    if (tensors.total() / chunk > 1 << 19) continue;
    const OptimParams p = tensors.with_chunks(chunk);
    for (const Variant& v : all) {
      if (v.knobs.threads * v.knobs.vectors * 4 > chunk) continue;
      const auto call = [&] { v.kernel<<<static_cast<unsigned>(p.chunk_count), v.knobs.threads>>>(p); };
      note(sweep::time_of(call, samples), text_of(v.knobs), chunk);
    }
  }

  std::vector<Row> rows;
  for (const auto& [name, row] : best) rows.push_back(row);
  const double copy_us = sweep::print(title, tensors.bytes(), rows, 12);
  for (const auto& [name, row] : best) of_copy[name].push_back(copy_us / row.us);
}

}  // namespace

int main() {
  std::map<std::string, std::vector<double>> of_copy;
  run("1.0e9 in 256", 256, 3932160, 5, of_copy);
  run("2000 x 4096", 2000, 4096, 15, of_copy);

  std::vector<std::pair<double, std::string>> both;
  for (const auto& [name, shares] : of_copy)
    if (shares.size() == 2) both.emplace_back(std::sqrt(shares[0] * shares[1]), name);
  std::sort(both.rbegin(), both.rend());
  std::printf("both, geometric mean of the shares of the copy rate\n");
  for (size_t i = 0; i < both.size(); ++i)
    if (i < 12 || both[i].second == kChosen)
      std::printf("  %2zu of %zu  %.3f  %s\n", i + 1, both.size(), both[i].first, both[i].second.c_str());
}
