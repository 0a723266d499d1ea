#pragma once
#include <cstdint>

#include "common/alignment.h"

// The Hopper products of linear layers: which kernels are compiled, and which one multiplies a problem. Pure functions
// of the problem, printable through warpsmith.plan("linear", ...).
namespace warpsmith {

// out[m, n] = sum over k. How the operands lie, each row-major.
enum class ProductLayout : uint8_t {
  nt,  // a [rows, inner], b [columns, inner]: the forward
  nn,  // a [rows, inner], b [inner, columns]: the gradient of the input
  tn,  // a [inner, rows], b [inner, columns]: the gradient of the weight
};

// What becomes of a sum. Where a bias is given, it is added before the sum is rounded.
enum class ProductEpilogue : uint8_t {
  store,       // out = sum + bias
  activate,    // z = sum + bias, kept or not; out = f(z), of the rounded z
  residual,    // out = (sum + bias) + z, of the rounded parenthesis
  derivative,  // out = sum * f'(z), of the rounded sum; column sums of it, if they are wanted
  gated,       // two sums, of b and of up: z = sum + bias and up_z likewise, kept or not; out = f(z) * up_z, rounded z
  wide,        // out = sum or out += sum, in float32
  symmetric,   // out = alpha sum + beta z, of the rounded product; symmetric: tiles below the diagonal are mirrored
  siblings,    // `store`, of several weights: nt has one a and an out for each b, nn one sum of all a b
};

// Of a product. 8-bit floats multiply in layout nt alone, with `store`: the scaled sum is stored.
enum class ProductFactors : uint8_t {
  halves = 1,  // two matrices of the result's dtype
  e4m3,        // two of float8_e4m3
  e5m2,        // a of float8_e5m2, b of float8_e4m3
};

// How sums of 8-bit floats are made.
enum class ProductSums : uint8_t {
  fast,      // the tensor core adds up all terms
  promoted,  // what it gives for 128 terms is added in float32
  blocks,    // likewise, times the scales of these terms
};

// What has a scale of its own: nothing or each factor; each of its rows; 128 terms of each row, `blocks`.
enum class ProductScales : uint8_t { one, rows, blocks };
constexpr ProductSums sums_of(ProductScales scales, bool promotes) {
  return scales == ProductScales::blocks ? ProductSums::blocks : promotes ? ProductSums::promoted : ProductSums::fast;
}

// Whether the warps beside the loader compute it, from sums that the consumers hand over.
constexpr bool hands_over(ProductEpilogue e) {
  return e == ProductEpilogue::activate || e == ProductEpilogue::residual || e == ProductEpilogue::derivative;
}

constexpr int kConsumerWarps = 8;  // of a block
constexpr int kFinishers = 3;      // warps of a block, where panels are handed over
constexpr int kMostSiblings = 3;   // weights of one launch

// Partial sums of a column of `derivative`. A finisher adds 16 rows of each consumer warp whose panel it takes: row r
// of column c is in sum r / 128 * 3 + (r / 16 % 8 + c / 64 % 4) % 3.
constexpr int64_t partial_rows(int64_t rows) { return (rows + 127) / 128 * kFinishers; }

struct ProductTile {
  int rows, columns, stages;          // of a block; stages of 128 bytes of k
  int cluster_rows, cluster_columns;  // blocks; they share operands by multicast

  constexpr int cluster() const { return cluster_rows * cluster_columns; }
  constexpr int stage_bytes() const { return (rows + columns) * 128; }
  constexpr int accumulators() const { return rows / 128 * columns / 2; }  // of a thread
  // With two staging buffers of 2 KiB for each warp.
  constexpr int shared_bytes() const { return stages * stage_bytes() + kConsumerWarps * 2 * 2048; }
  constexpr bool operator==(const ProductTile&) const = default;
};

struct ProductKernel {
  ProductLayout layout;
  ProductEpilogue epilogue;
  bool splits;  // the sums of the last, incomplete wave of tiles, over all clusters
  ProductTile tile;
  ProductSums sums = ProductSums::fast;
  // Last and never 0: g++ drops zeros at the end of a name, nvcc does not.
  ProductFactors factors = ProductFactors::halves;

