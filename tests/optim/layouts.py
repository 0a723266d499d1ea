"""Tensors whose memory does not hold their elements side by side as they are."""

import torch


def _into(place, values):
    with torch.no_grad():
        return place.copy_(values)


def _negated(values):
    return torch._neg_view(-values)


def _conjugate(values):
    """The imaginary part of a conjugate: every second word of memory, with the negative bit."""
    if values.dtype not in (torch.float32, torch.float64):
        return _negated(values)
    return torch.complex(torch.zeros_like(values), -values).conj().imag


def _with_gaps(values):
    place = values.new_zeros((*values.shape, 3))[..., 1]
    return _into(place, values)


def _transposed(values):
    order = tuple(reversed(range(values.dim())))
    return _into(values.new_zeros([values.shape[d] for d in order]).permute(order), values)


def _misaligned(values):
    return _into(values.new_zeros(values.numel() + 1)[1:].view(values.shape), values)


LAYOUTS = {
    "plain": torch.clone,
    "negated": _negated,
    "conjugate": _conjugate,
    "gaps": _with_gaps,
    "transposed": _transposed,
    "misaligned": _misaligned,
    "negated gaps": lambda values: torch._neg_view(_with_gaps(-values)),
    "transposed conjugate": lambda values: _conjugate(_transposed(values)),
}


def drawn(random, values, ordered=False):
    """Equal values in a layout that a ``random.Random`` chooses; ``ordered``: of one with the order of plain memory."""
    names = [name for name in LAYOUTS if not (ordered and "transposed" in name)]
    found = LAYOUTS[random.choice(names)](values)
    assert torch.equal(found, values)
    return found
