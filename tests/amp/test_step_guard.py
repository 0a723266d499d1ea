"""warpsmith.amp.StepGuard: steps without the bad ones, and nothing else."""

import math

import pytest
import torch
import warpsmith
from torch import nn
from torch.testing import assert_close
from warpsmith.amp import StepGuard
from warpsmith.testing import bitwise_equal

from tests.amp.runs import backward, by_scaler, make_model, ours, train


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_takes_the_good_steps_alone(dtype, unscale):
    """The bits of training without the bad batches."""
    models, bad = (make_model(dtype), make_model(dtype)), {0, 3, 4}
    optimizers = [warpsmith.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    guard = StepGuard()
    assert set(train(models[0], optimizers[0], guard, 8, bad, unscale=unscale)) == {1.0}
    for step in sorted(set(range(8)) - bad):
        backward(models[1], ours(enabled=False), step)
        optimizers[1].step()
    assert all(bitwise_equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert guard.skipped_steps == 3 and not guard.last_skipped
    assert guard.overflow(optimizers[0]).bad_values == 1


def test_clips_as_clip_grad_norm():
    models = make_model(), make_model()
    optimizers = [warpsmith.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    train(models[0], optimizers[0], StepGuard(), 4, clip=by_scaler(0.1))
    for step in range(4):
        backward(models[1], ours(enabled=False), step)
        nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
        optimizers[1].step()
    assert_close([*models[0].parameters()], [*models[1].parameters()], rtol=1e-5, atol=1e-6)


def test_guards_optimizers_of_torch_and_needs_no_scale():
    p = nn.Parameter(torch.zeros(2))
    guard, optimizer = StepGuard(), torch.optim.SGD([p], lr=1.0)
    for grad in ([1.0, 1.0], [1.0, math.nan], [2.0, 0.0]):
        p.grad = torch.tensor(grad)
        guard.step(optimizer)
        guard.update()
    assert bitwise_equal(p.detach(), torch.tensor([-3.0, -1.0]))
    loss = torch.ones(3)
    assert guard.scale(loss) is loss


def test_states_of_scalers_load_and_change_nothing():
    guard = StepGuard()
    guard.load_state_dict(ours(init_scale=8.0).state_dict())
    assert guard.state_dict()["scale"] == 1.0
    ours().load_state_dict(guard.state_dict())
    with pytest.raises(ValueError, match="StepGuard.update: new_scale: expected None or 1, got 2.0"):
        guard.update(2.0)


def test_disabled_it_takes_every_step():
    p = nn.Parameter(torch.zeros(1))
    guard, optimizer = StepGuard(enabled=False), warpsmith.optim.SGD([p], lr=1.0)
    p.grad = torch.tensor([math.inf])
    guard.step(optimizer)
    guard.update()
    assert p.item() == -math.inf and guard.skipped_steps == 0
