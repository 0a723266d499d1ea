"""Each house rule must find a planted violation, and must not cry over the clean form of the same file."""

import json

import arrows
import docstrings
import pytest
import rules
from files import code_of

from tools import families


@pytest.fixture
def plant(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


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


def test_clean_includes_pass(plant):
    assert arrows.include_violations(plant(HEADERS)) == []


@pytest.mark.parametrize(
    ("path", "include", "words"),
    [
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
    ],
)
def test_a_wrong_include_is_found(plant, path, include, words):
    (found,) = arrows.include_violations(plant({**HEADERS, path: f"#include {include}\n"}))
    assert path in found
    assert words in found


NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "source": ["not python"]},
            {"cell_type": "code", "source": ["%matplotlib inline\n", "import warpsmith\n", "warpsmith._load\n"]},
        ]
    }
)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("python/warpsmith/reference/a.py", "from warpsmith.ops.scale import scale", "torch alone"),
        ("python/warpsmith/reference/a.py", "import warpsmith", "torch alone"),
        ("python/warpsmith/ops/a.py", "from warpsmith.nn import RMSNorm", "must not use nn"),
        ("python/warpsmith/ops/a.py", "from warpsmith import optim", "must not use optim"),
        ("python/warpsmith/ops/a.py", "from ..reference import a", "must not use reference"),
        ("python/warpsmith/ops/a.py", "def f():\n    import warpsmith.testing", "must not use testing"),
        ("python/warpsmith/nn/a.py", "import torch\ny = torch.ops.warpsmith.scale", "uses torch.ops"),
        ("python/warpsmith/optim/a.py", "import torch\nf = lambda: torch.ops.warpsmith.adamw()", "uses torch.ops"),
        ("tests/ops/test_a.py", "from warpsmith.ops._library import raw", "private name"),
        ("python/warpsmith/_load.py", "def f():\n    from warpsmith.tools import main", "every room stands on _load"),
        ("benchmarks/a.py", "import warpsmith._load", "private name"),
        ("python/warpsmith/nn/a.py", "from lab import lab", "nothing uses lab"),
        ("examples/a.py", "import warpsmith\nwarpsmith.ops.scale._check(1)", "private name"),
        ("tests/test_a.py", "from warpsmith.nn import _hidden", "private name"),
        ("notebooks/01_a.ipynb", NOTEBOOK, "private name"),
    ],
)
def test_a_wrong_import_is_found(plant, path, text, words):
    found = arrows.import_violations(plant({path: text}))
    assert len(found) >= 1
    assert all(path in f for f in found)
    assert words in found[0]
    if path.startswith("tests"):
        assert arrows.import_violations(plant({path: text}), exceptions=(path,)) == []


@pytest.mark.parametrize(
    "again",
    [
        "from warpsmith.ops.a import f",
        "if TYPES:\n    from warpsmith.ops import a",
        "def late():\n    from warpsmith.ops.a import f",
        "class A:\n    async def late(self):\n        import warpsmith.ops.a",
    ],
)
def test_modules_that_import_each_other_are_found(plant, again):
    ways = {
        "python/warpsmith/ops/a.py": "from warpsmith.ops import b",
        "python/warpsmith/ops/b.py": "import warpsmith.ops.c",
        "python/warpsmith/ops/c.py": again,
    }
    (found,) = arrows.import_circles(plant(ways))
    assert found == " imports ".join(f"warpsmith.ops.{m}" for m in "abca")
    init = {
        "python/warpsmith/__init__.py": "from warpsmith.ops import a",
        "python/warpsmith/ops/d.py": "import warpsmith",
    }
    assert arrows.import_circles(plant({**ways, **init, "python/warpsmith/ops/c.py": "import torch"})) == []


def test_clean_imports_pass(plant):
    clean = {
        "python/warpsmith/reference/a.py": "import torch\nfrom warpsmith.reference.b import b",
        "python/warpsmith/ops/a.py": "from warpsmith.ops._library import raw\nimport torch\nx = torch.ops.warpsmith.a",
        "python/warpsmith/nn/a.py": "from warpsmith.ops.a import a",
        "python/warpsmith/_start.py": "from warpsmith.tools import main",
        "python/warpsmith/_plan.py": "from warpsmith import _C",
        "tests/test_a.py": "import warpsmith\nfrom warpsmith.testing import op_tests\nprint(warpsmith.__version__)",
    }
    assert arrows.import_violations(plant(clean)) == []


def complete(op, family):
    """A family of one op, with all of its files."""
    return {
        f"csrc/kernels/{family}/{family}_ops.h": f"#define WARPSMITH_{family.upper()}_OPS(ROW) ROW({op}, Silu)\n",
        f"tests/ops/test_{family}_values.py": f"SPECS = [{op}]",
        **dict.fromkeys(
            [
                f"csrc/kernels/{family}/{family}.h",
                f"csrc/kernels/{family}/body.cuh",
                f"csrc/kernels/{family}/forward.cu",
                f"csrc/kernels/{family}/{family}_budget.json",
                f"csrc/cpu/{family}.cpp",
                f"csrc/bindings/{family}_checks.cpp",
                f"csrc/pymodule/{family}.cpp",
                f"csrc/include/warpsmith/{family}.h",
                f"python/warpsmith/ops/{op}.py",
                f"python/warpsmith/reference/{op}.py",
                f"tests/sim/sim_{family}.cpp",
                f"benchmarks/bench_{family}.py",
                f"docs/ops/{op}.md",
            ],
            "",
        ),
    }


