"""Makes the tables of ops and optimizers, from the rows of the families' lists, docstrings and docs/op_facts.toml. This
writes those of README.md, and begins the sections of new ops on their families' pages. The docs build puts the others
into docs/ops and docs/design, and the reference of functions and modules into docs/api.

    python docs/op_tables.py
"""

import functools
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.families import OpRow, optimizers, rows  # noqa: E402

NAMES = {"function", "function, module"}
# What a family is called in the README; others go by their folder's name.
TITLES = {
    "norm": "norms, alone or with residual sum and dropout",
    "batch_norm": "batch norm in NHWC, with residual and ReLU",
    "group_norm": "group norm in NHWC, with SiLU",
    "max_pool": "max pooling in NHWC",
    "conv2d": "convolution: bias, residual, activation",
    "rope": "rotary embedding, alone or with norms of the heads",
    "attention": "attention, batched or packed",
    "activation": "activations: gated, behind a bias, dropout and sum",
    "cross_entropy": "loss, with its gradient in the same pass",
    "softmax": "softmax and its logarithm over rows",
    "linear": "linear layers: activation, residual, MLP",
    "linear_loss": "language-model head with loss or log-probabilities",
    "quantize": "8-bit floats with scales, and back",
    "image": "bytes of images to normalised numbers",
    "optim": "optimizer, one launch for all parameters",
}


@functools.cache
def families() -> dict[str, list[OpRow]]:
    """{family: its ops}."""
    found: dict[str, list[OpRow]] = {}
    for row in rows():
        found.setdefault(row.family, []).append(row)
    return found


@functools.cache
def table_of_facts() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs/op_facts.toml").read_text())


@functools.cache
def templates(row: OpRow) -> dict[str, str]:
    """What the tables say of an op, in the order of its page, with {op} and {family} as in op_facts.toml."""
    import warpsmith

    known = table_of_facts()
    found = {"function": "`warpsmith.{op}`", **known["all"], **known.get(row.body, {}), **known.get(row.name, {})}
    if moved := re.search(r"Moves (\d+ elements of .+?)[.;,] ", one_line(inspect.getdoc(getattr(warpsmith, row.name)))):
        found["memory traffic"] = moved[1]
    if "function, module" in found:
        del found["function"]
    return {name: found[name] for name in known["order"] if name in found}


def filled(found: dict[str, str], op: str, family: str) -> dict[str, str]:
    return {name: text.replace("{op}", op).replace("{family}", family) for name, text in found.items()}


def facts(row: OpRow) -> dict[str, str]:
    """What the tables say of an op, in the order of its page."""
    return filled(templates(row), row.name, row.family)


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def table(head: list[str], lines: list[list[str]]) -> str:
    return line(head) + "|---" * len(head) + "|\n" + "".join(map(line, lines))


def family_tables(family: str) -> dict[str, str]:
    """{name of a mark: its table} of a family's page: what half of its ops have in common and no op lacks; of each op
    what is different from that, or from a sibling where that is less."""
    ops = families()[family]
    everywhere = [name for name in templates(ops[0]) if all(name in templates(op) for op in ops)]
    most = {name: Counter(templates(op)[name] for op in ops).most_common(1)[0] for name in everywhere}
    common = {name: text for name, (text, times) in most.items() if times > 1 and 2 * times >= len(ops)}

    def of(found: dict[str, str], op: str) -> str:
        lines = [list(cell) for cell in filled(found, op, family).items()]
        return table(["", ""], lines).replace("|  |  |", "| | |") if lines else ""

    head = "Every op of this page, unless its own table says otherwise:\n\n"
    found = {"facts": head + of(common, "<op>")} if common else {}
    whole: list[OpRow] = []  # the ops whose tables do not lean on a sibling's
    for op in ops:
        least, sibling = different(op, common), None
        for other in whole:
            less = different(op, templates(other))
            if other.body == op.body and len(less) < len(least) and not templates(other).keys() - templates(op) - NAMES:
                least, sibling = less, other.name
        whole += [] if sibling else [op]
        lean = f"As [`{sibling}`](#{sibling}){', but:' if least else '.'}\n" + "\n" * bool(least) if sibling else ""
        found[op.name] = lean + of(least, op.name)
    return found


