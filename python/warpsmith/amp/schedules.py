r"""Factors of the learning rate: functions of the number of steps taken, for :class:`warpsmith.amp.DeviceLR` and for
``torch.optim.lr_scheduler.LambdaLR``.

Each function returns one :math:`f(t)` from the number of steps :math:`t \ge 0` that were taken before to a factor of
the base learning rate. During a warmup of :math:`w` steps all are :math:`f(t) = t / w`, which begins at 0 and is 1 in
step :math:`w`, if that is not the last one: without steps between, the last has the final factor. The formulas are
those of transformers' schedules of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from warpsmith._core import checks

Factor = Callable[[int], float]

__all__ = ["constant", "cosine", "inverse_sqrt", "linear", "wsd"]


def _checked(op: str, **counts: int) -> None:
    for name, value in counts.items():
        if not checks.is_int64(value) or value < 0:
            checks.refuse(op, name, "a number of steps >= 0", checks.value_text(value))


def _check_final(op: str, final: float) -> None:
    checks.number(op, "final", final, "a number in [0, 1]", lambda f: 0 <= f <= 1)


def _after(warmup_steps: int, then: Factor) -> Factor:
    return lambda t: t / warmup_steps if t < warmup_steps else then(t)


def _down(op: str, total_steps: int, warmup_steps: int, final: float, shape: Callable[[float], float]) -> Factor:
    """After the warmup from 1 to ``final`` by ``shape``, which falls from 1 to 0 on [0, 1]."""
    _checked(op, total_steps=total_steps, warmup_steps=warmup_steps)
    _check_final(op, final)
    if warmup_steps > total_steps:
        checks.refuse(op, "warmup_steps", f"at most total_steps = {total_steps}", str(warmup_steps))
    length = total_steps - warmup_steps

    def then(t: int) -> float:
        return final + (1 - final) * shape((t - warmup_steps) / length if t < total_steps else 1.0)

    return _after(warmup_steps, then)


def constant(warmup_steps: int = 0) -> Factor:
    """1 after the warmup.

    Example:
        >>> import warpsmith
        >>> [warpsmith.amp.schedules.constant(warmup_steps=2)(t) for t in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """
    _checked("constant", warmup_steps=warmup_steps)
    return _after(warmup_steps, lambda t: 1.0)


def linear(total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    """In a straight line from 1 after the warmup to ``final`` in step ``total_steps``, and there from then on.

    Example:
        >>> import warpsmith
        >>> [warpsmith.amp.schedules.linear(4)(t) for t in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _down("linear", total_steps, warmup_steps, final, lambda x: 1 - x)


def cosine(total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    r"""By half a cosine from 1 after the warmup to ``final`` in step ``total_steps``, and there from then on.

    .. math::
        \text{final} + (1 - \text{final}) \, \tfrac12 \Big(1 + \cos \pi \frac{t - w}{\text{total} - w}\Big)

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    Example:
        >>> import warpsmith
        >>> [round(warpsmith.amp.schedules.cosine(4, final=0.1)(t), 3) for t in range(6)]
        [1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """
    return _down("cosine", total_steps, warmup_steps, final, lambda x: 0.5 * (1 + math.cos(math.pi * x)))


def wsd(total_steps: int, decay_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Factor:
    """Warmup, stable, decay: 1 until ``decay_steps`` before ``total_steps``, then in a straight line to ``final``.

    Source: Hu et al., MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training
    Strategies, 2024.

    Example:
        >>> import warpsmith
        >>> [warpsmith.amp.schedules.wsd(6, decay_steps=2, warmup_steps=2)(t) for t in range(8)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    _checked("wsd", total_steps=total_steps, decay_steps=decay_steps, warmup_steps=warmup_steps)
    if warmup_steps + decay_steps > total_steps:
        expected = f"at most total_steps - warmup_steps = {total_steps - warmup_steps}"
        checks.refuse("wsd", "decay_steps", expected, str(decay_steps))
    _check_final("wsd", final)
    decay = linear(decay_steps, 0, final)
    begin = total_steps - decay_steps
    return _after(warmup_steps, lambda t: 1.0 if t < begin else decay(t - begin))


def inverse_sqrt(warmup_steps: int, timescale: int | None = None) -> Factor:
    r"""After the warmup the inverse square root of the steps, so that there is no last step.

    .. math::
        \sqrt{\frac{\text{timescale}}{t - w + \text{timescale}}}, \qquad \text{timescale} = w \text{ by default}

    Source: Zhai et al., Scaling Vision Transformers, 2022; without a timescale Vaswani et al., 2017.

    Example:
        >>> import warpsmith
        >>> [warpsmith.amp.schedules.inverse_sqrt(4)(t) for t in (0, 2, 4, 16, 64)]
        [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    scale = warmup_steps if timescale is None else timescale
    _checked("inverse_sqrt", warmup_steps=warmup_steps, timescale=scale)
    if scale == 0:
        checks.refuse("inverse_sqrt", "timescale", "a number of steps >= 1, or a warmup", "0")
    return _after(warmup_steps, lambda t: math.sqrt(scale / (t - warmup_steps + scale)))
