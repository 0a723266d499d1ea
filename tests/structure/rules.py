"""The house rules that are about files and their text."""

import ast
import importlib.metadata
import re
import sys

from files import CODE, CPP, DOCUMENTS, code_of, files, lines_matching, read

SOFT_LINES, HARD_LINES = 400, 800


# What a family has beside the row of each op: at least one file for each pattern.
OF_A_FAMILY = (
    "csrc/kernels/{0}/{0}.h",
    "csrc/kernels/{0}/*.cuh",
    "csrc/kernels/{0}/*.cu",
    "csrc/kernels/{0}/*_budget.json",
    "csrc/cpu/{0}*.cpp",
    "csrc/bindings/{0}*.cpp",
    "csrc/pymodule/{0}*.cpp",
    "csrc/include/warpsmith/{0}.h",
    "tests/ops/test_{0}*.py",
    "benchmarks/bench_{0}.py",
    "docs/ops/{0}.md",
)
# The family's files that define a public function for each op.
DEFINING = ("python/warpsmith/ops/{0}.py", "python/warpsmith/reference/{0}.py")
# What holds files of families, and of nothing else.
FAMILIES_ROOMS = ("csrc/cpu/*.cpp", "csrc/bindings/*.cpp", "tests/sim/sim_*.cpp")
# Sim programs of the machine and of the vocabulary of device code.
NOT_A_FAMILYS = {
    f"tests/sim/sim_{name}.cpp"
    for name in ("async float8 libraries math row_absmax smoke tensor_copy warp wgmma").split()
}


def functions_of(path):
    """The names of a module's public functions."""
    text = path.read_text() if path.exists() else ""
    return set(re.findall(r"^def ([a-z]\w*)", text, re.MULTILINE))


def missing_rooms(root, rows, optimizers=()):
    """What a row of a family's list lacks: files of the family, files of the op, cases in the family's tests."""
    found = []
    composed = {row.family for row in rows if row.body == "COMPOSED"}  # in Python
    for family in dict.fromkeys(row.family for row in rows):
        wanted = [pattern.format(family) for pattern in OF_A_FAMILY]
        wanted = [path for path in wanted if not (family in composed and path.startswith("csrc/"))]
        found += [f"{family}: {pattern} is missing" for pattern in wanted if not any(root.glob(pattern))]
    for name in optimizers:
        path = f"python/warpsmith/optim/{name}.py"
        found += [f"{name}: {path} is missing"] * (not (root / path).exists())
    for row in rows:
        for path in (pattern.format(row.family) for pattern in DEFINING):
            if row.name not in functions_of(root / path):
                found.append(f"{row.name}: {path} does not define it")
        tests = [path.read_text() for path in root.glob(f"tests/ops/test_{row.family}*.py")]
        if not any(re.search(rf'\b{row.name}\b|families\.rows\("{row.body}"\)', text) for text in tests):
            found.append(f"{row.name}: no cases in tests/ops/test_{row.family}*.py")
    return found


def without_a_row(root, rows):
    """Files of ops and families that no list names, and lists that the compiled package does not know."""
    known = {row.family for row in rows}
    found = []
    for pattern in FAMILIES_ROOMS:
        for path in sorted(root.glob(pattern)):
            name, relative = path.stem.removeprefix("sim_"), path.relative_to(root).as_posix()
            if relative not in NOT_A_FAMILYS and not any(re.fullmatch(rf"{f}(_\w+)?", name) for f in known):
                found.append(f"{relative}: belongs to no family")
    for path in sorted((root / "csrc/kernels").glob("*")):
        if path.is_dir() and path.name not in known:
            found.append(f"{path.relative_to(root).as_posix()}: has no list of ops")
    for path in sorted((root / "python/warpsmith/ops").glob("[a-z]*.py")):
        strays = functions_of(path) - {row.name for row in rows if row.family == path.stem}
        found += [f"{path.relative_to(root).as_posix()}: {op} has no row" for op in sorted(strays)]
    return found


