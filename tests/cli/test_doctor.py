"""`python -m warpsmith doctor --distributed`: alone, on two ranks, and each problem that it names."""

import json
import os
import subprocess
import sys

import pytest
import torch
from warpsmith.cli import doctor, main

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_", "LD_"))}
    environ = kept | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)


def test_one_process():
    done = run([sys.executable, "-m", "warpsmith", "doctor", "--distributed"], GLOO_SOCKET_IFNAME="nosuch0")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert f"torch        {torch.__version__}" in lines
    assert "environment  GLOO_SOCKET_IFNAME=nosuch0" in lines
    assert lines[-1].startswith("problem: GLOO_SOCKET_IFNAME=nosuch0: expected one of ")
    assert any(line.startswith("links        ") for line in lines)
    assert any("not measured: one process" in line for line in lines)


def test_two_ranks():
    done = run([*LAUNCHER, "-m", "warpsmith", "doctor", "--distributed", "--json"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["problems"] == []
    assert facts["links"].keys() == {"gpus", "topology", "missing"}
    assert [row["expected_gigabytes_per_s"] for row in facts["all_reduce"]] == [None, None]
    assert facts["all_reduce"][0]["expectation_from"] == "ranks are on cpu"
    assert facts["ranks"] == len(facts["hosts"]) == 2
    small, large = facts["all_reduce"]
    assert small["bytes"] < large["bytes"]
    assert all(row["microseconds"] > 0 for row in (small, large))
    # Of two ranks the bus carries the bytes once.
    assert large["bus_gigabytes_per_s"] == pytest.approx(large["bytes"] / large["microseconds"] / 1e3)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "RANK is set without MASTER_ADDR, MASTER_PORT: start with torchrun"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, WORLD_SIZE is 2: start with torchrun"),
        (
            {"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "WORLD_SIZE: expected a number from 1 to 2147483647, got 'two'",
        ),
    ],
)
def test_a_place_that_is_none_is_a_problem(variables, words, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--distributed"]) == 1
    assert f"problem: {words}" in capsys.readouterr().out


def test_a_network_speed_that_is_none(capsys):
    assert main(["doctor", "--distributed", "--network-gbit", "-4"]) == 2
    assert "doctor: --network-gbit: expected a number above 0, got -4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1: every kernel is waited for"),
        ({"NCCL_BLOCKING_WAIT": "0"}, "NCCL_BLOCKING_WAIT: torch reads TORCH_NCCL_BLOCKING_WAIT now"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set without MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_variables_that_are_problems(environ, words):
    (found,) = doctor.environment_problems(environ)
    assert found.startswith(words)


def test_variables_that_are_none():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert doctor.environment_problems(place | {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": "0"}) == []


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),  # NCCL takes the beginning of a name
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "^eth", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth0", True),
    ],
)
def test_interfaces(name, value, fits):
    assert (doctor.interface_problems({name: value}, ["lo", "eth0"]) == []) == fits


def test_nccl_libraries_are_told_apart_by_what_links_lead_to(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libnccl.so.2.28.9").touch()
    (tmp_path / "a" / "libnccl.so.2").symlink_to(tmp_path / "a" / "libnccl.so.2.28.9")
    mapped = f"7f00-7f01 r-xp 00000000 00:00 0    {tmp_path}/b/libnccl.so.2.28.9\n"
    found = doctor.nccl_libraries([tmp_path / "a"], mapped)
    assert found == [f"{tmp_path}/b/libnccl.so.2.28.9", f"{tmp_path}/a/libnccl.so.2.28.9"]


def test_differences_between_ranks():
    same = {"torch": "2.13.0", "nccl": "2.29.7"}
    assert doctor.differences([same, same]) == []
    assert doctor.differences([same, same, same | {"nccl": "2.28.9"}]) == ["nccl: 2.29.7 on rank 0, 2.28.9 on rank 2"]
