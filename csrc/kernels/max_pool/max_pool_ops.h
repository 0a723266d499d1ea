#pragma once

// The ops of the family, a row each: ROW(op). This file is installed with the headers of the C++ functions.
#define WARPSMITH_MAX_POOL_OPS(ROW) ROW(max_pool2d)
