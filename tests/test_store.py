"""The store of builds and verdicts: hits by content alone, nothing from damage, safe for several processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import launcher  # noqa: E402
import store  # noqa: E402
import tiers  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

with_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A store for the test alone."""
    path = tmp_path / "kept"
    monkeypatch.setenv("WARPSMITH_CACHE", str(path))
    monkeypatch.setattr(store, "_unseen", 0)
    return path


def entries(kept: Path) -> list[Path]:
    return sorted(kept.glob("??/*"))


def test_what_was_put_is_found() -> None:
    key = store.key("test", 1, ["a"])
    assert store.get(key) is None
    assert store.put(key, {"n": 1}, {".o": b"\0\n1", ".gcno": b""})
    assert store.get(key) == store.Entry({"n": 1}, {".o": b"\0\n1", ".gcno": b""})
    assert store.get(store.key("test", 2, ["a"])) is None
    assert store.put(key, None) and store.get(key) == store.Entry(None)


def test_the_folder_belongs_to_its_owner_alone(kept: Path, monkeypatch, capsys) -> None:
    assert store.put("0" * 64, 1)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o077 for p in [*entries(kept), *kept.glob("??")]} == {0}
    kept.chmod(0o777)
    assert store.get("0" * 64) is None and not store.put("0" * 64, 1)
    assert "others must not write to it" in capsys.readouterr().err
    kept.chmod(0o755)
    assert store.get("0" * 64)
    monkeypatch.setenv("WARPSMITH_CACHE", "off")
    assert store.get("0" * 64) is None and not store.put("0" * 64, 1)


def test_without_a_name_it_lies_in_the_users_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WARPSMITH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.folder() == tmp_path / ".cache" / "warpsmith"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "warpsmith"


@pytest.mark.parametrize("damage", [b"", b"short", b"cut", b"flipped", b"text"])
def test_a_damaged_entry_is_a_miss_and_goes(kept: Path, damage: bytes) -> None:
    store.put("1" * 64, "value", {".o": bytes(1000)})
    (path,) = entries(kept)
    data = path.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    path.write_bytes({b"cut": data[:-1], b"flipped": flipped, b"text": store.MAGIC}.get(damage, damage))
    assert store.get("1" * 64) is None
    assert entries(kept) == []
    assert store.put("1" * 64, "again") and store.get("1" * 64) == store.Entry("again")


