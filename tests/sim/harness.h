#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/half_host.h"
#include "common/status.h"
#include "sim/sim.h"

// Tests of kernels that run on the host. A file holds TESTs and RANDOM_TESTs; harness.cpp has main():
//
//   TEST(forward_of_odd_rows) {
//     Buffer<bfloat16> x(rows * columns), y(rows * columns);
//     fill_normal(x, 1);
//     under_every_seed([&] {
//       y.poison();
//       expect_ok(rms_norm_forward_cuda(params, nullptr));
//       same_bits_for_every_seed("y", y);
//       expect_close("y", y, oracle, {.ulps = 1});
//       expect_bytes({.read = ..., .written = ...});
//     });
//   }
//
// `program --seeds 8 --random 200 --only forward` runs tests whose name contains "forward"; `--code 80` runs all as
// code of sm_80 on a device of sm_90. A test that launches by hand what only sm_90's code can do begins with
// NEEDS_SM90_CODE.
namespace warpsmith::test {

// ---- expectations: a failure is recorded and the test goes on

void fail(const std::string& what);
inline void expect(bool ok, const std::string& what) {
  if (!ok) fail(what);
}
void expect_ok(const Status& status);
// A failure whose text contains `part`.
void expect_refused(const Status& status, const std::string& part);
template <class A, class B> void expect_equal(const std::string& what, const A& actual, const B& expected) {
  if (!(actual == expected)) fail(what + ": expected " + std::to_string(expected) + ", got " + std::to_string(actual));
}

// ---- memory

// An allocation of exactly `count` elements, aligned like torch's allocator, `offset` elements past that alignment. The
// address sanitizer sees the first byte outside it. Filled with NaN bytes.
template <class T> class Buffer {
 public:
  explicit Buffer(size_t count, size_t offset = 0) : count_(count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, (count + offset) * sizeof(T))) std::abort();
    memory_.reset(memory);
    data_ = static_cast<T*>(memory) + offset;
    poison();
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  void poison() { std::memset(static_cast<void*>(data_), 0xff, count_ * sizeof(T)); }

 private:
  static constexpr size_t kAlignment = 256;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t count_;
  T* data_ = nullptr;
};

// ---- random numbers

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  int64_t integer(int64_t low, int64_t high);  // both inclusive; put the simplest value low
  bool coin() { return integer(0, 1); }
  template <class T> T choice(std::initializer_list<T> options) {
    return options.begin()[integer(0, static_cast<int64_t>(options.size()) - 1)];
  }
  // Small sizes, and sizes next to powers of two and tiles, more often than a uniform draw would give.
  int64_t size(int64_t low, int64_t high);
  uint64_t bits() {  // splitmix64; for data: from the seed alone
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  std::vector<int64_t> drawn;  // for reports
 private:
  uint64_t state_;
};

// Where the arguments of a problem lie: elements past an aligned address. A launcher that forgets to look at one
// pointer is wrong where that argument alone is misaligned, so each has an offset of its own.
class Offsets {
 public:
  constexpr Offsets(size_t all = 0) : all_(all) {}  // `.offset = 1` moves all of them
  static constexpr Offsets only(int argument) {
    Offsets o;
    o.moved_ = 1u << argument;
    return o;
  }
  // None, one, all, or any.
  static Offsets draw(Random& random, int arguments) {
    Offsets o;
    switch (random.integer(0, 4)) {
      case 2: return only(static_cast<int>(random.integer(0, arguments - 1)));
      case 3: return 1;
      case 4: o.moved_ = static_cast<uint32_t>(random.integer(0, (1 << arguments) - 1)); break;
      default: break;
    }
    return o;
  }
  constexpr size_t operator[](int argument) const { return all_ + (moved_ >> argument & 1); }

 private:
  size_t all_;
  uint32_t moved_ = 0;
};

