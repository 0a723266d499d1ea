"""amp.fp8 behind patch, for every family of transformers that patch knows."""

from __future__ import annotations

import pytest
import torch
import warpsmith
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations.families import ALL, FAMILIES, inputs_of, small_model


class Layers(TorchDispatchMode):
    """How many forwards of 8-bit layers ran."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.warpsmith.scaled_linear_forward.default
        return op(*args, **(kwargs or {}))


def step(model, family):
    with Layers() as layers:
        loss = model(**inputs_of(family)).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients, layers.count


def cosine(a, b):
    a, b = (torch.cat([t.flatten() for t in g.values()]).double() for g in (a, b))
    return float(nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("family", ALL)
def test_layers_of_a_patched_model(family):
    model = small_model(family)
    parameters = {name: id(p) for name, p in model.named_parameters()}
    with warpsmith.patch(model):
        plain_loss, plain, _ = step(model, family)
        done = warpsmith.amp.fp8(model, emulate=True)
        loss, gradients, count = step(model, family)
        if not done.replaced:
            assert not any(type(m) is nn.Linear and m.out_features % 16 == 0 for m in model.modules())
            return
        assert count == len(done.replaced), "layers are read, not called"
        assert plain.keys() == gradients.keys()
        assert loss != plain_loss and float(loss) == pytest.approx(float(plain_loss), rel=0.1)
        routed = any("expert" in name for name, _ in model.named_modules())  # a token may change its expert
        assert cosine(plain, gradients) > (0.9 if routed else 0.97)
        done.undo()
        again, exact, _ = step(model, family)
        assert again == plain_loss and all(torch.equal(exact[n], plain[n]) for n in plain)
    assert parameters == {name: id(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_undoing_does_not_matter(family):
    model = small_model(family)
    plain_loss, plain, _ = step(model, family)
    for first in ("fp8", "patch"):
        patched, done = warpsmith.patch(model), warpsmith.amp.fp8(model)
        for one in (done, patched) if first == "fp8" else (patched, done):
            one.undo()
        loss, gradients, count = step(model, family)
        assert loss == plain_loss and count == 0 and all(torch.equal(gradients[n], plain[n]) for n in plain)
