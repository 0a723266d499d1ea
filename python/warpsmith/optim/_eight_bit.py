"""8-bit states: codes and scales by the block of 256 elements in memory order, as the kernels read and write them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core.raw_step import SCALES, not_negative, state_names
from warpsmith._core.tensor_list import is_dense

LEAST_ELEMS = 4096  # of a parameter whose states become codes
ZERO_CODES = {True: 127, False: 0}  # with and without sign


def blocks_of(numel: int) -> int:
    """The number of scales of each state of a tensor."""
    return -(-numel // _C.QUANT_BLOCK)


def is_signed(row: str, name: str) -> bool:
    """Whether a state of an optimizer's row may be negative."""
    return name not in not_negative(row)


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def _dense(t: Tensor) -> Tensor:
    return t if is_dense(t) else t.contiguous()


def encode(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """The codes of a float32 tensor, uint8 with its strides if it is dense, and the scales of its blocks."""
    value = _dense(value)
    code_values = torch.tensor(_C.DYNAMIC_MAPS[signed], dtype=torch.float32, device=value.device)
    borders = (code_values[:-1] + code_values[1:]) * 0.5
    blocks = torch.nn.functional.pad(_flat(value), (0, -value.numel() % _C.QUANT_BLOCK)).view(-1, _C.QUANT_BLOCK)
    scales = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)
    x = torch.where(scales[:, None] == 0, torch.zeros_like(blocks), blocks / scales[:, None])
    codes = torch.bucketize(x, borders)
    if not signed:
        codes = torch.where((codes == 0) & (x > 0), 1, codes)
    result = torch.empty_like(value, dtype=torch.uint8)
    _flat(result).copy_(codes.flatten()[: value.numel()])
    return result, scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The float32 values of codes, with their strides if they are dense."""
    codes = _dense(codes)
    code_values = torch.tensor(_C.DYNAMIC_MAPS[signed], dtype=torch.float32, device=codes.device)
    of_elements = scales.repeat_interleave(_C.QUANT_BLOCK)[: codes.numel()]
    result = torch.empty_like(codes, dtype=torch.float32)
    _flat(result).copy_(code_values[_flat(codes).long()] * of_elements)
    return result


def lay_as(state: dict[str, Any], name: str, row: str, like: Tensor) -> None:
    """Brings a state of codes into the memory order of another tensor: blocks of other elements, so other scales."""
    scales = state[SCALES][[n for n in state_names(row) if n in state].index(name)]
    value = torch.empty_like(like, dtype=torch.float32, memory_format=torch.preserve_format)
    value.copy_(decode(state[name], scales, is_signed(row, name)))
    state[name], moved = encode(value, is_signed(row, name))
    scales.copy_(moved)


def decoded_state(state: Mapping[str, Any], row: str) -> dict[str, Any]:
    """A parameter's state with its codes as float32 and without scales; any other state as it is."""
    if SCALES not in state:
        return dict(state)
    names = [name for name in state_names(row) if name in state]
    decoded = {n: decode(state[n], s, is_signed(row, n)) for n, s in zip(names, state[SCALES], strict=True)}
    return {name: decoded.get(name, value) for name, value in state.items() if name != SCALES}


def encoded_state(state: Mapping[str, Any], row: str) -> dict[str, Any]:
    """The opposite of :func:`decoded_state`: codes and scales of a parameter's float states."""
    names = [name for name in state_names(row) if name in state]
    if SCALES in state or not names:
        return dict(state)
    encoded = {n: encode(state[n].float(), is_signed(row, n)) for n in names}
    codes = {name: encoded[name][0] if name in encoded else value for name, value in state.items()}
    return {**codes, SCALES: torch.stack([encoded[n][1] for n in names])}


def float32_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer with ``precision="8bit"`` as one with float32 states.

    For ``torch.optim``, which knows no codes, and for an optimizer of this package of any other precision. Values are
    ``map[code] * scale``, one float32 rounding. Tensors that are no codes are not copied. A state_dict without 8-bit
    states comes back with the same contents.

    Raises:
        ValueError: states of which no optimizer has 8-bit ones.

    Example:
        >>> import torch, warpsmith
        >>> p = torch.nn.Parameter(torch.ones(4096))
        >>> optimizer = warpsmith.optim.Adam([p], precision="8bit")
        >>> p.grad = torch.ones_like(p)
        >>> optimizer.step()
        >>> theirs = torch.optim.Adam([p])
        >>> theirs.load_state_dict(warpsmith.optim.float32_states(optimizer.state_dict()))
        >>> theirs.state[p]["exp_avg"].dtype
        torch.float32
    """
    rows = {("exp_avg", "exp_avg_sq"): "adamw", ("exp_avg",): "lion", ("momentum_buffer",): "sgd"}
    states = {}
    for key, state in state_dict["state"].items():
        names = tuple(n for n, v in state.items() if isinstance(v, Tensor) and v.dtype == torch.uint8)
        if SCALES in state and names not in rows:
            raise ValueError(
                f"float32_states: state_dict: expected states of Adam, Lion or SGD, got {', '.join(names)}"
            )
        states[key] = decoded_state(state, rows[names]) if SCALES in state else dict(state)
    groups = [{k: v for k, v in g.items() if k not in ("precision", "keep_fp32")} for g in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}
