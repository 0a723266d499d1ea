"""The experiments of lab compile, and their runner knows them; nothing of them runs here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
sys.path.insert(0, str(ROOT / "lab"))
import cuda  # noqa: E402
import store  # noqa: E402

import build  # noqa: E402
import lab  # noqa: E402

EXPERIMENTS = lab.experiments()


@pytest.mark.skipif(cuda.nvcc() is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(f"lab {n}")) for n in EXPERIMENTS])
def test_experiments_compile(name: str, verdicts) -> None:
    experiment = EXPERIMENTS[name]
    flags = [*experiment.runs[0].defines]
    key = store.key("lab", cuda.compile_key(experiment.source, "sm_90a", flags), store.digest(Path(cuda.__file__)))
    if verdicts.known(key):
        return
    cuda.check_compiles(experiment.source, "sm_90a", flags)
    verdicts.keep(key)


@pytest.mark.skipif(cuda.nvcc() is None, reason="no nvcc on this machine")
def test_an_experiment_that_does_not_compile_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "a.cu"
    source.write_text("template <class T> __global__ void k() { T::gone(); }\nint main() { k<int><<<1, 1>>>(); }\n")
    with pytest.raises(build.BuildError, match="gone"):
        cuda.check_compiles(source, "sm_90a", [])


def test_the_runner_reads_an_experiments_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ROOT / "lab" / "a.cu"
    text = "// Question: which?\n// links: csrc/b.cu\n// runs: -DN=1 -DM=2 all\n// runs: -DN=2\nint main() {}\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text if path == source else "")
    read = lab.experiment(source)
    assert (read.question, read.links) == ("which?", ("csrc/b.cu",))
    first, second = read.runs
    assert (first.defines, first.arguments, second.arguments) == (("-DN=1", "-DM=2"), ("all",), ())
    assert read.program(first).name == "a_N=1_M=2"
    command = read.command(second, "sm_80")
    assert "-gencode=arch=compute_80,code=sm_80" in command
    assert command[-5:] == ["-DN=2", "lab/a.cu", "csrc/b.cu", "-o", str(ROOT / "build/lab/a_N=2")]
    with pytest.raises(SystemExit, match="first line"):
        lab.experiment(tmp_path / "b.cu")


def test_what_experiments_link_exists() -> None:
    assert EXPERIMENTS
    assert [link for e in EXPERIMENTS.values() for link in e.links if not (ROOT / link).exists()] == []