def test_a_store_that_cannot_be_written_is_a_miss(kept: Path, monkeypatch) -> None:
    monkeypatch.setenv("WARPSMITH_CACHE", "/proc/none/warpsmith")
    assert store.folder() is None and store.get("2" * 64) is None and not store.put("2" * 64, 1)
    monkeypatch.setenv("WARPSMITH_CACHE", str(kept))
    monkeypatch.setattr(store.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    assert not store.put("2" * 64, 1)
    assert entries(kept) == []  # nothing is left behind


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import store
for i in range(60):
    key = f"{i % 5:064x}"
    store.put(key, i, {".o": bytes([i % 5]) * 200_000})
    entry = store.get(key)
    assert entry is None or entry.files[".o"] == bytes([i % 5]) * 200_000, i
    store.evict(store.folder(), 3000)
"""


def test_processes_beside_each_other_read_whole_entries(kept: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(ROOT / "tools" / "sim")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [p.communicate()[1] for p in running] == ["", "", ""]
    assert [p.returncode for p in running] == [0, 0, 0]
    assert not list(kept.glob("??/new-*"))


def test_the_least_recently_used_go_first(kept: Path) -> None:
    keys = [f"{i:064x}" for i in range(10)]
    for i, key in enumerate(keys):
        store.put(key, i, {".o": os.urandom(10_000)})
        os.utime(store._path(kept, key), (i, i))
    assert store.get(keys[0])  # used now
    abandoned, fresh = kept / "00" / "new-old", kept / "00" / "new-young"
    abandoned.write_bytes(b"")
    fresh.write_bytes(b"")
    os.utime(abandoned, (1, 1))
    store.evict(kept, 50_000)
    left = [key for key in keys if store._path(kept, key).exists()]
    assert left == [keys[0], *keys[8:]]  # within four fifths of the limit
    assert fresh.exists() and not abandoned.exists()
    store.evict(kept, 50_000)
    assert len(left) == sum(store._path(kept, key).exists() for key in keys)


def test_a_process_looks_at_the_size_after_so_many_bytes(kept: Path, monkeypatch) -> None:
    monkeypatch.setenv("WARPSMITH_CACHE_MIB", "0")
    monkeypatch.setattr(store, "LOOK_BYTES", 15_000)
    store.put("a" * 64, 0, {".o": os.urandom(10_000)})
    assert len(entries(kept)) == 1
    store.put("b" * 64, 0, {".o": os.urandom(10_000)})
    assert entries(kept) == []


# Of builds.


def tree(folder: Path) -> Path:
    """A tree with one kernel-like source and its header."""
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "a.h").write_text("inline int two() { return 2; }\n")
    (folder / "csrc" / "a.cpp").write_text('#include "a.h"\nint main() { return two() - 2; }\n')
    return folder


def compiled(monkeypatch: pytest.MonkeyPatch, root: Path, flags: str = "-O0", count: list | None = None) -> str:
    """What `compile_object` did in a tree: "kept", "from the store" or "compiled"."""
    monkeypatch.setattr(build, "ROOT", root)
    seen: list[str] = []
    original = build._compile

    def watched(command: list[str]) -> str:
        seen.append("listed" if "-M" in command else "compiled")
        return original(command)

    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", watched)
        target = build.object_path(root / "csrc" / "a.cpp", root / "build")
        before = target.stat().st_mtime_ns if target.exists() else 0
        made = build.compile_object(root / "csrc" / "a.cpp", [*flags.split(), f"-I{root / 'csrc'}"], root / "build")
    assert made == target
    return "compiled" if "compiled" in seen else "kept" if target.stat().st_mtime_ns == before else "from the store"


@with_compiler
def test_an_object_is_known_by_content(monkeypatch, tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    header = one / "csrc" / "a.h"
    assert compiled(monkeypatch, one) == "compiled"
    assert compiled(monkeypatch, one) == "kept"
    os.utime(header, (time.time() + 100, time.time() + 100))
    assert compiled(monkeypatch, one) == "kept"  # touched, not changed
    text = header.read_text()
    header.write_text(text.replace("2", "1 + 1"))
    os.utime(header, (1, 1))  # as a checkout of an older file may leave it
    assert compiled(monkeypatch, one) == "compiled"
    assert compiled(monkeypatch, one, "-O1") == "compiled"
    header.write_text(text)
    assert compiled(monkeypatch, one) == "from the store"
    monkeypatch.setattr(build, "compiler_version", lambda: "another")
    assert compiled(monkeypatch, one) == "compiled"


@with_compiler
@pytest.mark.parametrize("flags", ["-O0 -g1", "-O0 --coverage -fprofile-dir=build/sim/counts"])
def test_a_fresh_clone_finds_what_another_one_compiled(monkeypatch, tmp_path: Path, flags: str) -> None:
    assert compiled(monkeypatch, tree(tmp_path / "one"), flags) == "compiled"
    assert compiled(monkeypatch, tree(tmp_path / "two"), flags) == "from the store"
    found = {p.suffix: p.read_bytes() for p in (tmp_path / "two" / "build").iterdir()}
    assert found == {p.suffix: p.read_bytes() for p in (tmp_path / "one" / "build").iterdir()}
    assert (".gcno" in found) == ("--coverage" in flags)
    monkeypatch.setenv("WARPSMITH_CACHE", "off")
    assert compiled(monkeypatch, tree(tmp_path / "three"), flags) == "compiled"


@with_compiler
def test_a_header_that_comes_first_on_the_path_is_seen(monkeypatch, tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    (one / "csrc" / "a.cpp").write_text("#include <a.h>\nint main() { return two() - 2; }\n")
    flags = f"-I{one / 'first'}"
    assert compiled(monkeypatch, one, flags) == "compiled"
    (one / "first").mkdir()
    (one / "first" / "a.h").write_text("inline int two() { return 1 + 1; }\n")
    build._listed.clear()  # as in another process
    assert compiled(monkeypatch, one, flags) == "compiled"


@with_compiler
def test_a_source_edited_while_it_compiles_is_compiled_again(monkeypatch, tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    header, original, edits = one / "csrc" / "a.h", build._compile, []

    def edited(command: list[str]) -> str:
        output = original(command)
        if "-M" not in command and not edits:
            edits.append(header.write_text("inline int two() { return 3 - 1; }\n"))
        return output

    monkeypatch.setattr(build, "_compile", edited)
    assert compiled(monkeypatch, one) == "compiled"
    monkeypatch.setattr(build, "_compile", original)
    assert compiled(monkeypatch, one) == "kept"
    assert len(list((tmp_path / "kept").glob("??/*"))) == 1  # never the first compilation under either key


@with_compiler
def test_a_program_is_known_by_its_objects() -> None:
    (smoke,) = build.tests_of("smoke")
    keys = {build.program_key(smoke, variant) for variant in build.VARIANTS}
    assert len(keys) == len(build.VARIANTS)
    assert build.program_key(smoke, "plain") in keys


# Of the package, through CMake.


@pytest.fixture
def cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiles in a tree as CMake would with the launcher; the number of times that the compiler ran until now."""
    counted = tmp_path / "counted"
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-c*) echo >> "{counted}";; esac\nexec {build.compiler()} "$@"\n')
    compiler.chmod(0o755)

    def compile_in(root: Path, *flags: str, source: str = "a.cpp") -> int:
        monkeypatch.setattr(launcher, "ROOT", root)
        monkeypatch.chdir(root)
        dependencies = ["-MD", "-MT", "a.o", "-MF", "a.o.d"]
        command = [str(compiler), f"-I{root}/csrc", *flags, *dependencies, "-o", "a.o", "-c", f"{root}/csrc/{source}"]
        for name in ("a.o", "a.o.d"):
            (root / name).unlink(missing_ok=True)
        time.sleep(0.02)  # files that were written now count as edited meanwhile
        assert launcher.run(command) == 0
        assert (root / "a.o").exists()
        assert f"{root}/csrc/a.h" in (root / "a.o.d").read_text().split()
        return len(counted.read_text().splitlines())

    return compile_in


