#pragma once

// The ops of the family, a row each: ROW(op). This file is installed with the headers of the C++ functions.
#define WARPSMITH_BATCH_NORM_OPS(ROW) ROW(batch_norm)