@pytest.mark.parametrize("left_out", list(complete("scale", "norm"))[1:])
def test_a_missing_room_is_found(plant, left_out):
    files = {**complete("scale", "norm"), **complete("shift", "shift")}
    del files[left_out]
    found = rules.missing_rooms(plant(files))
    assert found
    assert all(line.startswith(("norm: ", "scale: ")) for line in found)


def test_an_optimizer_without_class_or_page_is_found(plant):
    files = complete("scale", "optim")
    files["csrc/kernels/optim/optim_ops.h"] += (
        "\n#define WARPSMITH_OPTIMIZERS(ROW) ROW(scale, Scale) ROW(heavy, Heavy)\n"
    )
    found = rules.missing_rooms(plant(files))
    assert found == [
        "scale: python/warpsmith/optim/scale.py is missing",
        "heavy: python/warpsmith/optim/heavy.py is missing",
        "heavy: docs/optim/heavy.md is missing",
    ]


def test_a_row_without_cases_is_found(plant):
    files = {**complete("scale", "norm"), "tests/ops/test_norm_values.py": "SPECS = [scales]"}
    assert rules.missing_rooms(plant(files)) == ["scale: no cases in tests/ops/test_norm*.py"]


def test_complete_families_pass_and_strays_are_found(plant):
    root = plant(complete("scale", "norm"))
    assert rules.missing_rooms(root) == rules.without_a_row(root) == []
    strays = {
        "csrc/bindings/shift.cpp": "belongs to no family",
        "tests/sim/sim_shift.cpp": "belongs to no family",
        "csrc/kernels/shift": "has no list of ops",
        "python/warpsmith/ops/shift.py": "has no row",
    }
    root = plant({path if "." in path else f"{path}/a.cu": "" for path in strays})
    assert rules.without_a_row(root) == [f"{path}: {why}" for path, why in strays.items()]


def test_rows_are_read_with_their_arguments(plant):
    text = """// A row each: ROW(op, function).
#define WARPSMITH_GATED_OPS(ROW) \\
  ROW(one, Silu, plain)          \\
  ROW(two, Gelu, tanh)

#define WARPSMITH_UNARY_OPS(ROW) ROW(three)
#define WARPSMITH_SELECT(op) use(op)
"""
    found = families.rows(plant({"csrc/kernels/f/f_ops.h": text}))
    assert [(r.name, r.family, r.body, r.arguments) for r in found] == [
        ("one", "f", "GATED", ("Silu", "plain")),
        ("two", "f", "GATED", ("Gelu", "tanh")),
        ("three", "f", "UNARY", ()),
    ]


def test_a_long_file_is_found_unless_it_is_on_the_list(plant):
    root = plant({"python/a.py": "x = 1\n" * 801, "python/b.py": "x = 1\n" * 800})
    (found,) = rules.too_long(root, {})
    assert found == "python/a.py: 801 lines (limit 800)"
    assert rules.too_long(root, {"python/a.py": "why"}) == []
    assert rules.stale_exceptions(root, {"python/b.py": "why", "python/a.py": "why"}) == [
        "python/b.py: needs no exception"
    ]


def test_exceptions_carry_a_date_and_a_reason(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# comment\n\n2026-11-20 python/a.py: one table that reads best whole\n")
    assert rules.read_exceptions(path) == {"python/a.py": "one table that reads best whole"}
    path.write_text("python/a.py: no date here\n")
    with pytest.raises(ValueError, match="expected 'YYYY-MM-DD path: reason'"):
        rules.read_exceptions(path)


def test_inline_assembly_is_found(plant):
    root = plant(
        {
            "csrc/kernels/scale/a.cuh": '// asm( in a comment\nint x;\nasm volatile("mov;");\n',
            "csrc/device/a.h": 'asm volatile("mov;");',
            "csrc/sim/a.cpp": 'asm("switch");',
            "csrc/common/b.h": 'const char* s = "asm(";\nvoid asm_like(); int asmx(int);\n',
        }
    )
    assert rules.inline_assembly(root) == ["csrc/kernels/scale/a.cuh:3: inline assembly"]


def test_a_bare_launch_is_found(plant):
    root = plant(
        {
            "csrc/kernels/scale/a.cu": "// never <<<>>>\nvoid f() {\n  kernel<<<1, 2>>>();\n}\n",
            "csrc/device/launch.h": "kernel<<<1, 2>>>();\n",
        }
    )
    assert rules.bare_launches(root) == ["csrc/kernels/scale/a.cu:3: bare launch"]


def test_a_question_to_the_device_is_found(plant):
    root = plant(
        {
            "csrc/kernels/scale/a.cu": "// cudaGetDeviceProperties\nint major = 0;\n"
            "cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);\n",
            "csrc/device/launch.h": "cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0);\n",
        }
    )
    (found,) = rules.questions_to_the_device(root)
    assert found.startswith("csrc/kernels/scale/a.cu:3: expected DeviceProperties::code_capability")


UNROLLED = "#pragma unroll\n  for (int i = 0; i < 4; ++i) { x[i] += 1; }\n"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("  if constexpr (kCount > f(1))\n", "if constexpr"),
        ("  if constexpr (C)  // only then {\n    for (int j = 0; j < 2; ++j)\n", "if constexpr"),
        ("  if constexpr (C) y = 0;\n  else\n", "else"),
        ("  if constexpr (C) {\n  } else\n", "else"),
    ],
)
def test_an_unbraced_branch_before_an_unrolled_loop_is_found(plant, before, words):
    (found,) = rules.unbraced_discards(plant({"csrc/kernels/scale/a.cuh": "int y;\n" + before + UNROLLED}))
    assert found.endswith(f": expected braces between {words} and #pragma")