def different(op: OpRow, told: dict[str, str]) -> dict[str, str]:
    """The cells of an op but for those that are told already; of its names, those that its heading does not say."""
    told = {**told, "function": "`warpsmith.{op}`"}
    return {name: text for name, text in templates(op).items() if told.get(name) != text}


def readme_table() -> str:
    """A row a family: its ops, and the modules around them."""
    lines = []
    for family, ops in families().items():
        links = ", ".join(f"[`{op.name}`](docs/ops/{family}.md#{op.name})" for op in ops)
        modules = dict.fromkeys(f"`{name}`" for op in ops for name in modules_of(op))
        lines.append([TITLES.get(family, family), links, ", ".join(modules)])
    return table(["what", "ops: `warpsmith.<op>`, and C++", "modules"], lines)


def index_table() -> str:
    """Derivatives, dtypes and what traces and captures an op: a row for ops of a family that are alike."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows():
        found, page = facts(row), f"{row.family}.md"
        second = re.search(r"second[^:]*: ([^;]+)", found["derivatives"])
        told = [found["forward"], found["backward"], second[1] if second else found["derivatives"]]
        told += [found[name].replace("](#", f"]({page}#") for name in ("dtypes", "compile, export", "CUDA graphs")]
        lines.setdefault((page, *told), []).append(f"[`{row.name}`]({page}#{row.name})")
    heads = ["ops", "forward", "backward", "second derivative", "dtypes", "`torch.compile`, `torch.export`"]
    return table([*heads, "CUDA graphs"], [[", ".join(ops), *told] for (_, *told), ops in lines.items()])


def optimizer_line() -> str:
    """The optimizers, for the README; docs/optimizers.md has a line for each, and docs/ops/optim.md a section."""
    import warpsmith

    classes = {name.lower(): name for name in warpsmith.optim.__all__}
    table = (ROOT / "docs/optimizers.md").read_text()
    if missing := [name for name in optimizers() if f"](ops/optim.md#{name})" not in table]:
        raise SystemExit(f"docs/optimizers.md: no link to ops/optim.md#{', #'.join(missing)}")
    found = ", ".join(f"`{classes[name]}`" for name in (*optimizers(), "muon"))  # steps of sgd: no row of its own
    return f"Optimizers of `warpsmith.optim`: {found} ([what they share](docs/optimizers.md)).\n"


def modules_of(row: OpRow) -> list[str]:
    """The modules around an op: ``nn.RMSNorm``."""
    return re.findall(r"`warpsmith\.((?:nn|optim)\.\w+)`", facts(row).get("function, module", ""))


def one_line(doc: str | None) -> str:
    """A docstring, or a part of one, for a cell of Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join((doc or "").split()))
    return text.replace("``", "`").replace("|", "\\|")


def first_sentence(thing: object) -> str:
    first = one_line((inspect.getdoc(thing) or "").split("\n\n")[0])
    return re.split(r"(?<=\.)\s", first)[0].rstrip(".:")


def title(family: str) -> str:
    """A family's name as a heading."""
    words = re.split("[,:]| with ", TITLES.get(family, family))[0]
    return words[0].upper() + words[1:]


def functions_reference() -> str:
    """For docs/api/warpsmith.md: a table of all functions, and each family's functions and modules."""
    import warpsmith

    ops = [row.name for row in rows()]
    others = [name for name in warpsmith.__all__ if name not in ops and callable(getattr(warpsmith, name))]
    lines = [
        [f"{{py:obj}}`~warpsmith.{name}`", first_sentence(getattr(warpsmith, name)), page]
        for name, page in (
            *((row.name, f"[{row.name}](../ops/{row.family}.md#{row.name})") for row in rows()),
            *((name, "") for name in others),
        )
    ]
    parts = [table(["function", "what it computes", "limits, speeds"], lines)]
    for family, members in families().items():
        if family != "optim":
            around = dict.fromkeys(name for op in members for name in modules_of(op))
            parts += [f"## {title(family)}\n", directives([op.name for op in members] + list(around))]
    return "\n".join([*parts, "## Plan and statistics\n", directives(others)])


def directives(names: list[str]) -> str:
    """autodoc's for functions and classes of warpsmith, in one block."""
    import warpsmith

    block = ""
    for name in names:
        thing = functools.reduce(getattr, name.split("."), warpsmith)
        block += f".. {'autoclass' if isinstance(thing, type) else 'autofunction'}:: warpsmith.{name}\n"
        if name.startswith("nn."):
            block += f"   :show-inheritance:\n   :members: {public(thing)}\n"
        block += "\n"
    return f"```{{eval-rst}}\n{block}```\n"


