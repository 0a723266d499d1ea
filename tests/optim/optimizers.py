"""The optimizers that torch has too, each with the option sets of torch's own tests."""

from dataclasses import dataclass
from typing import Any

import torch
import warpsmith
from torch.testing._internal.common_optimizers import optim_db


@dataclass(frozen=True)
class Options:
    """A class by name, and the arguments of its constructor."""

    name: str
    given: dict[str, Any]
    text: str

    def ours(self, params, **more):
        return getattr(warpsmith.optim, self.name)(params, **{**self.given, **more})

    def theirs(self, params, **more):
        """torch's; its fused implementation where it has one (of Adagrad not on CUDA)."""
        on_cuda = isinstance(params[0], torch.Tensor) and params[0].is_cuda
        fused = {} if self.name == "RMSprop" or (self.name == "Adagrad" and on_cuda) else {"fused": True}
        return getattr(torch.optim, self.name)(params, **{**self.given, **fused, **more})

    def __str__(self):
        return f"{self.name}: {self.text}"


def of_torch():
    """Every option set of torch's tests for the classes that warpsmith.optim has."""
    infos = {info.optim_cls.__name__: info for info in optim_db}
    names = [name for name in warpsmith.optim.__all__ if name in infos and name != "Muon"]  # test_muon.py
    return [
        Options(name, given.kwargs, given.desc)
        for name in names
        for given in infos[name].optim_inputs_func(device="cpu", dtype=torch.float32)
    ]


OF_TORCH = [
    *of_torch(),
    Options("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "amsgrad": True}, "decoupled"),
    Options("Adam", {"betas": (0.3, 0.5), "eps": 1e-3}, "small betas"),
    Options("SGD", {"momentum": 0.5, "dampening": -0.5, "maximize": True}, "negative dampening"),
    Options("RMSprop", {"momentum": 0.9, "alpha": 0.5}, "momentum without centre"),
    Options("RMSprop", {"centered": True}, "centre without momentum"),
]
# One a class, with as many states as it can have.
FULL = [
    Options("Adam", {"amsgrad": True, "weight_decay": 0.1}, "full"),
    Options("AdamW", {"amsgrad": True}, "full"),
    Options("SGD", {"momentum": 0.9, "dampening": 0.5}, "full"),
    Options("Adagrad", {"lr_decay": 0.1}, "full"),
    Options("RMSprop", {"centered": True, "momentum": 0.9}, "full"),
]
LION = Options("Lion", {"weight_decay": 0.1}, "decay")
LAMB = Options("LAMB", {"weight_decay": 0.1}, "decay")
# One for each way in which a kernel stores parameters and states.
EACH_STORAGE = [
    *FULL,
    LION,
    LAMB,
    *(Options("AdamW", {"precision": p}, p) for p in ("master", "bf16_kahan", "bf16_sr", "remainder")),
    *(Options(n, {"precision": "8bit", **more}, "8bit") for n, more in (("AdamW", {}), ("SGD", {"momentum": 0.9}))),
]
FEW_STATES = [Options("AdamW", {}, "plain"), Options("SGD", {"momentum": 0.9}, "momentum")]
# One for each set of states that a class can have.
EVERY = [
    *FULL,
    *FEW_STATES,
    LION,
    LAMB,
    Options("Adam", {}, "plain"),
    Options("SGD", {}, "no state"),
    Options("RMSprop", {}, "plain"),
    Options("RMSprop", {"momentum": 0.9}, "momentum"),
    Options("RMSprop", {"centered": True}, "centered"),
]


def dtype_of(options):
    """The dtype of parameters that a precision is for."""
    return torch.float32 if options.given.get("precision", "8bit") == "8bit" else torch.bfloat16
