"""A checkpoint's optimizer state goes into an optimizer of its class, of torch.optim or ours, and into no other."""

import copy
import inspect

import pytest
import torch
import warpsmith
from test_checkpoint_parts import same
from warpsmith.train import Checkpointer, checkpointer

CLASSES = [
    kind
    for package in (torch.optim, warpsmith.optim)
    for kind in vars(package).values()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def stepped(kind):
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([param], lr=0.1)
    param.grad = torch.ones(2, 2).to_sparse() if kind is torch.optim.SparseAdam else torch.ones(2, 2)
    optimizer.step(lambda: param.detach().sum())
    return optimizer


def fresh(kind):
    return kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each class, before and after a step."""
    found = {}
    for kind in CLASSES:
        for make in (stepped, fresh):
            folder = found[kind, make] = tmp_path_factory.mktemp(kind.__name__)
            with Checkpointer(folder) as checkpoints:
                checkpoints.save(1, optimizer=make(kind))
    return found


@pytest.mark.parametrize("own", CLASSES, ids=lambda kind: f"{kind.__module__.split('.')[0]} {kind.__name__}")
def test_each_class_loads_its_own_states_alone(folders, own):
    optimizer = stepped(own)
    before = copy.deepcopy(optimizer.state_dict())
    for (kind, make), folder in folders.items():
        if kind.__name__ != own.__name__:
            with pytest.raises(ValueError, match=f"^Checkpointer.load: optimizer: .*{own.__name__}.*got "):
                Checkpointer(folder).load(optimizer=optimizer)
            assert same(optimizer.state_dict(), before), (kind, make)
    for (kind, _), folder in folders.items():
        if kind.__name__ == own.__name__:
            assert Checkpointer(folder).load(optimizer=optimizer) == 1


def test_a_class_derived_from_a_known_one_is_that_one(folders):
    class Own(torch.optim.AdamW):
        pass

    assert Checkpointer(folders[torch.optim.AdamW, stepped]).load(optimizer=fresh(Own)) == 1
    with pytest.raises(ValueError, match="expected a state of AdamW, got one of SGD in step-00000001"):
        Checkpointer(folders[torch.optim.SGD, stepped]).load(optimizer=fresh(Own))


def test_a_class_of_ones_own_may_change_its_name(tmp_path):
    class First(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    class Second(First):
        pass

    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, optimizer=fresh(First))
    optimizer = Second([torch.nn.Parameter(torch.ones(2, 2))], lr=0.5)
    assert Checkpointer(tmp_path).load(optimizer=optimizer) == 1 and optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("saved", "own", "words"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "SGD, got groups without momentum, dampening"),
        (torch.optim.SGD, torch.optim.AdamW, "AdamW, got groups without betas, eps"),
        (torch.optim.AdamW, torch.optim.RMSprop, "RMSprop, got groups without alpha, momentum"),
        (torch.optim.Adagrad, torch.optim.Adadelta, "Adadelta, got groups without rho"),
        (torch.optim.SGD, warpsmith.optim.SGD, None),
        (warpsmith.optim.AdamW, torch.optim.AdamW, None),
    ],
)
def test_a_checkpoint_that_does_not_tell_the_class(tmp_path, monkeypatch, saved, own, words):
    """As those of earlier versions: hyperparameters that a class has, and the groups lack, are refused."""
    with monkeypatch.context() as patched, Checkpointer(tmp_path) as checkpoints:
        patched.setattr(checkpointer, "known_class", lambda optimizer: None)
        checkpoints.save(1, optimizer=fresh(saved))
    optimizer = stepped(own)
    if words is None:
        assert Checkpointer(tmp_path).load(optimizer=optimizer) == 1
        return
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"^Checkpointer.load: optimizer: expected a state of {words}"):
        Checkpointer(tmp_path).load(optimizer=optimizer)
    assert same(optimizer.state_dict(), before)
