"""The host bodies of the device vocabulary against what a card computed (tools/gpu/conformance)."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
FOLDER = ROOT / "tools" / "gpu" / "conformance"
GOLDEN = FOLDER / "golden.txt"
STRIDE = 5  # of the seeds; `conformance check golden.txt` replays all


@pytest.fixture(scope="module")
def program() -> Path:
    return build.build_program(FOLDER / "conformance.cu")


def test_host_bodies_compute_what_the_card_computed(program: Path, figure) -> None:
    primitives = [line.split()[0] for line in build.run(program, ["list"]).stdout.splitlines()]
    if not GOLDEN.exists():
        pytest.skip(f"no vectors from a card: all {len(primitives)} primitives are unproven")
    result = build.run(program, ["check", str(GOLDEN), str(STRIDE)])
    unproven = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("unproven ")]
    if unproven:
        warnings.warn(f"primitives without a vector from a card: {', '.join(unproven)}", stacklevel=1)
    assert result.returncode == 0, result.stdout
    vectors = sum(not line.startswith("#") for line in GOLDEN.read_text().splitlines())
    figure(f"{vectors:,} vectors from a card; primitives without one: {', '.join(unproven) or 'none'}")


def test_vectors_come_from_a_card_and_stay_small() -> None:
    if not GOLDEN.exists():
        pytest.skip("no vectors from a card")
    assert "host execution layer" not in GOLDEN.read_text().splitlines()[0]
    assert GOLDEN.stat().st_size < 4 << 20


def test_a_wrong_vector_is_noticed(program: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.txt"
    recorded = build.run(program, ["record", str(vectors)])
    assert recorded.returncode == 0, recorded.stdout
    lines = vectors.read_text().splitlines()
    assert len(lines) > 10_000
    assert build.run(program, ["check", str(vectors), "20"]).returncode == 0
    for primitive in ("wgmma.bfloat16.64.swizzle128.k.k", "exp2"):
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{primitive} 0 ")]
        name, seed, text = lines[at].split()
        changed = [*lines[:at], f"{name} {seed} {'%x' % (int(text[0], 16) ^ 1)}{text[1:]}", *lines[at + 1 :]]
        vectors.write_text("\n".join(changed))
        result = build.run(program, ["check", str(vectors), "20"])
        assert result.returncode == 1 and f"differs {primitive} seed 0" in result.stdout, result.stdout