// Data: scale times a sum of four uniform numbers, of mean 0 and variance 1 (nearly normal, within 3.5 of 0), rounded
// to T.
template <class T> void fill_normal(Buffer<T>& buffer, uint64_t seed, float scale = 1.0f, float mean = 0.0f) {
  constexpr float kMean = 2 * 65535.0f, kDeviation = 37837.2f;  // sqrt(4 (2^32 - 1) / 12)
  Random random(seed);
  T* data = buffer.data();
  for (size_t i = 0; i < buffer.size(); ++i) {
    const uint64_t r = random.bits();
    const auto sum = static_cast<float>((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48));
    data[i] = from_float<T>(mean + scale * ((sum - kMean) / kDeviation));
  }
}

// ---- running

// Runs `body` once per schedule seed, with counters reset before each.
void under_every_seed(const std::function<void()>& body);

// While it lives, under_every_seed takes no more than the first `most` seeds. Two, index order and a shuffled one, are
// enough for a test of numbers: of types, lengths, strides and arguments. Tests of what threads, warps, blocks and
// clusters exchange, and of the order in which they do, take every seed.
class SeedsAtMost {
 public:
  explicit SeedsAtMost(int most);
  ~SeedsAtMost();
  SeedsAtMost(const SeedsAtMost&) = delete;
  SeedsAtMost& operator=(const SeedsAtMost&) = delete;

 private:
  int before_;
};

// Whether the code that runs (--code) is older than sm_90's; the current test then counts as not run.
bool lacks_sm90_code();
#define NEEDS_SM90_CODE \
  if (::warpsmith::test::lacks_sm90_code()) return

// Runs `body` on a machine of so many multiprocessors that runs code of `code`, or that of --code where it is older.
void on_machine(int multiprocessors, int code, const std::function<void()>& body);

// Inside under_every_seed: the bytes must be those of the first seed.
void same_bits_for_every_seed(const std::string& name, const void* data, size_t bytes);
template <class T> void same_bits_for_every_seed(const std::string& name, const Buffer<T>& buffer) {
  same_bits_for_every_seed(name, buffer.data(), buffer.size() * sizeof(T));
}

// ---- comparison with an oracle

// |actual - expected| <= ulps * (spacing of T at expected) + relative * |expected| + absolute; NaN and infinities must
// match.
struct Tolerance {
  double ulps = 0, relative = 0, absolute = 0;
};
template <class T> constexpr int kMantissaBits = 52;
template <> inline constexpr int kMantissaBits<float> = 23;
template <> inline constexpr int kMantissaBits<float16> = 10;
template <> inline constexpr int kMantissaBits<bfloat16> = 7;
// Of the smallest normal number: below it the steps do not shrink any more.
template <class T> constexpr int kLeastExponent = -126;
template <> inline constexpr int kLeastExponent<float16> = -14;

void expect_close_element(const std::string& name, size_t index, double actual, double expected, int mantissa_bits,
                          int least_exponent, const Tolerance& tolerance, int& reported);

template <class T, class Oracle> void expect_close(const std::string& name, const Buffer<T>& actual,
                                                   const Oracle& expected, const Tolerance& tolerance) {
  expect(expected.size() == actual.size(), name + ": the oracle has another size");
  int reported = 0;
  for (size_t i = 0; i < actual.size() && i < expected.size(); ++i)
    expect_close_element(name, i, static_cast<double>(to_float(actual[i])), static_cast<double>(expected[i]),
                         kMantissaBits<T>, kLeastExponent<T>, tolerance, reported);
}

// ---- counted bytes

// Global bytes since the seed began (or since sim::counters() was reset), through the vocabulary.
struct Bytes {
  int64_t read, written;
};
void expect_bytes(const Bytes& formula);

// ---- registration

struct Registration {
  Registration(const char* name, void (*body)(Random*), bool random);
};
#define TEST(name)                                                      \
  static void test_##name();                                            \
  static const ::warpsmith::test::Registration register_##name(         \
      #name, [](::warpsmith::test::Random*) { test_##name(); }, false); \
  static void test_##name()
// Runs --random times with other draws.
#define RANDOM_TEST(name)                                                  \
  static void test_##name(::warpsmith::test::Random& random);              \
  static const ::warpsmith::test::Registration register_##name(            \
      #name, [](::warpsmith::test::Random* r) { test_##name(*r); }, true); \
  static void test_##name(::warpsmith::test::Random& random)

}  // namespace warpsmith::test
