"""Objects and verdicts are known by content alone; tiers, times and the order of groups."""

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
    monkeypatch.delenv("WARPSMITH_CACHE", raising=False)
    monkeypatch.setattr(store, "FOLDER", tmp_path / "kept")
    return tmp_path / "kept"


def test_what_was_put_is_found_unless_the_store_is_off(monkeypatch) -> None:
    key = store.key("kind", 1, ["a"])
    assert store.get(key) is None
    store.put(key, {"seconds": 2})
    assert store.get(key) == store.Entry({"seconds": 2})
    assert store.get(store.key("kind", 2, ["a"])) is None
    monkeypatch.setenv("WARPSMITH_CACHE", "off")
    assert store.get(key) is None
    store.put(store.key("other"), 1)
    monkeypatch.delenv("WARPSMITH_CACHE")
    assert store.get(store.key("other")) is None


# Of builds.


def tree(folder: Path) -> Path:
    """A tree with one kernel-like source and its header."""
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "a.h").write_text("inline int two() { return 2; }\n")
    (folder / "csrc" / "a.cpp").write_text('#include "a.h"\nint main() { return two() - 2; }\n')
    return folder


def compiled(monkeypatch: pytest.MonkeyPatch, root: Path, flags: str = "-O0") -> bool:
    """Whether `compile_object` compiled in a tree."""
    monkeypatch.setattr(build, "ROOT", root)
    seen: list[str] = []
    original = build._compile
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda command: (seen.append(command), original(command))[1])
        build.compile_object(root / "csrc" / "a.cpp", [*flags.split(), f"-I{root / 'csrc'}"], root / "build")
    return any("-c" in command for command in seen)


