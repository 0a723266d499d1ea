"""Parts of a checkpoint: what a load refuses changes nothing; an optimizer's state goes into its class alone."""

import copy
import inspect

import pytest
import torch
import warpsmith
from warpsmith.distributed import ResumableSampler, ShardedOptimizer
from warpsmith.testing.distributed import multirank
from warpsmith.train import Checkpointer, checkpointer
from warpsmith.train.checkpoint_parts import known_class


def run(optimizer_class, seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = ResumableSampler(20, seed=1, rank=0, world_size=1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for _ in range(seed + 1):
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
        checkpoints.save(1, **saved, extra="saved")
    used = Checkpointer(tmp_path)
    used.extra = "own"
    before = states(own)
    words = r"optimizer: step-00000001: SGD: state_dict: .*\[0\]: expected a state with momentum_buffer, got one"
    with pytest.raises(ValueError, match=f"^Checkpointer.load: {words} without momentum_buffer"):
        used.load(**own)
    assert same(states(own), before)

    class Refusing(torch.optim.AdamW):
        def load_state_dict(self, state):
            raise ValueError("planted")

    own = run(Refusing, 1)
    before = states(own)
    assert not any(same(state, before[name]) for name, state in states(saved).items())  # so that each is taken back
    with pytest.raises(ValueError, match="planted"):
        used.load(**own)
    assert same(states(own), before)
    other = own | {"optimizer": saved["optimizer"], "sampler": ResumableSampler(21, seed=1, rank=0, world_size=1)}
    with pytest.raises(ValueError, match="length: expected 21, got 20"):
        used.load(**other)
    assert same(states(own), before)
    assert used.extra == "own"


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
    words = r"SGD: state_dict: .*\[0\]: expected a state with momentum_buffer, got one without momentum_buffer"
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
