"""The README's Python runs and prints what it says; its speed rows are those of benchmarks/results.csv."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recorded

ROOT = Path(__file__).resolve().parents[1]
OF_MANY_RANKS = "docs/distributed/"  # pages whose blocks start process groups: in a process of their own


def python_pages():
    """README and all pages with a Python block; design notes quote code as it was."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = str(path.relative_to(ROOT))
        if not name.startswith("docs/design/") and "\n```python\n" in path.read_text(encoding="utf-8"):
            yield name


TRAINERS = "docs/huggingface.md"  # whose libraries print what they please
NEEDED = {
    **dict.fromkeys(("README.md", "docs/transformers.md"), ("transformers",)),
    TRAINERS: ("transformers", "accelerate", "peft", "lightning"),
}
DOCUMENTS = [name for name in python_pages() if not name.startswith(OF_MANY_RANKS)]


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def promised_output(code):
    """What comments behind `print(...)` promise, a line each."""
    return re.findall(r"^print\(.*\)\s+# (.*)$", code, re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_run_in_order(name, tmp_path, monkeypatch):
    for library in NEEDED.get(name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    if name == TRAINERS:
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of tests before this one
    blocks = python_blocks((ROOT / name).read_text(encoding="utf-8"))
    assert blocks, f"{name} has no python block"
    scope = {"__name__": "readme"}
    for code in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), scope)
        assert printed.getvalue().splitlines() == promised_output(code) or name == TRAINERS
    assert scope.get("failed", {}) == {}


def test_python_blocks_of_many_ranks_run_on_one(tmp_path):
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / OF_MANY_RANKS).glob("*.md"))]
    blocks = [block for page in pages for block in python_blocks(page)]
    assert len(blocks) >= 6
    script = (
        "for code in " + repr(blocks) + ":\n    exec(compile(code, 'docs/distributed', 'exec'), {})\nprint('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    assert (tmp_path / "runs/mine").is_dir()


def test_the_readmes_example_learns():
    """Its model and optimizer, in a loop."""
    pytest.importorskip("transformers")
    scope = {"__name__": "readme"}
    exec(python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))[0], scope)
    model, optimizer, tokens, losses = scope["model"], scope["optimizer"], scope["tokens"], []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_pictures_figures_are_the_recordings():
    medians = script("step_plot").medians()
    speeds, gigabytes = ([round(m[i]) for m in medians.values()] for i in (0, 1))
    torchs, compiled, ours = speeds
    runs = len(script("step_plot").recorded()["step"]["warpsmith"])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{ours} thousand tokens a second beside {torchs} with torch and {compiled} with torch.compile" in text
    assert f"{gigabytes[2]} GB beside {gigabytes[0]} and {gigabytes[1]}]" in text
    exact = [medians[name][0] for name in ("warpsmith", "torch", "torch.compile")]
    times = f"{exact[0] / exact[1]:.2f} times torch's rate and {exact[0] / exact[2]:.2f} times that of torch.compile"
    assert f"{ours} thousand tokens a second, {times}" in text
    for page in (text, (ROOT / "docs/index.md").read_text(encoding="utf-8")):
        assert f"edians of {runs} recordings on H200 cards" in " ".join(page.split())


@pytest.fixture(scope="module")
def speed_table():
    return script("speed_table")


def between_marks(speed_table, document):
    text = (ROOT / document).read_text(encoding="utf-8")
    return text.split(speed_table.BEGIN)[1].split(speed_table.END)[0].strip()


def test_the_readmes_speed_rows_are_those_of_the_newest_runs(speed_table):
    assert between_marks(speed_table, "README.md") == speed_table.summary(speed_table.recordings()).strip()