# Folders that go on sys.path, in the processes of tests for instance.
FOLDERS_OF_MODULES = ("tools/sim", "tools/gpu", "tools/gpu/conformance", "lab", "examples", "docs")
# Packages that other packages import where they are installed: numba, which torch.testing imports, wants coverage.
IMPORTED_BY_OTHERS = {"coverage", "numba", "numpy", "scipy", "pandas", "psutil", "yaml", "transformers", "accelerate"}
FREE_NAMES = {"build"}  # the Python Packaging Authority's runs in a process of its own, and is imported by nobody


def hiding_modules(root):
    """Modules of ours that another package's import would find instead of what it means."""
    taken = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), *IMPORTED_BY_OTHERS} - FREE_NAMES
    modules = [path for folder in FOLDERS_OF_MODULES for path in sorted((root / folder).glob("*.py"))]
    return [f"{p.relative_to(root).as_posix()}: hides the package {p.stem}" for p in modules if p.stem in taken]


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
        if path.as_posix() != "csrc/device/launch.h":
            found += [f"{path}:{n}: bare launch" for n in lines_matching(code_of(read(root, path)), r"<<<")]
    return found


def questions_to_the_device(root):
    """Queries of the device's compute capability: what runs there may be code of an older architecture, in which
    clusters, bulk copies and programmatic launches are compiled out. (csrc/common/code_capability.h)"""
    asked = r"cudaDevAttrComputeCapability|cudaGetDeviceProperties|CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
    return [
        f"{path}:{n}: expected DeviceProperties::code_capability, not the device's own"
        for path in files(root, *CPP, under="csrc")
        for n in lines_matching(code_of(read(root, path)), asked)
    ]


def unbraced_discards(root):
    """`if constexpr` or `else` without braces before a loop with a pragma. Where such a branch is discarded and the
    loop's body has braces, nvcc 13.0 loses count of them and drops the next statements without a word; the host's
    compilers do not. (docs/design/norm.md)"""
    found = []
    for path in files(root, *CPP):
        text, pairs = code_of(read(root, path)), 1
        while pairs:  # what stands in parentheses may hold semicolons
            text, pairs = re.subn(r"\([^()]*\)", lambda m: "@" + "\n" * m.group().count("\n"), text)
        for match in re.finditer(r"(\bif constexpr\s*@|\belse\b)[^{};]*#\s*pragma", text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path}:{line}: expected braces between {match[1].split('@')[0].strip()} and #pragma")
    return found


def experiments_without_a_question(root):
    """What lies in lab, headers and the script that runs the others apart, says on top what it answers."""
    return [
        f"{path}: its first line is not a question"
        for path in files(root, ".cu", ".py", ".sh", under="lab")
        if path.name != "lab.py" and not re.match(r'(// |"""|#!.*\n# )Question: .+\?', read(root, path))
    ]


# Written in parts, so that the rule's own text is not found.
NOTES = r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"


def notes_to_self(root):
    """Notes of unfinished work in any source or document."""
    found = []
    for path in files(root, *CODE, *DOCUMENTS, ".toml", ".yml", ".yaml", ".txt"):
        found += [f"{path}:{n}: unfinished work" for n in lines_matching(read(root, path), NOTES)]
    return found


NAME_LIMIT = 60  # characters of a test's name: it stands in a line of pytest's output beside its file


def long_test_names(root):
    found = []
    for path in files(root, ".py", under="tests"):
        names = re.findall(r"^ *(?:async )?def (test_\w+)", read(root, path), re.MULTILINE)
        found += [f"{path}: {name}: {len(name)} characters" for name in names if len(name) > NAME_LIMIT]
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


TOP = r"(?:csrc|python|tests|benchmarks|docs|examples|notebooks|tools|lab|build_backend|\.ci)"
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
        if path.parts[:2] != ("tests", "structure"):
            cites = CITED_IN_SOURCES.findall(read(root, path))
            found += [f"{path}: cites {cited}, which does not exist" for cited in cites if not (root / cited).exists()]
    return found
