#pragma once

// The ops of the family, a row each: ROW(op, log). This file is installed with the headers of the C++ functions.
#define WARPSMITH_SOFTMAX_OPS(ROW) \
  ROW(softmax, false)              \
  ROW(log_softmax, true)
