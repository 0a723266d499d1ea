"""What a ShardedOptimizer refuses: every rank hears of it, the message names rank and remedy, and no rank waits."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import warpsmith
from sharding import Uneven, input_of
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import ShardedOptimizer
from warpsmith.distributed.agreement import fingerprints, require_agreement
from warpsmith.optim import AdamW
from warpsmith.testing.distributed import multirank

pytestmark = pytest.mark.xdist_group("sharded")
SMALL = [(torch.float32, (20_000,), None), (torch.float32, (7, 3), None), (torch.float32, (5,), None)]


def other_shape(model, arguments):
    model.weights[1] = torch.nn.Parameter(torch.zeros(7, 4))


def other_count(model, arguments):
    model.weights.append(torch.nn.Parameter(torch.zeros(2)))


def other_dtype(model, arguments):
    model.weights[2] = torch.nn.Parameter(model.weights[2].bfloat16())


def other_values(model, arguments):
    with torch.no_grad():
        model.weights[0][19_999] += 1e-3


def frozen(model, arguments):
    model.weights[2].requires_grad_(False)


def other_lr(model, arguments):
    arguments["lr"] = 0.5


def bad_lr(model, arguments):
    arguments["lr"] = -1.0


@multirank(4, timeout_s=200)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_shape, r"\[1\]: expected float32 \(7, 3\) .*, as on rank 0, got float32 \(7, 4\)"),
        (other_count, r"param_groups\[0\]: expected 3 parameters.*got 4 parameters"),
        (other_dtype, r"\[2\]: expected float32 \(5,\) .*got bfloat16 \(5,\)"),
        (other_values, r"values of param_groups\[0\]\['params'\]\[0\]: expected checksum"),
        (frozen, r"\[2\]: .*got float32 \(5,\) .* frozen"),
        (other_lr, r"param_groups\[0\]: .*'lr': 0.001.*got .*'lr': 0.5"),
    ],
)
def test_a_rank_that_differs(rank, world_size, change, words):
    model, arguments = Uneven(SMALL), {}
    if rank == 2:
        change(model, arguments)
    with pytest.raises(ValueError, match=f"^ShardedOptimizer: rank 2 of 4: .*{words}.*torch.manual_seed"):
        ShardedOptimizer(model.parameters(), AdamW, **arguments)


@multirank(4, timeout_s=200)
def test_an_argument_that_one_rank_refuses(rank, world_size):
    arguments = {"lr": -1.0 if rank == 3 else 1e-3}
    words = "^AdamW: lr: expected" if rank == 3 else "^ShardedOptimizer: rank 3 of 4: AdamW: lr: expected"
    with pytest.raises(ValueError, match=words):
        ShardedOptimizer(Uneven(SMALL).parameters(), AdamW, **arguments)


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_without_data(rank, world_size, stage):
    """It comes to the step, to the norm or has run all backwards under no_sync, while others are in theirs."""
    model = Uneven(SMALL)
    sharded = ShardedOptimizer(model.parameters(), AdamW, stage=stage, bucket_cap_mb=0.02)
    before = copy.deepcopy(model.state_dict())
    calls = {"step()": sharded.step, "grad_norm()": sharded.grad_norm, "clip_grad_norm_()": None}
    for call, function in calls.items():
        words = r"rank 1 of 4: .* without a backward that reduced gradients: give every rank equally many batches"
        with pytest.raises(RuntimeError, match=words) as raised:
            if rank != 1:
                model(input_of(rank, 0)).backward()
            elif function is not None:
                function()
            else:
                with sharded.no_sync():
                    model(input_of(rank, 0)).backward()
                sharded.clip_grad_norm_(1.0)
        if rank == 1:
            assert f": {call} without" in str(raised.value)
        sharded.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    model(input_of(rank, 0)).backward()  # all goes on
    sharded.step()
    with pytest.raises(RuntimeError, match=r"ranks 0, 1, 2, 3 of 4: step\(\) without a backward"):
        sharded.step()


@multirank(4, timeout_s=200)
def test_a_parameter_without_a_gradient(rank, world_size):
    model = Uneven(SMALL)
    sharded = ShardedOptimizer(model.named_parameters(), AdamW)
    with pytest.raises(
        RuntimeError, match=r"rank 3 of 4: .*weights.2\) has no gradient: .*find_unused_parameters=True"
    ):
        model(input_of(rank, 0), unused=(2,) if rank == 3 else ()).backward()
    sharded.zero_grad()
    model(input_of(rank, 0)).backward()
    sharded.step()


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_that_changed(rank, world_size, stage):
    """On one rank; all ranks hear of it at the end of the backward."""
    model = Uneven(SMALL)
    sharded = ShardedOptimizer(model.parameters(), AdamW, stage=stage)
    before = copy.deepcopy(model.state_dict())
    kept = model.weights[1].data
    others = {"memory": kept.clone(), "dtype": kept.bfloat16(), "shape": kept[:, :2].contiguous()}
    for other in others.values():
        if rank == 2:
            model.weights[1].data = other
        words = (
            r"rank 2 of 4: param_groups\[0\]\['params'\]\[1\] was frozen or replaced .*: change the model on all ranks"
        )
        with pytest.raises(RuntimeError, match=words):
            model(input_of(rank, 0)).backward()
        sharded.zero_grad()
        model.weights[1].data = kept
    if rank == 2:
        model.weights[2].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"rank 2 of 4: .*\[2\] was frozen or replaced"):
        model(input_of(rank, 0)).backward()
    model.weights[2].requires_grad_(True)
    sharded.zero_grad()
    model(input_of(rank, 0)).backward()
    model.weights[1].data = others["memory"]  # between backward and step
    with pytest.raises(RuntimeError, match=rf"rank {rank} of 4: .*\[1\] was frozen or replaced"):
        sharded.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    model.weights[1].data = kept
    sharded.step()
    assert not torch.equal(model.weights[0], before["weights.0"])
    with pytest.raises(RuntimeError, match="add_param_group: expected all groups at construction"):
        sharded.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@multirank(4, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_come_too_late(rank, world_size, stage):
    """Torch's clipping, which scales this rank's own gradients; a backward under no_sync() after the last one."""
    model = Uneven(SMALL)
    sharded = ShardedOptimizer(model.parameters(), AdamW, stage=stage)
    words = rf"rank {rank} of 4: the gradient of .*\[0\] was written to after it was reduced, which {{}} would not see"
    model(input_of(rank, 0)).backward()
    with sharded.no_sync():
        model(input_of(rank, 1)).backward()
    with pytest.raises(RuntimeError, match=words.format(r"step\(\)")):
        sharded.step()
    sharded.zero_grad()
    model(input_of(rank, 0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if stage == 1:
        with pytest.raises(RuntimeError, match=words.format(r"grad_norm\(\)") + ".*clip_grad_norm_"):
            sharded.grad_norm()
    else:  # there is nothing to clip
        sharded.step()
        sharded.zero_grad(set_to_none=False)
    sharded.zero_grad(set_to_none=False)
    model(input_of(rank, 0)).backward()
    sharded.step()


@multirank(2, timeout_s=200)
@pytest.mark.parametrize("stage", [1, 2])
def test_under_ddp_gradients_are_averaged_twice(rank, world_size, stage):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    sharded = ShardedOptimizer(ddp.parameters(), AdamW, stage=stage)
    ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="was written to after it was reduced.* wrap the model in no DistributedDat"):
        sharded.step()


class Lamb(AdamW):
    """Stands for an optimizer that needs the norms of whole tensors."""


@multirank(4, timeout_s=200)
def test_arguments(rank, world_size):
    model = Uneven(SMALL)

    def refused(words, params=None, optimizer_class=AdamW, **arguments):
        with pytest.raises(ValueError, match=words):
            ShardedOptimizer(model.parameters() if params is None else params, optimizer_class, **arguments)

    for other in (Lamb, warpsmith.optim.LAMB, torch.optim.AdamW, "AdamW"):
        refused(
            r"optimizer_class: expected SGD, .* of warpsmith.optim \(each rank has only parts of tensors", None, other
        )
    for stage in (0, 3):
        refused(f"stage: expected 1 or 2, got {stage}", stage=stage)
    refused("wire: expected torch.bfloat16 or torch.float16, got torch.float32", wire=torch.float32)
    for size in (0, -1.0, float("nan"), float("inf")):
        refused(f"bucket_cap_mb: expected a finite number > 0, got {size}", bucket_cap_mb=size)
    refused("precision: expected", precision="8bit")
    refused("empty parameter list", [])
    refused("a parameter that requires a gradient, got none", [torch.nn.Parameter(torch.zeros(2), requires_grad=False)])
    refused("elements without gaps or overlap, got strides", [torch.nn.Parameter(torch.zeros(4, 4)[:, :2])])
    refused("float32 or float64|a dtype of precision", [torch.nn.Parameter(torch.zeros(2))], precision="bf16")
    group = dist.new_group([0, 1])
    if rank >= 2:
        refused(rf"process_group: expected a group with this rank, {rank}, got one without", process_group=group)
    refused("a tensor on the CPU or on CUDA, got meta", [torch.nn.Parameter(torch.zeros(2, device="meta"))])


@multirank(4, ends={1: "died", 0: "raised", 2: "raised", 3: "raised"}, timeout_s=60)
def test_a_rank_that_dies_in_the_reduction(rank, world_size):
    model = Uneven(SMALL)
    sharded = ShardedOptimizer(model.parameters(), AdamW, bucket_cap_mb=0.02)
    with warpsmith.testing.distributed.fault("kill", rank=1, call="all_to_all_single", nth=2):
        for step in range(3):
            model(input_of(rank, step)).backward()
            sharded.step()
            sharded.zero_grad()


def test_without_a_process_group():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"expected a process group: call warpsmith.distributed.init\(\) first"):
        ShardedOptimizer([torch.nn.Parameter(torch.zeros(1))], AdamW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_fingerprints_see_each_bit_and_place(dtype):
    x = torch.randn(2_000_003, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    flipped, swapped = x.clone(), x.clone()
    flipped[-1] = flipped[-1] * (1 + 2 * torch.finfo(dtype).eps)
    swapped[0], swapped[1_500_000] = x[1_500_000], x[0]
    first, again, *others = fingerprints([x, x.clone(), flipped, swapped, x[:-1], -x])
    assert first == again
    assert first not in others
    assert fingerprints([]) == []


def test_agreement_of_one_rank():
    require_agreement("f", lambda: [("size", "3")], "nothing")
    with pytest.raises(KeyError):
        require_agreement("f", lambda: [{}["a"]], "nothing")


@multirank(2, timeout_s=100)
def test_two_over_one_model(rank, world_size):
    """The second may be made while the first is alive, to load a state; a backward wants the first gone."""
    model = Uneven(SMALL)
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    model(input_of(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    for shared in (list(model.parameters()), [model.weights[2]]):
        other = ShardedOptimizer(shared, AdamW)
        name = rf"param_groups\[0\]\['params'\]\[{'2' if len(shared) == 1 else '[0-2]'}\]"
        words = rf"rank {rank} of 2: ({name}|.*\[0\]) belongs to another living ShardedOptimizer too.*delete the other"
        with pytest.raises(RuntimeError, match=words):
            model(input_of(rank, 1)).backward()
        optimizer.zero_grad()
        del other
        model(input_of(rank, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer = ShardedOptimizer(model.parameters(), AdamW)  # the first is gone, but for a reference cycle
    model(input_of(rank, 2)).backward()
    optimizer.step()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())])
def test_it_is_not_copied(copied):
    """The error comes from the copy, not from what is made of it."""
    with warpsmith.distributed.init(device="cpu"):
        optimizer = ShardedOptimizer([torch.nn.Parameter(torch.zeros(2))], AdamW)
        for holder in (optimizer, {"optimizer": optimizer}):
            if copied is copy.copy and holder is not optimizer:
                continue
            with pytest.raises(TypeError, match=r"^ShardedOptimizer: expected no copy .*consolidate_state_dict\(\)"):
                copied(holder)
