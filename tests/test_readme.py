"""The README's Python runs and prints what it says; its speed table is that of the file it names."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPS = sorted(f"docs/ops/{page.name}" for page in (ROOT / "docs/ops").glob("*.md") if page.name != "index.md")
DOCUMENTS = ("README.md", "docs/index.md", *OPS, "docs/testing.md")


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def promised_output(code):
    """What comments behind `print(...)` promise, a line each."""
    return re.findall(r"^print\(.*\)\s+# (.*)$", code, re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_run_in_order(name):
    blocks = python_blocks((ROOT / name).read_text(encoding="utf-8"))
    assert blocks, f"{name} has no python block"
    scope = {"__name__": "readme"}
    for code in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), scope)
        assert printed.getvalue().splitlines() == promised_output(code)
    assert scope.get("failed", {}) == {}


def test_the_readmes_example_learns():
    scope = {"__name__": "readme"}
    exec(python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))[0], scope)
    assert scope["losses"][-1] < 0.2 * scope["losses"][0]


@pytest.fixture
def speed_table():
    spec = importlib.util.spec_from_file_location("speed_table", ROOT / "docs/speed_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_speed_table_is_that_of_the_file_it_names(speed_table):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split(speed_table.BEGIN)[1].split(speed_table.END)[0].strip()
    (named,) = {name for name in re.findall(r"`(benchmarks/results/[^`]+\.json)`", shown) if "layers" not in name}
    assert shown == speed_table.table(ROOT / named).strip()


def test_a_faster_rival_keeps_its_row(speed_table):
    row = {"op": "o", "shape": "4x4", "dtype": "bfloat16", "direction": "forward", "spread": 0.1, "of_yardstick": 0.5}
    contenders = {"warpsmith": 2.0, "torch": 3.0, "torch.compile": 1.0, "copy_": 0.5, "broken": None}
    rows = [{**row, "contender": name, "value": value, "unit": "ms"} for name, value in contenders.items()]
    (cell,) = speed_table.cells(rows)
    assert speed_table.line(cell).endswith("| torch.compile, 1 ms (10%) | 0.50 |")
