"""One message for each thing that can be wrong when the package is loaded, and loading in every order."""

import json
import re

import pytest
from environments import IN_ONE_PROCESS, run

pytestmark = IN_ONE_PROCESS


def stub_torch(folder, text):
    """A package that stands for a torch which is missing, old or broken."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(text)
    return str(folder)


MISSING = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
BROKEN = "raise OSError('libcudart.so.13: cannot open shared object file')"
OLD = "__version__ = '2.10.1+cpu'"


def assert_explained(environment, path, message):
    """The import ends with the message, and `python -m warpsmith info` with it alone, as a problem and exit code 1."""
    done = environment.run("import warpsmith", PYTHONPATH=path)
    assert done.returncode == 1
    assert re.match("ImportError: " + message, done.stderr.strip().splitlines()[-1]), done.stderr

    told = run(environment.python, "-m", "warpsmith", "info", "--json", PYTHONPATH=path)
    assert told.returncode == 1, told.stderr
    (problem,) = json.loads(told.stdout)["problems"]
    assert re.match(message, problem)
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MISSING, r"warpsmith: torch is missing or broken \(No module named 'torch'\); install torch >= 2\.11$"),
        (
            BROKEN,
            r"warpsmith: torch is missing or broken \(libcudart\.so\.13: cannot open .*\); install torch >= 2\.11$",
        ),
        (OLD, r"warpsmith: expected torch >= 2\.11, got 2\.10\.1\+cpu; upgrade torch$"),
    ],
)
def test_a_missing_broken_or_old_torch_is_named(installed, tmp_path, text, message):
    assert_explained(installed, stub_torch(tmp_path, text), message)


REINSTALL = r"; install the package again with `pip install \.` in the environment that holds torch$"


def test_a_missing_library_is_named(installed, package_copy):
    (library,) = package_copy.glob("libwarpsmith_ops.*")
    library.unlink()
    message = rf"warpsmith: {library.name} is missing beside the compiled module" + REINSTALL
    assert_explained(installed, str(package_copy.parent), message)


def test_a_library_that_does_not_load_is_named(installed, package_copy):
    (library,) = package_copy.glob("libwarpsmith_ops.*")
    library.write_bytes(b"not a library")
    message = rf"warpsmith: {library.name} does not load into torch \S+: .*" + REINSTALL
    assert_explained(installed, str(package_copy.parent), message)


def test_a_missing_compiled_module_is_named(installed, package_copy):
    for module in package_copy.glob("_C.*.so"):
        module.unlink()
    assert_explained(installed, str(package_copy.parent), "warpsmith: the compiled module _C is missing" + REINSTALL)


def test_cmake_dir_without_its_config_is_named(installed, package_copy):
    (package_copy / "cmake/warpsmithConfig.cmake").unlink()
    done = run(installed.python, "-m", "warpsmith", "info", "--cmake-dir", PYTHONPATH=str(package_copy.parent))
    assert done.returncode == 1
    assert "holds no warpsmithConfig.cmake; install the package again" in done.stderr


USE = "assert warpsmith.rms_norm(torch.ones(2, 3)).shape == (2, 3)"
LIBRARY = "next(pathlib.Path(importlib.util.find_spec('warpsmith._C').origin).parent.glob('libwarpsmith_ops.*'))"


@pytest.mark.parametrize(
    "code",
    [
        # A LibTorch host has loaded the library before Python comes.
        "import glob, sys, torch, os\n"
        "folder = [p for p in sys.path if os.path.isdir(os.path.join(p, 'warpsmith'))][0]\n"
        "torch.ops.load_library(glob.glob(os.path.join(folder, 'warpsmith', 'libwarpsmith_ops.*'))[0])\n"
        "import warpsmith",
        # The other order.
        f"import importlib.util, pathlib, torch, warpsmith\ntorch.ops.load_library(str({LIBRARY}))",
        "import importlib, torch, warpsmith\nimportlib.reload(warpsmith)",
        "import importlib, sys, torch, warpsmith\n"
        "for name in [n for n in sys.modules if n.startswith('warpsmith.ops')]: importlib.reload(sys.modules[name])",
    ],
    ids=["library first", "library again", "reload", "reload of the ops"],
)
def test_the_library_is_loaded_once_in_any_order(installed, code):
    done = installed.run(f"{code}\n{USE}\nprint('fine')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def test_the_copy_of_the_library_that_a_host_loaded_is_used(installed, package_copy):
    # Two copies of the same schemas would end the process.
    (library,) = package_copy.glob("libwarpsmith_ops.*")
    done = installed.run(
        f"import torch\ntorch.ops.load_library({str(library)!r})\nimport warpsmith\n{USE}\nprint('fine')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"
