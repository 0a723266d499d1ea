"""`python -m warpsmith info`: facts, verdicts, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warpsmith
from warpsmith.cli import info


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
    assert facts["kernels"]["cpu"]["runs"] and facts["kernels"]["cpu"]["code"] is None
    assert facts["problems"] == []


public = [name for name in warpsmith.ops.__all__ if name.islower()]


def test_text_says_the_same():
    done = tool("info")
    assert done.returncode == 0, done.stderr
    first, *_ = done.stdout.splitlines()
    assert first.startswith("verdict    runs on the CPU")
    if not torch.cuda.is_available():
        assert "; CUDA: no, " in first
    for words in (warpsmith.__version__, torch.__version__, "cpu        runs: "):
        assert words in done.stdout
    (ops,) = [line for line in done.stdout.splitlines() if line.startswith("ops        ")]
    assert ops.split()[1:] == [name + "," for name in sorted(public)[:-1]] + [max(public)]
    assert "rms_norm_backward" not in done.stdout
    assert "op         rms_norm_backward: CPU" in tool("info", "--ops").stdout


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
    assert (directory.parent / "include/warpsmith/norm.h").is_file()


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("info", "--json", "--cmake-dir")])
def test_wrong_usage_is_two(arguments):
    done = tool(*arguments)
    assert done.returncode == 2
    assert "usage: python -m warpsmith" in done.stderr


@pytest.mark.parametrize(
    ("capability", "architectures", "runs", "words"),
    [
        ((9, 0), ["80", "90a-real"], True, "(sm_90) with code of sm_90a (machine code)"),
        ((8, 0), ["80", "90"], True, "(sm_80) with code of sm_80 (machine code)"),
        ((8, 9), ["80", "90"], True, "(sm_89) with code of sm_80 (machine code)"),
        ((9, 0), ["80", "90"], True, "(sm_90) with code of sm_90 (machine code)"),
        ((9, 0), ["80"], True, "(sm_90) with code of sm_80 (PTX, compiled by the driver at first use)"),
        ((10, 0), ["80", "90"], True, "(sm_100) with code of sm_90 (PTX"),
        ((12, 0), ["90", "80"], True, "(sm_120) with code of sm_90 (PTX"),
        ((10, 0), ["80", "90a-real"], True, "with code of sm_80 (PTX"),
        ((10, 0), ["80", "90a"], True, "with code of sm_80 (PTX"),
        ((12, 0), ["80-real", "90a-real"], False, "TORCH_CUDA_ARCH_LIST=12.0"),
        ((7, 5), ["80", "90a-real"], False, "sm_75, but the kernels are built for sm_80, sm_90a"),
        ((8, 0), ["86-real"], False, "sm_86"),
        ((9, 0), ["90a-virtual"], True, "with code of sm_90a (PTX"),
        ((9, 0), ["80-virtual"], True, "with code of sm_80 (PTX"),
        ((8, 0), ["80-virtual"], True, "with code of sm_80 (PTX"),
        ((12, 1), ["120-real", "100-real"], True, "with code of sm_120 (machine code)"),
        ((8, 9), ["86-real", "80-real"], True, "with code of sm_86 (machine code)"),
        ((10, 3), ["100a-real"], False, "sm_100a"),
        ((10, 3), ["100f-real"], True, "with code of sm_100f"),
    ],
)
def test_which_architecture_a_gpu_runs(monkeypatch, capability, architectures, runs, words):
    monkeypatch.delenv("CUDA_FORCE_PTX_JIT", raising=False)
    verdict = info.cuda_verdict(capability, architectures, "Some GPU")
    assert verdict.runs is runs
    assert words in verdict.why and verdict.why.startswith("Some GPU")
    assert verdict.device == "sm_{}{}".format(*capability)
    assert (verdict.code is not None) is runs and str(verdict.code or "") in words


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["80", "90"], "with code of sm_90 (PTX"),
        (["80", "90a-real"], "with code of sm_80 (PTX"),
        (["80", "90a"], "with code of sm_90a (PTX"),
        (["90a-real"], "the kernels are built for sm_90a"),
    ],
)
def test_a_driver_told_to_compile_ptx_takes_no_machine_code(monkeypatch, architectures, words):
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    assert words in info.cuda_verdict((9, 0), architectures).why


@pytest.mark.parametrize(
    ("answer", "runs", "code", "words"),
    [
        (90, True, "sm_90a", "with code of sm_90a (machine code)"),
        (80, True, "sm_80", "by its architectures; the driver picked code of sm_80"),
        (RuntimeError("no kernel image\nC++ trace"), False, "sm_90a", "but the driver says: no kernel image"),
    ],
)
def test_the_driver_has_the_last_word(monkeypatch, answer, runs, code, words):
    def ask(index):
        assert index == 3
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch.ops.warpsmith, "_code_capability", ask, raising=False)
    verdict = info.asked(info.cuda_verdict((9, 0), ["80", "90a-real"]), 3)
    assert (verdict.runs, verdict.code) == (runs, code)
    assert verdict.why.endswith(words)
    refused = info.Verdict(False, "no kernels")
    assert info.asked(refused, 3) is refused


@pytest.mark.gpu
def test_the_driver_picks_the_code_that_its_rules_say():
    """What choosers go by, `binaryVersion` and `ptxVersion` of a kernel, against the architectures of the build."""
    facts = info.collect()
    for i in range(torch.cuda.device_count()):
        found = facts["kernels"][f"cuda:{i}"]
        assert found["runs"], found["why"]
        assert "by its architectures" not in found["why"]
        expected = info.cuda_verdict(torch.cuda.get_device_capability(i), facts["build"]["cuda_architectures"])
        assert found["code"] == expected.code


CAPTURED = """
import torch, warpsmith
x = torch.ones(8, device="cuda")
y = x + 1
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    code = torch.ops.warpsmith._code_capability(0)
    y = x + 1
