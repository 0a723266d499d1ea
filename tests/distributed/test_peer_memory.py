"""Reduction over memory that ranks share: the bits of the other path, one decision on all ranks, and its reason."""

import itertools
import os
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import warpsmith
from sharding import Pair
from torch.distributed import _symmetric_memory
from torch.nn.parallel import DistributedDataParallel
from warpsmith.distributed import accurate_hook, reduction_plan
from warpsmith.distributed.gradients.hook import average_by_peers, average_whole, mean_in_rank_order
from warpsmith.distributed.gradients.peer_memory import box_offsets, peer_memory
from warpsmith.testing import run_ranks

SIZES = [1, 8, 9, 65, 1001, 30_000]
DTYPES = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)]


BYTES = 1 << 19


class Files:
    """Memory that processes share, in place of memory that GPUs share."""

    def __init__(self, folder, rank, world_size):
        self.rank, self.world_size, self.views, self.turn = rank, world_size, {}, 0
        self.files = [
            torch.from_file(str(Path(folder) / str(r)), shared=True, size=BYTES, dtype=torch.uint8)
            for r in range(world_size)
        ]

    def boxes(self, dtype, part):
        elements = self.world_size * part

        def box(file, offset):
            return file.view(dtype)[offset : offset + elements].view(self.world_size, part)

        return tuple([box(file, offset) for file in self.files] for offset in box_offsets(BYTES, dtype))

    def barrier(self, channel):
        dist.barrier()


