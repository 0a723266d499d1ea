#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace warpsmith {

// Whether some sum of whole multiples of strides, each multiple within its bounds, equals a distance.
class StridedSums {
 public:
  void add(int64_t stride, int64_t least, int64_t most) {
    if (least == 0 && most == 0) return;
    for (Term& t : terms_) {
      if (t.stride == stride) {
        t.least += least;
        t.most += most;
        return;
      }
    }
    terms_.push_back({stride, least, most});
  }

  // Strides > 0. Counts a distance as reached if kSteps do not decide it. Views of one tensor take a few steps.
  bool reach(int64_t distance) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride > b.stride; });
    steps_ = 0;
    return reach_from(0, distance);
  }

 private:
  struct Term {
    int64_t stride, least, most;
  };
  static constexpr int kSteps = 1 << 16;

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  bool reach_from(size_t first, int64_t distance) {
    if (first == terms_.size()) return distance == 0;
    if (++steps_ > kSteps) return true;
    int64_t rest_least = 0, rest_most = 0;  // the least and most that smaller strides add
    for (size_t i = first + 1; i < terms_.size(); ++i) {
      rest_least += terms_[i].stride * terms_[i].least;
      rest_most += terms_[i].stride * terms_[i].most;
    }
    const auto [stride, least, most] = terms_[first];
    const int64_t from = std::max(least, -floor_div(rest_most - distance, stride));
    const int64_t to = std::min(most, floor_div(distance - rest_least, stride));
    for (int64_t n = from; n <= to; ++n)
      if (reach_from(first + 1, distance - n * stride)) return true;
    return false;
  }

  std::vector<Term> terms_;
  int steps_ = 0;
};

// Where the elements of a tensor lie. Sizes > 0; strides in elements, > 0 where a size is more than 1.
struct StridedElements {
  const void* data;
  std::vector<int64_t> sizes, strides;
  int64_t element_bytes;
};

// Whether two tensors have a byte in common.
inline bool overlap(const StridedElements& a, const StridedElements& b) {
  StridedSums sums;
  for (size_t i = 0; i < a.sizes.size(); ++i) sums.add(a.strides[i] * a.element_bytes, 0, a.sizes[i] - 1);
  for (size_t i = 0; i < b.sizes.size(); ++i) sums.add(b.strides[i] * b.element_bytes, 1 - b.sizes[i], 0);
  sums.add(1, 1 - b.element_bytes, a.element_bytes - 1);
  return sums.reach(reinterpret_cast<intptr_t>(b.data) - reinterpret_cast<intptr_t>(a.data));
}

// Whether two elements of a tensor, different in some index, have the same address.
inline bool overlaps_itself(const StridedElements& a) {
  for (size_t apart = 0; apart < a.sizes.size(); ++apart) {
    if (a.sizes[apart] == 1) continue;
    StridedSums sums;
    for (size_t i = 0; i < a.sizes.size(); ++i) sums.add(a.strides[i], i == apart ? 1 : 1 - a.sizes[i], a.sizes[i] - 1);
    if (sums.reach(0)) return true;
  }
  return false;
}

}  // namespace warpsmith
