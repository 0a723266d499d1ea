"""Packages of AOTInductor call the ops by their schemas: what runs them has no Python of ours, only the library."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import warpsmith
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
NAMES = ("x", "residual", "norm_weight", "weight", "target")
LIBRARY = next(path for path in torch.ops.loaded_libraries if "warpsmith_ops" in path)


class Head(torch.nn.Module):
    """Ops with tensors, numbers, a string and absent arguments, of one output and of several."""

    def forward(self, x, residual, norm_weight, weight, target):
        y, stream = warpsmith.add_rms_norm(x, residual, norm_weight, 1e-6)
        hidden = warpsmith.swiglu(y)
        loss = warpsmith.linear_cross_entropy(hidden, weight, target, reduction="none", z_loss=1e-3)
        return loss, stream


def inputs(rows):
    g = torch.Generator().manual_seed(rows)
    x, residual = torch.randn(2, rows, 32, generator=g)
    return x, residual, torch.randn(32, generator=g), torch.randn(11, 16, generator=g), torch.arange(rows) % 11


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("aoti") / "head.pt2"
    rows = torch.export.Dim("rows", min=2, max=1000)
    dynamic = ({0: rows}, {0: rows}, None, None, {0: rows})
    program = torch.export.export(Head(), inputs(5), dynamic_shapes=dynamic)
    return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


def run_elsewhere(package, load, given, found):
    """Runs the package on each given set of inputs in a process that has torch alone, where warpsmith stays unknown.

    The package is unpacked beside the results, not in the temporary folder of the machine, where torch leaves it when
    loading fails.
    """
    code = f"""
        import sys, torch
        from safetensors.torch import load_file, save_file
        {load}
        run = torch._inductor.aoti_load_package({str(package)!r})
        for given, found in {[*zip(map(str, given), map(str, found), strict=True)]!r}:
            tensors = load_file(given)
            loss, stream = run(*(tensors[name] for name in {NAMES!r}))
            save_file({{"loss": loss, "stream": stream}}, found)
        assert "warpsmith" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=package.parent,
        env=os.environ | {"TMPDIR": str(found[0].parent)},
    )


def written(folder, rows):
    path = folder / f"given{rows}.safetensors"
    save_file(dict(zip(NAMES, inputs(rows), strict=True)), path)
    return path


def test_a_package_gives_the_same_bits_with_the_library_alone(package, tmp_path):
    sizes = (5, 33)
    found = [tmp_path / f"found{rows}.safetensors" for rows in sizes]
    load = f"torch.ops.load_library({LIBRARY!r})"
    done = run_elsewhere(package, load, [written(tmp_path, rows) for rows in sizes], found)
    assert done.returncode == 0, done.stderr
    for rows, path in zip(sizes, found, strict=True):
        loss, stream = Head()(*inputs(rows))
        got = load_file(path)
        assert torch.equal(got["loss"], loss)
        assert torch.equal(got["stream"], stream)


def test_a_package_without_the_library_names_the_op(package, tmp_path):
    for _ in range(3):
        done = run_elsewhere(package, "", [written(tmp_path, 5)], [tmp_path / "found"])
        assert done.returncode != 0
        # Seen once on a busy machine, with a package that another process had just loaded: torch's loader, alone in
        # its process, found an unpacked JSON file empty and never came to the ops, so nothing was said about them.
        if "attempting to parse an empty input" not in done.stderr:
            break
    assert "Could not find schema for warpsmith::" in done.stderr, (done.stderr, shutil.disk_usage(tmp_path))
