"""The host bodies of the device vocabulary against what a card computed (tools/gpu/conformance)."""

import shutil
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "sim"), str(ROOT / "tools" / "gpu" / "conformance")]
import pins  # noqa: E402
import vectors  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
FOLDER = ROOT / "tools" / "gpu" / "conformance"
STRIDE = 5  # of the seeds; `conformance check` of the unpacked file replays all


@pytest.fixture(scope="module")
def program() -> Path:
    return build.build_program(FOLDER / "conformance.cu")


def test_host_bodies_compute_what_the_card_computed(program: Path, verdicts, figure) -> None:
    key = verdict.key("conformance", [build.made_from(program)], STRIDE, [vectors.PACKED, Path(__file__)])
    if verdicts.known(key):
        return
    result = build.run(program, ["check", str(vectors.unpacked(build.BUILD)), str(STRIDE)])
    unproven = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("unproven ")]
    if unproven:
        warnings.warn(f"primitives without a vector from a card: {', '.join(unproven)}", stacklevel=1)
    assert result.returncode == 0, result.stdout
    count = sum(not line.startswith("#") for line in vectors.text().splitlines())
    figure(f"{count:,} vectors from a card; primitives without one: {', '.join(unproven) or 'none'}")
    if not unproven:
        verdicts.keep(key)


def test_vectors_come_from_a_card_and_stay_small() -> None:
    assert "host execution layer" not in vectors.text().splitlines()[0]
    assert vectors.PACKED.stat().st_size < 160_000


def test_packing_keeps_every_line_and_adding_replaces_one(monkeypatch, tmp_path: Path) -> None:
    lines = vectors.text()
    monkeypatch.setattr(vectors, "PACKED", tmp_path / "golden.txt.xz")
    vectors.pack(lines)
    assert vectors.unpacked(tmp_path).read_text() == lines
    new = "# another card\nexp2 0 3f800000\nnovel 0 00000000\n"
    before, after = vectors.by_primitive(lines), vectors.by_primitive(vectors.added(lines, new))
    assert after.pop("exp2") == ["exp2 0 3f800000"] and after.pop("novel") == ["novel 0 00000000"]
    assert after == {name: found for name, found in before.items() if name != "exp2"}
    assert len(vectors.summary(lines).splitlines()) == len(before)


def test_a_wrong_vector_is_noticed(program: Path, tmp_path: Path) -> None:
    written = tmp_path / "vectors.txt"
    recorded = build.run(program, ["record", str(written)])
    assert recorded.returncode == 0, recorded.stdout
    lines = written.read_text().splitlines()
    assert len(lines) > 10_000
    assert build.run(program, ["check", str(written), "20"]).returncode == 0
    for primitive in ("wgmma.bfloat16.64.swizzle128.k.k", "exp2"):
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{primitive} 0 ")]
        name, seed, text = lines[at].split()
        changed = [*lines[:at], f"{name} {seed} {'%x' % (int(text[0], 16) ^ 1)}{text[1:]}", *lines[at + 1 :]]
        written.write_text("\n".join(changed))
        result = build.run(program, ["check", str(written), "20"])
        assert result.returncode == 1 and f"differs {primitive} seed 0" in result.stdout, result.stdout


def test_inline_ptx_is_what_a_card_has_run(figure) -> None:
    changed = "\n".join(map(str, pins.changed()))
    assert not changed, f"changed since its run on a card (tools/gpu/conformance/README.md):\n{changed}"
    never = sorted({p.function for p in pins.never_run()})
    if never:
        warnings.warn(f"inline PTX that no run on a card covers: {', '.join(never)}", stacklevel=1)
    rest = ", ".join(never) or "none"
    figure(f"{len(pins.pieces())} pieces of inline PTX, each with its run on a card; without one: {rest}")


# (file, text, what takes its place, the function that is named): waits too weak, scopes too small, wrong operands.
EDITS = [
    ("async_copy.h", "wait_group %0", "wait_group 1", "copy_async_wait"),
    ("bulk_copy.h", '"n"(GroupsInFlight)', '"n"(GroupsInFlight + 1)', "bulk_wait_read"),
    ("mbarrier.h", "fence.mbarrier_init.release.cluster", "fence.mbarrier_init.release.cta", "mbarrier_init_fence"),
    ("cluster.h", "#elif __CUDA_ARCH__ >= 900", "#elif __CUDA_ARCH__ >= 1000", "cluster_wait"),
    ("wgmma_instruction.h", 'WARPSMITH_F48, "%48"', 'WARPSMITH_F48, "%47"', "WARPSMITH_WGMMA_SHAPES"),
    ("async_copy.h", "valid ? Bytes : 0", "Bytes", "copy_async"),
]


@pytest.mark.parametrize(("name", "old", "new", "function"), EDITS, ids=[e[3] for e in EDITS])
def test_an_edit_of_inline_ptx_is_noticed(name: str, old: str, new: str, function: str) -> None:
    text = (pins.DEVICE / name).read_text()
    assert old in text
    known = pins.load()
    found = [p for p in pins.pieces_of(name, text.replace(old, new)) if p.key not in known]
    assert {p.function for p in found} >= {function}


@pytest.mark.parametrize("name", ["async_copy.h", "cluster.h", "mbarrier.h"])
def test_comments_and_layout_of_inline_ptx_do_not_count(name: str) -> None:
    text = (pins.DEVICE / name).read_text()
    other = text.replace("asm volatile(", "asm  volatile(  // a comment\n      ").replace("%0, %1", '%0, " "%1')
    known = pins.load()
    assert other != text and all(p.key in known for p in pins.pieces_of(name, other))
