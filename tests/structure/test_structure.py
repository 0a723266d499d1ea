"""The laws of the house, on the project itself."""

import doctest
import importlib
import os
import pkgutil
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import arrows
import docstrings
import pytest
import rules
import warpsmith
from files import ROOT

from tools import families

HERE = Path(__file__).parent
IMPORT_LIMIT_MS = 50


def none(violations):
    assert not violations, "\n" + "\n".join(violations)


def test_includes_follow_the_table_of_arrows():
    none(arrows.include_violations(ROOT))


def test_imports_follow_the_table_of_arrows():
    none(arrows.import_violations(ROOT, rules.read_exceptions(HERE / "private_uses.txt")))


def test_no_modules_import_each_other():
    none(arrows.import_circles(ROOT))


def test_every_row_has_its_files():
    assert families.rows(), "no row found: the rule would check nothing"
    none(rules.missing_rooms(ROOT, families.rows(), families.optimizers()))


def test_every_file_of_an_op_or_family_has_its_row():
    none(rules.without_a_row(ROOT, families.rows()))


@pytest.fixture
def op_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("op_tables")


def test_the_generated_tables_are_those_of_the_rows(op_tables):
    none(op_tables.stale())


def test_the_section_of_a_new_op_is_begun_in_its_place(op_tables):
    page = (ROOT / "docs/ops/activation.md").read_text()
    before, rest = page.split("\n## reglu\n")
    begun = op_tables.with_sections("activation", before + rest[rest.index("\n## ") :])
    assert [x for x in begun.splitlines() if x.startswith("## ")] == [
        x for x in page.splitlines() if x.startswith("## ")
    ]
    begin = "## reglu\n\nThe gated linear unit with a rectifier.\n\n"
    assert begin + "<!-- reglu -->\n" in begun
    assert begin + "As [`swiglu`]" in op_tables.built("ops/activation", begun)


def test_no_module_hides_a_package():
    none(rules.hiding_modules(ROOT))


def test_files_are_short():
    exceptions = rules.read_exceptions(HERE / "exceptions.txt")
    none(rules.too_long(ROOT, exceptions) + rules.stale_exceptions(ROOT, exceptions))
    long = [f"{path} ({n})" for n, path in rules.line_counts(ROOT) if n > rules.SOFT_LINES]
    if long:
        warnings.warn(f"files above {rules.SOFT_LINES} lines: {', '.join(long)}", stacklevel=1)


def test_inline_assembly_stays_in_device():
    none(rules.inline_assembly(ROOT))


def test_kernels_are_launched_through_the_wrapper():
    none(rules.bare_launches(ROOT))


def test_the_code_is_asked_and_not_the_device():
    none(rules.questions_to_the_device(ROOT))


def test_discarded_branches_have_braces_around_unrolled_loops():
    none(rules.unbraced_discards(ROOT))


def test_names_of_tests_are_short():
    none(rules.long_test_names(ROOT))


def test_no_unfinished_work():
    none(rules.notes_to_self(ROOT))


def test_experiments_say_what_they_answer():
    none(rules.experiments_without_a_question(ROOT))


def test_no_pickle():
    none(rules.pickling(ROOT))


def test_cited_paths_exist():
    none(rules.dead_citations(ROOT))


def test_public_names_are_documented():
    names = ("nn", "optim", "distributed", "train")
    modules = [warpsmith] + [importlib.import_module(f"warpsmith.{name}") for name in names]
    none(docstrings.undocumented(modules))


def modules_of_the_package():
    # __main__ runs something at import; the compiled modules have no examples.
    names = [m.name for m in pkgutil.walk_packages(warpsmith.__path__, "warpsmith.")]
    return [n for n in names if not n.endswith(("__main__", "._C", "libwarpsmith_ops"))]


@pytest.mark.parametrize("name", modules_of_the_package())
def test_examples_in_docstrings_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("warpsmith"):
            raise
        pytest.skip(f"optional package {error.name} is not installed")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert results.failed == 0


# Processor time, not the clock's: the test must not depend on what else the machine does.
IMPORT_CODE = """
import sys, time
import torch
start = time.process_time()
import warpsmith
elapsed = time.process_time() - start
late = tuple(f"warpsmith.{name}" for name in ("distributed", "testing", "train"))
assert not [m for m in sys.modules if m.startswith(late)], "imported before it was asked for"
print(1e3 * elapsed)
"""


def test_import_is_quick():
    # With bytecode, as pip leaves a package; the first import writes it where an editable install has none.
    with_bytecode = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", IMPORT_CODE]
    times = []
    for _ in range(6):
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=with_bytecode)
        times.append(float(run.stdout.split()[-1]))
    times = times[1:]
    assert statistics.median(times) <= IMPORT_LIMIT_MS, f"milliseconds beyond torch: {times}"
