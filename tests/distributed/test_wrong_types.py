"""Arguments of another Python type, of the parts that need no ranks: a TypeError that names the argument."""

import pytest
import torch
import warpsmith
from warpsmith.distributed import ResumableSampler, ShardedOptimizer, init, shard_sequence, unshard_sequence, watch


def sampler(**change):
    return ResumableSampler(**{"length": 5, "seed": 0, "rank": 0, "world_size": 1} | change)


CALLS = [
    (lambda: sampler(length="5"), "ResumableSampler: length: expected an int, got the str '5'"),
    (lambda: sampler(length=5.5), "ResumableSampler: length: expected an int, got the float 5.5"),
    (lambda: sampler(seed=None), "ResumableSampler: seed: expected an int, got None"),
    (lambda: sampler(rank=0.0), "ResumableSampler: rank: expected an int, got the float 0.0"),
    (lambda: sampler(world_size=torch.tensor(1)), "ResumableSampler: world_size: expected an int, got Tensor"),
    (lambda: sampler().advance("3"), "ResumableSampler.advance: samples: expected an int, got the str '3'"),
    (lambda: sampler().load_state_dict(None), r"ResumableSampler.load_state_dict: state: expected a dict, .* got None"),
    (lambda: watch("3"), "watch: timeout_s: expected a number, got the str '3'"),
    (lambda: watch(on_report="log.txt"), "watch: on_report: expected a function of the text, or None, got the str"),
    (lambda: watch().step(loss="low"), "Watch.step: loss: expected a number, got the str 'low'"),
    (lambda: shard_sequence(torch.zeros(1, 8), "1"), "shard_sequence: dim: expected an int, got the str '1'"),
    (lambda: unshard_sequence(torch.zeros(1, 8), 1.0), "unshard_sequence: dim: expected an int, got the float 1.0"),
]


@pytest.mark.parametrize("call, words", CALLS, ids=[words.partition(": expected")[0] for _, words in CALLS])
def test_it_is_named(call, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        call()


def test_of_a_sharded_optimizer():
    model = torch.nn.Linear(2, 2)
    with init(device="cpu"):
        for options, error, words in (
            (
                {"bucket_cap_mb": "25"},
                TypeError,
                "ShardedOptimizer: bucket_cap_mb: expected a finite number > 0, got the str '25'",
            ),
            ({"stage": True}, ValueError, "ShardedOptimizer: stage: expected 1 or 2, got True"),
        ):
            with pytest.raises(error, match=f"^{words}"):
                ShardedOptimizer(model.parameters(), warpsmith.optim.SGD, **options)
        optimizer = ShardedOptimizer(model.parameters(), warpsmith.optim.SGD)
        with pytest.raises(TypeError, match="clip_grad_norm_: max_norm: expected a number >= 0, got None"):
            optimizer.clip_grad_norm_(None)
        with pytest.raises(TypeError, match="consolidate_state_dict: to: expected an int, got the str '0'"):
            optimizer.consolidate_state_dict("0")


def test_a_position_that_no_epoch_has():
    state = {"seed": 0, "length": 5, "position": 2**70}
    with pytest.raises(ValueError, match="position: expected at least 0 and below 2.*63, got"):
        sampler().load_state_dict(state)


def test_a_watch_before_init(monkeypatch):
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="^watch: rank 1 of 2: expected a process group, got none: call init"):
        watch()