def test_the_docs_build_puts_the_tables_into_their_page(speed_table):
    page = speed_table.page((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    assert page.count("\n## sm_80 code on an H200\n") == 1 and speed_table.MARK not in page
    for gpu in (speed_table.GPU, speed_table.PORTABLE, speed_table.NO_GPU):
        ours = {
            row["op"] for row in speed_table.all_rows(speed_table.recordings(gpu)) if row["contender"] == "warpsmith"
        }
        assert len(ours) > 5 and not [op for op in ours if f"\n| `{op}`" not in page]
    with pytest.raises(ValueError, match="expected one line <!-- speed tables -->"):
        speed_table.page(page)


def measured(op, direction, device="cuda", shape="4x4", unit="ms", **values):
    """Rows of one cell; names with `__` for `, `."""
    row = {"op": op, "shape": shape, "dtype": "bfloat16", "direction": direction, "device": device, "unit": unit}
    more = {"spread": 0.1, "tb_s": None, "note": "no reason"}
    copy = values.get("copy_")
    return [
        {
            **row,
            **more,
            "contender": name.replace("__", ", "),
            "value": v,
            "of_yardstick": copy / v if copy and v else None,
        }
        for name, v in values.items()
    ]


def facts(name, date="2026-01-01 10:00:00 UTC", **more):
    """A line of recordings.csv."""
    said = {"recording": name, "date": date, "rivals": "liger-kernel 0.8.5, apex absent"}
    return dict.fromkeys(recorded.FACTS, "some") | said | more


@pytest.fixture
def recording(speed_table, monkeypatch):
    """The tables, or the summary, of some rows."""

    def table(*cells, short=False):
        runs = [recorded.Recording(facts("run"), [row for cell in cells for row in cell])]
        monkeypatch.setattr(speed_table, "recordings", lambda gpu: [])
        devices = [
            [run._replace(rows=[r for r in run.rows if r["device"] == d]) for run in runs] for d in ("cuda", "cpu")
        ]
        return (speed_table.summary(devices[0]) if short else speed_table.tables(*devices)).splitlines()

    return table


def test_a_faster_rival_keeps_its_row_beside_both_directions(recording):
    lines = recording(
        measured("rope", "forward", warpsmith=1.0, torch=2.0, copy_=0.97),
        measured("rope", "backward", warpsmith=2.0, torch=3.0, compiled=1.0, copy_=0.5),
        measured("rms_norm", "forward", warpsmith=0.05, torch=0.1),
    )
    rms, rope = (x for x in lines[lines.index("All sizes:") :] if x.startswith("| `r"))
    forward = "| 1 ms (10%) | 0.97 | torch, 2 ms (10%) | 2.00 |"
    assert rope == f"| `rope` | 4x4 {forward} 2 ms (10%) | 0.25 | compiled, 1 ms (10%) | 0.50 |"
    assert rms == "| `rms_norm` | 4x4 | 50 us (10%) |  | torch, 100 us (10%) | 2.00 |  |  |  |  |"
    assert "Rivals: torch eager, `torch.compile`, liger-kernel 0.8.5 (not installed: apex)." in lines[0]


def test_variants_memory_and_training_have_their_lines(recording):
    loss = {"op": "linear_cross_entropy", "shape": "8x9"}
    lines = recording(
        measured(**loss, direction="forward + backward", warpsmith=2.0, warpsmith__none=3.0, torch=4.0, cce=None),
        measured(**loss, direction="peak memory", unit="MB", warpsmith=1000.0, warpsmith__none=1500.0, torch=4000.0),
        measured("train_gpt", "step", shape="gpt2-124m 64x1024", warpsmith=100.0, torch=200.0),
    )
    one, none = (x for x in lines[lines.index("All sizes:") :] if x.startswith("| `linear"))
    assert one.startswith("| `linear_cross_entropy` | forward + backward | 8x9 | 2 ms (10%) |")
    assert one.endswith("|  | torch, 4 ms (10%) | 2.00 | 1.00, 4.00 GB |")
    assert none.startswith("| `linear_cross_entropy`, none | ")
    assert none.endswith("| 1.33 | 1.50, 4.00 GB |")
    rates = "Tokens a second in training `gpt2-124m` (64x1024 a step): warpsmith 655,360, torch 327,680."
    assert rates in lines
    assert "Without a time: cce at `linear_cross_entropy` 8x9 (no reason)." in lines


def test_several_runs_are_a_list_and_their_machine_is_named_once(speed_table):
    runs = [
        recorded.Recording(facts(f"run-{day}", f"2026-01-0{day} 10:00:00"), measured(op, "forward", warpsmith=1.0))
        for day, op in ((2, "rope"), (1, "adamw"))
    ]
    lines = speed_table.tables(runs, runs).splitlines()
    assert lines[2:4] == [
        "- 2026-01-02 10:00, recording `run-2`: `rope`",
        "- 2026-01-01 10:00, recording `run-1`: `adamw`",
    ]
    assert lines[0].count("driver some") == 1 and lines[5].startswith("Rivals: ")
    first = speed_table.summary(runs).splitlines()[0]
    assert "2 runs from 2026-01-01 to 2026-01-02: [list](benchmarks/recordings.csv)). Rivals" in first


def test_the_cpu_has_tables_of_its_own(recording):
    lines = recording(
        measured("rope", "forward", device="cpu", warpsmith=1.0, torch=2.0),
        measured("rms_norm", "forward", warpsmith=1.0),
    )
    marks = [i for i, x in enumerate(lines) if x.startswith(("The CPU", "| `rope`"))]
    assert len(marks) == 2
    assert lines[marks[0]].startswith("The CPU")
    assert "| `rope` | 4x4 bf16 | 1 ms" in lines[marks[1]]


def test_the_summary_has_an_op_once_and_names_who_is_faster(recording):
    lines = recording(
        measured("rope", "forward", shape="4x4", warpsmith=1.0, torch=8.0, liger=1.1, copy_=0.97),
        measured("rope", "backward", shape="4x4", warpsmith=1.0, torch=8.0, liger=0.99),
        measured("rope", "forward", shape="2x2", warpsmith=1.0, torch=8.0, liger=0.5),
        measured("adamw", "step", warpsmith=1.0, torch__fused=None, torch=2.0),
        measured("adamw", "peak memory", unit="MB", warpsmith=1000.0, torch=4000.0),
        measured("adamw", "host", warpsmith=1.0, torch=0.1),
        short=True,
    )
    assert [x for x in lines if x.startswith("| `")] == [
        "| `rope` | 4x4 | 1 ms | 0.97 | 8.00 | 1.10 liger | 1 ms |  | 8.00 | 0.99 liger |",
        "| `adamw`, step | 4x4 | 1 ms |  | 2.00 | 2.00 torch |  |  |  |  |",
    ]
    cells = "Over all sizes a rival is more than 2% faster in 1 of 4 cells: `rope` 2x2 forward (0.50 liger)."
    assert cells in lines


def test_the_summary_says_what_a_faster_rival_holds_in_memory(recording):
    lines = recording(
        measured("linear_log_prob", "forward + backward", warpsmith=2.0, torch=1.0),
        measured("linear_log_prob", "peak memory", unit="MB", warpsmith=1000.0, torch=4000.0),
        short=True,
    )
    what = "`linear_log_prob` 4x4 forward + backward (0.50 torch, memory: 4.00 GB beside our 1.00 GB)"
    assert f"Over all sizes a rival is more than 2% faster in 1 of 1 cells: {what}." in lines
