#pragma once
#include <cstdint>

// Which kernel runs an attention problem: pure functions of the problem, printable through warpsmith.plan("attention").
namespace warpsmith {

namespace attention {

// What is added to the logits. A kernel of its own for each, because branches between them cost registers.
enum class Biases {
  none,
  tensor,  // a bias tensor, and ALiBi if there are slopes
  pairs,   // in the forward: the same, for bias tensors that TMA cannot read
  mask,    // a boolean mask, and ALiBi if there are slopes
  alibi,
};

// The configuration of a Hopper forward kernel.
struct ForwardTile {
  int head_dim;          // q, k and v are padded to it
  int groups;            // consumer warpgroups; each owns 64 query rows
  int block_keys;        // keys per block
  int block_stages;      // blocks of keys or values in shared memory or in flight
  bool pingpong;         // warpgroups issue their products one after the other
  bool extended;         // with softcap
  int query_stages = 2;  // tiles of queries in shared memory. 1: tiles do not overlap
  bool dropout = false;
  Biases biases = Biases::none;

  constexpr bool biased() const { return biases != Biases::none; }
  constexpr bool serial() const { return query_stages == 1; }
  constexpr int tile_rows() const { return 64 * groups; }
  constexpr int threads() const { return 128 * (groups + 1); }
  // Registers per thread after setmaxnreg has moved some from the first warpgroup to the consumers. The total must not
  // exceed that at launch: 168 for each of 384 threads, 128 for each of 512.
  constexpr int producer_registers() const { return groups == 2 ? 40 : 32; }
  constexpr int consumer_registers() const { return groups == 2 ? 232 : 160; }
  constexpr int query_bytes() const { return 64 * head_dim * 2; }  // per warpgroup
  constexpr int block_bytes() const { return block_keys * head_dim * 2; }
  constexpr bool stages_biases() const { return biases == Biases::tensor; }
  constexpr int bias_bytes() const { return stages_biases() ? 64 * block_keys * 2 : 0; }  // per warpgroup
  constexpr int shared_bytes() const {
    return query_stages * groups * query_bytes() + block_stages * block_bytes() + groups * bias_bytes();
  }
  constexpr bool operator==(const ForwardTile&) const = default;
};

// At head dimension 64, exponentials take as long as products, and three warpgroups keep both units busy. Tiles of two
// warpgroups waste less work on the masked half of a short causal triangle.
constexpr ForwardTile kForward128{128, 2, 128, 5, false, false};
constexpr ForwardTile kForward64{64, 3, 96, 8, true, false};
constexpr ForwardTile kForward64Short{64, 2, 128, 8, true, false};
constexpr ForwardTile kForward128Extended{128, 2, 128, 5, false, true};
constexpr ForwardTile kForward64Extended{64, 2, 128, 8, true, true};
constexpr ForwardTile kForward128Dropout{128, 2, 128, 5, true, false, 2, true};
constexpr ForwardTile kForward64Dropout{64, 2, 128, 8, true, false, 2, true};
// Adding a bias tensor makes exponentials take as long as products at head dimension 128 too.
constexpr ForwardTile kForward128Bias{128, 2, 128, 4, true, false, 2, false, Biases::tensor};
constexpr ForwardTile kForward128Pairs{128, 2, 96, 6, false, false, 2, false, Biases::pairs};
constexpr ForwardTile kForward64Pairs{64, 2, 128, 8, true, false, 2, false, Biases::pairs};
constexpr ForwardTile kForward128Mask{128, 2, 128, 5, false, false, 2, false, Biases::mask};
constexpr ForwardTile kForward128Alibi{128, 2, 128, 5, false, false, 2, false, Biases::alibi};
constexpr ForwardTile kForward64Bias{64, 2, 128, 8, true, false, 2, false, Biases::tensor};
constexpr ForwardTile kForward64Mask{64, 2, 128, 8, true, false, 2, false, Biases::mask};
constexpr ForwardTile kForward64Alibi{64, 2, 128, 8, true, false, 2, false, Biases::alibi};
// The output takes half of a thread's registers, and a tile of queries takes 64 KiB. That leaves room for 80 keys a
// step and for one tile of queries. There are no registers for a second set of probabilities, so the base of the
// softmax follows the row maxima (online_softmax.cuh).
constexpr ForwardTile kForward256{256, 2, 80, 4, false, true, 1};

constexpr ForwardTile kForwardTiles[] = {kForward128,        kForward64,      kForward64Short,    kForward128Extended,
                                         kForward64Extended, kForward256,     kForward128Dropout, kForward64Dropout,
                                         kForward128Bias,    kForward128Mask, kForward128Alibi,   kForward64Bias,
                                         kForward64Mask,     kForward64Alibi, kForward128Pairs,   kForward64Pairs};

// The configuration of a Hopper backward kernel: tiles of 128 keys, two consumer warpgroups.
struct BackwardTile {
  int head_dim;       // q, k and v are padded to it
  int block_queries;  // queries per step, 64 or 128
  int query_stages;   // blocks of q and dout in flight
  int key_stages;     // tiles of k in flight
  int value_stages;   // tiles of v in flight
  bool dropout = false;
  Biases biases = Biases::none;