graph.replay()
assert y.sum().item() == 16 and code == torch.ops.warpsmith._code_capability(0)
"""


@pytest.mark.gpu
def test_the_first_question_for_code_may_come_in_a_capture():
    """The first call of an op may be captured: what loads the probe's module must not break the capture."""
    done = subprocess.run([sys.executable, "-c", CAPTURED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_verdict_names_every_device_and_what_to_do():
    kernels = {
        "cpu": info.Verdict(True, "2 threads")._asdict(),
        "cuda:0": info.Verdict(True, "H200")._asdict(),
        "cuda:1": info.Verdict(False, "T4 is sm_75; build with TORCH_CUDA_ARCH_LIST=7.5")._asdict(),
    }
    facts = {"build": None, "torch": None, "library": None, "python": "3", "platform": "x", "ops": {}, "problems": []}
    first = info.text({**facts, "kernels": kernels}).splitlines()[0]
    assert first == (
        "verdict    runs on the CPU and cuda:0; cuda:1: no, T4 is sm_75; build with TORCH_CUDA_ARCH_LIST=7.5"
    )
    broken = info.text({**facts, "kernels": {}, "problems": ["torch is missing"]})
    assert broken.startswith("verdict    nothing runs: torch is missing")


def test_a_line_says_whether_cublas_lt_is_used():
    assert info.cublas_lt({"cuda": False}) == "not used: this build is for the CPU only"
    facts = info.collect()
    line = next(x for x in info.text(facts).splitlines() if x.startswith("cublasLt"))
    assert re.search(r"not used.*: |\d+\.\d+\.\d+$", line), line


BUILD = {"host_compiler": "GNU 12", "cuda": True, "cuda_compiler": "13.0.48", "cuda_architectures": ["80", "90a-real"]}
TORCH = {"version": "2.11.0", "cuda": "13.0", "driver_cuda": "13.0", "threads": 2, "devices": []}
H200 = {"index": 0, "name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 2**37}
T4 = {"index": 1, "name": "Tesla T4", "capability": [7, 5], "memory_bytes": 2**34}


@pytest.mark.parametrize(
    ("build", "torch_facts", "device", "runs", "words"),
    [
        ({}, {"devices": [H200, T4]}, "cuda:0", True, "NVIDIA H200 (sm_90) with code of sm_90a (machine code)"),
        ({}, {"devices": [H200, T4]}, "cuda:1", False, "Tesla T4 is sm_75"),
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