def test_no_inbox_lies_where_an_outbox_does(tmp_path):
    """Of whatever bucket: the ranks are never further apart than one is in its outbox, another in the next inbox."""
    files = Files(tmp_path, 0, 2)
    places = {"in": [], "out": []}
    for dtype in (torch.float32, torch.bfloat16):
        for part in (8, 520, BYTES // 4 // dtype.itemsize):
            for kind, boxes in zip(places, files.boxes(dtype, part), strict=True):
                begin = boxes[0].data_ptr()
                places[kind].append((begin, begin + boxes[0].numel() * dtype.itemsize))
    assert max(end for _, end in places["in"]) <= min(begin for begin, _ in places["out"])


def gradients_of(rank, size, dtype):
    draw = torch.Generator().manual_seed(1000 * rank + size)
    return (torch.randn(size, generator=draw) * 3).to(dtype)


def formula(world_size, size, dtype, wire):
    total = gradients_of(0, size, dtype).to(wire).float()
    for rank in range(1, world_size):
        total = total + gradients_of(rank, size, dtype).to(wire).float()
    return (total / world_size).to(wire).to(dtype)


def averaged(average, peers, times):
    """How many averages were made, all with the formula's bits. The second finds the boxes full."""
    cases = list(itertools.product(DTYPES, SIZES, range(times)))
    for (dtype, wire), size, _ in cases:
        gradients = gradients_of(peers.rank, size, dtype)
        average(gradients, peers, wire)
        assert torch.equal(gradients, formula(peers.world_size, size, dtype, wire)), (dtype, wire, size)
    return len(cases)


def on_ranks_that_share_files(rank, world_size, folder):
    def average(gradients, peers, wire):
        average_by_peers(gradients, peers, wire, -(-len(gradients) // (world_size * 8)) * 8)

    return averaged(average, Files(folder, rank, world_size), 2)


@pytest.mark.parametrize("world_size", [3])
def test_shared_memory_gives_the_formulas_bits(world_size, tmp_path):
    checked = run_ranks(on_ranks_that_share_files, world_size, str(tmp_path), timeout_s=200)
    assert checked == [2 * len(DTYPES) * len(SIZES)] * world_size


class Late(Files):
    """One rank, in turn, comes late from a barrier: the other one is at its next bucket by then."""

    barriers = 0

    def barrier(self, channel):
        dist.barrier()
        self.barriers += 1
        if self.barriers % 2 == self.rank:
            time.sleep(0.02)


def whole_on_ranks_that_share_files(rank, world_size, folder):
    return averaged(average_whole, Late(folder, rank, world_size), 3)


def test_two_ranks_that_send_whole_buckets_have_known_bits(tmp_path):
    checked = run_ranks(whole_on_ranks_that_share_files, 2, str(tmp_path), timeout_s=200)
    assert checked == [3 * len(DTYPES) * len(SIZES)] * 2


def sharded_on_ranks_that_share_files(rank, world_size, folder):
    memories = {}

    def memory(group, device, user):
        place = Path(folder) / user
        place.mkdir(exist_ok=True)
        return memories.setdefault(user, Files(place, rank, world_size))

    with (
        patch("warpsmith.distributed.sharded.gradient_shards.peer_memory", memory),
        patch("warpsmith.distributed.sharded.param_gather.peer_memory", memory),
    ):
        for stage in (1, 2):
            pair = Pair(rank, None, stage=stage, bucket_cap_mb=0.05, lr=0.01, find_unused_parameters=stage == 2)
            for step in range(5):
                pair.backward(step, unused=(2, 9) if stage == 2 and rank == 1 and step == 3 else ())
                pair.clip(0.5)
                pair.step()
                pair.check(step)
            pair.check_state()
    return sorted(memories)


def test_a_sharded_optimizer_has_its_bits_over_shared_memory(tmp_path):
    memories = run_ranks(sharded_on_ranks_that_share_files, 3, str(tmp_path), timeout_s=200)
    assert memories == [["ShardedOptimizer", "parameters of ShardedOptimizer"]] * 3


def main_grads_on_ranks_that_share_files(rank, world_size, folder):
    """Of a bucket with two main_grads and biases between, over shared memory and without."""
    memories = {}

    def memory(group, device, user):
        place = Path(folder) / user
        place.mkdir(exist_ok=True)
        return memories.setdefault(user, Files(place, rank, world_size))

    found = []
    for peers in (memory, peer_memory):
        torch.manual_seed(0)
        layer = partial(warpsmith.nn.Linear, 48, 48, dtype=torch.bfloat16, fuse_main_grad=True)
        ddp = DistributedDataParallel(torch.nn.Sequential(layer(), layer()))
        ddp.register_comm_hook(None, accurate_hook)
        for module in ddp.module:
            module.weight.main_grad = torch.zeros(48, 48)
        x = torch.randn(7, 48, generator=torch.Generator().manual_seed(rank)).bfloat16()
        with patch("warpsmith.distributed.gradients.hook.peer_memory", peers):
            for _ in range(3):
                ddp(x).square().sum().backward()
        found.append([t for module in ddp.module for t in (module.weight.main_grad, module.bias.grad)])
    assert all(t.any() for t in found[0])
    assert all(map(torch.equal, *found))
    return sorted(memories)


@pytest.mark.parametrize("world_size", [2, 3])
def test_main_grads_have_their_bits_over_shared_memory(world_size, tmp_path):
    memories = run_ranks(main_grads_on_ranks_that_share_files, world_size, str(tmp_path), timeout_s=200)
    way = "accurate_hook, whole buckets" if world_size == 2 else "accurate_hook"
    assert memories == [[way]] * world_size


def machine(rank, gpus=("a", "b"), host="h", visible=None, peers=True):
    """What torch says of GPUs, where there are none."""
    visible = list(gpus) if visible is None else visible
    index = visible.index(gpus[rank])
    stack = ExitStack()
    stack.enter_context(patch.object(torch.cuda, "device_count", lambda: len(visible)))
    stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=visible[i])))
    stack.enter_context(patch.object(torch.cuda, "can_device_access_peer", lambda a, b: peers))
    stack.enter_context(patch.object(torch.cuda, "synchronize", lambda device: None))
    stack.enter_context(patch.object(socket, "gethostname", lambda: host))
    return stack, torch.device("cuda", index)


def reasons_on(rank, world_size):
    def no_memory(*size, **options):
        if rank == 1:
            raise RuntimeError("no handle\nmore of it")
        return torch.empty(1)

    found = []
    cases = [
        {"gpus": ("a", "a"), "visible": ["a"]},
        {"host": f"host{rank}"},
        {"visible": ["ab"[rank]]},
        {"peers": False},
        {},
    ]
    for n, case in enumerate(cases):
        stack, device = machine(rank, **case)
        with stack, patch.object(_symmetric_memory, "empty", no_memory):
            with patch.object(_symmetric_memory, "rendezvous", lambda buffer, group: None):
                found.append(str(peer_memory(None, device, f"case {n}")))
    stack, device = machine(rank)
    os.environ["WARPSMITH_PEER_MEMORY"] = str(1 - rank)
    with stack:
        found.append(str(peer_memory(None, device, "off")))
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ  # as it was
    return found


