"""transformers: :func:`warpsmith.attention` as an attention implementation of its models."""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.utils.output_capturing import _active_collector

from warpsmith._core import checks
from warpsmith.integrations import _models as models
from warpsmith.integrations._patch import Patched as Patched
from warpsmith.integrations._patch import undone_by_errors
from warpsmith.integrations._rows import FAMILIES as FAMILIES
from warpsmith.integrations._rows import add_family as add_family
from warpsmith.integrations._rows import row_of
from warpsmith.integrations.patch import patch as patch_any
from warpsmith.integrations.patch import warn_of_versions
from warpsmith.ops._shared_casts import keeps
from warpsmith.ops.attention import attention, attention_varlen


def _window(causal: bool, sliding_window: int | None) -> dict[str, Any]:
    # A window of transformers counts the query's own token.
    size = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    return {"causal": causal, "window_size": size}


def _bias(mask: Tensor | None, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if position_bias is None:
        return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    if mask is None:
        return position_bias.to(dtype)
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, float("-inf")).to(dtype)
    return (mask + position_bias).to(dtype)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as ``transformers.AttentionInterface`` calls it.

    query, key, value: (B, H, S, D). attention_mask: (B, 1 or H, Sq, Sk), boolean or additive, with everything that a
    query does not see; None: the causal mask and the window alone. ``s_aux`` are sinks. With ``cu_seq_lens_q`` the
    batch of one is a row of packed sequences. Returns (out, None), out (B, S, H, D): weights are never made.
    """
    if "attentions" in (_active_collector.get() or ()):
        refused = "output_attentions: expected False: weights are never made; patch(model, attention=False) keeps them"
        raise ValueError(f"warpsmith.attention: {refused}")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    sink = None if s_aux is None else s_aux.to(query.dtype)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "sink": sink}
    if cu_seq_lens_q is not None:
        q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
        offsets = [None if c is None else c.to(torch.int32) for c in (cu_seq_lens_q, cu_seq_lens_k)]
        options.update(_window(causal, sliding_window))
        out = cast(Tensor, attention_varlen(q, k, v, offsets[0], offsets[1], max_length_q, max_length_k, **options))
        keeps(out)
        return out[None], None
    # A mask says all: what is causal, and the window, is in it.
    seen = _window(causal, sliding_window) if attention_mask is None else {}
    bias = _bias(attention_mask, position_bias, query.dtype)
    out = cast(Tensor, attention(query, key, value, layout="bhsd", bias=bias, **seen, **options))
    keeps(out)
    return out.transpose(1, 2), None


def attention_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """The mask of ``transformers.AttentionMaskInterface``: None where ``attention_forward`` needs none, else boolean.

    None is for what is causal and no more, and for sliding windows of such: then no mask of S x S is made.
    """
    config, local_size = options.get("config"), options.get("local_size")
    plain = options.get("attention_mask") is None
    may_skip = plain and options.get("allow_is_causal_skip", True)
    sliding = local_size is not None and local_size == getattr(config, "sliding_window", None)
    q_offset, q_length, kv_length = options.get("q_offset", 0), options["q_length"], options["kv_length"]
    # A static cache has its offset in a tensor, which the host must not wait for.
    same_end = isinstance(q_offset, int) and q_offset + q_length == options.get("kv_offset", 0) + kv_length
    if may_skip and sliding and same_end and getattr(config, "attention_chunk_size", None) is None:
        return None
    # transformers skips the mask of an empty static cache too, and takes the first queries and keys for aligned. Here
    # no mask says that the last ones are.
    skip = options.get("allow_is_causal_skip", True) and q_length in (1, kv_length)
    # While a CUDA graph is captured, transformers 5.17 makes each mask: the attention would read S x S elements.
    if plain and not is_compiling() and (local_size is None or kv_length < local_size):
        if (skip and same_end) or options.get("allow_is_bidirectional_skip", False):
            return None
    return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": skip})


def register(name: str = "warpsmith") -> None:
    """Makes ``attn_implementation="warpsmith"`` known to transformers. May be called again.

    Every model that takes its attention from ``transformers.AttentionInterface`` can then use it: grouped heads,
    sliding windows, softcap (Gemma 2), sinks (gpt-oss), additive position biases, and packed sequences with
    ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` in the call.

    Args:
        name: what ``attn_implementation`` will be.

    Errors: head dimensions and dtypes that :func:`warpsmith.attention` does not take raise its ValueError in the
    model's forward, as does ``output_attentions=True``.

    Example:
        >>> import torch, transformers
        >>> from warpsmith.integrations.transformers import register
        >>> register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        ...     num_key_value_heads=2, attn_implementation="warpsmith",
        ... )
        >>> transformers.LlamaForCausalLM(config)(torch.arange(8)[None]).logits.shape
        torch.Size([1, 8, 32])
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def patch(
    model_or_class: Any,
    *,
    norms: bool = True,
    rope: bool = True,
    mlp: bool = True,
    attention: bool | None = None,
    linear: bool = True,
    loss: bool = True,
    logits: bool = False,
) -> Patched:
    """Puts our ops into a model of transformers: its norms, rotary embedding, attention, feed-forward layers and loss.

    Parameters, ``state_dict``, arguments and outputs stay. A residual sum and the norm behind it become one op. In
    training mode, with ``labels``, the head and its loss are :func:`warpsmith.linear_cross_entropy`, and the logits are
    never in memory: who uses ``logits`` gets an error. The gradients of a feed-forward layer's activation are written
    over its inputs, so that a second backward through one graph is refused. The backward makes a layer's normed rows
    and activations again. Hooks of modules are called as before, and attention functions get the same arguments. A deep
    copy is patched until ``undo()``; a pickle is one of the model as it was.

    Each kind of layer is compared with itself as it was, on 8 random rows, and left where the error law does not hold.

    Args:
        model_or_class: a model, whose modules of the classes in ``FAMILIES`` and of torch are changed; or such a class,
            for all its models.
        norms, rope, mlp, linear, loss, logits: as for :func:`warpsmith.patch`.
        attention: also :func:`register` ``"warpsmith"`` and make it the model's ``attn_implementation``, in the place
            of ``"eager"`` or ``"sdpa"``. None: for a model True, for a class False.

    Returns:
        :class:`Patched`: what was replaced, what was not and why, and ``undo()``.

    Loss and gradients obey the error law beside the model as it was. Deterministic as the ops are.

    Raises:
        ValueError: no model of transformers, an unknown class of models, a class that is patched already, or one with
            ``attention``: the implementation stands in the model's config. Nothing has changed.

    Source: the idea is Liger-Kernel's.

    Example:
        >>> import torch, transformers
        >>> from warpsmith.integrations.transformers import patch
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        ...     num_key_value_heads=2,
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> done = patch(model)
        >>> done.replaced["LlamaRMSNorm"], done.kept
        ('warpsmith.rms_norm (3)', {})
        >>> tokens = torch.arange(8)[None]
        >>> model.train()(tokens, labels=tokens).loss.backward()
        >>> done.undo()
    """
    by_class = isinstance(model_or_class, type)
    got = model_or_class if by_class else type(model_or_class)
    if not issubclass(got, nn.Module if row_of(got) else transformers.PreTrainedModel):
        checks.refuse("patch", "model_or_class", "a model of transformers", got.__name__)
    switches = {"norms": norms, "rope": rope, "mlp": mlp, "linear": linear, "loss": loss, "logits": logits}
    if not by_class:
        return patch_any(model_or_class, attention=attention is not False, **switches)
    if row_of(got) is None:
        checks.refuse("patch", "model_or_class", f"a class of {', '.join(FAMILIES)}", got.__name__)
    if models.is_patched(model_or_class):
        checks.refuse("patch", "model_or_class", "what is not patched yet", "what is: undo() it first")
    if attention:
        checks.refuse("patch", "attention", "False for a class: a model's config says its attention", "True")
    checks.flags("patch", **switches)
    warn_of_versions()
    with undone_by_errors() as done:
        models.patch_class(done, model_or_class, {**switches, "loss": loss and not logits})
    return done
