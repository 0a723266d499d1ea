"""The error law, of whole models and layers."""

import statistics

import torch
from warpsmith.testing import measure


def root_mean_square(t):
    return float(t.double().square().mean().sqrt())


def assert_law_of_the_mean(found, expected, exact):
    """The error law, of the root mean square: over a whole model the largest error of one small tensor is a draw, which
    is held to twice the law."""
    assert found.keys() == expected.keys() == exact.keys()
    for name, theirs in expected.items():
        largest = measure(name, found[name].to(theirs.dtype), exact[name], theirs)
        assert largest.error <= 2 * largest.bound, str(largest)
        if theirs.numel() == 0:
            continue
        ours, base = (root_mean_square(t - exact[name]) for t in (found[name], theirs))
        step = torch.finfo(theirs.dtype).eps / 2 * root_mean_square(exact[name])
        assert ours <= 2 * base + 2 * step, (name, ours, base, step)


def assert_law_of_the_model(found, expected, exact):
    """The law of all tensors of a model together. Where rounding brings values across ReLU's kink, one tensor's error
    is a draw: the median stands as for an op's table, and the law for the mean."""
    assert found.keys() == expected.keys() == exact.keys()
    ratios = []
    for name, theirs in expected.items():
        ours, base = (root_mean_square(t - exact[name]) for t in (found[name], theirs))
        step = torch.finfo(theirs.dtype).eps / 2 * root_mean_square(exact[name])
        ratios.append(ours / max(base, step) if ours else 0.0)
    assert statistics.median(ratios) <= 1.1 and statistics.mean(ratios) <= 2, sorted(ratios)


def assert_close(found, expected, rtol=1e-3, atol=1e-5):
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=rtol, atol=atol)
