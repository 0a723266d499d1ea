"""Writes the tables of ops and optimizers from the families' rows and their pages: in README.md, docs/ops/index.md,
docs/optim/index.md and docs/api/warpsmith.md.

    python docs/op_tables.py           # writes them
    python docs/op_tables.py --check   # says which are not what it would write

Which ops there are, and their order, come from csrc/kernels/<family>/<family>_ops.h. What a table says of an op comes
from the lines of the tables on its page, docs/ops/<op>.md; of lines that begin alike, from the first.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.families import optimizers, rows  # noqa: E402

MARKS = {name: (f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n") for name in ("ops", "optimizers")}
OF_AN_OPTIMIZER = ("class", "as in torch", "states", "options", "bytes a parameter", "beside torch's")
NEEDED = ("C++", "dtypes", "derivatives", "compile, export", "CUDA graphs", "forward", "backward")


def cells(path: str) -> dict[str, str]:
    """The cells of a page's tables, by the first cell of their line; of lines that begin alike, the first."""
    return dict(reversed(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", (ROOT / path).read_text(), re.MULTILINE)))


def facts(op: str) -> dict[str, str]:
    """The cells of an op's page, by the first cell of their line."""
    found = cells(f"docs/ops/{op}.md")
    names = found.get("function, module") or found.get("function")
    missing = [name for name in NEEDED if name not in found] + ["function, module"] * (names is None)
    if missing:
        raise SystemExit(f"docs/ops/{op}.md: its table has no line {', '.join(missing)}")
    second = re.search(r"second[^:]*: ([^;]+)", found["derivatives"])
    return {**found, "names": names or "", "second": second[1] if second else found["derivatives"]}


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def table(head: list[str], lines: list[list[str]]) -> str:
    return line(head) + "|---" * len(head) + "|\n" + "".join(map(line, lines))


# What a family is called in the README; others go by their folder's name.
TITLES = {
    "norm": "norms, alone or with residual sum and dropout",
    "rope": "rotary embedding, alone or with norms of the heads",
    "attention": "attention, batched or packed",
    "activation": "activations: gated, behind a bias, dropout and sum",
    "cross_entropy": "loss, with its gradient in the same pass",
    "linear_loss": "language-model head with loss or log-probabilities",
    "optim": "optimizer, one launch for all parameters",
}


def readme_table() -> str:
    """A row a family: its ops, and the modules around them."""
    families: dict[str, list[str]] = {}
    for row in rows():
        families.setdefault(row.family, []).append(row.name)
    lines = []
    for family, ops in families.items():
        modules = [name for op in ops for name in re.findall(r"`warpsmith\.((?:nn|optim)\.\w+)`", facts(op)["names"])]
        links = ", ".join(f"[`{op}`](docs/ops/{op}.md)" for op in ops)
        lines.append([TITLES.get(family, family), links, ", ".join(f"`{m}`" for m in dict.fromkeys(modules))])
    return table(["what", "ops: `warpsmith.<op>`, and C++", "modules"], lines)


def index_table() -> str:
    """The same with dtypes and what traces and captures an op."""
    columns = ("forward", "backward", "second", "dtypes", "compile, export", "CUDA graphs")
    found = [(row.name, facts(row.name)) for row in rows()]
    lines = [[f"[`{op}`]({op}.md)", *(f[c] for c in columns)] for op, f in found]
    heads = [
        "op",
        "forward",
        "backward",
        "second derivative",
        "dtypes",
        "`torch.compile`, `torch.export`",
        "CUDA graphs",
    ]
    return table(heads, lines)


def optimizer_page(row: str) -> str:
    """Where an optimizer's page is, below docs."""
    return f"ops/{row}.md" if any(op.name == row for op in rows()) else f"optim/{row}.md"


def optimizer_table(columns: tuple[str, ...], folder: str) -> str:
    """The optimizers; links are from a page in `folder`."""
    lines = []
    for row in optimizers():
        page = optimizer_page(row)
        found = cells(f"docs/{page}")
        if missing := [name for name in OF_AN_OPTIMIZER if name not in found]:
            raise SystemExit(f"docs/{page}: its table has no line {', '.join(missing)}")
        lines.append([f"[{found['class']}]({folder}{page})", *(found[c] for c in columns)])
    return table(["class", *columns], lines)


def api_page() -> str:
    """Every op, and what else the package exports but modules."""
    import warpsmith

    ops = [row.name for row in rows()]
    others = [n for n in warpsmith.__all__ if n not in ops and callable(getattr(warpsmith, n))]
    kinds = {n: "autoclass" if isinstance(getattr(warpsmith, n), type) else "autofunction" for n in others}
    entries = [f".. autofunction:: warpsmith.{op}" for op in ops] + [f".. {kinds[n]}:: warpsmith.{n}" for n in others]
    return "# warpsmith\n\n```{eval-rst}\n" + "\n\n".join(entries) + "\n```\n"


def with_tables(path: str, **texts: str) -> str:
    """The page with these tables between their marks."""
    page = (ROOT / path).read_text()
    for name, text in texts.items():
        begin, end = MARKS[name]
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    return page


def pages() -> dict[str, str]:
    """{path: what should stand there}."""
    short = optimizer_table(("as in torch", "options", "bytes a parameter"), "docs/")
    return {
        "README.md": with_tables("README.md", ops=readme_table(), optimizers=short),
        "docs/ops/index.md": with_tables("docs/ops/index.md", ops=index_table()),
        "docs/optim/index.md": with_tables(
            "docs/optim/index.md", optimizers=optimizer_table(OF_AN_OPTIMIZER[1:], "../")
        ),
        "docs/api/warpsmith.md": api_page(),
    }


def stale() -> list[str]:
    """The pages that are not what the rows give."""
    return [path for path, text in pages().items() if (ROOT / path).read_text() != text]


def main() -> int:
    if "--check" in sys.argv:
        found = stale()
        print("\n".join(f"{path}: run python docs/op_tables.py" for path in found) or "up to date")
        return bool(found)
    for path, text in pages().items():
        (ROOT / path).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
