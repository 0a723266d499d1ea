"""The house rules that are about files and their text."""

import ast
import re

from files import CODE, CPP, DOCUMENTS, code_of, files, lines_matching, read

SOFT_LINES, HARD_LINES = 400, 800


def ops(root):
    """Names of the ops: every binding in csrc/torch and every public module in python/warpsmith/ops."""
    bound = {p.stem for p in (root / "csrc/torch").glob("*.cpp")}
    public = {p.stem for p in (root / "python/warpsmith/ops").glob("*.py") if not p.stem.startswith("_")}
    return sorted(bound | public)


def missing_rooms(root):
    """For each op, the rooms in which it has no file. The kernels' folder may be the op's own or its family's."""
    found = []
    for op in ops(root):
        wanted = [
            f"csrc/kernels/*/{op}.h",
            f"csrc/kernels/*/{op}_kernel*.cuh",
            f"csrc/kernels/*/{op}*.cu",
            f"csrc/cpu/{op}.cpp",
            f"csrc/torch/{op}.cpp",
            f"python/warpsmith/ops/{op}.py",
            f"python/warpsmith/reference/{op}.py",
            f"tests/ops/test_{op}.py",
            f"tests/cpp/sim_{op}.cpp",
            f"benchmarks/bench_{op}.py",
            f"docs/ops/{op}.*",
        ]
        found += [f"{op}: {pattern} is missing" for pattern in wanted if not any(root.glob(pattern))]
    return found


def kernels_without_an_op(root):
    """Kernel sources whose name begins with no op's: an op that is not bound, or a name that differs between rooms."""
    names = ops(root)
    return [
        f"{path}: belongs to no op"
        for path in files(root, ".cu", under="csrc/kernels")
        if not any(path.stem == op or path.stem.startswith(op + "_") for op in names)
    ]


def line_counts(root):
    """Lines of every source file, longest first."""
    counts = [(len(read(root, path).splitlines()), path) for path in files(root, *CODE)]
    return sorted(counts, reverse=True)


def too_long(root, exceptions):
    """Files above the hard limit, but for those on the list of exceptions."""
    return [
        f"{path}: {n} lines (limit {HARD_LINES})"
        for n, path in line_counts(root)
        if n > HARD_LINES and str(path) not in exceptions
    ]


def stale_exceptions(root, exceptions):
    """Exceptions for files that are short or gone."""
    long = {str(path) for n, path in line_counts(root) if n > HARD_LINES}
    return [f"{path}: needs no exception" for path in exceptions if path not in long]


def read_exceptions(path):
    """Lines `YYYY-MM-DD path: reason`; empty lines and # comments are skipped."""
    exceptions = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"(\d{4}-\d\d-\d\d) (\S+): (.{10,})", line)
            if match is None:
                raise ValueError(f"{path.name}: expected 'YYYY-MM-DD path: reason', got {line!r}")
            exceptions[match[2]] = match[3]
    return exceptions


def inline_assembly(root):
    """Inline PTX outside csrc/device. csrc/sim may switch stacks in the host's own assembly."""
    found = []
    for path in files(root, *CPP, under="csrc"):
        if path.parts[1] not in ("device", "sim"):
            text = code_of(read(root, path))
            found += [
                f"{path}:{n}: inline assembly"
                for n in lines_matching(text, r"\b(asm|__asm__)\b\s*(volatile\b)?\s*(\(|$)")
            ]
    return found


def bare_launches(root):
    """`<<<...>>>` outside the launch wrapper."""
    found = []
    for path in files(root, *CPP, under="csrc"):
        if path.as_posix() != "csrc/common/launch.h":
            found += [f"{path}:{n}: bare launch" for n in lines_matching(code_of(read(root, path)), r"<<<")]
    return found


def unbraced_discards(root):
    """`if constexpr` or `else` without braces before a loop with a pragma. Where such a branch is discarded and the
    loop's body has braces, nvcc 13.0 loses count of them and drops the next statements without a word; the host's
    compilers do not. (docs/design/2026-11-21-norms.md)"""
    found = []
    for path in files(root, *CPP):
        text, pairs = code_of(read(root, path)), 1
        while pairs:  # what stands in parentheses may hold semicolons
            text, pairs = re.subn(r"\([^()]*\)", lambda m: "@" + "\n" * m.group().count("\n"), text)
        for match in re.finditer(r"(\bif constexpr\s*@|\belse\b)[^{};]*#\s*pragma", text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path}:{line}: expected braces between {match[1].split('@')[0].strip()} and #pragma")
    return found


# Written in parts, so that the rule's own text is not found.
NOTES = r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"


def notes_to_self(root):
    """Notes of unfinished work in any source or document."""
    found = []
    for path in files(root, *CODE, *DOCUMENTS, ".toml", ".yml", ".yaml", ".txt"):
        found += [f"{path}:{n}: unfinished work" for n in lines_matching(read(root, path), NOTES)]
    return found


PICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PICKLING_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("dist", "broadcast_object_list"),
    ("dist", "all_gather_object"),
    ("dist", "gather_object"),
    ("dist", "scatter_object_list"),
    ("distributed", "broadcast_object_list"),
    ("distributed", "all_gather_object"),
    ("distributed", "gather_object"),
    ("distributed", "scatter_object_list"),
}


def pickling(root):
    """Pickle, or a torch function that uses it, in what users run: the package, examples and benchmarks."""
    found = []
    for folder in ("python/warpsmith", "examples", "benchmarks"):
        for path in files(root, ".py", under=folder):
            for node in ast.walk(ast.parse(read(root, path))):
                names = []
                if isinstance(node, ast.Import):
                    names = [a.name.split(".")[0] for a in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module.split(".")[0]]
                bad = PICKLING_MODULES.intersection(names)
                if isinstance(node, ast.Attribute):
                    owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                    bad = {f"{owner}.{node.attr}"} if (owner, node.attr) in PICKLING_CALLS else bad
                found += [f"{path}:{node.lineno}: {name}" for name in bad]
    return found


TOP = r"(?:csrc|python|tests|benchmarks|docs|examples|notebooks|tools|build_backend|\.ci)"
CITED_IN_DOCUMENTS = re.compile(rf"`({TOP}/[\w./-]+)`|\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
CITED_IN_SOURCES = re.compile(r"(?<![\w/])(docs/[\w./-]+\.(?:md|rst|png|svg|json))")


def dead_citations(root):
    """Paths that documents or comments cite and that do not exist."""
    found = []
    for path in files(root, *DOCUMENTS):
        for cited, link in CITED_IN_DOCUMENTS.findall(read(root, path)):
            target = root / cited if cited else (root / path).parent / link
            if not target.exists():
                found.append(f"{path}: cites {cited or link}, which does not exist")
    for path in files(root, *CODE):
        if path.parts[:2] != ("tests", "house"):
            cites = CITED_IN_SOURCES.findall(read(root, path))
            found += [f"{path}: cites {cited}, which does not exist" for cited in cites if not (root / cited).exists()]
    return found