@with_compiler
def test_the_packages_objects_are_found_by_other_clones(cmake, tmp_path: Path, monkeypatch) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert cmake(one) == 1
    assert cmake(one) == 1
    assert cmake(two) == 1
    assert cmake(two, "-O1") == 2
    header = two / "csrc" / "a.h"
    text = header.read_text()
    header.write_text(text.replace("2", "1 + 1"))
    assert cmake(two) == 3
    assert cmake(one) == 3  # both states are known
    header.write_text(text)
    assert cmake(two) == 3
    monkeypatch.setattr(launcher, "version", lambda compiler: "another")
    assert cmake(one) == 4
    monkeypatch.setenv("WARPSMITH_CACHE", "off")
    assert cmake(one) == 5


@with_compiler
def test_what_the_compiler_refuses_stays_refused(tmp_path: Path, monkeypatch) -> None:
    one = tree(tmp_path / "one")
    monkeypatch.setattr(launcher, "ROOT", one)
    monkeypatch.chdir(one)
    (one / "csrc" / "a.cpp").write_text("int main() { return nothing; }\n")
    words = f"{build.compiler()} -MD -MT a.o -MF a.o.d -o a.o -c {one}/csrc/a.cpp".split()
    assert [launcher.run(words) for _ in range(2)] == [1, 1]
    assert entries(tmp_path / "kept") == []
    assert launcher.source_of(["g++", "a.o", "-o", "a"]) is None  # linking is the linker's alone
    assert launcher.source_of(["g++", *words[1:-1], "/usr/include/stdio.h"]) is None


# Of verdicts.


