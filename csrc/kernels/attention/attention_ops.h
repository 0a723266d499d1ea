#pragma once

// The ops of the family. attention_varlen is attention over packed sequences: the same raw ops, with offsets.
#define WARPSMITH_ATTENTION_OPS(ROW) \
  ROW(attention)                     \
  ROW(attention_varlen)
