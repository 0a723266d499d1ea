"""What a module is told reaches the op that it calls: each option of its constructor that the op has too."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
import torch
import warpsmith

from tests.nn.test_no_copies import CASES

# Values that are no module's default, by option.
OTHER = dict.fromkeys(
    ("eps", "p", "dropout_p", "softmax_scale", "label_smoothing", "z_loss", "weight_offset", "momentum"), 0.25
)
OTHER |= dict.fromkeys(("interleaved", "causal", "check_labels", "inplace_backward"), True) | {"deterministic": False}
OTHER |= {"softcap": 4.0, "ignore_index": 3, "max_chunk_bytes": 4096, "max_bytes": 1 << 30, "window_size": (3, 5)}
OTHER |= {"activation": "relu", "approximate": "tanh", "reduction": "sum", "dw_dtype": torch.float32}
# Without options beyond torch's it calls the function of torch's signature.
ALWAYS = {"CrossEntropyLoss": {"z_loss": 0.125}}


def calls(monkeypatch, cls, arguments, call):
    """The arguments by name of each call of a public op while a module is called."""
    found = []
    with monkeypatch.context() as patched:
        for name, op in list(vars(sys.modules[cls.__module__]).items()):
            if inspect.isfunction(op) and getattr(warpsmith, name, None) is op:

                def noted(*given, op=op, **more):
                    bound = inspect.signature(op).bind(*given, **more)
                    bound.apply_defaults()
                    found.append((op, bound.arguments))
                    return op(*given, **more)

                patched.setattr(sys.modules[cls.__module__], name, noted)
        given, more = call()
        with contextlib.suppress(ValueError):  # of an option that does not fit these tensors
            cls(**arguments)(*given, **more)
    return found


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_an_option_reaches_the_op(monkeypatch, name):
    cls = getattr(warpsmith.nn, name)
    told = inspect.signature(cls)
    for _, given, options, call in (case for case in CASES if case[0] == name):
        arguments = told.bind(*given, **options).arguments | ALWAYS.get(name, {})
        ops = {op for op, _ in calls(monkeypatch, cls, arguments, call)}
        assert ops or name == "NormLinear"  # whose step of autograd is no public op
        taken = [p for op in ops for p in inspect.signature(op).parameters.values()]
        for option in {p.name for p in taken if "Tensor" not in str(p.annotation)} & told.parameters.keys():
            made = calls(monkeypatch, cls, {**arguments, option: OTHER[option]}, call)
            assert any(seen.get(option) == OTHER[option] for _, seen in made), option
