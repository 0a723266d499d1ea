"""Writes the tables of ops and optimizers from the families' rows and their pages: in README.md, docs/ops/index.md,
docs/optim/index.md, docs/design/index.md and docs/api.

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

MARKS = {name: (f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n") for name in ("ops", "optimizers", "notes")}
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
        modules = [name for op in ops for name in modules_of(op)]
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


def optimizer_cells() -> dict[str, dict[str, str]]:
    """{an optimizer's page below docs: the cells of its table}."""
    found = {}
    for row in optimizers():
        page = f"ops/{row}.md" if any(op.name == row for op in rows()) else f"optim/{row}.md"
        found[page] = cells(f"docs/{page}")
        if missing := [name for name in OF_AN_OPTIMIZER if name not in found[page]]:
            raise SystemExit(f"docs/{page}: its table has no line {', '.join(missing)}")
    return found


def optimizer_table() -> str:
    """The optimizers, for docs/optim/index.md."""
    lines = [
        [f"[{found['class']}](../{page})", *(found[c] for c in OF_AN_OPTIMIZER[1:])]
        for page, found in optimizer_cells().items()
    ]
    return table(list(OF_AN_OPTIMIZER), lines)


def optimizer_line() -> str:
    """The optimizers, for the README."""
    classes = (found["class"].replace("warpsmith.optim.", "") for found in optimizer_cells().values())
    return f"Optimizers of `warpsmith.optim`: {', '.join(classes)} ([what they share](docs/optim/index.md)).\n"


def modules_of(op: str) -> list[str]:
    """The modules that an op's page names: ``nn.RMSNorm``."""
    return re.findall(r"`warpsmith\.((?:nn|optim)\.\w+)`", facts(op)["names"])


def first_sentence(thing: object) -> str:
    """The first sentence of a docstring, for a cell of Markdown."""
    import inspect

    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")
    return re.split(r"(?<=\.)\s", text)[0].rstrip(".:")


def title(family: str) -> str:
    """A family's name as the title of a page."""
    words = re.split("[,:]| with ", TITLES.get(family, family))[0]
    return words[0].upper() + words[1:]


def directives(kind_of: dict[str, str]) -> str:
    """{name: autodoc's kind} as one block."""
    return (
        "```{eval-rst}\n" + "\n\n".join(f".. {kind}:: warpsmith.{name}" for name, kind in kind_of.items()) + "\n```\n"
    )


def family_page(family: str) -> str:
    """The reference of a family: a table, then its ops and their modules with signature and docstring."""
    import warpsmith

    ops = [row.name for row in rows() if row.family == family]
    lines = []
    modules: dict[str, str] = {}
    for op in ops:
        around = [name for name in modules_of(op) if name.startswith("nn.")]
        modules |= dict.fromkeys(around, "autoclass")
        links = ", ".join(f"{{py:class}}`~warpsmith.{name}`" for name in around)
        what = first_sentence(getattr(warpsmith, op))
        lines.append([f"{{py:func}}`~warpsmith.{op}`", what, links, f"[{op}](../ops/{op}.md)"])
    head = table(["function", "what it computes", "module", "limits, speeds"], lines)
    parts = [f"# {title(family)}", head.rstrip("\n"), "## Functions", directives(dict.fromkeys(ops, "autofunction"))]
    if modules:
        members = {f"{name}\n   :show-inheritance:\n   :members: {public(name)}": "autoclass" for name in modules}
        parts += ["## Modules", directives(members)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def public(name: str) -> str:
    """The documented methods that a module itself defines, but for torch's own names."""
    import warpsmith

    module = getattr(warpsmith.nn, name.removeprefix("nn."))
    own = [n for n, member in vars(module).items() if not n.startswith("_") and callable(member) and member.__doc__]
    return ", ".join(n for n in own if n not in ("reset_parameters", "extra_repr"))


def api_pages() -> dict[str, str]:
    """The reference: all functions by family, all modules beside torch's, and a page for each family."""
    import torch
    import warpsmith

    families = list(dict.fromkeys(row.family for row in rows() if row.family != "optim"))
    ops = [row.name for row in rows()]
    lines = []
    for row in rows():
        page = f"[{title(row.family)}]({row.family}.md)"
        lines.append([f"{{py:func}}`~warpsmith.{row.name}`", first_sentence(getattr(warpsmith, row.name)), page])
    others = [n for n in warpsmith.__all__ if n not in ops and callable(getattr(warpsmith, n))]
    kinds = {n: "autoclass" if isinstance(getattr(warpsmith, n), type) else "autofunction" for n in others}
    functions = "# warpsmith: functions\n\n" + table(["function", "what it computes", "page"], lines)
    for n in others:
        role = "class" if kinds[n] == "autoclass" else "func"
        functions += line([f"{{py:{role}}}`~warpsmith.{n}`", first_sentence(getattr(warpsmith, n)), "below"])
    listing = "\n".join(families)
    functions += f"\n```{{toctree}}\n:hidden:\n\n{listing}\n```\n\n" + directives(kinds)

    lines = []
    found = {name: row.family for row in reversed(rows()) for name in modules_of(row.name) if name.startswith("nn.")}
    for name in warpsmith.nn.__all__:
        module = getattr(warpsmith.nn, name)
        if not isinstance(module, type):
            continue
        if f"nn.{name}" not in found:
            raise SystemExit(f"warpsmith.nn.{name}: no op's page names it in its line 'function, module'")
        theirs = f"`torch.nn.{name}`" if hasattr(torch.nn, name) else ""
        page = f"[{title(found[f'nn.{name}'])}]({found[f'nn.{name}']}.md)"
        lines.append([f"{{py:class}}`~warpsmith.nn.{name}`", first_sentence(module), theirs, page])
    nn = with_tables("docs/api/nn.md", ops=table(["module", "what it computes", "takes the place of", "page"], lines))
    return {
        "docs/api/warpsmith.md": functions,
        "docs/api/nn.md": nn,
        **{f"docs/api/{family}.md": family_page(family) for family in families},
    }


def notes_table() -> str:
    """The design pages, family by family and then the rest: what each is about, and its result."""
    families = list(dict.fromkeys(row.family for row in rows()))
    names = sorted(path.stem for path in (ROOT / "docs/design").glob("*.md") if path.stem != "index")
    if missing := [f for f in families if not any(f in name for name in names)]:
        raise SystemExit(f"docs/design: no page of {', '.join(missing)}")

    def place(name: str) -> int:
        return next((n for n, family in enumerate(families) if family in name), len(families))

    lines = []
    for name in sorted(names, key=place):
        summary = cells(f"docs/design/{name}.md")
        what, result = summary.get("what") or summary.get("question"), summary.get("result") or summary.get("number")
        if not what or not result:
            raise SystemExit(f"docs/design/{name}.md: its summary has no line what, result")
        title = (ROOT / f"docs/design/{name}.md").read_text().splitlines()[0].removeprefix("# ")
        lines.append([f"[{title}]({name}.md)", what, result])
    return table(["page", "what", "result"], lines)


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
    return {
        "README.md": with_tables("README.md", ops=readme_table(), optimizers=optimizer_line()),
        "docs/ops/index.md": with_tables("docs/ops/index.md", ops=index_table()),
        "docs/optim/index.md": with_tables("docs/optim/index.md", optimizers=optimizer_table()),
        "docs/design/index.md": with_tables("docs/design/index.md", notes=notes_table()),
        **api_pages(),
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
