"""torch: :func:`warpsmith.attention` under ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import register_flash_attention_impl

from warpsmith._core.library import call_raw, raw
from warpsmith.ops import _attention

_LAYOUT = _attention.LAYOUTS.index("bhsd")


def _with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    # torch.compile checks that an op returns the strides that torch's own kernel gives.
    return t if t.stride() == strides else t.new_empty_strided(t.shape, strides).copy_(t)


def _strides_like(t: Tensor) -> tuple[int, ...]:
    return torch.empty_like(t, device="meta").stride()


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    bottom_right: bool,
    scale: float | None,
) -> tuple[Any, ...]:
    """The arguments of the raw ops from q to deterministic."""
    if dropout_p > 0:  # its mask belongs to torch's generator
        raise ValueError("scaled_dot_product_attention: dropout_p: expected 0")
    window = -1, 0 if causal else -1
    numbers = (0, 0, _LAYOUT, 0, bottom_right, *window, scale, 0.0, 0.0, True)
    return query, key, value, None, None, None, mask, None, None, *numbers


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: what the flash back end calls on a GPU. Tensors are (B, H, S, D);
    ``is_causal`` aligns bottom right. Raises a ValueError where there is no kernel of ours."""
    if return_debug_mask:
        raise ValueError("scaled_dot_product_attention: return_debug_mask: expected False")
    problem = _problem(query, key, value, None, dropout_p, is_causal, True, scale)
    out, lse, _ = call_raw(raw.attention_forward.default, *problem)
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a generator, for dropout
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    out = _with_strides(out, _strides_like(query))
    return out, lse, None, None, *lengths, state, unused, query.new_empty(0)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    problem = _problem(query, key, value, None, dropout_p, is_causal, True, scale)
    # torch keeps no lse_rest. On a GPU it matters from |lse| 1,024 on alone, and is left out.
    rest = None if query.is_cuda else call_raw(raw.attention_forward.default, *problem)[2]
    grads = call_raw(
        raw.attention_backward.default, grad_out, None, *problem, out, logsumexp, False, False, None, rest
    )[:3]
    return tuple(_with_strides(g, _strides_like(t)) for g, t in zip(grads, (query, key, value), strict=True))


def flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``. ``is_causal`` aligns top left."""
    problem = _problem(query, key, value, attn_mask, dropout_p, is_causal, False, scale)
    out, lse, _ = call_raw(raw.attention_forward.default, *problem)
    tokens_first = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return _with_strides(out, _strides_like(query)), tokens_first


def flash_attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_for_cpu_backward``."""
    problem = _problem(query, key, value, attn_mask, dropout_p, is_causal, False, scale)
    lse = logsumexp.contiguous()
    # torch keeps no lse_rest. The CPU's differs from 0 in ordinary ranges too, and the bits are to be the op's.
    lse_rest = call_raw(raw.attention_forward.default, *problem)[2]
    grads = call_raw(raw.attention_backward.default, grad_out, None, *problem, out, lse, False, False, None, lse_rest)[
        :3
    ]
    return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)


_OVERRIDES: dict[str, dict[str, Callable]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": flash_attention_for_cpu_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": flash_attention,
        "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    },
}


class _Active:
    """Our kernels in torch's dispatcher, until ``remove``."""

    def __init__(self) -> None:
        self.library: Library | None = Library("aten", "IMPL")
        for key, overrides in _OVERRIDES.items():
            if key == "CPU" or torch.backends.cuda.is_built():
                for name, ours in overrides.items():
                    self._override(name, ours, key)

    def _override(self, name: str, ours: Callable, key: str) -> None:
        theirs = get_kernel(f"aten::{name}", key)

        def kernel(keys: Any, *args: Any, **options: Any) -> Any:
            try:
                return ours(*args, **options)
            except ValueError:  # out, lse and their gradients mean the same: torch's kernel may take either part
                return theirs.call_boxed(keys, *args, **options)

        assert self.library is not None
        self.library.impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        self.library = None


def register(name: str = "warpsmith") -> None:
    """Makes our kernels known to torch as a flash attention, next to its own. May be called again.

    Nothing changes until ``torch.nn.attention.activate_flash_attention_impl(name)``. From then on
    ``torch.nn.functional.scaled_dot_product_attention`` runs :func:`warpsmith.attention` wherever torch picks its flash
    back end, on the CPU and on GPUs, until ``torch.nn.attention.restore_flash_attention_impl()``.

    torch still picks the back end. On the CPU it is flash attention unless there is dropout, or heads of q, k and v
    differ in their size. On a Hopper GPU it may be cuDNN's; ``with torch.nn.attention.sdpa_kernel(
    torch.nn.attention.SDPBackend.FLASH_ATTENTION)`` asks for flash attention.

    Args:
        name: what torch will call it.

    What :func:`warpsmith.attention` refuses (head dimensions that are no multiple of 8, or a feature without a kernel
    on this GPU), and everything with dropout, torch computes as before. Gradients, errors and meaning are those of
    torch; the backward has the same bits at every run. A call passes through Python, which
    ``warpsmith.attention`` does with less: call that where you can.

    Example:
        >>> import torch, warpsmith
        >>> from warpsmith.integrations import sdpa
        >>> sdpa.register()
        >>> torch.nn.attention.activate_flash_attention_impl("warpsmith")
        >>> q = torch.randn(1, 4, 16, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.equal(out, warpsmith.attention(q, q, q, causal=True, layout="bhsd"))
        True
        >>> torch.nn.attention.restore_flash_attention_impl()
    """
    register_flash_attention_impl(name, register_fn=_Active)
