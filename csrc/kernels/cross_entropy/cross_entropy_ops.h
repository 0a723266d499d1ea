#pragma once

// The op of the family, a row: ROW(op). Its names in errors and its planner are made from it.
//
// This file is installed for the C++ function (warpsmith/cross_entropy.h), so it includes nothing.
#define WARPSMITH_CROSS_ENTROPY_OPS(ROW) ROW(cross_entropy)

// How the losses of rows become the result, here and in the linear losses: ROW(name). Their numbers follow from the
// order and are torch's. Raw ops take the number; Python reads it from warpsmith._C.REDUCTIONS.
#define WARPSMITH_REDUCTIONS(ROW) ROW(none) ROW(mean) ROW(sum)
