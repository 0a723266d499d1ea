"""The fused operators: one file an op, each with its fake kernel, its autograd formula and its public function."""
