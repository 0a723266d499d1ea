"""torch's convolution, and a bias, a residual and an activation behind it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from warpsmith.ops import _conv2d
from warpsmith.ops._linear import under_autocast


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    r"""torch's convolution, and a bias, a residual and an activation behind it in few passes.

    .. math:: y = \operatorname{act}(\text{conv}(x, w) + b + r)

    ``torch.nn.functional.conv2d``, with its order of arguments, then ``+ residual`` and the activation. The residual
    comes before the activation, as in ResNet's blocks; :func:`warpsmith.linear` adds it behind.

    Args:
        x: shape (N, C, H, W) or (C, H, W), float32, float16, bfloat16 or float64. Best in ``channels_last``: only there
            passes are joined.
        weight: shape (O, C / groups, kH, kW), the dtype of ``x``.
        bias: shape (O,), the dtype of ``x``; or None.
        stride, dilation: a number >= 1, or two.
        padding: a number >= 0, or two; ``"valid"``: none; ``"same"``, at stride 1: for a result as large as ``x``.
        groups: divides C and O.
        activation: None, ``"relu"`` or ``"silu"``.
        residual: shape of the result, dtype of ``x``; or None.

    Returns:
        A tensor of shape (N, O, H', W') and the dtype of ``x``, in ``channels_last`` where ``x`` is. Under autocast all
        inputs are cast to its dtype.

    On CUDA bias and activation are one pass, :func:`warpsmith.bias_relu` or :func:`warpsmith.bias_silu`. In 16 bits,
    where no gradient is needed and nobody asked for deterministic algorithms, convolution, bias, residual and ReLU are
    one kernel of cuDNN, by torch. On the CPU torch's convolution adds the bias. ``warpsmith.plan("conv2d",
    dtype="bfloat16", activation="relu")`` says which way a call takes, and why.

    Gradients for ``x``, ``weight``, ``bias`` and ``residual``, and theirs in turn, are torch's and those of the pass,
    which keeps the convolution's result.

    Deterministic but for cuDNN's convolutions, for which ``torch.backends.cudnn.deterministic`` decides.

    Raises:
        ValueError: a dtype, shape, device, number or name that does not fit; the message names op, argument,
            expectation and finding.

    Source: He et al., Deep Residual Learning for Image Recognition, 2016.

    Example:
        >>> import torch, warpsmith
        >>> x, weight = torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3)
        >>> residual = torch.full((1, 1, 1, 1), 3.0)
        >>> warpsmith.conv2d(x, weight, torch.tensor([-20.0]), activation="relu", residual=residual)
        tensor([[[[1.]]]])
    """
    x, weight, bias, residual = under_autocast(_conv2d.NAME, x=x, weight=weight, bias=bias, residual=residual)
    given = _conv2d.checked(x, weight, bias, stride, padding, dilation, groups, activation, residual)
    return _conv2d.convolved(x, weight, bias, *given, groups, activation, residual)
