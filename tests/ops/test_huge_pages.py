"""Outputs of 4 MiB and more on the CPU ask the system for huge pages; smaller ones, and others' memory, do not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warpsmith

MIB = 1 << 20


def mapping_of(address):
    """The flags of the mapping that holds an address, and its end."""
    inside, end = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if limits := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(limit, 16) for limit in limits.groups())
            inside = start <= address < end
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:], end
    raise AssertionError(f"no mapping holds {address:#x}")


def check_outputs():
    for mib, advised in ((3, False), (4, True), (9, True)):
        x = torch.randn(mib * MIB // 4)
        y = warpsmith.relu_squared(x)
        flags, end = mapping_of(y.data_ptr() + 8192)
        assert ("hg" in flags) == advised, (mib, flags)
        assert not advised or end <= y.data_ptr() + y.nbytes, "memory behind the output is backed as well"
        assert "hg" not in mapping_of(x.data_ptr() + 8192)[0], "memory of others is advised"
        torch.testing.assert_close(y, torch.relu(x).square())


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no transparent huge pages"
)
def test_large_outputs_are_advised():
    # Each allocation gets a mapping of its own: in a heap an output may lie where a larger one has been.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", "from tests.ops import test_huge_pages; test_huge_pages.check_outputs()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
