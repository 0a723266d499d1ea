#pragma once

// The ops of the family. attention_varlen runs the same raw ops as attention, with the offsets of packed sequences.
#define WARPSMITH_ATTENTION_OPS(ROW) \
  ROW(attention)                     \
  ROW(attention_varlen)
