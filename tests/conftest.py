"""Which tests run, in which order, and what a session prints at its end.

Tiers. Without an option: does the package work on this machine? Every op's law, every kernel on the CPU, the examples.
``--full`` adds what asks whether the sources are right: sanitizers, random cases, planted bugs, static checks, the
house rules, the package as it is built; of planted bugs and sanitizers those that a commit's turn has. ``--slow`` adds
all of them, and the tests marked ``slow``. Files and folders that are named on the command line run whole. ``gpu``
tests are skipped without a CUDA device.

Under pytest-xdist's ``--dist loadgroup`` the tests of a file run in one process, unless they name another group; the
groups that took longest come first (``--no-loadscope-reorder`` keeps that order). A test that passed before with the
same content may answer from the store (tools/sim/store.py); ``--no-cache`` runs all. Figures that tests hand to
``figure``, the coverage of device code, and where the time went are printed when the session ends."""

import gc
import hashlib
import importlib.util
import math
import os
import sys
import types
import unittest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import library  # noqa: E402
import tiers  # noqa: E402

if "--sim" in sys.argv:  # before anything imports warpsmith, which takes the library that is there
    library.load()
if importlib.util.find_spec("expecttest") is None:
    # torch's sample inputs (op_db, optim_db) lie beside a base class of torch's own tests, which derives from this one.
    # No test here uses that class, so that a GPU machine without expecttest runs every test.
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)


def inductor_cache():
    """A cache of compiled graphs for each state of the bindings: torch's keys hold names of ops, not their schemas nor
    the formulas of their gradients, so that a cached graph would call what the ops once were."""
    folders = ("csrc/bindings", "python/warpsmith/_core", "python/warpsmith/ops")
    sources = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(sources) if p.suffix != ".pyc"))
    return ROOT / "build" / "inductor" / digest.hexdigest()[:16]


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache()))
# Two ranks or threads on a small machine must not fight for cores with OpenMP's spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also sanitizers, random cases, static checks, house rules")
    parser.addoption("--slow", action="store_true", help="--full without a budget, and the tests marked slow")
    parser.addoption("--sim", action="store_true", help="ops run by their CUDA kernels, simulated on the CPU")
    parser.addoption("--no-cache", action="store_true", help="run what passed before with the same content, too")


def pytest_configure(config):
    if config.getoption("--no-cache"):
        os.environ["WARPSMITH_CACHE"] = "off"
    config.stash[tiers.PLAN] = tiers.Plan.of(config)


def pytest_make_parametrize_id(config, val, argname):
    """On the device "cpu" of tests beside the specs, too, it is the kernels that run: they are chosen by `-k sim-`."""
    return "sim-kernels" if argname == "device" and val == "cpu" and config.getoption("--sim") else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["warpsmith"] = node.config.stash[tiers.PLAN].text()


def runs_on_sim(item):
    """No kernel takes float64, nor does a test that is marked."""
    import torch

    values = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
    wide = [v for v in values if v is torch.float64 or (isinstance(v, tuple) and torch.float64 in v)]
    return not wide and not item.get_closest_marker("not_on_sim")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    import torch

    plan = config.stash[tiers.PLAN]
    no_cuda = pytest.mark.skip(reason="no CUDA device")
    not_asked = pytest.mark.skip(reason="slow; run with --slow")
    left_out = []
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_cuda)
        if item.name.endswith("-random_cases]"):  # likewise
            item.add_marker(pytest.mark.full)
        if "more_elements_than_int32" in item.name:  # of every op's law; up to 30 GB
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(not_asked)
        if plan.whole and not config.getoption("--slow") and (reason := tiers.out_of_turn(item)):
            item.add_marker(pytest.mark.skip(reason=reason))
        if (tiers.is_full(item) and not plan.full) or (config.getoption("--sim") and not runs_on_sim(item)):
            left_out.append(item)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
        tiers.describe(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items[:] = plan.longest_first(items)
    if hasattr(config, "workerinput") and hasattr(pytest.Item, "id"):
        # pytest-xdist 3.8 writes the group into _nodeid, which pytest 9.2 no longer reads.
        for item in items:
            item._id = type(item._id).parse(f"{item.nodeid}@{tiers.group_of(item)}")


def pytest_collection_finish():
    """Thousands of tests stay to the end: Python's collector need not walk over them each time, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_teardown(item):
    """The tests of several processes share a card: a large test's memory goes back to it."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def figure(record_property):
    """``figure(text)`` prints a line at the end of the session, also from another process."""
    return lambda text: record_property("figure", text)


@pytest.fixture
def verdicts(record_property):
    """What passed before with the same content: ``known(key)``, and ``keep(key, value)`` after a test's last assert."""
    return tiers.Verdicts(record_property)


@pytest.fixture
def sanitizers(request):
    """The seconds that the session's processes may spend on sanitizers; a test that they do not suffice for is skipped
    where it calls ``begin``."""
    plan = request.config.stash[tiers.PLAN]
    limited = plan.whole and not request.config.getoption("--slow")
    budget = tiers.SANITIZERS_S if limited else math.inf
    return tiers.Spent.of(plan, budget, plan.expected(tiers.group_of(request.node)))


def pytest_terminal_summary(terminalreporter):
    passed = terminalreporter.stats.get("passed", [])
    properties = [p for report in passed if report.when == "call" for p in report.user_properties]
    if figures := [text for name, text in properties if name == "figure"]:
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(figures))
    if dumped := [path for name, path in properties if name == "sim coverage"]:
        terminalreporter.section("coverage of device code and launchers on the CPU")
        terminalreporter.write_line(merged_coverage(dumped)[0])
    tiers.print_times(terminalreporter, terminalreporter.config.stash[tiers.PLAN])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # behind pytest's summary, as the session's last line
def pytest_sessionfinish(session):
    """A session that ran every sim test fails below the floor of coverage."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    passed = [r for r in reporter.stats.get("passed", []) if r.when == "call"]
    dumped = [path for r in passed for name, path in r.user_properties if name == "sim coverage"]
    for line in merged_coverage(dumped)[1] if dumped else []:
        reporter.write_line(f"FAILED coverage of device code: {line}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def imported_files():
    """Of the repository; of an installed package those that it was made from."""
    import warpsmith

    folders = {ROOT: "", Path(warpsmith.__file__).parent: "python/warpsmith/"}
    files = [Path(m.__file__) for m in [*sys.modules.values()] if getattr(m, "__file__", None)]
    places = {
        f"{to}{f.relative_to(folder)}" for folder, to in folders.items() for f in files if f.is_relative_to(folder)
    }
    return {place for place in places if place.endswith(".py") and not place.startswith(".")}


def pytest_unconfigure(config):
    if library.NAMES_IMPORTS in os.environ:
        print(library.IMPORTED + " ".join(sorted(imported_files())))
    if path := os.environ.get(library.LAUNCHES):
        from warpsmith.testing import sim

        sim.write_launched_kernels(path)
    if not hasattr(config, "workerinput"):
        spent = tiers.Spent.of(config.stash[tiers.PLAN], 0).file
        for file in (spent, spent.with_suffix(".lock")):
            file.unlink(missing_ok=True)


def merged_coverage(dumped):
    """The table of a session, and what is below the floor if the session ran all tests."""
    import device_coverage

    import build

    counts = device_coverage.Coverage()
    for path in dumped:
        counts.merge(Path(path))
    table, low = counts.table()
    all_ran = len(dumped) >= len(build.tests_of(None)) + len(library.FAMILIES) * len(library.COUNTED)
    return table, [f"{device_coverage.FLOOR}: {', '.join(low)}"] if low and all_ran else []
