// links: csrc/kernels/optim/average.cu
// Moving averages of many tensors on the host, against the formula in double.
#include <cmath>
#include <memory>

#include "dtypes.h"
#include "harness.h"
#include "kernels/optim/average.h"

namespace warpsmith::test {
namespace {

constexpr int32_t kChunkElems = 4096;
constexpr int64_t kThreadsOfABlock = 256;

// Values of any dtype and their averages.
struct Averaged {
  Dtype dtype;
  size_t count;
  Buffer<float> average, single;
  Buffer<float16> half;
  Buffer<bfloat16> brain;

  Averaged(Dtype of, size_t elems, const Offsets& offset)
      : dtype(of),
        count(elems),
        average(elems, offset[0]),
        single(of == Dtype::float32 ? elems : 0, offset[1]),
        half(of == Dtype::float16 ? elems : 0, offset[1]),
        brain(of == Dtype::bfloat16 ? elems : 0, offset[1]) {}

  void reset(uint64_t seed) {
    fill_normal(average, seed);
    fill_normal(single, seed + 1);
    fill_normal(half, seed + 1);
    fill_normal(brain, seed + 1);
  }
  double value(size_t i) const {
    if (dtype == Dtype::float32) return static_cast<double>(single[i]);
    return static_cast<double>(dtype == Dtype::float16 ? to_float(half[i]) : to_float(brain[i]));
  }
  const void* data() const {
    if (dtype == Dtype::float32) return single.data();
    return dtype == Dtype::float16 ? static_cast<const void*>(half.data()) : brain.data();
  }
};

struct Averages {
  std::vector<std::unique_ptr<Averaged>> tensors;
  Buffer<float> found_inf{1};

  void add(Dtype dtype, size_t elems, const Offsets& offset = {}) {
    tensors.push_back(std::make_unique<Averaged>(dtype, elems, offset));
  }

  int64_t run(double weight) {
    std::vector<AverageTensor> records;
    for (const auto& t : tensors)
      records.push_back({t->average.data(), t->data(), static_cast<int64_t>(t->count), 0, 0, t->dtype});
    const std::vector<int64_t> words = tensor_list_words(records, kChunkElems);
    const size_t record_words = records.size() * sizeof(AverageTensor) / sizeof(int64_t);
    const auto chunks = static_cast<int64_t>(words.size() - record_words);
    expect_ok(average_cuda(
        {reinterpret_cast<const AverageTensor*>(words.data()),
         reinterpret_cast<const ListChunk*>(words.data() + record_words), chunks, found_inf.data(), weight},
        nullptr));
    return chunks;
  }

  void check(double weight, bool skips = false) {
    found_inf[0] = skips ? 1.0f : 0.0f;
    under_every_seed([&] {
      std::vector<std::vector<double>> want;
      for (size_t k = 0; k < tensors.size(); ++k) {
        tensors[k]->reset(7 * k + 1);
        want.emplace_back();
        for (size_t i = 0; i < tensors[k]->count; ++i) {
          const double a = static_cast<double>(tensors[k]->average[i]);
          want.back().push_back(skips ? a : a + weight * (tensors[k]->value(i) - a));
        }
      }
      run(weight);
      for (size_t k = 0; k < tensors.size(); ++k) {
        const bool exact = skips || weight == 0 || weight == 1;
        expect_close("average " + std::to_string(k), tensors[k]->average, want[k],
                     {.ulps = exact ? 0.0 : 2.0, .absolute = exact ? 0.0 : 5e-7});
        same_bits_for_every_seed("average " + std::to_string(k), tensors[k]->average);
      }
    });
  }
};

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float16, Dtype::bfloat16};

TEST(many_sizes_dtypes_and_alignments) {
  const SeedsAtMost few(3);
  Averages n;
  for (const Dtype dtype : kDtypes) {
    for (const size_t elems : {0, 1, 3, 4, 5, 1023, 4096, 4097, 9001}) n.add(dtype, elems);
    for (const size_t offset : {1, 2, 3}) n.add(dtype, 3001, offset);
    for (const int argument : {0, 1}) n.add(dtype, 3001, Offsets::only(argument));
  }
  for (const double weight : {0.0, 0.001, 0.4999, 0.7, 1.0}) n.check(weight);
}

TEST(a_skipped_step_changes_nothing) {
  Averages n;
  for (const Dtype dtype : kDtypes) n.add(dtype, 5000);
  n.check(0.25, true);
}

TEST(bytes_are_the_floor) {
  for (const Dtype dtype : kDtypes) {
    Averages n;
    n.add(dtype, 2 * kChunkElems);
    n.found_inf[0] = 0;
    under_every_seed([&] {
      n.tensors[0]->reset(1);
      sim::counters() = {};
      const int64_t chunks = n.run(0.5), elems = 2 * kChunkElems;
      expect_bytes({.read = (4 + (dtype == Dtype::float32 ? 4 : 2)) * elems + 4 * kThreadsOfABlock * chunks,
                    .written = 4 * elems});
    });
  }
}

RANDOM_TEST(random_averages) {
  Averages n;
  const int64_t count = random.integer(1, 6);
  for (int64_t i = 0; i < count; ++i)
    n.add(random.choice({Dtype::float32, Dtype::bfloat16, Dtype::float16}), static_cast<size_t>(random.size(0, 10000)),
          static_cast<size_t>(random.integer(0, 4)));
  n.check(random.choice({0.0, 0.1, 0.5, 0.9, 1.0}));
}

}  // namespace
}  // namespace warpsmith::test
