#pragma once
#include <string>
#include <vector>

#include "harness.h"
#include "kernels/attention/attention.h"

// What problems of attention are made of: shapes and options, and tensors as they lie in memory.
namespace warpsmith::test {

struct AttentionCase {
  int64_t batch = 1, queries = 1, keys = 1, heads = 1, key_heads = 1, head_dim = 64, head_dim_v = 0;  // 0: as head_dim
  int64_t window_left = -1, window_right = -1;
  bool bottom_right = true;
  double softcap = 0;
  bool sink = false;
  bool heads_first = false;                             // (batch, heads, length, dim) in memory
  std::vector<int64_t> lengths_q = {}, lengths_k = {};  // packed sequences
  int64_t spare_tokens = 0;                             // packed: behind the last sequence
  float logit_growth = 0;                               // factor on keys from the last (1) to the first
  double softmax_scale = 0;                             // 0: 1 / sqrt(head_dim)
  std::string bias = "", mask = "";                     // "1001": of shape (batch, 1, 1, keys); "": none
  bool bias_is_float = false;                           // else of the dtype, as the sink is
  int alibi = 0;                                        // dimensions of the slopes
  double dropout = 0;
  AttentionDropoutPlace place = {};  // of the call in a larger one
  bool narrow_sink = false;          // of the dtype

  bool packed() const { return !lengths_q.empty(); }
  int64_t dim_v() const { return head_dim_v ? head_dim_v : head_dim; }
};

// A part of a larger call: a place that every counter word of the dropout mask shows.
inline AttentionDropoutPlace part_of_a_whole(const AttentionCase& c) {
  return {.first_query = 48, .queries = c.queries + 90, .first_key = 160, .first_head = 3, .heads = c.heads + 5};
}

// A tensor of heads in memory, with a stride of its own for each dimension.
template <class T> struct HeadBuffer {
  AttentionStrides strides;
  int64_t dim;
  Buffer<T> data;

  HeadBuffer(int64_t batch, int64_t length, int64_t heads, int64_t head_dim, bool heads_first)
      : strides(heads_first ? AttentionStrides{heads * length * head_dim, head_dim, length * head_dim}
                            : AttentionStrides{length * heads * head_dim, heads * head_dim, head_dim}),
        dim(head_dim),
        data(static_cast<size_t>(batch * length * heads * head_dim)) {}
  size_t at(int64_t b, int64_t s, int64_t h, int64_t d) const {
    return static_cast<size_t>(b * strides.batch + s * strides.seq + h * strides.head + d);
  }
};

// A tensor that is broadcast to [batch, heads, queries, keys].
struct BroadcastShape {
  int64_t count = 1;
  AttentionBiasStrides strides{};

  BroadcastShape(const std::string& kept, const int64_t (&sizes)[4]) {
    int64_t* of[4] = {&strides.batch, &strides.head, &strides.q, &strides.k};
    for (size_t i = 4; i-- > 0 && !kept.empty();)
      if (kept[i] == '1' && sizes[i] > 1) *of[i] = count, count *= sizes[i];
  }
  size_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return static_cast<size_t>(b * strides.batch + h * strides.head + i * strides.q + j * strides.k);
  }
};

}  // namespace warpsmith::test
