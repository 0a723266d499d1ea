from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import call_raw, raw, refuse_wrong_kinds, register_fake
from warpsmith.ops._scaled_linear import Steps

_OP = "adamw"
_ARGUMENTS = raw.adamw.default._schema.arguments


def _check_lists(op: str, params: Sequence[Tensor], lists: Mapping[str, Sequence[Tensor]]) -> None:
    if not params:
        checks.refuse(op, "params", "at least one tensor", "none")
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            checks.refuse(op, name, f"{len(params)} tensors", str(len(tensors)))
        for i, (t, p) in enumerate(zip(tensors, params, strict=True)):
            argument = f"{name}[{i}]"
            if name == "steps":
                checks.same_dtype(op, argument, t, torch.empty((), dtype=torch.float32, device="meta"))
            else:
                checks.same_dtype(op, argument, t, p)
                checks.same_shape(op, argument, t, p.shape)
            checks.same_device(op, argument, t, p)


def _fake_adamw(a: Any) -> None:
    lists = {"grads": a.grads, "exp_avgs": a.exp_avgs, "exp_avg_sqs": a.exp_avg_sqs, "steps": a.steps}
    if a.max_exp_avg_sqs:
        lists["max_exp_avg_sqs"] = a.max_exp_avg_sqs
    _check_lists(_OP, a.params, lists)
    if checks.device_of(a.lr).type != "cpu":
        checks.same_device(_OP, "lr", a.lr, a.params[0])
    for name, t in (("grad_scale", a.grad_scale), ("found_inf", a.found_inf)):
        if t is not None:
            checks.same_device(_OP, name, t, a.params[0])


register_fake("adamw", _fake_adamw, on_one_device=False, named=True)  # lr may be on the CPU


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    r"""One step of Adam with decoupled weight decay over lists of tensors, in place.

    With :math:`t` the new value of ``steps[i]`` and :math:`g` the gradient divided by ``grad_scale`` (negated by
    ``maximize``):

    .. math::
        p &\leftarrow p \, (1 - \gamma \lambda) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t} \, \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    :class:`warpsmith.optim.AdamW` is made of this and keeps the addresses between steps; a call of this function hands
    over six lists, at about 0.12 us a tensor.

    Args:
        params, exp_avgs, exp_avg_sqs: of one device and dtype, float32, or float64 on the CPU. All tensors of one
            parameter have its shape and strides, and its elements fill their memory without gaps or overlap. Written
            to.
        grads: like ``params``; only read, so they stay scaled.
        max_exp_avg_sqs: like ``params`` for amsgrad (the maximum of ``v`` so far takes its place), or empty.
        steps: one float32 element each, the number of steps taken. Written to.
        lr: a number, or a tensor of one float32 or float64 element, which the kernel reads where it lies.
        beta1, beta2: in [0, 1). eps, weight_decay: >= 0.
        grad_scale: one float32 element that gradients are divided by (by way of its reciprocal), or None.
        found_inf: one float32 element; where it is not zero nothing changes, not even ``steps``. Or None.

    Not differentiable. Deterministic. Moves 28 bytes a float32 parameter, 36 with amsgrad. The host does not wait.

    Raises:
        ValueError: lists of different lengths, a dtype, device, shape, strides or number that does not fit. Nothing has
            changed.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; formula and order of operations as
    torch.optim.AdamW.

    Example:
        >>> import torch, warpsmith
        >>> p, m, v, step = torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(())
        >>> warpsmith.adamw([p], [torch.ones(1)], [m], [v], [], [step], lr=0.1, weight_decay=0.0)
        >>> p, step
        (tensor([0.9000]), tensor(1.))
    """
    if not isinstance(lr, Tensor):
        checks.refuse_non_number(_OP, "lr", lr, "a number >= 0")
        if not 0 <= lr < math.inf:
            checks.refuse(_OP, "lr", "a number >= 0", str(lr))
        lr = torch.tensor(lr, dtype=torch.float64, device="cpu")  # whatever the default device
    inputs = (
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        list(max_exp_avg_sqs),
        list(steps),
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        maximize,
        grad_scale,
        found_inf,
    )
    if not torch.compiler.is_compiling():
        refuse_wrong_kinds(_OP, _ARGUMENTS, inputs)
        Steps.add(inputs[0])
    call_raw(raw.adamw.default, *inputs)
