"""Ranks of NCCL that share a GPU: what they must be told, and on a GPU that they reduce."""

import pytest
import torch
import torch.distributed as dist
from warpsmith.testing.distributed import multirank
from warpsmith.testing.ranks import nccl_environment


def test_ranks_that_share_gpus_are_hosts_of_their_own():
    shared = [nccl_environment(rank, 3, gpus=2) for rank in range(3)]
    assert len({one["NCCL_HOSTID"] for one in shared}) == 3
    assert all(one["NCCL_SOCKET_IFNAME"] == "lo" for one in shared)
    assert nccl_environment(0, 2, gpus=2) == nccl_environment(0, 2, gpus=8) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 1 << 20])
@multirank(3, backend="nccl", timeout_s=200)
def test_three_ranks_of_any_number_of_gpus(rank, world_size, size):
    assert torch.cuda.current_device() == rank % torch.cuda.device_count()
    total = torch.full((size,), float(rank + 1), device="cuda")
    dist.all_reduce(total)
    assert (total == 6).all()
    parts = torch.empty(3 * size, device="cuda")
    dist.all_gather_into_tensor(parts, torch.full((size,), float(rank), device="cuda"))
    assert parts.view(3, size).mean(1).tolist() == [0, 1, 2]
