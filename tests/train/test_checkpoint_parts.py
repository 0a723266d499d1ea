"""What a load refuses changes nothing, on any rank; arguments of another type are named."""

import copy

import pytest
import torch
import warpsmith
from warpsmith.distributed import ResumableSampler, ShardedOptimizer
from warpsmith.testing.distributed import multirank
from warpsmith.train import Checkpointer
from warpsmith.train.checkpoint_parts import known_class


def run(optimizer_class, seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = ResumableSampler(20, seed=1, rank=0, world_size=1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    next(iter(sampler))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}


def states(parts):
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def test_a_part_that_refuses_its_state_changes_nothing(tmp_path):
    saved, own = run(warpsmith.optim.AdamW, foreach=False), run(warpsmith.optim.SGD, 1, momentum=0.9)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, **saved)
    before = states(own)
    words = r"optimizer: step-00000001: SGD: state_dict: state of .*\[0\]: expected one with momentum_buffer, got one"
    with pytest.raises(ValueError, match=f"^Checkpointer.load: {words} without momentum_buffer"):
        Checkpointer(tmp_path).load(**own)
    assert same(states(own), before)

    class Refusing(torch.optim.AdamW):
        def load_state_dict(self, state):
            raise ValueError("planted")

    own = run(Refusing, 1)
    before = states(own)
    with pytest.raises(ValueError, match="planted"):
        Checkpointer(tmp_path).load(**own)
    assert same(states(own), before)
    other = own | {"optimizer": saved["optimizer"], "sampler": ResumableSampler(21, seed=1, rank=0, world_size=1)}
    with pytest.raises(ValueError, match="length: expected 21, got 20"):
        Checkpointer(tmp_path).load(**other)
    assert same(states(own), before)


@multirank(3, timeout_s=200)
def test_the_state_of_another_optimizer_is_refused_on_every_rank(rank, world_size):
    """Also on ranks that own no fragment of a parameter with a state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)  # one fragment, on one of the ranks
    optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, lr=0.1, momentum=0.9)
    assert known_class(optimizer) == "SGD"
    alien = warpsmith.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    alien.step()
    words = r"SGD: state_dict: state of .*\[0\]: expected one with momentum_buffer, got one without momentum_buffer"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(alien.state_dict())
    for state, error, words in (
        (None, TypeError, "state_dict: expected a dict with state and param_groups, as .*, got None"),
        ({"state": {}}, ValueError, "state_dict: expected a dict with .*, got one without param_groups"),
    ):
        with pytest.raises(error, match=f"^ShardedOptimizer.load_state_dict: {words}"):
            optimizer.load_state_dict(state)


def test_arguments_of_another_type(tmp_path):
    model = torch.nn.Linear(1, 1)
    for call, words in (
        (lambda: Checkpointer(None), "Checkpointer: folder: expected a path, got None"),
        (lambda: Checkpointer(tmp_path, keep=2.5), "Checkpointer: keep: expected an int, got the float 2.5"),
        (
            lambda: Checkpointer(tmp_path).save("5", model=model),
            "Checkpointer.save: step: expected an int, got the str",
        ),
        (lambda: Checkpointer(tmp_path).save(torch.tensor(5)), "Checkpointer.save: step: expected an int, got Tensor"),
        (
            lambda: Checkpointer(tmp_path).save(5, model=[model]),
            r"Checkpointer.save: model: .* state_dict\(\), got the",
        ),
        (lambda: Checkpointer(tmp_path).load(model=3), r"Checkpointer.load: model: .* with load_state_dict\(\), got"),
    ):
        with pytest.raises(TypeError, match=f"^{words}"):
            call()
    assert list(tmp_path.iterdir()) == []
