"""Each house rule must find a planted violation, and must not cry over the clean form of the same file."""

import functools
import itertools
import json
from types import SimpleNamespace

import arrows
import docstrings
import pytest
import rules
from files import code_of


@pytest.fixture
def plant(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


# fmt: off
HEADERS = {
    "csrc/common/status.h": "#pragma once\n#include <string>\n",
    "csrc/device/vector.h": '#include <cuda_runtime.h>\n#include "common/status.h"\n',
    "csrc/sim/sim.h": '#include "device/vector.h"\n',
    "csrc/kernels/scale/scale.h": '#include "common/status.h"\n',
    "csrc/kernels/scale/scale_kernel.cuh": '#include "device/vector.h"\n#include "kernels/scale/scale.h"\n',
    "csrc/kernels/norm/norm.h": "#pragma once\n",
    "csrc/libraries/loader.h": "#include <dlfcn.h>\n",
    "csrc/libraries/cudnn.h": '#include <cudnn.h>\n#include "common/status.h"\n#include "libraries/loader.h"\n',
    "csrc/kernels/scale/scale.cu": '#include "libraries/cudnn.h"\n',
    "csrc/bindings/support/product.h": '#include "libraries/cudnn.h"\n',
    "csrc/bindings/support/tensor.h": "#include <torch/csrc/stable/tensor.h>\n",
    "csrc/bindings/scale.cpp": '#include "kernels/scale/scale.h"\n#include "bindings/support/tensor.h"\n',
    "csrc/cpu/scale.cpp": '#include "kernels/scale/scale.h"\n',
    "csrc/pymodule/module.cpp": "#include <pybind11/pybind11.h>\n",
    "csrc/include/warpsmith/scale.h": "#include <torch/torch.h>\n",
}
INCLUDES = [
    ("csrc/device/a.h", '"kernels/scale/scale.h"', "device must not use kernels"),
    ("csrc/common/a.h", '"kernels/scale/scale.h"', "common must not use kernels"),
    ("csrc/common/a.h", '"device/vector.h"', "common must not use device"),
    ("csrc/common/a.h", '"libraries/loader.h"', "common must not use libraries"),
    ("csrc/device/a.h", '"libraries/loader.h"', "device must not use libraries"),
    ("csrc/libraries/a.h", '"device/vector.h"', "libraries must not use device"),
    ("csrc/libraries/a.h", '"kernels/scale/scale.h"', "libraries must not use kernels"),
    ("csrc/libraries/a.h", "<torch/csrc/stable/tensor.h>", "libraries must not use torch"),
    ("csrc/kernels/scale/a.cuh", '"libraries/loader.h"', "device code must not use libraries"),
    ("csrc/kernels/scale/a.cu", "<cublas_v2.h>", "by csrc/libraries alone"),
    ("csrc/bindings/support/a.h", "<dlfcn.h>", "by csrc/libraries alone"),
    ("csrc/bindings/a.cpp", '"libraries/loader.h"', "in bindings/support alone"),
    ("csrc/common/a.h", "<torch/csrc/stable/tensor.h>", "common must not use torch"),
    ("csrc/sim/a.h", '"bindings/support/tensor.h"', "sim must not use bindings"),
    ("csrc/kernels/scale/a.cuh", '"kernels/norm/norm.h"', "another family's folder"),
    ("csrc/kernels/scale/a.cuh", "<ATen/ATen.h>", "kernels must not use torch"),
    ("csrc/kernels/scale/a.cuh", "<cub/cub.cuh>", "no CUTLASS, CUB"),
    ("csrc/kernels/scale/a.cuh", "<cute/tensor.hpp>", "no CUTLASS, CUB"),
    ("csrc/kernels/scale/a.cuh", "<cooperative_groups.h>", "no CUTLASS, CUB"),
    ("csrc/kernels/scale/a.cuh", '"sim/sim.h"', "kernels must not use sim"),
    ("csrc/cpu/a.cpp", '"kernels/scale/scale_kernel.cuh"', "plain header alone"),
    ("csrc/cpu/a.cpp", "<cuda_runtime.h>", "cpu must not use the CUDA runtime"),
    ("csrc/cpu/a.cpp", '"device/vector.h"', "cpu must not use device"),
    ("csrc/bindings/a.cpp", "<torch/extension.h>", "stable ABI"),
    ("csrc/bindings/a.cpp", "<c10/cuda/CUDAStream.h>", "stable ABI"),
    ("csrc/bindings/a.cpp", '"device/vector.h"', "bindings must not use device"),
    ("csrc/bindings/a.cpp", '"kernels/scale/scale_kernel.cuh"', "plain header alone"),
    ("csrc/pymodule/a.cpp", "<torch/torch.h>", "pymodule must not use torch"),
    ("csrc/kernels/scale/a.cuh", "<pybind11/pybind11.h>", "belongs to pymodule"),
    ("csrc/attic/a.h", "<string>", "not a room"),
    ("csrc/kernels/scale/a.cuh", '"../../lab/sweep.h"', "nothing uses lab"),
]

NOTEBOOK = json.dumps({"cells": [
    {"cell_type": "markdown", "source": ["not python"]},
    {"cell_type": "code", "source": ["%matplotlib inline\n", "import warpsmith\n", "warpsmith._core.load\n"]},
]})
IMPORTS = [
    ("python/warpsmith/reference/a.py", "from warpsmith.ops.scale import scale", "torch alone"),
    ("python/warpsmith/reference/a.py", "import warpsmith", "torch alone"),
    ("python/warpsmith/ops/a.py", "from warpsmith.nn import RMSNorm", "must not use nn"),
    ("python/warpsmith/ops/a.py", "from warpsmith import optim", "must not use optim"),
    ("python/warpsmith/nn/a.py", "from ..reference import a", "must not use reference"),
    ("python/warpsmith/ops/a.py", "def f():\n    import warpsmith.testing", "must not use testing"),
    ("python/warpsmith/nn/a.py", "import torch\ny = torch.ops.warpsmith.scale", "uses torch.ops"),
    ("python/warpsmith/optim/a.py", "import torch\nf = lambda: torch.ops.warpsmith.adamw()", "uses torch.ops"),
    ("tests/ops/test_a.py", "from warpsmith._core.library import raw", "private name"),
    ("python/warpsmith/_core/load.py", "def f():\n    from warpsmith.cli import main", "_core must not use cli"),
    ("benchmarks/a.py", "import warpsmith._core.load", "private name"),
    ("python/warpsmith/nn/a.py", "from lab import lab", "nothing uses lab"),
    ("examples/a.py", "import warpsmith\nwarpsmith.ops.scale._check(1)", "private name"),
    ("tests/test_a.py", "from warpsmith.nn import _hidden", "private name"),
    ("notebooks/01_a.ipynb", NOTEBOOK, "private name"),
]
CLEAN_IMPORTS = {
    "python/warpsmith/reference/a.py": "import torch\nfrom warpsmith.reference.b import b",
    "python/warpsmith/ops/a.py": "from warpsmith._core.library import raw\nimport torch\nx = torch.ops.warpsmith.a",
    "python/warpsmith/nn/a.py": "from warpsmith.ops.a import a",
    "python/warpsmith/_start.py": "from warpsmith.cli import main",
    "python/warpsmith/nn/_dispatch.py": "from warpsmith import _C",
    "tests/test_a.py": "import warpsmith\nfrom warpsmith.testing import op_tests\nprint(warpsmith.__version__)",
}
LATE_IMPORTS = [
    "from warpsmith.ops.a import f",
    "if TYPES:\n    from warpsmith.ops import a",
    "def late():\n    from warpsmith.ops.a import f",
    "class A:\n    async def late(self):\n        import warpsmith.ops.a",
]
# fmt: on


def row(op, family):
    return SimpleNamespace(name=op, family=family, body=family.upper())


def complete(op, family):
    """A family of one op, with all of its files."""
    paths = [pattern.format(family).replace("*", "") for pattern in rules.OF_A_FAMILY]
    paths = [path.replace(f"{family}/.cu", f"{family}/body.cu").replace("/_", "/a_") for path in paths]
    made = dict.fromkeys(paths, "")
    made |= dict.fromkeys((pattern.format(family) for pattern in rules.DEFINING), f"def {op}(x):\n    return x\n")
    return {**made, f"tests/ops/test_{family}.py": f"SPECS = [{op}]"}


SCALE, SHIFT = row("scale", "norm"), row("shift", "shift")
NORM, BOTH = complete("scale", "norm"), {**complete("scale", "norm"), **complete("shift", "shift")}
missing_rooms = functools.partial(rules.missing_rooms, rows=[SCALE, SHIFT])
without_a_row = functools.partial(rules.without_a_row, rows=[SCALE])
missing_optimizers = functools.partial(rules.missing_rooms, rows=[row("scale", "optim")], optimizers=["scale", "heavy"])
STRAYS = {
    "csrc/bindings/shift.cpp": "belongs to no family",
    "tests/sim/sim_shift.cpp": "belongs to no family",
    "csrc/kernels/shift/a.cu": "has no list of ops",
    "python/warpsmith/ops/shift.py": "shift has no row",
}


def unbraced(before):
    text = f"int y;\n{before}#pragma unroll\n  for (int i = 0; i < 4; ++i) {{ x[i] += 1; }}\n"
    return {"csrc/kernels/scale/a.cuh": text}


def too_long(root):
    long = {"python/a.py": "why"}
    return rules.too_long(root, {}) + rules.too_long(root, long) + rules.stale_exceptions(root, long | {"b.py": "why"})


# fmt: off
# (rule, {path: text}, what is found: a part of each line, in order)
PLANTED = [
    (arrows.include_violations, HEADERS, []),
    *((arrows.include_violations, {**HEADERS, path: f"#include {include}\n"}, [(path, words)])
      for path, include, words in INCLUDES),
    (arrows.import_violations, CLEAN_IMPORTS, []),
    *((arrows.import_circles,
       {"python/warpsmith/ops/a.py": "from warpsmith.ops import b",
        "python/warpsmith/ops/b.py": "import warpsmith.ops.c", "python/warpsmith/ops/c.py": again},
       [" imports ".join(f"warpsmith.ops.{m}" for m in "abca")]) for again in LATE_IMPORTS),
    (arrows.import_circles,
     {"python/warpsmith/__init__.py": "from warpsmith.ops import a", "python/warpsmith/ops/a.py": "import warpsmith.b",
      "python/warpsmith/ops/d.py": "import warpsmith", "python/warpsmith/b.py": "import torch"}, []),
    (missing_rooms, BOTH, []),
    *((missing_rooms, {k: v for k, v in BOTH.items() if k != path}, ["norm: " if "norm" in path else "scale: "])
      for path in NORM if not path.startswith(("tests/ops/", "python/"))),
    *((missing_rooms, {k: v for k, v in BOTH.items() if k != path}, [f"scale: {path} does not define it"])
      for path in NORM if path.startswith("python/")),
    (missing_rooms, {k: v for k, v in BOTH.items() if k != "tests/ops/test_norm.py"},
     ["norm: tests/ops/test_norm*.py is missing", "scale: no cases in tests/ops/test_norm*.py"]),
    (missing_rooms, {**BOTH, "tests/ops/test_norm.py": "[scales]"}, ["scale: no cases in tests/ops/test_norm*.py"]),
    (missing_rooms, {**BOTH, "tests/ops/test_norm.py": 'families.rows("NORM")'}, []),
    (missing_optimizers, complete("scale", "optim"),
     [f"{path} is missing" for path in ("scale: python/warpsmith/optim/scale.py",
                                        "heavy: python/warpsmith/optim/heavy.py")]),
    (without_a_row, NORM, []),
    (without_a_row, {**NORM, **dict.fromkeys(STRAYS, "def shift(x):\n    return x\n")},
     [f"{path.removesuffix('/a.cu')}: {why}" for path, why in STRAYS.items()]),
    (too_long, {"python/a.py": "x = 1\n" * 801, "python/b.py": "x = 1\n" * 800},
     ["python/a.py: 801 lines (limit 800)", "b.py: needs no exception"]),
    (rules.inline_assembly,
     {"csrc/kernels/scale/a.cuh": '// asm( in a comment\nint x;\nasm volatile("mov;");\n',
      "csrc/device/a.h": 'asm volatile("mov;");', "csrc/sim/a.cpp": 'asm("switch");',
      "csrc/common/b.h": 'const char* s = "asm(";\nvoid asm_like(); int asmx(int);\n'},
     ["csrc/kernels/scale/a.cuh:3: inline assembly"]),
    (rules.bare_launches,
     {"csrc/kernels/scale/a.cu": "// never <<<>>>\nvoid f() {\n  kernel<<<1, 2>>>();\n}\n",
      "csrc/device/launch.h": "kernel<<<1, 2>>>();\n"}, ["csrc/kernels/scale/a.cu:3: bare launch"]),
    (rules.questions_to_the_device,
     {"csrc/kernels/scale/a.cu": "// cudaGetDeviceProperties\nint major = 0;\n"
                                 "cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);\n",
      "csrc/device/launch.h": "cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0);\n"},
     ["csrc/kernels/scale/a.cu:3: expected DeviceProperties::code_capability"]),
    *((rules.unbraced_discards, unbraced(before), [f": expected braces between {words} and #pragma"])
      for before, words in (
        ("  if constexpr (kCount > f(1))\n", "if constexpr"),
        ("  if constexpr (C)  // only then {\n    for (int j = 0; j < 2; ++j)\n", "if constexpr"),
        ("  if constexpr (C) y = 0;\n  else\n", "else"),
        ("  if constexpr (C) {\n  } else\n", "else"),
    )),
    *((rules.unbraced_discards, unbraced(before), [])
      for before in ("", "if constexpr (C) {\n", "if constexpr (C) x = 0;\n", "if (c) {\n} else {\n")),
    (rules.experiments_without_a_question,
     {"lab/a.cu": "// Question: which?\n", "lab/b.py": '"""Question: where?\n"""', "lab/c.h": "", "lab/lab.py": "",
      "lab/d.cu": "// Times something.\n"}, ["lab/d.cu: its first line is not a question"]),
    *((rules.notes_to_self,
       {"python/a.py": f"x = 1  # {word}: later\n", "docs/a.md": f"{word}\n", "python/b.py": "# todos are a list\n"},
       ["docs/a.md:1: unfinished work", "python/a.py:1: unfinished work"]) for word in ("TO" + "DO", "FIX" + "ME")),
    (rules.long_test_names,
     {"tests/a/test_b.py": f"def test_{'a' * 55}():\n    pass\n\n\ndef test_{'b' * 56}(): pass\n"},
     [("tests/a/test_b.py: test_bbb", ": 61 characters")]),
    (rules.pickling, {"python/warpsmith/a.py": "import json\njson.load(open('x'))"}, []),
    *((rules.pickling, {"python/warpsmith/a.py": text}, ["python/warpsmith/a.py:"]) for text in (
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.save({}, 'x')",
        "def f():\n    import dill",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch\ntorch.distributed.all_gather_object([], 1)",
    )),
    (rules.dead_citations,
     {"README.md": "See `csrc/gone.h`, `csrc/here.h`, [a](docs/gone.md), [b](docs/here.md#part), [c](https://x.org/y), "
                   "`csrc/<op>.h`",
      "csrc/here.h": "// measured: docs/design/gone.md and docs/here.md\n", "docs/here.md": "[up](../README.md)"},
     [f"{cited}, which does not exist" for cited in ("README.md: cites csrc/gone.h", "README.md: cites docs/gone.md",
                                                     "csrc/here.h: cites docs/design/gone.md")]),
    (rules.hiding_modules,
     dict.fromkeys(("tools/sim/coverage.py", "tools/sim/crash.py", "examples/numpy.py", "lab/queue.py"), ""),
     ["tools/sim/coverage.py: hides the package coverage", "lab/queue.py: hides the package queue",
      "examples/numpy.py: hides the package numpy"]),
]
# fmt: on


def name_of(case, number):
    return f"{getattr(case[0], 'func', case[0]).__name__}-{number}{'' if case[2] else '-clean'}"


@pytest.mark.parametrize(("rule", "files", "expected"), PLANTED, ids=map(name_of, PLANTED, itertools.count()))
def test_a_rule_finds_what_is_planted_and_no_more(plant, rule, files, expected):
    found = rule(plant(files))
    assert len(found) == len(expected), found
    for line, parts in zip(found, expected, strict=True):
        assert all(part in line for part in ([parts] if isinstance(parts, str) else parts)), found


@pytest.mark.parametrize(("path", "text", "words"), IMPORTS)
def test_a_wrong_import_is_found(plant, path, text, words):
    found = arrows.import_violations(plant({path: text}))
    assert len(found) >= 1
    assert all(path in f for f in found)
    assert words in found[0]
    if path.startswith("tests"):
        assert arrows.import_violations(plant({path: text}), exceptions=(path,)) == []


def test_exceptions_carry_a_date_and_a_reason(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# comment\n\n2026-11-20 python/a.py: one table that reads best whole\n")
    assert rules.read_exceptions(path) == {"python/a.py": "one table that reads best whole"}
    path.write_text("python/a.py: no date here\n")
    with pytest.raises(ValueError, match="expected 'YYYY-MM-DD path: reason'"):
        rules.read_exceptions(path)


GOOD = """Scales.

    ``y = a x``. Shape (..., D), float32. Deterministic.

    Raises:
        ValueError: never.

    Source: folklore.

    >>> 1
    1
    """
PIECES = dict(
    zip(
        docstrings.OP_SECTIONS,
        ("``y = a x``.", "Shape (..., D),", "float32", "Raises:", "Determ", "Source", ">>>"),
        strict=True,
    )
)


@pytest.mark.parametrize("section", PIECES)
def test_a_missing_docstring_section_is_found(section):
    def op():
        pass

    lacks = "op: docstring: {} is missing".format
    for text, found in (
        (GOOD, []),
        (GOOD.replace(PIECES[section], ""), [lacks(section)]),
        (None, ["op: no docstring"]),
    ):
        op.__doc__ = text
        assert docstrings.missing_sections("op", op, is_op=True) == found


def test_comments_and_strings_are_not_code():
    assert code_of('a; // asm(\nb; /* <<< \n */ c("<<<");').split() == ["a;", "b;", "c(", ");"]
