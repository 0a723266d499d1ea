"""Pages that lead through the code cite it as `path::name`: the file defines each of these names."""

import ast
import re
from pathlib import Path

import pytest
from files import code_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/one_call.md", "docs/adding_an_op.md")


def of_python(source):
    """{a name, with the functions and classes around it: None} of what a module defines."""
    found = {}

    def visit(node, around):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[around + child.name] = None
                visit(child, f"{around}{child.name}.")
            elif isinstance(child, ast.Assign):
                found.update({around + t.id: None for t in child.targets if isinstance(t, ast.Name)})
                visit(child, around)
            else:
                visit(child, around)

    visit(ast.parse(source), "")
    return found


def defines(source, suffix, name):
    if suffix == ".py":
        return name in of_python(source)
    type_or_macro = rf"(?:\b(?:struct|class|enum class)|#define) {name}\b"
    function = rf"^(?!\s*return\b)(?:[\w:<>&*,() ]*[\w>&*)] +|\s*){name}\([^;]*?\)\s*(?:const\s*)?\{{"
    value = rf"\bconstexpr [\w:<> ]+ {name}\b"
    return bool(re.search(f"{type_or_macro}|{function}|{value}", code_of(source), re.MULTILINE))


def unresolved(text, root):
    """What a page cites and no file defines; and code beside it of which no cited file has a word."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    cited = [span.split("::") for span in spans if re.fullmatch(r"[\w./]+\.\w+::[\w.]+", span)]
    texts = {path: (root / path).read_text() if (root / path).exists() else "" for path, _ in cited}
    found = [f"{p}::{name}" for p, name in cited if not defines(texts[p], Path(p).suffix, name)]
    known = set(re.findall(r"\w+", " ".join(texts.values())))
    plain = [s for s in spans if re.fullmatch(r"[a-z]\w+|[A-Z]\w+|_\w+", s)]
    return found + [s for s in plain if not any(word.startswith(s) for word in known)]


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_resolves(page):
    text = (ROOT / page).read_text()
    assert len(re.findall(r"::\w", text)) > 5
    assert unresolved(text, ROOT) == []


@pytest.mark.parametrize(
    ("path", "text", "good", "bad"),
    [
        ("a.py", "def f():\n    def g(): pass\nclass C:\n    x = 1\n", "f f.g C C.x", "g h C.y"),
        (
            "a.cpp",
            "// gone(\nstruct S {};\nStatus run(int a,\n  int b) {\n  return other(a);\n}\n",
            "S run",
            "gone other",
        ),
        ("a.cuh", "template <int N> __global__ void __launch_bounds__(N, 2)\n    kernel(P p) {\n}\n", "kernel", "P"),
    ],
)
def test_a_name_that_a_file_does_not_define_is_found(tmp_path, path, text, good, bad):
    (tmp_path / path).write_text(text)
    page = "".join(f"`{path}::{name}` " for name in (good + " " + bad).split())
    assert unresolved(page, tmp_path) == [f"{path}::{name}" for name in bad.split()]
    assert unresolved(f"`{path}::{good.split()[0]}` `nowhere`", tmp_path) == ["nowhere"]
