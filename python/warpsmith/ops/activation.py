"""The activations: gated, biased, relu squared, and dropout with a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.dropout import check_p, check_seed, draw_seed
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake
from warpsmith.ops._activation import BIASED, GATED, biased, documented, gated, gelu, is_tanh, silu

_swiglu = gated("swiglu", silu)


@documented(GATED)
def swiglu(gate: Tensor, up: Tensor | None = None, *, inplace_backward: bool = False) -> Tensor:
    r"""The gated activation of Llama's feed-forward layer.

    .. math:: y = \operatorname{silu}(\text{gate}) \cdot \text{up}, \qquad \operatorname{silu}(x) = \frac{x}{1 + e^{-x}}

    Arguments, result, gradients and errors are those of every gated activation.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.swiglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0.0000, 5.2848])
        >>> warpsmith.swiglu(torch.tensor([0.0, 2.0, 1.0, 3.0]))
        tensor([0.0000, 5.2848])
    """
    return _swiglu(gate, up, inplace_backward)


_geglu = gated("geglu", gelu)


@documented(
    GATED,
    argument='approximate: "none" for the first, "tanh" for the second, as in ``torch.nn.functional.gelu``.',
    error="another ``approximate``",
)
def geglu(
    gate: Tensor, up: Tensor | None = None, approximate: str = "none", *, inplace_backward: bool = False
) -> Tensor:
    r"""The gated linear unit with a Gaussian error linear unit.

    .. math:: y = \operatorname{gelu}(\text{gate}) \cdot \text{up}, \qquad \operatorname{gelu}(x) = x \, \Phi(x)
        \quad\text{or}\quad \tfrac{x}{2} \left(1 + \tanh\left(\sqrt{2 / \pi} \, (x + 0.044715 \, x^3)\right)\right)

    Arguments, result, gradients and errors are those of every gated activation.

    Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.geglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0.0000, 5.8635])
        >>> warpsmith.geglu(torch.tensor([0.0, 2.0, 1.0, 3.0]), approximate="tanh")
        tensor([0.0000, 5.8638])
    """
    return _geglu(gate, up, inplace_backward, is_tanh("geglu", approximate))


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), (x > 0).to(x.dtype)


_reglu = gated("reglu", _relu)


@documented(GATED)
def reglu(gate: Tensor, up: Tensor | None = None, *, inplace_backward: bool = False) -> Tensor:
    r"""The gated linear unit with a rectifier.

    .. math:: y = \max(\text{gate}, 0) \cdot \text{up}

    Arguments, result, gradients and errors are those of every gated activation.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.reglu(torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([0., 6.])
        >>> warpsmith.reglu(torch.tensor([-1.0, 2.0, 1.0, 3.0]))
        tensor([0., 6.])
    """
    return _reglu(gate, up, inplace_backward)


_bias_gelu = biased("bias_gelu", gelu)


@documented(
    BIASED,
    argument='approximate: "none" for the first, "tanh" (GPT-2\'s) for the second, as in ``torch.nn.functional.gelu``.',
    error="another ``approximate``",
)
def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    r"""A bias and a Gaussian error linear unit in one pass, for what a matrix product without bias gives.

    .. math:: y = \operatorname{gelu}(x + b), \qquad \operatorname{gelu}(z) = z \, \Phi(z)
        \quad\text{or}\quad \tfrac{z}{2} \left(1 + \tanh\left(\sqrt{2 / \pi} \, (z + 0.044715 \, z^3)\right)\right)

    Arguments, result, gradients and errors are those of every biased activation.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.bias_gelu(torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0]))
        tensor([[0.0000, 1.9545]])
    """
    return _bias_gelu(x, bias, is_tanh("bias_gelu", approximate))


_bias_silu = biased("bias_silu", silu)


@documented(BIASED)
def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    r"""A bias and a sigmoid linear unit in one pass, for what a matrix product without bias gives.

    .. math:: y = \operatorname{silu}(x + b), \qquad \operatorname{silu}(z) = \frac{z}{1 + e^{-z}}

    Arguments, result, gradients and errors are those of every biased activation.

    Source: Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, 2017.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.bias_silu(torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0]))
        tensor([[0.0000, 1.7616]])
    """
    return _bias_silu(x, bias)


_bias_relu = biased("bias_relu", _relu)


@documented(BIASED)
def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    r"""Adds a bias and applies a rectifier in one pass, to the result of a matrix product without bias.

    .. math:: y = \max(x + b, 0)

    As in torch, the derivative is 0 at 0.

    Arguments, result, gradients and errors are those of every biased activation.

    Source: Nair and Hinton, Rectified Linear Units Improve Restricted Boltzmann Machines, 2010.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.bias_relu(torch.tensor([[-2.0, 1.0]]), torch.tensor([1.0, 1.0]))
        tensor([[0., 2.]])
    """
    return _bias_relu(x, bias)


_RELU_SQUARED = "relu_squared"


def _relu_squared_fake_forward(x: Tensor) -> Tensor:
    checks.float_dtype(_RELU_SQUARED, "x", x)
    checks.at_least_one_dimension(_RELU_SQUARED, "x", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _relu_squared_fake_backward(dy: Tensor, x: Tensor) -> Tensor:
    op = _RELU_SQUARED + "_backward"
    checks.float_dtype(op, "x", x)
    checks.float_dtype(op, "dy", dy)
    checks.alike(op, "dy", dy, x)
    checks.at_least_one_dimension(op, "x", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register_fake(("relu_squared", "relu_squared_forward"), _relu_squared_fake_forward)
register_fake("relu_squared_backward", _relu_squared_fake_backward)


def _relu_squared_differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    x = saved.x
    math = checks.wide_dtype(x)
    return {"x": (dy.to(math) * 2 * torch.relu(x.to(math))).to(x.dtype)}


def _relu_squared_plain(x: Tensor) -> Tensor:
    math = checks.wide_dtype(x)
    return torch.relu(x.to(math)).square().to(x.dtype)


_relu_squared = differentiable(
    "relu_squared",
    forward=raw.relu_squared_forward.default,
    rows=1,
    save=("x",),
    backward=lambda saved, wants, dy: {"x": call_raw(raw.relu_squared_backward.default, dy, saved.x)},
    differentiable_backward=_relu_squared_differentiable_backward,
    plain=_relu_squared_plain,
)


def relu_squared(x: Tensor) -> Tensor:
    r"""The square of a rectifier.

    .. math:: y = \max(x, 0)^2

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Arithmetic is float32 (float64 for float64) and rounds
        once. Under autocast nothing is cast.

    A gradient, and its own in turn (composed of plain torch operations). Nothing but ``x`` is kept for it.

    Deterministic. Moves 2 elements of memory for each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype that does not fit, or a tensor without dimensions.

    Source: So et al., Primer: Searching for Efficient Transformers for Language Modeling, 2021.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.relu_squared(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """
    return _relu_squared(x)


_DROPOUT_ADD = "dropout_add"


def _check_dropout_add(x: Tensor, residual: Tensor) -> None:
    checks.float_dtype(_DROPOUT_ADD, "x", x)
    checks.float_dtype(_DROPOUT_ADD, "residual", residual)
    checks.alike(_DROPOUT_ADD, "residual", residual, x)
    checks.at_least_one_dimension(_DROPOUT_ADD, "x", x)


def _dropout_add_fake_forward(x: Tensor, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    _check_dropout_add(x, residual)
    check_p(_DROPOUT_ADD, p)
    check_seed(_DROPOUT_ADD, seed, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dropout_add_fake_backward(dy: Tensor, seed: Tensor, p: float) -> Tensor:
    op = _DROPOUT_ADD + "_backward"
    checks.float_dtype(op, "dy", dy)
    check_p(op, p)
    check_seed(op, seed, dy)
    checks.at_least_one_dimension(op, "dy", dy)
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


register_fake(("dropout_add", "dropout_add_forward"), _dropout_add_fake_forward)
register_fake("dropout_add_backward", _dropout_add_fake_backward)

_dropout_add_raw_backward = raw.dropout_add_backward.default


def _dropout_add_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    dx = dy
    if wants.x and saved.seed is not None:
        dx = call_raw(_dropout_add_raw_backward, dy, saved.seed, saved.p)
    return {"x": dx, "residual": dy}


def _dropout_add_differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    dx = dy
    if saved.seed is not None:
        math = checks.wide_dtype(dy)
        factor = call_raw(_dropout_add_raw_backward, torch.ones_like(dy, dtype=math), saved.seed, saved.p)
        dx = torch.where(factor != 0, dy.to(math) * factor, 0).to(dy.dtype)
    return {"x": dx, "residual": dy}


def _dropout_add_plain(x: Tensor, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    if seed is None:
        return x + residual
    math = checks.wide_dtype(x)
    factor = call_raw(_dropout_add_raw_backward, torch.ones(tuple(x.shape), dtype=math, device=x.device), seed, p)
    return (torch.where(factor != 0, x.to(math) * factor, 0) + residual.to(math)).to(x.dtype)


_dropout_add = differentiable(
    "dropout_add",
    forward=raw.dropout_add_forward.default,
    rows=2,
    save=("seed", "p"),
    backward=_dropout_add_backward,
    differentiable_backward=_dropout_add_differentiable_backward,
    plain=_dropout_add_plain,
)


def dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True, *, seed: Tensor | None = None
) -> Tensor:
    r"""Dropout and the addition to the residual stream, in one pass and without a stored mask.

    .. math:: y = \text{residual} + \frac{m \cdot x}{1 - p}, \qquad m_i \sim \operatorname{Bernoulli}(1 - p)

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        residual: of the shape, dtype and device of ``x``.
        p: the probability of dropping an element, 0 to 1, in steps of 1 / 65536. 1 drops everything.
        training: False: ``residual + x``.
        seed: two int64 on the device of ``x`` that determine the mask. None: drawn from torch's default generator of
            that device, so the mask follows ``torch.manual_seed``, and a replayed CUDA graph draws anew.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Arithmetic is float32 (float64 for float64) and rounds
        once. Under autocast nothing is cast.

    Gradients for ``x`` and ``residual``, and theirs in turn. The backward makes the mask again from the seed: 16 bytes
    are kept.

    Deterministic: the mask is a function of seed and position (Philox4x32-10, ``warpsmith.reference.dropout``), the
    same bits on the CPU and on CUDA. Moves 3 elements of memory for each of ``x`` forward and 2 backward; the gradient
    of ``residual`` is the incoming one, untouched.

    Raises:
        ValueError: a dtype, shape, device or probability that does not fit.

    Source: Srivastava et al., Dropout, 2014; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch, warpsmith
        >>> x, residual = torch.ones(2, 3), torch.zeros(2, 3)
        >>> warpsmith.dropout_add(x, residual, p=1.0)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
        >>> warpsmith.dropout_add(x, residual, p=0.1, training=False)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    check_p(_DROPOUT_ADD, p)
    checks.flags(_DROPOUT_ADD, training=training)
    if not training or p == 0.0:
        return _dropout_add(x, residual, None, 0.0)
    if seed is None and isinstance(x, Tensor) and isinstance(residual, Tensor):  # else the op will refuse them
        _check_dropout_add(x, residual)  # a refused call leaves the generator as it was
        seed = draw_seed(x)
    return _dropout_add(x, residual, seed, p)
