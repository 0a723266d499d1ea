#pragma once
#include <cstdint>

// Which kernel runs an attention problem: pure functions of the problem, printable through warpsmith.plan("attention").
namespace warpsmith {

namespace attention {

// What a Hopper forward kernel is compiled for.
struct ForwardTile {
  int head_dim;          // of q, k and v, which are padded to it
  int groups;            // consumer warpgroups, of 64 query rows each
  int block_keys;        // keys of a block
  int block_stages;      // blocks of keys or values in flight
  bool turns;            // warpgroups issue their products one after the other
  bool extended;         // softcap
  int query_stages = 2;  // tiles of queries in shared memory. 1: a tile ends before the next one begins

  constexpr bool serial() const { return query_stages == 1; }
  constexpr int tile_rows() const { return 64 * groups; }
  constexpr int threads() const { return 128 * (groups + 1); }
  // Registers of a thread after they have been moved from the first warpgroup to the consumers. Together no more than
  // at entry: 168 of 384 threads, 128 of 512.
  constexpr int producer_registers() const { return groups == 2 ? 40 : 32; }
  constexpr int consumer_registers() const { return groups == 2 ? 232 : 160; }
  constexpr int query_bytes() const { return 64 * head_dim * 2; }  // of one warpgroup
  constexpr int block_bytes() const { return block_keys * head_dim * 2; }
  constexpr int shared_bytes() const { return query_stages * groups * query_bytes() + block_stages * block_bytes(); }
  constexpr bool operator==(const ForwardTile&) const = default;
};

// At head dimension 64 exponentials take as long as products: three warpgroups keep both units busy. Tiles of two leave
// less of a short triangle to the mask.
constexpr ForwardTile kForward128{128, 2, 128, 5, false, false};
constexpr ForwardTile kForward64{64, 3, 96, 8, true, false};
constexpr ForwardTile kForward64Short{64, 2, 128, 8, true, false};
constexpr ForwardTile kForward128Extended{128, 2, 128, 5, false, true};
constexpr ForwardTile kForward64Extended{64, 2, 128, 8, true, true};
// Output takes half of a thread's registers and one tile of queries 64 KiB: there is room for 80 keys a step, and for
// no second tile of queries. The probabilities have no second place either, so that the base follows the maxima.
constexpr ForwardTile kForward256{256, 2, 80, 4, false, true, 1};

constexpr ForwardTile kForwardTiles[] = {kForward128,         kForward64,         kForward64Short,
                                         kForward128Extended, kForward64Extended, kForward256};

// What a Hopper backward kernel is compiled for: tiles of 128 keys, two consumer warpgroups.
struct BackwardTile {
  int head_dim;       // of q, k and v, which are padded to it
  int block_queries;  // queries of a step, 64 or 128
  int query_stages;   // blocks of q and dout in flight
  int key_stages;     // tiles of k in flight, and of v
  int value_stages;