@with_compiler
def test_an_object_is_known_by_content(monkeypatch, tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    header = one / "csrc" / "a.h"
    assert compiled(monkeypatch, one)
    assert not compiled(monkeypatch, one)
    os.utime(header, (time.time() + 100, time.time() + 100))
    assert not compiled(monkeypatch, one)  # touched, not changed
    header.write_text(header.read_text().replace("2", "1 + 1"))
    os.utime(header, (1, 1))  # as a checkout of an older file may leave it
    assert compiled(monkeypatch, one)
    assert compiled(monkeypatch, one, "-O1")
    assert not compiled(monkeypatch, one, "-O1")
    monkeypatch.setattr(build, "compiler_version", lambda: "another")
    assert compiled(monkeypatch, one, "-O1")


@with_compiler
def test_a_header_that_comes_first_on_the_path_is_seen(monkeypatch, tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    (one / "csrc" / "a.cpp").write_text("#include <a.h>\nint main() { return two() - 2; }\n")
    flags = f"-I{one / 'first'}"
    assert compiled(monkeypatch, one, flags)
    (one / "first").mkdir()
    (one / "first" / "a.h").write_text("inline int two() { return 1 + 1; }\n")
    build._listed.clear()  # as in another process
    assert compiled(monkeypatch, one, flags)


@with_compiler
def test_a_source_edited_while_it_compiles_is_compiled_again(monkeypatch, tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    header, original, compilations = one / "csrc" / "a.h", build._compile, []

    def edited(command: list[str]) -> str:
        output = original(command)
        if "-M" not in command:
            compilations.append(command)
            if len(compilations) == 1:
                header.write_text("inline int two() { return 3 - 1; }\n")
        return output

    monkeypatch.setattr(build, "_compile", edited)
    assert compiled(monkeypatch, one) and len(compilations) == 2
    assert not compiled(monkeypatch, one)


@with_compiler
def test_a_program_is_known_by_its_objects() -> None:
    (smoke,) = build.tests_of("smoke")
    keys = {build.program_key(smoke, variant) for variant in build.VARIANTS}
    assert len(keys) == len(build.VARIANTS)
    assert build.program_key(smoke, "plain") in keys


# Of verdicts.


def test_a_verdict_depends_on_program_arguments_and_tools(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("1")
    key = verdict.key("sim", ["p"], ["--seeds"], [tool])
    assert key == verdict.key("sim", ["p"], ["--seeds"], [tool])
    others = [
        verdict.key("planted", ["p"], ["--seeds"], [tool]),
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


def test_what_is_early_by_the_commit_then_the_longest_group(monkeypatch) -> None:
    plan = tiers.Plan(seconds={"b": 30.0, "sim_a": 1.0, "d": 9.0})

    def item(name: str, group: str, *marks: str) -> SimpleNamespace:
        known = {"xdist_group": SimpleNamespace(args=(group,)), **dict.fromkeys(marks, SimpleNamespace())}
        return SimpleNamespace(nodeid=name, get_closest_marker=known.get)

    items = [item("1", "c"), item("2", "b"), item("3", "sim_new"), item("4", "b"), item("5", "sim_a")]
    early = [item("6", "d", "early"), item("7", "sim_a", "early")]
    orders = set()
    for number in range(8):
        monkeypatch.setattr(tiers, "commit", lambda _, number=number: str(number))
        first, second, *others = (i.nodeid for i in plan.longest_first([*items, *early]))
        assert others == ["3", "2", "4", "5", "1"]
        orders.add((first, second))
    assert orders == {("6", "7"), ("7", "6")}


def test_only_asked_for_tiers_run() -> None:
    some = "test_sim.py test_sim_law.py test_planted_bugs.py build/test_install.py ops/test_softmax.py".split()
    listing = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listing += ["-o", f"testpaths={' '.join(f'tests/{name}' for name in some)}"]

    def collected(*arguments: str) -> set[str]:
        done = subprocess.run([*listing, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line for line in done.stdout.splitlines() if "::" in line}

    default, full = collected(), collected("--full")
    assert default < full
    assert not [t for t in default if t.startswith(tiers.FULL)]
    assert [t for t in default if t.startswith("tests/test_sim.py::test_kernels_on_the_host") and "coverage" in t]
    assert not [t for t in default if "-asan]" in t or "-tsan]" in t or "random_cases" in t]
    assert [t for t in full if t.startswith("tests/build/test_install.py")]


def test_commits_take_turns(monkeypatch) -> None:
    mark = pytest.mark.in_turn(ROOT / "csrc", of=3)
    items = [SimpleNamespace(name=str(n), get_closest_marker=lambda _: mark.mark) for n in range(300)]
    monkeypatch.setattr(tiers, "lately", lambda *paths: False)
    ran = {}
    for head in ("a", "b", ""):  # the last: no repository
        monkeypatch.setattr(tiers, "commit", lambda root, head=head: head)
        ran[head] = {item.name for item in items if not tiers.out_of_turn(item)}
    assert 60 < len(ran["a"]) < 140 and 60 < len(ran["b"]) < 140 and ran["a"] != ran["b"] and len(ran[""]) == 300
    monkeypatch.setattr(tiers, "commit", lambda root: "a")
    monkeypatch.setattr(tiers, "lately", lambda *paths: paths == (ROOT / "csrc",))
    assert not any(map(tiers.out_of_turn, items))


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
    first, second, third = (tiers.Spent(tmp_path / "spent", 10, expected) for expected in (7, 4, 6))
    assert first.begin() and not second.begin()  # seconds that the first has not spent yet
    first.end(5)
    assert first.seconds() == 5 and second.begin() and not third.begin()


def test_a_budget_lets_one_test_take_more(tmp_path: Path) -> None:
    spent = tiers.Spent(tmp_path / "spent", 10, 12)
    assert spent.begin() and not tiers.Spent(tmp_path / "spent", 10).begin()


def test_a_verdict_depends_on_what_its_run_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    files = [tmp_path / name for name in ("imported.py", "other.py")]
    for file in files:
        file.write_text("1")
    kept = verdict.keep_imports("law", {"imported.py"})
    assert kept == verdict.with_imports("law") != verdict.with_imports("another law")
    files[1].write_text("22")
    assert verdict.with_imports("law") == kept
    files[0].write_text("22")
    assert verdict.with_imports("law") != kept
    files[0].unlink()
    assert verdict.with_imports("law") != kept
