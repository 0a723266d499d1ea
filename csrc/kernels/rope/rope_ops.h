#pragma once

// The ops of the family, one row each: ROW(op). Names in error messages, planners and sim tests are generated from the
// rows. This file is installed for programs that use the C++ functions (warpsmith/rope.h), so it includes nothing.
#define WARPSMITH_ROPE_OPS(ROW) ROW(rope) ROW(qk_norm_rope)
