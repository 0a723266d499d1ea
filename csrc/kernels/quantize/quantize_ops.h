#pragma once

// The ops of the family, a row each: ROW(op). The scalings, a row each: ROW(scaling, what one scale is for); a
// scaling's number in the schemas is its place in the list.
//
// This file is installed for the C++ functions (warpsmith/quantize.h), so it includes nothing.
#define WARPSMITH_QUANTIZE_OPS(ROW) \
  ROW(quantize_fp8)                 \
  ROW(dequantize_fp8)

#define WARPSMITH_FP8_SCALINGS(ROW) \
  ROW(row, "a row")                 \
  ROW(tensor, "the tensor")         \
  ROW(block, "128 values of a row") \
  ROW(block2d, "a square of 128 by 128")
