"""Kernels on the CPU: every tests/cpp/sim_<op>.cpp in three builds. By hand: `python tools/sim/run.py --op <op>`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
SEEDS = {"plain": 8, "asan": 2, "tsan": 2}
RANDOM_CASES = {"plain": 60, "asan": 10, "tsan": 5}


@pytest.mark.parametrize("variant", SEEDS)
@pytest.mark.parametrize("test", build.tests_of(None), ids=lambda p: p.stem)
def test_kernels_on_the_host(test: Path, variant: str) -> None:
    program = build.build(test, variant)
    result = build.run(program, ["--seeds", str(SEEDS[variant]), "--random", str(RANDOM_CASES[variant])])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout, "the program ran no test"
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr


def test_an_unknown_builtin_says_where_to_add_it(tmp_path: Path) -> None:
    source = tmp_path / "sim_unknown.cpp"
    source.write_text('#include "device/platform.h"\n__global__ void k(int* p) { *p = __vabsdiffs4(*p, 1); }\n')
    with pytest.raises(build.BuildError, match=r"csrc/device/host_builtins\.h"):
        build.compile_object(source, [f"-I{ROOT / 'csrc'}"], tmp_path)