@pytest.mark.parametrize("before", ["", "if constexpr (C) {\n", "if constexpr (C) x = 0;\n", "if (c) {\n} else {\n"])
def test_a_braced_branch_around_an_unrolled_loop_passes(plant, before):
    assert rules.unbraced_discards(plant({"csrc/kernels/scale/a.cuh": before + UNROLLED})) == []


def test_an_experiment_without_a_question_is_found(plant):
    root = plant(
        {"lab/a.cu": "// Question: which?\n", "lab/b.py": '"""Question: where?\n"""', "lab/c.h": "", "lab/lab.py": ""}
    )
    assert rules.experiments_without_a_question(root) == []
    plant({"lab/d.cu": "// Times something.\n"})
    assert rules.experiments_without_a_question(root) == ["lab/d.cu: its first line is not a question"]


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME"])
def test_unfinished_work_is_found(plant, word):
    root = plant(
        {"python/a.py": f"x = 1  # {word}: later\n", "docs/a.md": f"{word}\n", "python/b.py": "# todos are a list\n"}
    )
    assert rules.notes_to_self(root) == ["docs/a.md:1: unfinished work", "python/a.py:1: unfinished work"]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.save({}, 'x')",
        "def f():\n    import dill",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch\ntorch.distributed.all_gather_object([], 1)",
    ],
)
def test_pickle_is_found(plant, text):
    assert len(rules.pickling(plant({"python/warpsmith/a.py": text}))) == 1
    assert rules.pickling(plant({"python/warpsmith/a.py": "import json\njson.load(open('x'))"})) == []


def test_a_dead_citation_is_found(plant):
    root = plant(
        {
            "README.md": "See `csrc/gone.h`, `csrc/here.h`, [a](docs/gone.md), [b](docs/here.md#part), "
            "[c](https://x.org/y), `csrc/<op>.h`",
            "csrc/here.h": "// measured: docs/design/gone.md and docs/here.md\n",
            "docs/here.md": "[up](../README.md)",
        }
    )
    assert rules.dead_citations(root) == [
        "README.md: cites csrc/gone.h, which does not exist",
        "README.md: cites docs/gone.md, which does not exist",
        "csrc/here.h: cites docs/design/gone.md, which does not exist",
    ]


def test_a_module_that_hides_a_package_is_found(plant):
    root = plant({"tools/sim/coverage.py": "", "tools/sim/crash.py": "", "examples/numpy.py": "", "lab/queue.py": ""})
    assert rules.hiding_modules(root) == [
        "tools/sim/coverage.py: hides the package coverage",
        "lab/queue.py: hides the package queue",
        "examples/numpy.py: hides the package numpy",
    ]


def good_op():
    """Scales.

    ``y = a x``. Shape (..., D), float32. Deterministic.

    Raises:
        ValueError: never.

    Source: folklore.

    >>> 1
    1
    """


@pytest.mark.parametrize(
    ("piece", "section"),
    [
        ("``y = a x``.", "formula"),
        ("Shape (..., D),", "shapes"),
        ("float32", "dtypes"),
        ("Raises:", "errors"),
        ("Deterministic.", "determinism"),
        ("Source", "source"),
        (">>>", "example"),
    ],
)
def test_a_missing_docstring_section_is_found(piece, section):
    def op():
        pass

    op.__doc__ = good_op.__doc__
    assert docstrings.missing_sections("op", op, is_op=True) == []
    op.__doc__ = good_op.__doc__.replace(piece, "")
    assert docstrings.missing_sections("op", op, is_op=True) == [f"op: docstring: {section} is missing"]
    op.__doc__ = None
    assert docstrings.missing_sections("op", op, is_op=True) == ["op: no docstring"]


def test_comments_and_strings_are_not_code():
    assert code_of('a; // asm(\nb; /* <<< \n */ c("<<<");').split() == ["a;", "b;", "c(", ");"]
