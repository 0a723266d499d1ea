"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for raw ops that contain matrix products.

The rules are those of torch's own formulas: two operations for each multiplication and addition, masks and windows not
subtracted, the scores of attention computed again in its backward. Logits that a linear loss makes again count again.
"""

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from warpsmith._core.library import arguments_of, raw
from warpsmith.ops._attention import split_sizes
from warpsmith.ops._cross_entropy import NONE

_COUNTER = "torch.utils.flop_counter"


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    """The lengths of sequences, or the longest for each where there are no values: fake and meta tensors."""
    if type(offsets) is not Tensor or offsets.is_meta:
        return [longest] * (offsets.shape[0] - 1)
    return offsets.diff().tolist()


def _attention(a: Any, of_qk: int, of_v: int) -> int:
    """So many products of queries and keys along head_dim, and along head_dim of v."""
    (batch, tokens, heads, width), (_, keys, _, _), (*_, width_v) = split_sizes(a.q, a.k, a.v, a.layout, a.kv_heads)
    pairs = batch * tokens * keys
    if a.cu_seqlens_q is not None:
        of_q, of_k = _lengths(a.cu_seqlens_q, a.max_seqlen_q), _lengths(a.cu_seqlens_k, a.max_seqlen_k)
        pairs = sum(queries * keys_of_them for queries, keys_of_them in zip(of_q, of_k, strict=True))
    return 2 * heads * pairs * (of_qk * width + of_v * width_v)


def _head(a: Any, products: int) -> int:
    return 2 * products * a.target.numel() * a.weight.shape[0] * a.weight.shape[1]


def _cross_entropy(a: Any) -> int:
    return _head(a, 1 if a.reduction == NONE else 1 + a.want_dhidden + a.want_dweight)


def _layer(rows_of: Tensor, weight: Tensor, products: int = 1) -> int:
    """Of products of rows with a weight: forward, or one for each gradient that is wanted."""
    return 2 * products * math.prod(rows_of.shape[:-1]) * weight.shape[0] * weight.shape[1]


def _mlp_backward(a: Any) -> int:
    of_w2 = (a.want_dx or a.want_dw1 or a.want_db1) + a.want_dw2
    return _layer(a.x, a.w1, a.want_dx + a.want_dw1) + _layer(a.x, a.w2, of_w2)


def _gated_backward(a: Any, gate_wanted: bool, up_wanted: bool) -> int:
    return _layer(a.x, a.gate_weight, a.want_dx + gate_wanted) + _layer(a.x, a.up_weight, a.want_dx + up_wanted)


# Of an op's arguments by their names in its schema.
FORMULAS: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("attention", "attention_forward"), lambda a: _attention(a, 1, 1)),
    "attention_backward": lambda a: _attention(a, 3, 2),
    **dict.fromkeys(("linear", "linear_forward", "linear_inference"), lambda a: _layer(a.x, a.weight)),
    "linear_siblings": lambda a: sum(_layer(a.x, weight) for weight in a.weights),
    "linear_siblings_input_gradient": lambda a: sum(map(_layer, a.dys, a.weights)),
    "linear_backward": lambda a: _layer(a.dy, a.weight, a.want_dx + a.want_dweight),
    "linear_backward_main_grad": lambda a: _layer(a.dy, a.weight, 1 + a.want_dx),
    **dict.fromkeys(
        ("scaled_linear", "scaled_linear_forward", "scaled_linear_inference"), lambda a: _layer(a.x, a.weight)
    ),
    "scaled_linear_backward": lambda a: _layer(a.dy, a.weight, a.want_dx + a.want_dweight),
    # As torch's product, of which ours makes half.
    **dict.fromkeys(("matmul_symmetric", "symmetric_product"), lambda a: 2 * a.x.numel() * a.x.shape[-2]),
    **dict.fromkeys(("mlp", "mlp_forward", "mlp_inference"), lambda a: _layer(a.x, a.w1) + _layer(a.x, a.w2)),
    "mlp_backward": _mlp_backward,
    **dict.fromkeys(
        ("gated_linear", "gated_linear_forward", "gated_linear_inference"),
        lambda a: _layer(a.x, a.gate_weight) + _layer(a.x, a.up_weight),
    ),
    "gated_linear_backward": lambda a: _gated_backward(a, a.want_dgate_weight, a.want_dup_weight),
    "gated_linear_backward_main_grads": lambda a: _gated_backward(
        a, a.gate_main_grad is not None, a.up_main_grad is not None
    ),
    "linear_cross_entropy": _cross_entropy,
    "linear_cross_entropy_forward": _cross_entropy,
    "linear_cross_entropy_rows": _cross_entropy,
    "linear_cross_entropy_rows_backward": lambda a: _head(a, 1 + a.want_dhidden + a.want_dweight),
    "linear_cross_entropy_rows_backward_main_grad": lambda a: _head(a, 2 + a.want_dhidden),
    **dict.fromkeys(("linear_log_prob", "linear_log_prob_forward"), lambda a: _head(a, 1)),
    "linear_log_prob_backward": lambda a: _head(a, (a.logits.shape[0] == 0) + a.want_dhidden + a.want_dweight),
}


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():

        def counted(*inputs: Any, out_val: Any = None, name: str = name, formula: Any = formula) -> int:
            return formula(arguments_of(name)(*inputs))

        counter.register_flop_formula(getattr(raw, name), get_raw=True)(counted)


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
