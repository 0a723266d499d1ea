"""Each op's definition in a few lines of differentiable PyTorch: ``warpsmith.reference.rms_norm(x, weight)``."""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    # The attribute is the function and not its module, as in warpsmith.ops.
    globals()[_found.name] = getattr(importlib.import_module(f"{__name__}.{_found.name}"), _found.name)