def test_all_ranks_decide_alike_and_say_why():
    ranks = run_ranks(reasons_on, 2, timeout_s=200)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [
        "ranks 0 and 1 of 2 share a GPU",
        "rank 1 of 2 is on another host than rank 0",
        "the GPU of rank 1 is not visible to the others (CUDA_VISIBLE_DEVICES)",
        "the GPUs of ranks 0 and 1 have no peer access",
        "rank 1 of 2: torch's symmetric memory: no handle",
        "rank 1 of 2 has WARPSMITH_PEER_MEMORY=0",
    ]


def test_one_rank_shares_nothing():
    with warpsmith.distributed.init(device="cpu"):
        assert peer_memory(None, torch.device("cuda", 0), "user") == "one rank"
        assert reduction_plan(device="cpu") == "all-to-all, sum, all-gather: the gradients are on the CPU"


# The raw op.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_mean_over_ranks_is_the_formula(dtype, ranks):
    parts = torch.randn(ranks, 3001, generator=torch.Generator().manual_seed(ranks)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    want = (total / ranks).to(dtype)
    assert torch.equal(mean_in_rank_order(parts), want)
    padded = torch.cat([parts, torch.full_like(parts[:, :5], torch.nan)], 1)[:, :3001]
    assert torch.equal(mean_in_rank_order(padded), want)
    if dtype.itemsize == 2:  # a part that is not rounded yet, and two outputs, one of them in its place
        own = torch.randn(3001, generator=torch.Generator().manual_seed(9))
        parts[ranks - 1] = own.to(dtype)
        want, out = mean_in_rank_order(parts), torch.empty(3001, dtype=dtype)
        parts[ranks - 1] = torch.nan
        torch.ops.warpsmith.rank_mean(parts, own, ranks - 1, [out, own])
        assert torch.equal(out, want) and torch.equal(own, want.float())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": torch.zeros(4, 2).T}, "parts: expected rows of adjacent elements"),
        ({"rank": 2}, "rank: expected a row of parts, of 2, got 2"),
        ({"outs": [torch.zeros(4), torch.zeros(8)[::2]]}, r"outs\[1\]: expected adjacent elements"),
        ({"outs": [torch.zeros(4)] * 17}, "outs: expected at most 16, got 17"),
    ],
)
def test_what_the_mean_over_ranks_refuses(change, message):
    given = {"parts": torch.zeros(2, 4), "own": torch.zeros(4), "rank": 0, "outs": [torch.zeros(4)]} | change
    with pytest.raises(ValueError, match=message):
        torch.ops.warpsmith.rank_mean(*given.values())


# On GPUs.


def on_gpus(rank, world_size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    assert reduction_plan() == f"one kernel over peer memory: {world_size} GPUs of one host"
    os.environ["WARPSMITH_PEER_MEMORY"] = "0"
    without = dist.new_group()
    assert reduction_plan(without) == f"all-to-all, sum, all-gather: rank 0 of {world_size} has WARPSMITH_PEER_MEMORY=0"
    for size in (*SIZES, 7_000_001, 1001):  # memory grows in between
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            found = []
            for group in (None, without):
                model = torch.nn.ParameterList([torch.zeros(size, device=device, dtype=dtype)])
                ddp = DistributedDataParallel(Product(model), process_group=group)
                ddp.register_comm_hook(group, accurate_hook)
                for _ in range(3):
                    ddp.zero_grad()
                    ddp(gradients_of(rank, size, dtype).to(device)).backward()
                found.append(model[0].grad)
            assert torch.equal(*found), (size, dtype)
            if size <= 1001 and dtype == torch.float32:
                assert torch.equal(found[0].cpu(), formula(world_size, size, dtype, torch.bfloat16))
    return True


class Product(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        return (self.weights[0] * x).sum()


@pytest.mark.gpu
def test_peer_memory_has_the_bits_of_nccls_path():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs 2 GPUs")
    assert run_ranks(on_gpus, count, backend="nccl", timeout_s=200) == [True] * count
