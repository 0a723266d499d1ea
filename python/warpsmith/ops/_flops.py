"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for raw ops that contain matrix products.

The rules are those of torch's own formulas: two operations for each multiplication and addition, masks and windows not
subtracted, the scores of attention computed again in its backward. Logits that a linear loss makes again count again.
"""

import math
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from warpsmith._core.library import raw
from warpsmith.ops._attention import split_sizes
from warpsmith.ops._cross_entropy import NONE

_COUNTER = "torch.utils.flop_counter"


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    """The lengths of sequences, or the longest for each where there are no values: fake and meta tensors."""
    if type(offsets) is not Tensor or offsets.is_meta:
        return [longest] * (offsets.shape[0] - 1)
    return offsets.diff().tolist()


def _attention(of_qk: int, of_v: int, inputs: Sequence[Any]) -> int:
    """So many products of queries and keys along head_dim, and along head_dim of v."""
    q, k, v, offsets_q, offsets_k, _, _, _, _, longest_q, longest_k, layout, kv_heads = inputs[:13]
    (batch, tokens, heads, width), (_, keys, _, _), (*_, width_v) = split_sizes(q, k, v, layout, kv_heads)
    pairs = batch * tokens * keys
    if offsets_q is not None:
        lengths = zip(_lengths(offsets_q, longest_q), _lengths(offsets_k, longest_k), strict=True)
        pairs = sum(queries * keys_of_them for queries, keys_of_them in lengths)
    return 2 * heads * pairs * (of_qk * width + of_v * width_v)


def _head(target: Tensor, weight: Tensor, products: int) -> int:
    return 2 * products * target.numel() * weight.shape[0] * weight.shape[1]


def _attention_forward(*inputs: Any, out_val: Any = None) -> int:
    return _attention(1, 1, inputs)


def _attention_backward(*inputs: Any, out_val: Any = None) -> int:
    return _attention(3, 2, inputs[2:])


def _cross_entropy(*inputs: Any, out_val: Any = None) -> int:
    _, weight, target, _, _, _, reduction = inputs[:7]
    want_dhidden, want_dweight, _ = inputs[-3:]
    return _head(target, weight, 1 if reduction == NONE else 1 + want_dhidden + want_dweight)


def _cross_entropy_rows_backward(*inputs: Any, out_val: Any = None) -> int:
    want_dhidden, want_dweight, _ = inputs[-3:]
    return _head(inputs[3], inputs[2], 1 + want_dhidden + want_dweight)


def _cross_entropy_rows_backward_main_grad(*inputs: Any, out_val: Any = None) -> int:
    want_dhidden, _ = inputs[-2:]
    return _head(inputs[3], inputs[2], 2 + want_dhidden)


def _log_prob(*inputs: Any, out_val: Any = None) -> int:
    return _head(inputs[2], inputs[1], 1)


def _log_prob_backward(*inputs: Any, out_val: Any = None) -> int:
    logits, (want_dhidden, want_dweight, _) = inputs[10], inputs[-3:]
    return _head(inputs[5], inputs[4], (logits.shape[0] == 0) + want_dhidden + want_dweight)


def _layer_flops(rows_of: Tensor, weight: Tensor, products: int = 1) -> int:
    """Of products of rows with a weight: forward, or one for each gradient that is wanted."""
    return 2 * products * math.prod(rows_of.shape[:-1]) * weight.shape[0] * weight.shape[1]


def _linear(*inputs: Any, out_val: Any = None) -> int:
    return _layer_flops(inputs[0], inputs[2])


def _linear_backward(*inputs: Any, out_val: Any = None) -> int:
    want_dx, want_dweight = inputs[7:9]
    return _layer_flops(inputs[0], inputs[2], want_dx + want_dweight)


def _linear_backward_main_grad(*inputs: Any, out_val: Any = None) -> int:
    return _layer_flops(inputs[0], inputs[2], 1 + inputs[7])


def _scaled(*inputs: Any, out_val: Any = None) -> int:
    return _layer_flops(*inputs[:2])


def _siblings(x: Tensor, weights: Sequence[Tensor], *biases: Any, out_val: Any = None) -> int:
    return sum(_layer_flops(x, weight) for weight in weights)


def _siblings_backward(dys: Sequence[Tensor], weights: Sequence[Tensor], out_val: Any = None) -> int:
    return sum(_layer_flops(dy, weight) for dy, weight in zip(dys, weights, strict=True))


def _scaled_backward(*inputs: Any, out_val: Any = None) -> int:
    want_dx, want_dweight = inputs[14:16]
    return _layer_flops(inputs[0], inputs[2], want_dx + want_dweight)


def _mlp(*inputs: Any, out_val: Any = None) -> int:
    x, w1, _, w2 = inputs[:4]
    return _layer_flops(x, w1) + _layer_flops(x, w2)


def _mlp_backward(*inputs: Any, out_val: Any = None) -> int:
    x, w1, _, w2 = inputs[1:5]
    want_dx, want_dw1, want_db1, want_dw2, _ = inputs[-5:]
    return _layer_flops(x, w1, want_dx + want_dw1) + _layer_flops(x, w2, (want_dx or want_dw1 or want_db1) + want_dw2)


def _gated(*inputs: Any, out_val: Any = None) -> int:
    x, gate_weight, up_weight = inputs[:3]
    return _layer_flops(x, gate_weight) + _layer_flops(x, up_weight)


def _gated_backward(*inputs: Any, out_val: Any = None) -> int:
    x, gate_weight, up_weight = inputs[1:4]
    want_dx, want_dgate_weight, want_dup_weight, *_ = inputs[-5:]
    of_gate, of_up = want_dx + want_dgate_weight, want_dx + want_dup_weight
    return _layer_flops(x, gate_weight, of_gate) + _layer_flops(x, up_weight, of_up)


def _gated_backward_main_grads(*inputs: Any, out_val: Any = None) -> int:
    x, gate_weight, up_weight = inputs[1:4]
    of_gate, of_up, _, want_dx = inputs[8:12]
    return _layer_flops(x, gate_weight, want_dx + (of_gate is not None)) + _layer_flops(
        x, up_weight, want_dx + (of_up is not None)
    )


def _symmetric(x: Tensor, *others: Any, out_val: Any = None) -> int:
    return 2 * x.numel() * x.shape[-2]  # as torch's product, of which ours makes half


FORMULAS: dict[str, Callable[..., int]] = {
    "attention": _attention_forward,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    **dict.fromkeys(("linear", "linear_forward", "linear_inference"), _linear),
    "linear_siblings": _siblings,
    "linear_siblings_input_gradient": _siblings_backward,
    "linear_backward": _linear_backward,
    "linear_backward_main_grad": _linear_backward_main_grad,
    **dict.fromkeys(("scaled_linear", "scaled_linear_forward", "scaled_linear_inference"), _scaled),
    "scaled_linear_backward": _scaled_backward,
    **dict.fromkeys(("matmul_symmetric", "symmetric_product"), _symmetric),
    **dict.fromkeys(("mlp", "mlp_forward", "mlp_inference"), _mlp),
    "mlp_backward": _mlp_backward,
    **dict.fromkeys(("gated_linear", "gated_linear_forward", "gated_linear_inference"), _gated),
    "gated_linear_backward": _gated_backward,
    "gated_linear_backward_main_grads": _gated_backward_main_grads,
    "linear_cross_entropy": _cross_entropy,
    "linear_cross_entropy_forward": _cross_entropy,
    "linear_cross_entropy_rows": _cross_entropy,
    "linear_cross_entropy_rows_backward": _cross_entropy_rows_backward,
    "linear_cross_entropy_rows_backward_main_grad": _cross_entropy_rows_backward_main_grad,
    "linear_log_prob": _log_prob,
    "linear_log_prob_forward": _log_prob,
    "linear_log_prob_backward": _log_prob_backward,
}


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        counter.register_flop_formula(getattr(raw, name), get_raw=True)(formula)


class _WhenImported:
    """Registers the formulas as soon as somebody imports torch's counter. Importing it for them costs 6 ms, and on a
    GPU machine an import of Triton."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(cls)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_formulas() -> None:
    """Registers the formulas now, if torch's counter is imported, or when it is."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported)
