"""`python -m warpsmith info`: facts, verdicts, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warpsmith
from warpsmith.tools import info


def tool(*arguments):
    command = [sys.executable, "-m", "warpsmith", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_json_states_build_torch_ops_and_kernels():
    done = tool("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["build"]["version"] == warpsmith.__version__
    assert facts["torch"]["version"] == torch.__version__
    assert Path(facts["torch"]["libtorch"]).is_dir()
    assert Path(facts["library"]).is_file()
    assert "CPU" in facts["ops"]["rms_norm_forward"]
    assert ("CUDA" in facts["ops"]["rms_norm_forward"]) == facts["build"]["cuda"]
    assert facts["kernels"]["cpu"]["runs"]
    assert facts["problems"] == []


def test_text_says_the_same():
    done = tool("info")
    assert done.returncode == 0, done.stderr
    for words in (warpsmith.__version__, torch.__version__, "op         rms_norm_backward", "cpu        runs: "):
        assert words in done.stdout


def test_a_gpu_without_kernels_is_explained():
    kernels = json.loads(tool("info", "--json").stdout)["kernels"]
    gpus = {device: k for device, k in kernels.items() if device != "cpu"}
    assert gpus, "nothing is said of GPUs"
    assert all(k["why"] for k in gpus.values())
    if not torch.cuda.is_available():
        assert not gpus["cuda"]["runs"]


def test_cmake_dir_holds_the_package_config():
    done = tool("info", "--cmake-dir")
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert (directory / "warpsmithConfig.cmake").is_file()
    assert (directory / "warpsmithConfigVersion.cmake").is_file()
    assert (directory.parent / "include/warpsmith/rms_norm.h").is_file()


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("info", "--json", "--cmake-dir")])
def test_wrong_usage_is_two(arguments):
    done = tool(*arguments)
    assert done.returncode == 2
    assert "usage: python -m warpsmith" in done.stderr


@pytest.mark.parametrize(
    ("capability", "architectures", "runs", "words"),
    [
        ((9, 0), ["80", "90a-real"], True, "kernels of sm_90a"),
        ((8, 0), ["80", "90a-real"], True, "kernels of sm_80"),
        ((8, 9), ["80", "90a-real"], True, "kernels of sm_80"),
        ((10, 0), ["80", "90a-real"], True, "PTX of sm_80"),
        ((12, 0), ["80-real", "90a-real"], False, "TORCH_CUDA_ARCH_LIST=12.0"),
        ((7, 5), ["80", "90a-real"], False, "sm_75, but the kernels are built for sm_80, sm_90a"),
        ((8, 0), ["86-real"], False, "sm_86"),
        ((9, 0), ["90a-virtual"], False, "sm_90a-virtual"),
        ((9, 0), ["80-virtual"], True, "PTX of sm_80"),
        ((8, 0), ["80-virtual"], True, "PTX of sm_80"),
        ((12, 1), ["100-real", "120-real"], True, "kernels of sm_120"),
        ((10, 3), ["100a-real"], False, "sm_100a"),
        ((10, 3), ["100f-real"], True, "kernels of sm_100f"),
    ],
)
def test_which_architecture_a_gpu_runs(capability, architectures, runs, words):
    verdict = info.cuda_verdict(capability, architectures)
    assert verdict.runs is runs
    assert words in verdict.why


BUILD = {"host_compiler": "GNU 12", "cuda": True, "cuda_compiler": "13.0.48", "cuda_architectures": ["80", "90a-real"]}
TORCH = {"version": "2.11.0", "cuda": "13.0", "driver_cuda": "13.0", "threads": 2, "devices": []}
H200 = {"index": 0, "name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 2**37}
T4 = {"index": 1, "name": "Tesla T4", "capability": [7, 5], "memory_bytes": 2**34}


@pytest.mark.parametrize(
    ("build", "torch_facts", "device", "runs", "words"),
    [
        ({}, {"devices": [H200, T4]}, "cuda:0", True, "NVIDIA H200, sm_90: kernels of sm_90a"),
        ({}, {"devices": [H200, T4]}, "cuda:1", False, "Tesla T4, this GPU is sm_75"),
        ({}, {}, "cuda", False, "torch finds no CUDA device"),
        ({}, {"driver_cuda": "12.8"}, "cuda", False, "the driver serves CUDA 12.8, the kernels need 13.0.48"),
        ({}, {"cuda": None, "driver_cuda": None}, "cuda", False, "torch 2.11.0 is a CPU build"),
        (
            {"cuda": False, "cuda_compiler": None},
            {},
            "cuda",
            False,
            "no CUDA compiler was found, or WARPSMITH_CUDA=OFF",
        ),
    ],
)
def test_why_kernels_do_not_run(build, torch_facts, device, runs, words):
    verdict = info.kernels(BUILD | build, TORCH | torch_facts)[device]
    assert verdict.runs is runs
    assert words in verdict.why
