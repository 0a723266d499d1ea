"""Groups without this rank, mistakes of one rank, wrong types: errors that name the argument, on all ranks."""

import pytest
import torch
import torch.distributed as dist
import warpsmith
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import (
    ResumableSampler,
    ShardedOptimizer,
    accurate_hook,
    context_parallel_attention,
    init,
    reduction_plan,
    shard_sequence,
    unshard_sequence,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
    watch,
)
from warpsmith.testing.distributed import multirank

TARGET = torch.tensor([0, 1, 2])


def calls(group):
    """Of all functions that take a group, by the name in their messages."""
    t, q = torch.zeros(1, 8), torch.zeros(1, 8, 4, 16)
    model = torch.nn.Linear(2, 2)
    return {
        "shard_sequence": lambda: shard_sequence(t, process_group=group),
        "unshard_sequence": lambda: unshard_sequence(t, process_group=group),
        "context_parallel_attention": lambda: context_parallel_attention(q, q, q, process_group=group),
        "reduction_plan": lambda: reduction_plan(group, "cpu"),
        "vocab_parallel_cross_entropy": lambda: vocab_parallel_cross_entropy(q[0, :3, 0], TARGET, process_group=group),
        "vocab_parallel_linear_cross_entropy": lambda: vocab_parallel_linear_cross_entropy(
            q[0, :3, 0], torch.zeros(4, 16), TARGET, process_group=group
        ),
        "ShardedOptimizer": lambda: ShardedOptimizer(model.parameters(), warpsmith.optim.AdamW, process_group=group),
        "Checkpointer": lambda: warpsmith.train.Checkpointer("nowhere", process_group=group),
    }


@multirank(2, timeout_s=200)
def test_groups_without_this_rank_and_what_is_none(rank, world_size):
    group = dist.new_group([0])
    if rank == 1:
        for op, call in calls(group).items():
            with pytest.raises(ValueError, match=f"^{op}: process_group: expected a group with this rank, 1, got one"):
                call()
    for op, call in calls("data").items():
        with pytest.raises(TypeError, match=f"^{op}: process_group: expected a ProcessGroup or None, got the str 'da"):
            call()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    with pytest.raises(TypeError, match="got DeviceMesh: give one dimension of the mesh, as mesh.get_group"):
        shard_sequence(torch.zeros(1, 8), process_group=mesh)
    for hook in (accurate_hook, accurate_hook(keep_norm=True)):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp.register_comm_hook("data", hook)
        with pytest.raises(TypeError, match="^accurate_hook: process_group: expected a ProcessGroup or None, got the"):
            ddp(torch.ones(1, 2)).sum().backward()


@multirank(2, timeout_s=200)
def test_parts_that_are_no_sequence(rank, world_size):
    """On gloo they ended the process."""
    t = torch.zeros(1, 8)
    for part, options, error, words in (
        (t[:, : 8 - 4 * rank], {}, ValueError, r"t: expected float32 \(1, 8\), as on rank 0, got float32 \(1, 4\)"),
        (t.to((torch.float32, torch.float64)[rank]), {}, ValueError, "t: expected float32 .*, got float64"),
        (t, {"dim": (1, 0)[rank], "sharding": "contiguous"}, ValueError, "dim: expected 1, as on rank 0, got 0"),
        (t, {"sharding": ("zigzag", "striped")[rank]}, ValueError, "sharding: expected one of zigzag, contiguous"),
        (t.clone().requires_grad_(rank == 1), {}, ValueError, "requires_grad: expected False, as on rank 0, got True"),
        (t[:, : 8 - rank], {}, ValueError, "t: expected an even number of tokens along dimension 1, as .*, got 7"),
        ((t, [t])[rank], {}, TypeError, "t: expected a tensor, got list"),
    ):
        with pytest.raises(error if rank else ValueError, match=f"^unshard_sequence: (rank 1 of 2: )?{words}"):
            unshard_sequence(part, **options)
    assert unshard_sequence(t).shape == (1, 16)
    q = torch.zeros(1, 8, 2, 16)
    for mode in ("all_gather", "ring", "ulysses"):  # a refusal must not leave a message on its way
        with pytest.raises(TypeError, match="^context_parallel_attention: deterministic: expected True or False, got"):
            context_parallel_attention(q, q, q, mode=mode, deterministic="no")
        assert context_parallel_attention(q, q, q, mode=mode).shape == q.shape


@multirank(2, timeout_s=200)
def test_a_mistake_of_one_rank_in_a_parallel_loss(rank, world_size):
    """Both ranks raise, with the words of the one that is wrong, and the group works on."""
    logits, weight = torch.zeros(3, 5), torch.zeros(5, 4)

    def refused(op, words, call, error=ValueError):
        with pytest.raises(error if rank else ValueError, match=rf"^{op}: (rank 1 of 2: )?{words}"):
            call()

    def loss(target=TARGET, **options):
        return vocab_parallel_cross_entropy(logits, target, **options)

    op, later = "vocab_parallel_cross_entropy", [10, TARGET][1 - rank]
    loss()  # so that the sizes are known
    refused(
        op,
        r"target: expected classes in \[0, 10\), as on rank 0, got 10 at position 1",
        lambda: loss(TARGET + 9 * rank),
    )
    refused(op, r"target: expected shape \(3\), got \(2\)", lambda: loss(TARGET[: 3 - rank]))
    refused(op, "target: expected a tensor, got the int 10", lambda: loss(later), TypeError)
    refused(op, "reduction: expected none, mean or sum, got avg", lambda: loss(reduction=("sum", "avg")[rank]))
    refused(op, "reduction: expected mean, as on rank 0, got sum: give", lambda: loss(reduction=("mean", "sum")[rank]))
    refused(op, "z_loss: expected a number, got the str '1'", lambda: loss(z_loss=(0.0, "1")[rank]), TypeError)
    refused(op, "ignore_index: expected an int, got None", lambda: loss(ignore_index=(0, None)[rank]), TypeError)

    def linear(hidden, weight, bias=None):
        return vocab_parallel_linear_cross_entropy(hidden, weight, TARGET, bias=bias)

    op, hidden = "vocab_parallel_linear_cross_entropy", torch.zeros(3, 4)
    refused(op, r"weight: expected shape \(classes, 4\), got \(5, 3\)", lambda: linear(hidden, weight[:, : 4 - rank]))
    refused(
        op, "bias: expected False, as on rank 0, got True", lambda: linear(hidden, weight, [None, weight[:, 0]][rank])
    )
    refused(op, "weight: expected a tensor, got None", lambda: linear(hidden, [weight, None][rank]), TypeError)
    one_needs_it = hidden.clone().requires_grad_(rank == 1)
    refused(op, "requires_grad: expected False, as on rank 0, got True", lambda: linear(one_needs_it, weight))
    assert loss() == linear(hidden, weight)


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
