"""Markers: ``gpu`` tests are skipped without a CUDA device, ``slow`` ones unless ``--slow`` asks for them; both say
so. Under pytest-xdist's ``--dist loadgroup`` the tests of a file run in one process, unless they name another group.
Figures that tests hand to ``figure``, and the coverage of device code, are printed when the session ends."""

import hashlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def inductor_cache():
    """A cache of compiled graphs for each state of the bindings: torch's keys hold names of ops, not their schemas nor
    the formulas of their gradients, so that a cached graph would call what the ops once were."""
    sources = [
        p for folder in ("csrc/torch", "python/warpsmith/ops") for p in (ROOT / folder).rglob("*") if p.is_file()
    ]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(sources) if p.suffix != ".pyc"))
    return ROOT / "build" / "inductor" / digest.hexdigest()[:16]


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache()))
# Two ranks or threads on a small machine must not fight for cores with OpenMP's spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    import torch

    no_cuda = pytest.mark.skip(reason="no CUDA device")
    not_asked = pytest.mark.skip(reason="slow; run with --slow")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_cuda)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(not_asked)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


@pytest.fixture
def figure(record_property):
    """``figure(text)`` prints a line at the end of the session, also from another process."""
    return lambda text: record_property("figure", text)


def pytest_terminal_summary(terminalreporter):
    passed = terminalreporter.stats.get("passed", [])
    properties = [p for report in passed if report.when == "call" for p in report.user_properties]
    if figures := [text for name, text in properties if name == "figure"]:
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(figures))
    if dumped := [path for name, path in properties if name == "sim coverage"]:
        terminalreporter.section("coverage of device code and launchers on the CPU")
        table, low = merged_coverage(dumped)
        terminalreporter.write_line(table)
        for line in low:
            terminalreporter.write_line(line, red=True)


def pytest_sessionfinish(session):
    """A session that ran every sim test fails below the floor of coverage."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    passed = [r for r in reporter.stats.get("passed", []) if r.when == "call"]
    dumped = [path for r in passed for name, path in r.user_properties if name == "sim coverage"]
    if dumped and merged_coverage(dumped)[1]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def merged_coverage(dumped):
    """The table of a session, and what is below the floor if the session ran all tests."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "sim"))
    import coverage

    import build

    counts = coverage.Coverage()
    for path in dumped:
        counts.merge(Path(path))
    table, low = counts.table()
    all_ran = len(dumped) == len(build.tests_of(None))
    return table, [f"{coverage.FLOOR}: {', '.join(low)}"] if low and all_ran else []
