"""The definition of each op in a few lines of PyTorch: readable, differentiable, and the oracle of the tests."""