def test_a_verdict_depends_on_program_arguments_and_tools(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("1")
    key = verdict.key("sim", ["p"], ["--seeds"], [tool])
    assert key == verdict.key("sim", ["p"], ["--seeds"], [tool])
    others = [
        verdict.key("fuzz", ["p"], ["--seeds"], [tool]),
        verdict.key("sim", ["q"], ["--seeds"], [tool]),
        verdict.key("sim", ["p"], ["--random"], [tool]),
    ]
    tool.write_text("2 ")
    others.append(verdict.key("sim", ["p"], ["--seeds"], [tool]))
    monkeypatch.setattr(store, "machine", lambda: "another")
    others.append(verdict.key("sim", ["p"], ["--seeds"], [tool]))
    assert len({key, *others}) == 6


def report(name: str, seconds: float, **properties: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=name, when="call", duration=seconds, user_properties=[*properties.items()])


def test_the_table_of_times_counts_verdicts_and_remembers_groups() -> None:
    sums, tests, measured = tiers.times(
        [
            report("tests/test_sim.py::a@sim_a", 5.0, tier="full", group="sim_a", verdict="made"),
            report("tests/test_sim.py::b@sim_b", 0.1, tier="full", group="sim_b", verdict="known"),
            report("tests/ops/test_a.py::a[x]", 2.0, tier="default", group="tests/ops/test_a.py"),
            report("tests/ops/test_b.py::a", 3.0, tier="default", group="tests/ops/test_b.py"),
        ]
    )
    sim, ops = sums["full     tests/test_sim.py"], sums["default  tests/ops"]
    assert (sim.tests, sim.known, ops.tests, ops.seconds) == (2, 1, 2, 5.0)
    assert tests[0] == (5.0, "tests/test_sim.py::a")
    assert measured == {"sim_a": 5.0, "tests/ops/test_a.py": 2.0, "tests/ops/test_b.py": 3.0}


def test_the_longest_group_comes_first() -> None:
    plan = tiers.Plan(seconds={"b": 30.0, "sim_a": 1.0})

    def item(name: str, group: str) -> SimpleNamespace:
        mark = SimpleNamespace(args=(group,))
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark)

    items = [item("1", "c"), item("2", "b"), item("3", "sim_new"), item("4", "b"), item("5", "sim_a")]
    assert [i.nodeid for i in plan.longest_first(items)] == ["3", "2", "4", "5", "1"]


def test_only_asked_for_tiers_run() -> None:
    listing = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    wanted = ["--ignore=tests/ops", "--ignore=tests/optim", "--ignore=tests/nn", "--ignore=tests/examples"]
    wanted += [f"--ignore=tests/{name}" for name in ("convergence", "cpp_api", "structure", "testing", "tools")]

    def collected(*arguments: str) -> set[str]:
        done = subprocess.run([*listing, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line for line in done.stdout.splitlines() if "::" in line}

    default, full = collected(*wanted), collected("--full", *wanted)
    assert default < full
    assert not [t for t in default if t.startswith(tiers.FULL)]
    assert [t for t in default if t.startswith("tests/test_sim.py::test_kernels_on_the_host") and "coverage" in t]
    assert not [t for t in default if "-asan]" in t or "-tsan]" in t or "test_random_cases" in t]
    assert [t for t in full if t.startswith("tests/build/test_install.py")]


def test_named_files_run_whole() -> None:
    def plan(source: str, *options: str) -> tiers.Plan:
        args_source = pytest.Config.ArgsSource[source]
        return tiers.Plan.of(SimpleNamespace(args_source=args_source, getoption=lambda name: name in options))

    assert plan("ARGS").full and not plan("ARGS").whole
    assert plan("TESTPATHS").whole and not plan("TESTPATHS").full
    assert plan("TESTPATHS", "--full").full and plan("TESTPATHS", "--slow").full
    worker = SimpleNamespace(workerinput={"warpsmith": plan("TESTPATHS", "--full").text()})
    assert tiers.Plan.of(worker).full  # whatever a worker of pytest-xdist takes for its arguments


def test_a_budget_is_shared_by_processes(tmp_path: Path) -> None:
    spent = tiers.Spent(tmp_path / "spent")
    assert spent.seconds() == 0
    spent.add(2.5)
    tiers.Spent(tmp_path / "spent").add(1)
    assert spent.seconds() == 3.5