  constexpr bool biased() const { return biases != Biases::none; }
  static constexpr int threads() { return 3 * 128; }
  // Registers per thread after setmaxnreg: the total must not exceed 3 * 168 per lane of the three warpgroups.
  static constexpr int producer_registers() { return 24; }
  static constexpr int consumer_registers() { return 240; }
  // lse and delta of a block of queries, and with dropout its counter words.
  constexpr int statistics_bytes() const { return block_queries * 8 + (dropout ? block_queries / 4 : 0); }
  constexpr bool operator==(const BackwardTile&) const = default;
};

// A step has as many products and as much of dq at both head dimensions. At head dimension 64 with 64 queries a step,
// the waits between products took longer than the products.
constexpr BackwardTile kBackward128{128, 64, 2, 2, 1};
constexpr BackwardTile kBackward64{64, 128, 2, 2, 2};
constexpr BackwardTile kBackward128Dropout{128, 64, 2, 2, 1, true};
constexpr BackwardTile kBackward64Dropout{64, 128, 2, 2, 2, true};
constexpr BackwardTile kBackward128Bias{128, 64, 2, 2, 1, false, Biases::tensor};
constexpr BackwardTile kBackward128Mask{128, 64, 2, 2, 1, false, Biases::mask};
constexpr BackwardTile kBackward128Alibi{128, 64, 2, 2, 1, false, Biases::alibi};
constexpr BackwardTile kBackward64Bias{64, 128, 2, 2, 2, false, Biases::tensor};
constexpr BackwardTile kBackward64Mask{64, 128, 2, 2, 2, false, Biases::mask};
constexpr BackwardTile kBackward64Alibi{64, 128, 2, 2, 2, false, Biases::alibi};
// Two kernels, for dk and dv and for dq (backward_wide.cuh), so this one is not in the list.
constexpr BackwardTile kBackward256{256, 64, 2, 2, 1};
constexpr BackwardTile kBackwardTiles[] = {kBackward128,     kBackward64,      kBackward128Dropout, kBackward64Dropout,
                                           kBackward128Bias, kBackward128Mask, kBackward128Alibi,   kBackward64Bias,
                                           kBackward64Mask,  kBackward64Alibi};

}  // namespace attention

// What the choice of a kernel depends on.
struct AttentionKernelProblem {
  int64_t seqlen_q = 0, seqlen_k = 0;  // packed: the maxima
  int head_dim = 0, head_dim_v = 0;
  int element_bytes = 2;
  bool causal = false;  // window_right >= 0: keys beyond the diagonal are bounded
  bool softcap = false;
  bool mask = false, bias = false, alibi = false, dropout = false;
  bool bias_of_dtype = true;      // else float32 beside 16 bits
  bool pairs_of_keys = true;      // of bias and mask: keys 2 i and 2 i + 1 are aligned pairs of elements
  bool bias_map = true;           // TMA can read the bias
  bool scale_has_inverse = true;  // softmax_scale is at least 2^-64
  bool positive_scale = true;
  bool aligned = true;     // for TMA: addresses and strides are multiples of 16 bytes, strides in (0, 2^40)
  bool vectors = true;     // addresses and strides are multiples of 16 bytes
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
  if (!p.positive_scale) return "a softmax_scale that is not positive";
  if (!p.aligned) return "addresses or strides that are no multiples of 16 bytes";
  if (p.seqlen_q >= int64_t{1} << 28 || p.seqlen_k >= int64_t{1} << 28) return "sequences of 2^28 tokens or more";
  return nullptr;
}

constexpr bool has_biases(const AttentionKernelProblem& p) { return p.mask || p.bias || p.alibi; }
constexpr Biases biases_of(const AttentionKernelProblem& p) {
  return p.bias ? Biases::tensor : p.mask ? Biases::mask : p.alibi ? Biases::alibi : Biases::none;
}

// Why no Hopper kernel takes the problem's bias, mask or ALiBi slopes; null if one does or there are none.
constexpr const char* reason_against_biases(const AttentionKernelProblem& p) {
  if (!has_biases(p)) return nullptr;
  if (p.bias && p.mask) return "a bias beside a mask";
  if (p.bias && !p.bias_of_dtype) return "a float32 bias beside 16-bit tensors";
  if (!p.pairs_of_keys) return "a bias or mask whose keys are no aligned pairs";
  if (!p.scale_has_inverse) return "a bias, mask or ALiBi beside a softmax_scale below 2^-64";
  if (p.dropout) return "dropout beside a bias, mask or ALiBi";
  if (p.softcap) return "a softcap beside a bias, mask or ALiBi";
  if (p.head_dim > 128 || p.head_dim_v > 128) return "a bias, mask or ALiBi with head dimensions above 128";
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

// Measured on one H200 (2026-11-22, docs/design/attention.md): for causal attention at head dimension
// 64, tiles of 128 rows are faster up to 2,048 keys.
constexpr AttentionForwardChoice choose_attention_forward_sm90(const AttentionKernelProblem& p) {
  AttentionForwardChoice c;
  c.why = attention::reason_against_sm90(p);
  if (c.why == nullptr) c.why = attention::reason_against_biases(p);
  if (c.why == nullptr && p.dropout && p.softcap) c.why = "dropout beside a softcap";
  if (c.why == nullptr && p.dropout && (p.head_dim > 128 || p.head_dim_v > 128))
    c.why = "dropout with head dimensions above 128";
  if (c.why != nullptr) return c;
  c.supported = true;
  const bool small = p.head_dim <= 64 && p.head_dim_v <= 64;
  if (p.dropout) {
    c.tile = small ? attention::kForward64Dropout : attention::kForward128Dropout;
    c.why = "dropout: the kernel that makes the mask while the tensor cores multiply";
  } else if (attention::has_biases(p)) {
    const attention::Biases biases = attention::biases_of(p);
    using attention::Biases;
    if (biases == Biases::tensor && !p.bias_map)
      c.tile = small ? attention::kForward64Pairs : attention::kForward128Pairs;
    else if (biases == Biases::tensor)
      c.tile = small ? attention::kForward64Bias : attention::kForward128Bias;
    else if (biases == Biases::mask)
      c.tile = small ? attention::kForward64Mask : attention::kForward128Mask;
    else
      c.tile = small ? attention::kForward64Alibi : attention::kForward128Alibi;
    c.why = "bias, mask or ALiBi: the kernel that loads biases while the tensor cores multiply";
  } else if (p.head_dim > 128 || p.head_dim_v > 128) {
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
  const bool small = p.head_dim <= 64 && p.head_dim_v <= 64, wide = p.head_dim > 128 || p.head_dim_v > 128;
  if (c.why == nullptr) c.why = attention::reason_against_biases(p);
  if (c.why == nullptr && p.softcap) c.why = "softcap";
  if (c.why == nullptr && p.dropout && wide) c.why = "dropout with head dimensions above 128";
  if (c.why != nullptr) return c;
  c.supported = true;
  if (wide) {
    c.tile = attention::kBackward256;
    c.why = "head dimensions up to 256: one kernel for dk and dv of 64 keys, one for dq of 128 queries";
  } else if (p.dropout) {
    c.tile = small ? attention::kBackward64Dropout : attention::kBackward128Dropout;
    c.why = "dropout: the kernel that makes the mask again while the tensor cores multiply";
  } else if (attention::has_biases(p)) {
    c.tile = small ? attention::kBackward64 : attention::kBackward128;
    c.tile.biases = attention::biases_of(p);
    c.why = "bias, mask or ALiBi: a kernel for each, which loads biases before the tensor cores multiply";
  } else {
    c.tile = small ? attention::kBackward64 : attention::kBackward128;
    c.why = "128 keys a block, 64 queries a step; dq is added in the order of the keys";
  }
  return c;
}

}  // namespace warpsmith