  constexpr bool float8() const { return factors != ProductFactors::halves; }
  constexpr bool promotes() const { return sums != ProductSums::fast; }
  constexpr bool blocks() const { return sums == ProductSums::blocks; }
  // Whether a finished tile is rounded at once, and stored while the products of the next one run.
  constexpr bool defers() const { return epilogue != ProductEpilogue::wide && tile.accumulators() <= 128; }
  constexpr bool reads() const {
    return epilogue == ProductEpilogue::residual || epilogue == ProductEpilogue::derivative;
  }
  constexpr bool gated() const { return epilogue == ProductEpilogue::gated; }
  constexpr bool symmetric() const { return epilogue == ProductEpilogue::symmetric; }
  constexpr bool siblings() const { return epilogue == ProductEpilogue::siblings; }
  constexpr bool computes() const { return gated() || symmetric() || hands_over(); }
  constexpr bool hands_over() const { return warpsmith::hands_over(epilogue); }
  // Of 384 threads with 168 registers at launch, all of which are given out: to the loader's warpgroup, with the
  // finishers where panels are handed over, and to two of consumers.
  constexpr int producer_registers() const { return hands_over() ? 88 : tile.accumulators() > 128 ? 24 : 40; }
  constexpr int consumer_registers() const { return 252 - producer_registers() / 2; }
  constexpr int panels() const { return tile.rows / 128 * tile.columns / 64; }  // 16 x 64 sums of a consumer's warp
  constexpr int columns() const { return gated() ? tile.columns / 2 : tile.columns; }  // of out in a tile
  constexpr bool takes_bias() const { return layout == ProductLayout::nt && !symmetric(); }
  // Of a column in shared memory: its bias, behind which lie the scales of all, if they are those of whole columns.
  constexpr int vector_bytes() const { return tile.columns * (float8() && !blocks() ? 6 : 2); }
  // Tiles whose vectors lie in shared memory: the second half of an 8-bit tile is scaled under the next one's products.
  constexpr int vectors() const { return float8() && tile.rows == 256 ? 2 : 1; }
  constexpr bool operator==(const ProductKernel&) const = default;
};

constexpr ProductTile kWideTile{128, 256, 4, 2, 1};      // shares the longer side, which costs the least energy
constexpr ProductTile kTallTile{256, 128, 4, 1, 2};      // as fast within 0.4 %; of 8-bit floats: two blocks of rows
constexpr ProductTile kLargeTile{256, 192, 3, 2, 1};     // fills waves that the others leave half empty
constexpr ProductTile kPromotedTile{128, 192, 4, 2, 1};  // more products between additions of promoted sums
constexpr ProductKernel kProducts[] = {
    {ProductLayout::nt, ProductEpilogue::store, false, kWideTile},
    {ProductLayout::nt, ProductEpilogue::store, false, kTallTile},
    {ProductLayout::nt, ProductEpilogue::activate, false, kWideTile},
    {ProductLayout::nt, ProductEpilogue::residual, false, kWideTile},
    {ProductLayout::nt, ProductEpilogue::gated, false, kWideTile},
    {ProductLayout::nt, ProductEpilogue::symmetric, false, kWideTile},  // tiles of a cluster are square
    {ProductLayout::nt, ProductEpilogue::siblings, false, kWideTile},
    {ProductLayout::nn, ProductEpilogue::store, false, kWideTile},
    {ProductLayout::nn, ProductEpilogue::derivative, false, kWideTile},
    {ProductLayout::nn, ProductEpilogue::siblings, false, kWideTile},
    {ProductLayout::tn, ProductEpilogue::store, false, kWideTile},
    {ProductLayout::tn, ProductEpilogue::store, false, kLargeTile},
    {ProductLayout::tn, ProductEpilogue::store, true, kWideTile},
    {ProductLayout::tn, ProductEpilogue::wide, false, kWideTile},
    {ProductLayout::tn, ProductEpilogue::wide, false, kLargeTile},
    {ProductLayout::tn, ProductEpilogue::wide, true, kWideTile},
    {ProductLayout::tn, ProductEpilogue::symmetric, false, kWideTile},
    {ProductLayout::nt, ProductEpilogue::store, false, kWideTile, ProductSums::fast, ProductFactors::e4m3},
    {ProductLayout::nt, ProductEpilogue::store, false, kWideTile, ProductSums::fast, ProductFactors::e5m2},
    {ProductLayout::nt, ProductEpilogue::store, false, kTallTile, ProductSums::promoted, ProductFactors::e4m3},
    {ProductLayout::nt, ProductEpilogue::store, false, kTallTile, ProductSums::promoted, ProductFactors::e5m2},
    {ProductLayout::nt, ProductEpilogue::store, false, kPromotedTile, ProductSums::promoted, ProductFactors::e4m3},
    {ProductLayout::nt, ProductEpilogue::store, false, kPromotedTile, ProductSums::promoted, ProductFactors::e5m2},
    {ProductLayout::nt, ProductEpilogue::store, false, kTallTile, ProductSums::blocks, ProductFactors::e4m3},
    {ProductLayout::nt, ProductEpilogue::store, false, kTallTile, ProductSums::blocks, ProductFactors::e5m2},
};

// WARPSMITH_OWN_PRODUCT: where it was measured to pay, wherever it can run ("1"), or not ("0").
enum class OwnProduct : uint8_t { automatic, always, never };
constexpr const char* const kOwnProduct[] = {"auto", "always", "never"};

struct ProductProblem {
  int64_t rows = 0, columns = 1, inner = 1;  // inner: of 8-bit floats in pairs
  ProductLayout layout = ProductLayout::nt;
  ProductEpilogue epilogue = ProductEpilogue::store;
  bool half = true;     // the result has 16 bits, and so have factors that are not 8-bit floats
  bool aligned = true;  // bases and rows of all matrices on 16 bytes
  bool rival = false;   // `activate` and `derivative`: cuBLASLt has this activation
  bool kept = false;    // `activate`: with the pre-activation
  OwnProduct asked = OwnProduct::automatic;
  int tile_rows = 0;  // of the tile that is wanted where it is compiled; 0: any
  bool sm90a_code = true;
  int multiprocessors = 132;
  int64_t batches = 1;  // of `symmetric`
  ProductFactors factors = ProductFactors::halves;
  bool promotes = false;  // 8-bit floats: sums of more than 128 terms are made in float32
  ProductScales scales = ProductScales::one;
  // `siblings`: columns (nt) or terms (nn) of each, 0: no more; `columns` or `inner` is their sum.
  int64_t widths[kMostSiblings] = {};
};

struct ProductPlan {
  const ProductKernel* kernel = nullptr;  // null: the library multiplies
  const char* why = "";
  int64_t sums = 0, flags = 0;  // of the workspace of a product that splits: floats, ints
};

// Tiles of a cluster over the output.
constexpr int64_t product_units(const ProductTile& t, int64_t rows, int64_t columns) {
  const int64_t m = int64_t{t.rows} * t.cluster_rows, n = int64_t{t.columns} * t.cluster_columns;
  return ((rows + m - 1) / m) * ((columns + n - 1) / n);
}

// Of a symmetric output: those on and above the diagonal.
constexpr int64_t triangle_units(int64_t side) { return side * (side + 1) / 2; }

// Clusters that run at once.
constexpr int64_t product_clusters(const ProductTile& t, int multiprocessors) {
  return multiprocessors > t.cluster() ? multiprocessors / t.cluster() : 1;
}

// How many times as long the whole waves of a tile take as the work in them, in percent.
constexpr int64_t wave_percent(int64_t units, int64_t clusters) {
  return units == 0 ? 100 : (units + clusters - 1) / clusters * clusters * 100 / units;
}

// Waves of our own products, one for each sibling; and of all in one.
constexpr int64_t sibling_waves(const ProductProblem& p, bool together) {
  const int64_t clusters = product_clusters(kWideTile, p.multiprocessors);
  int64_t units = 0, waves = 0;
  for (int64_t width : p.widths) {
    units += product_units(kWideTile, p.rows, width);
    waves += ceil_div(product_units(kWideTile, p.rows, width), clusters);
  }
  return together ? ceil_div(units, clusters) : waves;
}

constexpr const ProductKernel* find_product(const ProductKernel& wanted) {
  for (const ProductKernel& k : kProducts)
    if (k == wanted) return &k;
  return nullptr;
}

constexpr double kLeastWork = 3e10;  // multiplications
constexpr const char* kPartOfACard = "the library's product: ours was measured on whole cards alone";
constexpr const char* kTooSmall = "the library's product: ours was not measured below 3e10 multiplications";

// Measured on an H200, 2026-11-28: of 768 terms 0.83 to 0.94 of the library's speed, of 2,048 and more 0.99 to 1.22.
constexpr int64_t kLeastForActivations = 1344;

// Where our product was faster than the library's on an H200 on 2026-11-28, cuBLAS 13.1, ten shapes of Llama and GPT-2
// from 34 to 1,100 G multiplications on (docs/design/linear.md): forward 0.99 to 1.07, mean 1.02; input gradient 0.98
// to 1.09, below 1 only where 16,384 and more terms are summed; with a residual 1.04 to 1.32; with an activation and
// the pre-activation 1.00 to 1.07 of cuBLASLt's epilogue, without it 0.93 to 1.02; gated 1.02 to 1.29, kept 1.00 to
// 1.12; behind a derivative 1.00 to 1.13. The weight gradient is as fast. Parts of a card, and Hopper cards with few
// multiprocessors, have not been measured.
constexpr const char* product_does_not_pay(const ProductProblem& p) {
  if (p.multiprocessors < 100) return kPartOfACard;
  if (p.epilogue == ProductEpilogue::symmetric) {  // waves of tiles, counted
    const int64_t clusters = product_clusters(kWideTile, p.multiprocessors), side = product_units(kWideTile, p.rows, 1);
    return ceil_div(p.batches * triangle_units(side), clusters) < ceil_div(p.batches * side * side, clusters)
               ? nullptr
               : "the library's product: half of the tiles take as many waves as all";
  }
  if (double(p.rows) * double(p.columns) * double(p.inner) < kLeastWork) return kTooSmall;
  switch (p.epilogue) {
    case ProductEpilogue::residual:
    case ProductEpilogue::gated: return nullptr;
    case ProductEpilogue::derivative:
    case ProductEpilogue::activate:
      if (!p.rival) return nullptr;
      if (p.inner < kLeastForActivations) return "the library's product: ours waits for its epilogue over so few terms";
      return p.epilogue == ProductEpilogue::activate && !p.kept
                 ? "the library's product: its epilogue without the pre-activation is faster than ours"
                 : nullptr;
    case ProductEpilogue::siblings:
      if (p.layout == ProductLayout::nt)
        return sibling_waves(p, true) < sibling_waves(p, false)
                   ? nullptr
                   : "a product for each weight: one of all takes as many waves, and has not been measured";
      [[fallthrough]];
    case ProductEpilogue::store:
      if (p.layout == ProductLayout::tn) break;
      return p.layout == ProductLayout::nn && p.inner >= 16384
                 ? "the library's product: ours is no faster for an input's gradient of so many terms"
                 : nullptr;
    case ProductEpilogue::wide:
    case ProductEpilogue::symmetric: break;
  }
  return "the library's product: ours is no faster for a weight's gradient";
}

// The same of 8-bit floats, beside cuBLASLt 13.1 on 2026-11-30 (docs/design/linear.md): by scales of rows 0.99 to 1.05
// of its speed, promoted 1.02 to 1.08; of tensors 1.01 to 1.07, promoted 0.96 to 1.02 on 2026-11-29; of blocks 1.08
// to 1.24.
constexpr const char* float8_does_not_pay(const ProductProblem& p) {
  if (p.multiprocessors < 100) return kPartOfACard;
  if (p.scales == ProductScales::blocks) return nullptr;
  if (2.0 * double(p.rows) * double(p.columns) * double(p.inner) < kLeastWork) return kTooSmall;
  return p.scales == ProductScales::one && p.promotes
             ? "the library's product: ours is no faster by a scale of the tensor and sums in float32"
             : nullptr;
}

// Forward and input gradient: 128 x 256 was the best tile or within 0.7 % of it everywhere. The weight gradient has few
// tiles and long sums. Sums are split where the tiles fill less than 0.6 of a wave, or leave less than 0.6 of one
// behind three whole ones: 65,536 x 768 -> 3,072 took 0.78 of the time of contiguous shares of (tile, k). Where the
// rest is larger, handing sums over cost more than it gave; so it would, by counting its bytes, for short sums. Else
// 128 x 256 where its whole waves waste less than 10 %, and 256 x 192 where that wastes less.
constexpr int64_t kLeastSplit = 8192;
// Promoted sums: a prototype's were faster by 128 x 192 from so many terms on, where that takes no more waves
// (2026-11-24; these kernels have not been compared at one shape).
constexpr int64_t kLeastForPromotedTile = 8192;
constexpr ProductPlan choose_product(const ProductProblem& p) {
  constexpr int64_t kMostSize = int64_t{1} << 31;
  if (p.asked == OwnProduct::never) return {nullptr, "the library's product: it has been asked for"};
  if (!p.sm90a_code) return {nullptr, "the library's product: ours needs code of sm_90a"};
  if (!p.half) return {nullptr, "the library's product: ours has operands of 16 bits"};
  if (!p.aligned) return {nullptr, "the library's product: ours needs matrices and rows on 16 bytes"};
  if (p.rows >= kMostSize || p.columns >= kMostSize || p.inner >= kMostSize)
    return {nullptr, "the library's product: ours counts rows and columns below 2^31"};
  if (p.rows == 0 || p.columns == 0 || p.inner == 0) return {nullptr, "nothing to multiply"};
  if (p.factors != ProductFactors::halves) {
    if (const char* why = p.asked == OwnProduct::automatic ? float8_does_not_pay(p) : nullptr) return {nullptr, why};
    const int64_t clusters = product_clusters(kTallTile, p.multiprocessors);
    const auto waves = [&](const ProductTile& t) {
      return ceil_div(product_units(t, p.rows, p.columns), clusters) * t.rows * t.columns;
    };
    const ProductSums sums = sums_of(p.scales, p.promotes);
    const bool promoted_tile = sums == ProductSums::promoted &&
                               (p.tile_rows == 128 || (p.tile_rows == 0 && 2 * p.inner >= kLeastForPromotedTile &&
                                                       waves(kPromotedTile) <= waves(kTallTile)));
    const ProductTile& tile = sums == ProductSums::fast ? kWideTile : promoted_tile ? kPromotedTile : kTallTile;
    return {find_product({p.layout, p.epilogue, false, tile, sums, p.factors}),
            sums == ProductSums::blocks     ? "our product: sums of 128 terms are scaled and added up in float32"
            : sums == ProductSums::promoted ? "our product: sums of 128 terms are added up in float32"
                                            : "our product: the tensor core adds up all terms"};
  }
  if (const char* why = p.asked == OwnProduct::automatic ? product_does_not_pay(p) : nullptr) return {nullptr, why};
  for (const ProductKernel& k : kProducts)
    if (k.tile.rows == p.tile_rows && !k.splits && !k.float8() && k.layout == p.layout && k.epilogue == p.epilogue)
      return {&k, "our product: its tile was asked for"};
  const ProductKernel *wide = find_product({p.layout, p.epilogue, false, kWideTile}),
                      *large = find_product({p.layout, p.epilogue, false, kLargeTile});
  if (!wide) return {nullptr, "the library's product: ours has no such epilogue in this layout"};
  if (!large) return {wide, "our product: the order of a sum depends on its length alone"};
  const int64_t clusters = product_clusters(kWideTile, p.multiprocessors);
  const int64_t units = product_units(kWideTile, p.rows, p.columns), rest = units % clusters;
  const bool few = rest > 0 && rest * 10 < clusters * 6 && (units < clusters || units > 3 * clusters);
  if (few && p.inner >= kLeastSplit && (p.inner / 64 + 1) * clusters * clusters < kMostSize)
    return {find_product({p.layout, p.epilogue, true, kWideTile}),
            "our product: the last tiles are split along the sum"};
  const int64_t of_wide = wave_percent(units, clusters),
                of_large = wave_percent(product_units(kLargeTile, p.rows, p.columns), clusters);
  if (of_wide < 110 || of_wide <= of_large) return {wide, "our product: its tiles fill whole waves"};
  return {large, "our product: larger tiles fill whole waves better"};
}

}  // namespace warpsmith
