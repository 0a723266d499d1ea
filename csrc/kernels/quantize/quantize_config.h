#pragma once
#include <cstdint>
#include <iterator>

#include "common/alignment.h"
#include "kernels/quantize/quantize_ops.h"

// Which kernels quantize a tensor: pure functions of the problem, printable through warpsmith.plan(op, ...).
namespace warpsmith {

enum class Fp8Scaling : uint8_t {
#define WARPSMITH_ROW(scaling, ...) scaling,
  WARPSMITH_FP8_SCALINGS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};
constexpr const char* const kFp8Scalings[] = {
#define WARPSMITH_ROW(scaling, ...) #scaling,
    WARPSMITH_FP8_SCALINGS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

constexpr int64_t kFp8Block = 128;
// Of a block that takes a square of 128 by 128: each takes 128 bytes of it.
constexpr int tile_threads(int element_bytes) { return 128 * element_bytes; }

struct QuantizeProblem {
  int64_t rows = 0, columns = 0;
  int element_bytes = 2;
  Fp8Scaling scaling = Fp8Scaling::row;
  bool data = true, transposed = false;  // which bytes are wanted
  bool given = false;                    // scales are read, not computed
  bool column_sums = false;
  bool factors = false;    // values are multiplied before they are cast
  bool contiguous = true;  // x
};

// Who casts a segment, which is a row, a part of it, or 128 values of it: `lanes` threads that keep `vectors` of 16
// bytes each in registers. A longer segment is read twice if its scale is computed.
struct SegmentTeam {
  int lanes, vectors, threads;  // threads of a block
  constexpr int64_t elems(int element_bytes) const { return int64_t{lanes} * vectors * (16 / element_bytes); }
};
constexpr SegmentTeam kSegmentTeams[] = {{16, 1, 256},  {32, 4, 256},  {32, 8, 256},
                                         {128, 4, 128}, {256, 4, 256}, {512, 4, 512}};
constexpr int kLongestPart = 4;  // of a row that need not stay whole

struct QuantizeConfig {
  bool tiles = false;      // squares of 128 by 128, else segments of rows
  bool amax_pass = false;  // x is read once more before, for scales that no block can compute alone
  bool flat = false;       // segments of the whole tensor as one row
  int team = 0;            // of kSegmentTeams
  int64_t length = 0;      // elements of a segment
  int64_t per_row = 0;     // segments of a row
  int64_t blocks = 0;
  int64_t workspace = 0;  // floats: partial sums
  int64_t maxima = 0;     // floats: of the tensor, or of rows and columns
  const char* why = "";
};

constexpr QuantizeConfig choose_quantize(const QuantizeProblem& p) {
  QuantizeConfig c;
  const int64_t down = ceil_div(p.rows, kFp8Block), across = ceil_div(p.columns, kFp8Block);
  c.tiles = p.transposed || p.column_sums || p.factors || p.scaling == Fp8Scaling::block2d ||
            (p.scaling == Fp8Scaling::block && !p.given && p.rows >= kFp8Block);  // else a team has one vector a thread
  c.amax_pass = !p.given && (p.scaling == Fp8Scaling::tensor || (p.scaling == Fp8Scaling::row && c.tiles));
  if (c.amax_pass)
    c.maxima = p.scaling == Fp8Scaling::tensor ? 1 : (p.data ? p.rows : 0) + (p.transposed ? p.columns : 0);
  if (p.column_sums) c.workspace = down * p.columns;
  if (c.tiles) {
    c.blocks = down * across;
    c.why = c.amax_pass ? "squares of 128 by 128, read once for the maxima and once to cast"
                        : "squares of 128 by 128, read once";
    return c;
  }
  c.flat = p.scaling == Fp8Scaling::tensor && p.contiguous;
  const int64_t rows = c.flat ? 1 : p.rows, columns = c.flat ? p.rows * p.columns : p.columns;
  // Only where one team must see all of a row is a segment as long as the row.
  const int64_t longest = kSegmentTeams[kLongestPart].elems(p.element_bytes);
  c.length = p.scaling == Fp8Scaling::block ? kFp8Block : columns;
  if (c.length > longest && (p.given || p.scaling == Fp8Scaling::tensor)) c.length = longest;
  if (c.length == 0) return c;
  while (c.team + 1 < static_cast<int>(std::size(kSegmentTeams)) &&
         c.length > kSegmentTeams[c.team].elems(p.element_bytes))
    ++c.team;
  c.per_row = ceil_div(columns, c.length);
  const SegmentTeam team = kSegmentTeams[c.team];
  c.blocks = ceil_div(rows * c.per_row, team.threads / team.lanes);
  c.why = c.amax_pass                              ? "one pass for the maximum, one to cast"
          : c.length > team.elems(p.element_bytes) ? "rows too long for registers: read twice, the second time near"
          : p.given                                ? "one pass, scales are given"
                                                   : "one pass, each maximum found in registers";
  return c;
}

}  // namespace warpsmith
