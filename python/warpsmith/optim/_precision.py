"""What the arrays of a parameter are stored in, by the precision of its group and its own dtype."""

from typing import NamedTuple

import torch

from warpsmith._core.raw_step import COUNTER, SCALES

# What a storage may keep of a parameter beside its states, by its name in the state: an element for each of its own.
EXTRA_DTYPES = {"master": torch.float32, "compensation": torch.bfloat16, "remainder": torch.int16}


class Storage(NamedTuple):
    """How the arrays of a parameter are stored."""

    name: str  # in csrc/kernels/optim/optim.h
    state_dtype: torch.dtype
    extra: str | None = None  # of EXTRA_DTYPES, or SCALES
    stochastic: bool = False  # rounded at random, by seed and step

    def arrays(self, states: tuple[str, ...]) -> tuple[str, ...]:
        """The names of all that the state of a parameter holds; ``states``: those of its optimizer."""
        counter = (COUNTER,) * (self.stochastic and COUNTER not in states)
        return (*states, *counter, *((self.extra,) if self.extra else ()))

    def array_dtype(self, name: str) -> torch.dtype:
        """The dtype of a state or extra."""
        return torch.float32 if name == SCALES else EXTRA_DTYPES.get(name, self.state_dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether the states are 8-bit codes."""
        return self.extra == SCALES


_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_FLOAT32 = Storage("float32", _FP32)

# {precision: {dtype of a parameter: how it is stored}}. By default the first that has the dtype.
_STORAGES: dict[str, dict[torch.dtype, Storage]] = {
    "fp32": {_FP32: _FLOAT32, torch.float64: Storage("float64", torch.float64)},
    "bf16": {_BF16: Storage("bfloat16", _BF16), _FP16: Storage("float16", _FP16)},
    "master": {
        _BF16: Storage("bfloat16_master", _FP32, "master"),
        _FP16: Storage("float16_master", _FP32, "master"),
        _FP32: _FLOAT32,
    },
    "bf16_states": {_FP32: Storage("bfloat16_states", _BF16), _BF16: Storage("bfloat16", _BF16)},
    "bf16_sr": {_BF16: Storage("bfloat16_stochastic", _BF16, stochastic=True), _FP32: _FLOAT32},
    "remainder": {_BF16: Storage("bfloat16_remainder", _FP32, "remainder"), _FP32: _FLOAT32},
    "8bit": {
        _FP32: Storage("float32_8bit", torch.uint8, SCALES),
        _BF16: Storage("bfloat16_8bit", torch.uint8, SCALES),
        _FP16: Storage("float16_8bit", torch.uint8, SCALES),
    },
    "bf16_kahan": {_BF16: Storage("bfloat16_compensated", _BF16, "compensation"), _FP32: _FLOAT32},
}
PRECISIONS = (None, *_STORAGES)


def storage_of(precision: str | None, dtype: torch.dtype, exact: bool = False) -> Storage | None:
    """The storage of a parameter of this dtype; None where the precision does not take it.

    ``exact``: its states are kept in float32 where those of others are 8-bit codes.
    """
    names = _STORAGES if precision is None else (precision,)
    storage = next((_STORAGES[name][dtype] for name in names if dtype in _STORAGES[name]), None)
    return Storage(storage.name, _FP32) if storage and storage.is_quantized and exact else storage


def dtypes_of(precision: str) -> tuple[torch.dtype, ...]:
    """The dtypes of parameters that a precision takes."""
    return tuple(_STORAGES[precision])
