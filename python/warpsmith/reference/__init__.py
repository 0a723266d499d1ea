"""Each op's definition in a few lines of differentiable PyTorch: ``warpsmith.reference.rms_norm(x, weight)``."""

import importlib
import inspect
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    # The attribute of a name that a family and its op share is the function, as in warpsmith.ops.
    _module = importlib.import_module(f"{__name__}.{_found.name}")
    globals().update({n: f for n, f in inspect.getmembers(_module, inspect.isfunction) if n[0] != "_"})
