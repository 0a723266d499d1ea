"""What doctor says of links and bandwidth: on made-up GPUs, of NVML and of nvidia-smi."""

import sys
import types

import pytest
from warpsmith.cli import doctor
from warpsmith.cli.links import expect, expectation, gpu_words, link_problems, links


class FakeError(Exception):
    pass


def fake_nvml(nvlinks, widths):
    """Two states for each link, and an error behind the last one, as NVML has it."""
    nvml = types.ModuleType("pynvml")

    def state(gpu, link):
        if link >= len(nvlinks[gpu]):
            raise FakeError("Invalid Argument")
        return nvlinks[gpu][link]

    nvml.NVMLError = FakeError
    nvml.NVML_NVLINK_MAX_LINKS = 18
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(nvlinks)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda gpu: b"NVIDIA H200"
    nvml.nvmlDeviceGetNvLinkState = state
    nvml.nvmlDeviceGetMaxPcieLinkGeneration = lambda gpu: 5
    nvml.nvmlDeviceGetCurrPcieLinkWidth = lambda gpu: widths[gpu]
    nvml.nvmlDeviceGetMaxPcieLinkWidth = lambda gpu: 16
    return nvml


def test_links_of_nvml_and_their_problems(monkeypatch):
    nvml = fake_nvml([[1] * 18, [1] * 17 + [0], [1] * 18, []], [16, 16, 8, 16])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = links()
    assert (found["topology"], found["missing"]) == ([], "")
    assert [gpu["nvlinks"] for gpu in found["gpus"]] == [18, 17, 18, 0]
    assert gpu_words(found["gpus"][3]) == "GPU 3 NVIDIA H200: no NVLinks active, PCIe 5 x16 of x16"
    assert link_problems(found["gpus"]) == [
        "GPU 1: 17 NVLinks active, expected 18, as on most GPUs",
        "GPU 2: PCIe x8, expected x16",
        "GPU 3: 0 NVLinks active, expected 18, as on most GPUs",
    ]
    assert link_problems([]) == []
    assert "links        GPU 0 NVIDIA H200: 18 NVLinks active" in doctor._text(doctor.gather())


@pytest.mark.parametrize(
    ("program", "topology", "missing"),
    [
        ("#!/bin/sh\necho 'GPU0 X NV18'; echo; echo \"$1 $2\"\n", ["GPU0 X NV18", "topo -m"], ""),
        ("#!/bin/sh\necho 'no driver' >&2; exit 9\n", [], "; nvidia-smi topo -m: no driver"),
        (None, [], "; no nvidia-smi in PATH"),
    ],
)
def test_links_of_nvidia_smi_or_what_is_missing(program, topology, missing, monkeypatch, tmp_path):
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(program)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if not installed
    found = links()
    assert found["gpus"] == []
    assert found["topology"] == topology
    bindings = "NVML's Python bindings are not installed (nvidia-ml-py)"
    assert found["missing"] == (bindings + missing if missing else "")


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        (["NVIDIA H200"] * 4, "H200"),
        (["NVIDIA H100 80GB HBM3"], "H100"),
        (["NVIDIA A100-SXM4-80GB"], "A100"),
        (["NVIDIA H100 PCIe"], None),
        (["NVIDIA H100 NVL"], None),
        (["NVIDIA GH200 480GB"], None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA H200"], None),
        (["NVIDIA L4"], None),
    ],
)
def test_the_gpus_with_an_expectation(names, gpu):
    cluster, words = expectation("cuda", names, ["a", "a"], None)
    assert (cluster and cluster.gpu.name) == gpu
    assert words.startswith("plan.Cluster of" if gpu else "the table has no NVIDIA ")


def test_hosts_need_the_speed_of_their_network():
    hosts = ["a", "a", "b", "b"]
    assert expectation("cuda", ["NVIDIA H200"], hosts, None) == (None, "2 hosts: give --network-gbit, of each GPU")
    slow, _ = expectation("cuda", ["NVIDIA H200"], hosts, 100.0)
    row = {"bytes": 2**30, "bus_gigabytes_per_s": 20.0}
    assert expect([row], slow, "", hosts) == []
    assert 20.0 < row["expected_gigabytes_per_s"] < 2 * 100 / 8  # two GPUs of a host send at once


def test_less_than_half_of_the_expected_bandwidth_is_a_problem():
    hosts = ["a"] * 4
    cluster, source = expectation("cuda", ["NVIDIA H200"], hosts, None)
    for got, problems in [(354.0, 0), (180.0, 0), (170.0, 1)]:
        rows = [{"bytes": 4, "bus_gigabytes_per_s": 1e-6}, {"bytes": 2**30, "bus_gigabytes_per_s": got}]
        assert len(expect(rows, cluster, source, hosts)) == problems
        assert rows[1]["expected_gigabytes_per_s"] == pytest.approx(354, rel=0.02)


def test_the_text_names_what_was_expected(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hosts = ["a"] * 2
    for device, words in (("cuda", "expected 35"), ("cpu", "no expectation known: ranks are on cpu")):
        row = {"bytes": 2**30, "microseconds": 3000.0, "bus_gigabytes_per_s": 340.0}
        assert expect([row], *expectation(device, ["NVIDIA H200"], hosts, None), hosts) == []
        facts = doctor.gather() | {"ranks": 2, "backend": "nccl", "hosts": hosts, "all_reduce": [row]}
        line = next(line for line in doctor._text(facts).splitlines() if line.startswith("bandwidth"))
        assert "3000.0 us, bus 340.000 GB/s; " + words in line
