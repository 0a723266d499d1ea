"""Writes the tables of ops and optimizers, from the rows of the families' lists and from docs/op_facts.toml: on their
pages, in README.md, docs/ops/index.md, docs/optim/index.md, docs/design/index.md and docs/api.

    python docs/op_tables.py           # writes them
    python docs/op_tables.py --check   # says which are not what it would write
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.families import OpRow, optimizers, rows  # noqa: E402

MARKS = {
    name: (f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n") for name in ("ops", "optimizers", "notes", "facts")
}
OF_AN_OPTIMIZER = ("class", "as in torch", "states", "options", "bytes a parameter", "beside torch's")


@functools.cache
def table_of_facts() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs/op_facts.toml").read_text())


def facts(row: OpRow) -> dict[str, str]:
    """What the tables say of an op, in the order of its page."""
    known = table_of_facts()
    found = {"function": "`warpsmith.{op}`", **known["all"], **known.get(row.body, {}), **known.get(row.name, {})}
    if "function, module" in found:
        del found["function"]
    names = {"op": row.name, "family": row.family}
    for name, text in found.items():
        found[name] = re.sub(r"\{(op|family)\}", lambda match: names[match[1]], text)
    return {name: found[name] for name in [*known["order"], "code", "text"] if name in found}


def second_derivative(found: dict[str, str]) -> str:
    second = re.search(r"second[^:]*: ([^;]+)", found["derivatives"])
    return second[1] if second else found["derivatives"]


def page_table(found: dict[str, str]) -> str:
    """The block of generated text on the page of an op or optimizer."""
    lines = [[name, cell] for name, cell in found.items() if name not in ("code", "text")]
    blocks = [found.get("code", ""), table(["", ""], lines).replace("|  |  |", "| | |"), found.get("text", "")]
    return "\n".join(block for block in blocks if block)


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
    families: dict[str, list[OpRow]] = {}
    for row in rows():
        families.setdefault(row.family, []).append(row)
    lines = []
    for family, ops in families.items():
        modules = [name for op in ops for name in modules_of(op)]
        links = ", ".join(f"[`{op.name}`](docs/ops/{op.name}.md)" for op in ops)
        lines.append([TITLES.get(family, family), links, ", ".join(f"`{m}`" for m in dict.fromkeys(modules))])
    return table(["what", "ops: `warpsmith.<op>`, and C++", "modules"], lines)


def index_table() -> str:
    """The same with dtypes and what traces and captures an op."""
    lines = []
    for row in rows():
        found = facts(row)
        cells = (found[name] for name in ("dtypes", "compile, export", "CUDA graphs"))
        ways = found["forward"], found["backward"], second_derivative(found)
        lines.append([f"[`{row.name}`]({row.name}.md)", *ways, *cells])
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
    ops = {row.name: row for row in rows()}
    return {
        f"ops/{name}.md" if name in ops else f"optim/{name}.md": facts(ops[name])
        if name in ops
        else table_of_facts()["optim"][name]
        for name in optimizers()
    }


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


def modules_of(row: OpRow) -> list[str]:
    """The modules around an op: ``nn.RMSNorm``."""
    return re.findall(r"`warpsmith\.((?:nn|optim)\.\w+)`", facts(row).get("function, module", ""))


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
    for row in (row for row in rows() if row.family == family):
        op = row.name
        around = [name for name in modules_of(row) if name.startswith("nn.")]
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
    found = {name: row.family for row in reversed(rows()) for name in modules_of(row) if name.startswith("nn.")}
    for name in warpsmith.nn.__all__:
        module = getattr(warpsmith.nn, name)
        if not isinstance(module, type):
            continue
        if f"nn.{name}" not in found:
            raise SystemExit(f"warpsmith.nn.{name}: docs/op_facts.toml names it in no line 'function, module'")
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
        page = (ROOT / f"docs/design/{name}.md").read_text()
        summary = dict(reversed(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", page, re.MULTILINE)))
        what, result = summary.get("what") or summary.get("question"), summary.get("result") or summary.get("number")
        if not what or not result:
            raise SystemExit(f"docs/design/{name}.md: its summary has no line what, result")
        title = (ROOT / f"docs/design/{name}.md").read_text().splitlines()[0].removeprefix("# ")
        lines.append([f"[{title}]({name}.md)", what, result])
    return table(["page", "what", "result"], lines)


def begun(op: str) -> str:
    """The page of an op that has none yet."""
    import warpsmith

    return f"# {op}\n\n{first_sentence(getattr(warpsmith, op))}.\n\n{''.join(MARKS['facts'])}"


def with_tables(path: str, **texts: str) -> str:
    """The page with these tables between their marks."""
    there = (ROOT / path).exists()
    page = (ROOT / path).read_text() if there else begun(Path(path).stem)
    for name, text in texts.items():
        begin, end = MARKS[name]
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    return page


def pages() -> dict[str, str]:
    """{path: what should stand there}."""
    tables = {f"docs/ops/{row.name}.md": facts(row) for row in rows()}
    tables |= {f"docs/{page}": cells for page, cells in optimizer_cells().items()}
    return {
        **{page: with_tables(page, facts=page_table(cells)) for page, cells in tables.items()},
        "README.md": with_tables("README.md", ops=readme_table(), optimizers=optimizer_line()),
        "docs/ops/index.md": with_tables("docs/ops/index.md", ops=index_table()),
        "docs/optim/index.md": with_tables("docs/optim/index.md", optimizers=optimizer_table()),
        "docs/design/index.md": with_tables("docs/design/index.md", notes=notes_table()),
        **api_pages(),
    }


def stale() -> list[str]:
    """The pages that are not what the rows give."""
    return [path for path, text in pages().items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]


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
