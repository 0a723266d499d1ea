#pragma once

// The ops of the family, a row each: ROW(op). Their names in errors and their planners are made from it. Both compute
// logits = hidden @ weight^T + bias chunk by chunk and run a kernel of cross_entropy over each chunk.
//
// This file is installed for the C++ functions (warpsmith/linear_loss.h), so it includes nothing.
#define WARPSMITH_LINEAR_LOSS_OPS(ROW) \
  ROW(linear_cross_entropy)            \
  ROW(linear_log_prob)