def public(module: object) -> str:
    """The documented methods that a module itself defines, but for torch's own names."""
    own = [n for n, member in vars(module).items() if not n.startswith("_") and callable(member) and member.__doc__]
    return ", ".join(n for n in own if n not in ("reset_parameters", "extra_repr"))


def modules_reference() -> str:
    """For docs/api/nn.md: all modules, beside torch's."""
    import torch
    import warpsmith

    lines = []
    known = {name for row in rows() for name in modules_of(row)}
    for name in warpsmith.nn.__all__:
        module = getattr(warpsmith.nn, name)
        if not isinstance(module, type):
            continue
        if f"nn.{name}" not in known:
            raise SystemExit(f"warpsmith.nn.{name}: docs/op_facts.toml names it in no line 'function, module'")
        theirs = f"`torch.nn.{name}`" if hasattr(torch.nn, name) else ""
        lines.append([f"{{py:class}}`~warpsmith.nn.{name}`", first_sentence(module), theirs])
    return table(["module", "what it computes", "takes the place of"], lines)


def notes_table() -> str:
    """The design pages, family by family and then the rest: what each is about, and its result."""
    names = sorted(path.stem for path in (ROOT / "docs/design").glob("*.md") if path.stem != "index")
    if missing := [f for f in families() if not any(f in name for name in names)]:
        raise SystemExit(f"docs/design: no page of {', '.join(missing)}")

    def place(name: str) -> int:
        return next((n for n, family in enumerate(families()) if family in name), len(families()))

    lines = []
    for name in sorted(names, key=place):
        page = (ROOT / f"docs/design/{name}.md").read_text()
        summary = dict(reversed(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", page, re.MULTILINE)))
        what, result = summary.get("what") or summary.get("question"), summary.get("result") or summary.get("number")
        if not what or not result:
            raise SystemExit(f"docs/design/{name}.md: its summary has no line what, result")
        lines.append([f"[{page.splitlines()[0].removeprefix('# ')}]({name}.md)", what, result])
    return table(["page", "what", "result"], lines)


def mark(name: str) -> str:
    return f"<!-- {name} -->\n"


def with_tables(page: str, texts: dict[str, str]) -> str:
    """The page with these tables in the place of the lines of their marks."""
    for name, text in texts.items():
        if mark(name) not in page:
            raise SystemExit(f"docs: no line of a page ends with {mark(name)}")
        page = re.sub(f"^.*{mark(name)}", lambda _, text=text: text, page, flags=re.MULTILINE)
    return page


def with_sections(family: str, page: str) -> str:
    """The page of a family; the section of a new op is begun, before that of the op that follows it."""
    import warpsmith

    place = len(page)
    for op in reversed(families()[family]):
        if mark(op.name) in page:
            place = page.rindex("\n## ", 0, page.index(mark(op.name)))
        else:
            text = first_sentence(getattr(warpsmith, op.name))
            page = f"{page[:place]}\n## {op.name}\n\n{text}.\n\n{mark(op.name)}{page[place:]}"
    return page


def built(docname: str, page: str) -> str:
    """A page of the docs as it is built."""
    whole = {"ops/index": lambda: {"ops": index_table()}, "design/index": lambda: {"notes": notes_table()}}
    family = docname.removeprefix("ops/")
    if family in families() and family != docname:
        return with_tables(page, family_tables(family))
    return with_tables(page, whole[docname]()) if docname in whole else page


def pages() -> dict[str, str]:
    """{path: what should stand there}."""
    page = (ROOT / "README.md").read_text()
    for name, text in {"ops": readme_table(), "optimizers": optimizer_line()}.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        page = page.split(begin)[0] + begin + text + end + page.split(end)[1]
    found = {"README.md": page}
    for family in families():
        path = ROOT / f"docs/ops/{family}.md"
        page = path.read_text() if path.exists() else f"# {title(family)}\n\n{mark('facts')}"
        found[f"docs/ops/{family}.md"] = page = with_sections(family, page)
        built(f"ops/{family}", page)  # raises where a mark is missing
    return found


def stale() -> list[str]:
    """The pages that are not what the rows give."""
    return [
        f"{path}: run python docs/op_tables.py"
        for path, text in pages().items()
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    ]


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text)
