#pragma once
#include <algorithm>
#include <cstdint>

// How a rope problem is laid out on threads: a pure function, printable through warpsmith.plan("rope", ...).
namespace warpsmith {

struct RopeProblem {
  int64_t tokens = 0;  // of all batch entries
  int64_t q_heads = 0, k_heads = 0;
  int64_t head_dim = 0, rotary_dim = 0;
  int element_bytes = 2;
  bool aligned = true;   // every pointer, token and head begins on 16 bytes, rows of cos and sin too
  bool inplace = false;  // what is not rotated is not copied
};

// A thread holds two vectors of a head (both members of its pairs), of `heads_a_thread` heads of one token, and loads
// their angles once.
struct RopeConfig {
  int vector_elems = 1;  // of one memory access
  int heads_a_thread = 1;
  int rotating = 0;                                  // pairs of vectors of a head that are rotated
  int columns = 1;                                   // and those that are copied besides
  int threads_x = 1, threads_y = 1, threads_z = 1;   // of a block: columns, groups of heads, tokens
  int64_t blocks_x = 1, blocks_y = 1, blocks_z = 1;  // of the grid: tokens, groups of heads, columns
  const char* why = "";
};

namespace rope_detail {
constexpr int kMaxThreads = 256, kVectorBytes = 16;
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Groups of heads of a token: a group's heads are all of q or all of k.
constexpr int64_t head_groups(const RopeProblem& p, int heads_a_thread) {
  return ceil_div(p.q_heads, heads_a_thread) + ceil_div(p.k_heads, heads_a_thread);
}
}  // namespace rope_detail

// The kernels that are compiled: 1, 2 and 4 heads a thread, element by element only 2; and registers for this many
// blocks of kMaxThreads.
constexpr bool rope_has_kernel(int heads_a_thread, int vector_elems) {
  return heads_a_thread == 2 || (vector_elems > 1 && (heads_a_thread == 1 || heads_a_thread == 4));
}
constexpr int rope_blocks(int heads_a_thread) { return heads_a_thread == 1 ? 6 : heads_a_thread == 2 ? 3 : 2; }

constexpr RopeConfig rope_config_of(const RopeProblem& p, int heads_a_thread, int threads) {
  using namespace rope_detail;
  RopeConfig c;
  const int vector = kVectorBytes / p.element_bytes;
  const bool vectors = p.aligned && p.head_dim % vector == 0 && p.rotary_dim % (2 * vector) == 0;
  c.vector_elems = vectors ? vector : 1;
  c.heads_a_thread = heads_a_thread;
  c.rotating = static_cast<int>(p.rotary_dim / 2 / c.vector_elems);
  c.columns =
      c.rotating + (p.inplace ? 0 : static_cast<int>(ceil_div((p.head_dim - p.rotary_dim) / c.vector_elems, 2)));
  const int64_t columns = std::max(1, c.columns), groups = std::max<int64_t>(1, head_groups(p, heads_a_thread));
  c.blocks_z = ceil_div(columns, threads);
  c.threads_x = static_cast<int>(ceil_div(columns, c.blocks_z));
  c.blocks_y = ceil_div(groups, std::max(1, threads / c.threads_x));
  c.threads_y = static_cast<int>(ceil_div(groups, c.blocks_y));
  c.threads_z = static_cast<int>(
      std::clamp<int64_t>(p.tokens, 1, std::min(64, std::max(1, threads / (c.threads_x * c.threads_y)))));
  c.blocks_x = ceil_div(p.tokens, c.threads_z);
  c.why = vectors ? "16-byte vectors of both halves of a head, angles loaded once for several heads"
                  : "heads or rows of cos are not made of aligned 16-byte vectors: pair by pair";
  return c;
}

// Measured on one H200 (bf16, tools/gpu/sweep/rope.cu), the best block's fraction of a copy of the same bytes, out of
// place and in place (heads of 128: out of place):
//   heads x D, tokens       one head a thread    two heads         four heads
//   40 x 128, 16384         below 0.95           0.962             0.961
//   72 x 128, 8192          below 0.93           0.932             0.966
//   40 x 80, 16384          0.899, 0.914         0.919, 0.925      0.904, 0.908
//   32 x 64, 16384          0.973, 0.982         0.956, 0.975      0.940, 0.943
//   24 x 64, 8192           0.935, 0.969         0.937, 0.961      0.907, 0.924
//   16 x 64, 16384          0.940, 0.972         0.934, 0.957      0.898, 0.889
//   64 x 32, 32768          0.981, 0.987         0.929, 0.922      0.884, 0.861
// The blocks of two and four heads that are chosen have up to 256 threads (at 32 x 64 0.929, 0.934). Two heads a thread
// keep 64 heads of 128 elements in one block; a token that is cut loses 0.03, but for cuts into blocks of 64 threads.
// Blocks of one head a thread: 64 threads where a token fills them are 0.01 to 0.03 better than others out of place;
// in place 128 are 0.005 to 0.03 better.
constexpr RopeConfig choose_rope(const RopeProblem& p) {
  using namespace rope_detail;
  constexpr int kShortHead = 4;  // columns
  const RopeConfig c = rope_config_of(p, 2, kMaxThreads);
  if (c.vector_elems == 1) return c;
  const int64_t threads = c.columns * head_groups(p, 1);  // of a token, with one head a thread
  if (c.columns <= kShortHead && threads <= kMaxThreads) {
    const bool small = p.inplace ? threads <= 128 : threads % 64 == 0;
    return rope_config_of(p, 1, !small ? kMaxThreads : p.inplace ? 128 : 64);
  }
  return c.blocks_y == 1 ? c : rope_config_of(p, 4, kMaxThreads);
}

}  // namespace warpsmith