  static constexpr int threads() { return 3 * 128; }
  // After registers have been moved to the consumers: together no more than 3 * 168.
  static constexpr int producer_registers() { return 24; }
  static constexpr int consumer_registers() { return 240; }
  constexpr bool operator==(const BackwardTile&) const = default;
};

// A step has the same products at both head dimensions, and the same dq. With steps of 64 queries at head dimension 64,
// the waits between products took more time than the products.
constexpr BackwardTile kBackward128{128, 64, 2, 2, 1};
constexpr BackwardTile kBackward64{64, 128, 2, 2, 2};
constexpr BackwardTile kBackwardTiles[] = {kBackward128, kBackward64};

// Where a tile stands in its list. Kernels take this number as their argument, because nvcc 13.0 cannot write the
// host's half of a kernel whose argument is a value of a class in a namespace.
constexpr int index_of(const ForwardTile& tile) {
  int i = 0;
  while (!(kForwardTiles[i] == tile)) ++i;
  return i;
}
constexpr int index_of(const BackwardTile& tile) {
  int i = 0;
  while (!(kBackwardTiles[i] == tile)) ++i;
  return i;
}

}  // namespace attention

// What the choice of a kernel depends on.
struct AttentionKernelProblem {
  int64_t seqlen_q = 0, seqlen_k = 0;  // packed: the most
  int head_dim = 0, head_dim_v = 0;
  int element_bytes = 2;
  bool causal = false;  // no key after the diagonal: window_right >= 0
  bool softcap = false;
  bool mask = false, bias = false, alibi = false, dropout = false;
  bool positive_scale = true;
  bool aligned = true;     // base addresses and strides are multiples of 16 bytes and below 2^40, none is 0
  bool vectors = true;     // base addresses and strides are multiples of 16 bytes
  bool fits_grid = true;   // no kernel needs more than 2^31 - 1 blocks
  bool sm90a_code = true;  // the current device runs code of sm_90a
};

// The Hopper kernel of a forward, or why there is none.
struct AttentionForwardChoice {
  bool supported = false;
  attention::ForwardTile tile{};
  const char* why = "";
};

namespace attention {

// Why no Hopper kernel takes the problem; null if one does.
constexpr const char* reason_against_sm90(const AttentionKernelProblem& p) {
  if (!p.sm90a_code) return "a device that runs no code of sm_90a";
  if (p.element_bytes != 2) return "a dtype other than float16 and bfloat16";
  if (p.seqlen_q <= 0 || p.seqlen_k <= 0) return "sequences without tokens";
  if (p.mask) return "a mask tensor";
  if (p.bias) return "a bias";
  if (p.alibi) return "ALiBi slopes";
  if (p.dropout) return "dropout";
  if (!p.positive_scale) return "a softmax_scale that is not positive";
  if (!p.aligned) return "addresses or strides that are no multiples of 16 bytes";
  if (p.seqlen_q >= int64_t{1} << 28 || p.seqlen_k >= int64_t{1} << 28) return "sequences of 2^28 tokens or more";
  return nullptr;
}

// Why no portable kernel takes the problem; null if one does.
constexpr const char* reason_against_portable(const AttentionKernelProblem& p) {
  if (p.element_bytes > 4) return "float64";
  if (!p.vectors) return "addresses or strides that are no multiples of 16 bytes";
  if (p.seqlen_q >= int64_t{1} << 28 || p.seqlen_k >= int64_t{1} << 28) return "sequences of 2^28 tokens or more";
  if (!p.fits_grid) return "more than 2^31 - 1 tiles of rows";
  return nullptr;
}

}  // namespace attention

// Measured on one H200 (2026-11-22, docs/design/2026-11-22-attention-sm90.md): at head dimension 64 and causal, tiles
// of 128 rows are ahead up to 2,048 keys.
constexpr AttentionForwardChoice choose_attention_forward_sm90(const AttentionKernelProblem& p) {
  AttentionForwardChoice c;
  c.why = attention::reason_against_sm90(p);
  if (c.why != nullptr) return c;
  c.supported = true;
  const bool small = p.head_dim <= 64 && p.head_dim_v <= 64;
  if (p.head_dim > 128 || p.head_dim_v > 128) {
    c.tile = attention::kForward256;
    c.why = "head dimensions up to 256: two warpgroups of 64 queries, 80 keys a step";
  } else if (p.softcap) {
    c.tile = small ? attention::kForward64Extended : attention::kForward128Extended;
    c.why = "softcap: the kernel with more arithmetic between the products";
  } else if (!small) {
    c.tile = attention::kForward128;
    c.why = "head dimensions up to 128: two warpgroups of 64 queries, 128 keys a step";
  } else if (p.causal && p.seqlen_k <= 2048) {
    c.tile = attention::kForward64Short;
    c.why = "head dimension 64, short and causal: two warpgroups leave less of the triangle to the mask";
  } else {
    c.tile = attention::kForward64;
    c.why = "head dimension 64: three warpgroups keep products and exponentials busy";
  }
  return c;
}

// The Hopper kernel of a backward, or why there is none.
struct AttentionBackwardChoice {
  bool supported = false;
  attention::BackwardTile tile{};
  const char* why = "";
};

constexpr AttentionBackwardChoice choose_attention_backward_sm90(const AttentionKernelProblem& p) {
  AttentionBackwardChoice c;
  c.why = attention::reason_against_sm90(p);
  if (c.why == nullptr && (p.head_dim > 128 || p.head_dim_v > 128)) c.why = "head dimensions above 128";
  if (c.why == nullptr && p.softcap) c.why = "softcap";
  if (c.why != nullptr) return c;
  c.supported = true;
  c.tile = p.head_dim <= 64 && p.head_dim_v <= 64 ? attention::kBackward64 : attention::kBackward128;
  c.why = "128 keys a block, 64 queries a step; dq is added in the order of the keys";
  return c;
}

}  // namespace warpsmith
