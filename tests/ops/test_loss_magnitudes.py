"""The numbers of losses over all magnitudes: a value that the arithmetic of the logits cannot hold is refused, and
every other gives a loss and gradients that are numbers."""

import itertools
import math

import pytest
import torch
import warpsmith

TARGET = torch.tensor([0, 3, 1, 4])
CASES = [
    (name, number)
    for name in ("cross_entropy", "linear_cross_entropy")
    for number in ("softcap", "z_loss", "label_smoothing")
]
CASES += [("linear_log_prob", "temperature")]
MAGNITUDES = [2.0**-149, 1e-46, 1e-40, 3e-39, 2.0**-126, 1e-20, 0.5, 1.0, 1e20, 2.0**126, 2.0**127, 1e39, 1e300, 2e-308]


def inputs_of(dtype):
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(*s, generator=generator) - 0.5).to(dtype).requires_grad_() for s in ((4, 3), (5, 3))]


def fits(number, value, dtype):
    least, most = (2.0**-1022, 2.0**1022) if dtype == torch.float64 else (2.0**-126, 2.0**126)
    if number == "z_loss":
        return value <= torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max
    return value <= 1 if number == "label_smoothing" else least <= value <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_number_is_refused_or_the_loss_is_one(name, number, dtype):
    for value, meta in itertools.product(MAGNITUDES, (False, True)):
        inputs = inputs_of(dtype)
        if not fits(number, value, dtype):
            given = [t.to("meta") for t in inputs] if meta else inputs
            with pytest.raises(ValueError, match=rf"^{name}: {number}: expected .*, got .*$"):
                call(name, given, number, value)
        elif not meta:
            loss = call(name, inputs, number, value)
            assert not loss.isnan(), value
            if number != "z_loss" and 1e-30 < value < 1e30:
                assert all(g.isfinite().all() for g in torch.autograd.grad(loss, inputs)), value


def call(name, given, number, value):
    target = TARGET.to(given[0].device)
    if name == "cross_entropy":
        return warpsmith.cross_entropy(given[0] @ given[1].T, target, **{number: value})
    if name == "linear_cross_entropy":
        return warpsmith.linear_cross_entropy(*given, target, **{number: value})
    return sum(t.sum() for t in warpsmith.linear_log_prob(*given, target, **{number: value}))


@pytest.mark.parametrize("offset", [math.nan, math.inf, 1e39, -1e39])
def test_a_weight_offset_beyond_float32_is_refused(offset):
    x, weight = torch.zeros(2, 8), torch.ones(8)
    for device in ("cpu", "meta"):
        for op, more in ((warpsmith.rms_norm, ()), (warpsmith.add_rms_norm, (x.to(device),))):
            with pytest.raises(ValueError, match="weight_offset: expected a finite number of float32, got"):
                op(x.to(device), *more, weight.to(device), weight_offset=offset)
    if math.isfinite(offset):
        y = warpsmith.rms_norm(x.double(), weight.double(), weight_offset=offset)
        assert y.dtype == torch.float64 and not y.any()
