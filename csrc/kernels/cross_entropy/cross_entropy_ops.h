#pragma once

// The family's op, one row: ROW(op). Its names in error messages and its planner are generated from the row.
//
// This file is installed for the C++ function (warpsmith/cross_entropy.h), so it includes nothing.
#define WARPSMITH_CROSS_ENTROPY_OPS(ROW) ROW(cross_entropy)

// How row losses become the result, here and in the linear losses: ROW(name). A reduction's number is its position, as
// in torch. Raw ops take the number; Python reads it from warpsmith._C.REDUCTIONS.
#define WARPSMITH_REDUCTIONS(ROW) ROW(none) ROW(mean) ROW(sum)
