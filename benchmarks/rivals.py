"""Rivals that several benchmarks share, and which are installed. All are optional: what is absent is left out, and the
results say so."""

import contextlib
import sys
from importlib import metadata, util

PACKAGES = {
    "liger-kernel": "liger_kernel",
    "quack-kernels": "quack",
    "nvidia-cudnn-frontend": "cudnn",
    "cut-cross-entropy": "cut_cross_entropy",
    "apex": "apex",
    "torchao": "torchao",
    "flash-attn": "flash_attn",
    "flash-attn-4": "flash_attn",
}


def installed():
    """{package: its version, or "absent", or why it cannot be imported}."""
    found = {}
    for package, module in PACKAGES.items():
        try:
            if util.find_spec(module) is None:
                found[package] = "absent"
                continue
            __import__(module)
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "version unknown"
        except Exception as error:
            found[package] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
    return found


@contextlib.contextmanager
def optional():
    """Around the import of a rival: an absent one is left out, one that does not import says why."""
    try:
        yield
    except ModuleNotFoundError:
        pass  # `installed` says so
    except Exception as error:
        print(f"a rival is left out: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)


def liger_cute(op, *middle, **options):
    """{"liger cutedsl": function} of Liger's kernels in NVIDIA's CuTe DSL, where both are installed.

    The function takes an op's tensors; ``middle`` and ``options`` follow them in the call. Where Liger has no such
    kernel for a shape it calls its Triton kernel.
    """
    with optional():
        import cutlass.cute  # noqa: F401
        import liger_kernel.functional

        fn = getattr(liger_kernel.functional, op)
        return {"liger cutedsl": lambda *tensors: fn(*tensors, *middle, impl="nvidia-cutedsl", **options)}
    return {}
