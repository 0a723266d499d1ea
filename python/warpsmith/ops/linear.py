"""Linear layers with what stands behind them as one step of autograd."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from warpsmith._core import checks
from warpsmith._core.main_grad import check_main_grad
from warpsmith.ops import _linear, _linear_symmetric, _scaled_linear
from warpsmith.ops._scaled_linear import SCALED, Fp8Recipe, Fp8State

_LINEAR, _MLP, _GATED = _linear.LINEAR, _linear.MLP, _linear.GATED


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    residual: Tensor | None = None,
    main_grad: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    r"""A linear layer, its activation and a residual sum.

    .. math::
        y = f(x W^T + b) + r

    Args:
        x: shape (..., K), float32, float16, bfloat16, or float64 on the CPU. Any strides.
        weight: shape (N, K), the dtype of ``x``. It may lie transposed, as GPT-2's ``Conv1D`` gives it by ``.t()``; its
            gradient then lies so too.
        bias: shape (N,), the dtype of ``x``, or float32 beside a 16-bit ``x``; or None.
        activation: f: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        residual: r, of the shape and dtype of the result. Nothing is broadcast.
        main_grad: a float32 tensor (float64 for float64) of the shape of ``weight``, contiguous or its transpose. The
            backward adds the weight's gradient there, in float32, and gives the parameter zeros, so that hooks that
            wait for a gradient run. Only in eager mode. Over ranks :func:`warpsmith.distributed.accurate_hook` and
            :class:`warpsmith.distributed.ShardedOptimizer` reduce it, as ``weight.main_grad``, and the parameter gets
            None; other ways that would not reduce it are refused.
        batch_invariant: the bits of a row of the result, and of the gradient of ``x``, depend on that row and the
            weights alone, not on the number of rows: each sum is one chain in the order of k, by our products, on
            Hopper cards alone, in 16 bits, with all rows on 16 bytes.

    Returns:
        A contiguous tensor of shape (..., N) and the dtype of ``x``. Under autocast ``x``, ``weight``, ``bias`` and
        ``residual`` are cast to its dtype, as for ``torch.nn.functional.linear``.

    Gradients for ``x``, ``weight``, ``bias`` and ``residual``, and theirs in turn, composed of plain torch operations.
    A gradient that nobody asks for costs no product. With an activation the pre-activation is kept, but for relu. A
    weight with ``weight.grad_dtype = torch.float32`` gets its gradient in float32, not rounded in between.

    Deterministic: the bias' gradient is a sum in a fixed order, and matrix products are torch's, on CUDA cuBLAS's,
    which repeat bit for bit. The host does not wait.

    Raises:
        ValueError: a dtype, shape, device or name that does not fit; ``batch_invariant`` where our products cannot run,
            as on the CPU, whose library gives no such promise. Nothing has changed.

    Source: the pre-activation written by the product follows llm.c, https://github.com/karpathy/llm.c.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.linear(torch.ones(2, 3), torch.ones(4, 3), activation="relu", residual=torch.ones(2, 4))[0]
        tensor([4., 4., 4., 4.])
    """
    if batch_invariant is not False:
        checks.flags(_LINEAR, batch_invariant=batch_invariant)
    elif activation is None and residual is None:
        try:
            if main_grad is None:
                if _linear.is_torchs(x, weight, bias):
                    return functional.linear(x, weight, bias)
            elif (y := _linear.with_main_grad(x, weight, bias, main_grad)) is not None:
                return y
        except RuntimeError:
            pass  # the op says what does not fit
    number = _linear.activation_number(_LINEAR, activation, none_allowed=True)
    if main_grad is not None:
        check_main_grad(_LINEAR, main_grad, weight, x=x, bias=bias, residual=residual)
    operands = _linear.under_autocast(_LINEAR, x=x, residual=residual, weight=weight, bias=bias)
    return _linear.linear(*operands, main_grad, number, bool(batch_invariant))


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh"
) -> Tensor:
    r"""Two linear layers with an activation between them, as one step of autograd.

    .. math::
        y = f(x W_1^T + b_1) W_2^T + b_2

    Args:
        x: shape (..., K), float32, float16, bfloat16, or float64 on the CPU. Any strides.
        w1: shape (F, K), the dtype of ``x``. Weights may lie transposed, as for :func:`warpsmith.linear`.
        b1: shape (F,), the dtype of ``x``, or float32 beside a 16-bit ``x``; or None.
        w2: shape (N, F), the dtype of ``x``.
        b2: shape (N,), as ``b1``.
        activation: f: "relu", "gelu" (exact), "gelu_tanh" or "silu".

    Returns:
        A contiguous tensor of shape (..., N) and the dtype of ``x``. Under autocast all inputs are cast to its dtype.

    Gradients for ``x``, both weights and both biases, and theirs in turn, composed of plain torch operations. The
    pre-activation (but for relu) and the activation are kept. The backward makes the gradient of the pre-activation
    where the gradient of the activation lies.

    Deterministic: the biases' gradients are sums in a fixed order, and matrix products are torch's, on CUDA cuBLAS's,
    which repeat bit for bit. The host does not wait.

    Raises:
        ValueError: a dtype, shape, device or name that does not fit.

    Source: the derivative of the activation behind the second layer's product follows llm.c,
    https://github.com/karpathy/llm.c.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.mlp(torch.ones(1, 2), torch.ones(3, 2), None, torch.ones(4, 3), None, "relu")
        tensor([[6., 6., 6., 6.]])
    """
    number = _linear.activation_number(_MLP, activation)
    tensors = _linear.under_autocast(_MLP, x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    return _linear.mlp(*tensors, number)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str = "silu",
    *,
    main_grads: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    r"""Two linear layers of the same input, one of which gates the other, as one step of autograd.

    .. math::
        y = f(x W_g^T + b_g) \cdot (x W_u^T + b_u)

    Args:
        x: shape (..., K), float32, float16, bfloat16, or float64 on the CPU. Any strides.
        gate_weight: shape (F, K), the dtype of ``x``. Weights may lie transposed, as for :func:`warpsmith.linear`.
        up_weight: shape (F, K), the dtype of ``x``.
        gate_bias: shape (F,), the dtype of ``x``, or float32 beside a 16-bit ``x``; or None.
        up_bias: shape (F,), as ``gate_bias``.
        activation: f: "silu" (SwiGLU), "gelu" (exact), "gelu_tanh" or "relu".
        main_grads: where the gradients of the two weights are added, as ``main_grad`` of :func:`warpsmith.linear`.

    Returns:
        A contiguous tensor of shape (..., F) and the dtype of ``x``. Under autocast all inputs are cast to its dtype.

    Gradients for ``x``, both weights and both biases, and theirs in turn, composed of plain torch operations. Both
    products are kept; the two parts of the gradient of ``x`` are added in the second product.

    Deterministic: the biases' gradients are sums in a fixed order, and matrix products are torch's, on CUDA cuBLAS's,
    which repeat bit for bit. The host does not wait.

    Raises:
        ValueError: a dtype, shape, device or name that does not fit.

    Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.gated_linear(torch.ones(1, 2), torch.ones(3, 2), torch.ones(3, 2), activation="relu")
        tensor([[4., 4., 4.]])
    """
    number = _linear.activation_number(_GATED, activation)
    given = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight, "gate_bias": gate_bias, "up_bias": up_bias}
    of_gate, of_up = (None, None) if main_grads is None else _linear.check_main_grads(main_grads, **given)
    return _linear.gated_linear(*_linear.under_autocast(_GATED, **given), of_gate, of_up, number)


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str | Fp8Recipe = "row",
    state: Fp8State | None = None,
    emulate: bool = False,
) -> Tensor:
    r"""A linear layer whose products are of 8-bit floats, with scales, summed in float32.

    .. math::
        y = Q(x) Q(W)^T + b, \qquad \frac{dL}{dx} = Q(g) Q(W^T)^T, \qquad \frac{dL}{dW} = Q(g^T) Q(x^T)^T

    Q is :func:`warpsmith.quantize_fp8` and back; of rows, or of the other scaling of the recipe. g is the upstream
    gradient. The gradient of the bias is a sum of what was not cast. With scales s of rows, x and W are cast once: the
    gradients' products read their bytes X and V, with x = s X and W = t V, and the scales are absorbed in g before it
    is cast:

    .. math::
        \frac{dL}{dx} = Q(g \, t^T) V, \qquad \frac{dL}{dW} = Q((s g)^T) X

    Args:
        x: shape (..., K), float32, float16 or bfloat16. Any strides.
        weight: shape (N, K), the dtype of ``x``, or float32 beside a 16-bit ``x``. K, its in_features, and N, its
            out_features, are multiples of 16.
        bias: shape (N,), as ``weight``; or None.
        recipe: an :class:`warpsmith.amp.Fp8Recipe`, or "row", "tensor" or "block" for one of defaults.
        state: what :func:`warpsmith.amp.fp8` keeps of a layer: counts, and largest values for delayed scales.
        emulate: multiply what the casts leave in float32. So on the CPU in any case, and where a card lacks the recipe.

    Returns:
        A contiguous tensor of shape (..., N) and the dtype of ``x``. Under autocast all are cast to its dtype, but
        for a ``weight`` of float32, which is cast to 8 bits as it is.

    Gradients for ``x``, ``weight`` (in its dtype) and ``bias``; no second derivatives, no forward mode. The cast of a
    parameter is kept until torch sees its values change or an optimizer steps; not in compiled and captured graphs. The
    backward keeps the bytes of x; x itself with blocks and with ``wgrad="high"``. NaN and infinite elements of x and of
    g make what they touch NaN.

    Deterministic: casts are bitwise, products are our Hopper kernels' or cuBLASLt's (``warpsmith.plan("scaled_linear",
    rows=..., in_features=..., out_features=..., scaling=...)`` says which), without either torch's ``_scaled_mm``; all
    repeat bit for bit. The host does not wait. The emulated products of scales that are no powers of two are rounded
    as torch's float32 products are.

    Raises:
        ValueError: a dtype, shape, device or word that does not fit; a card without such products. Nothing has changed.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; row scales as in torchao, blocks as in the
    DeepSeek-V3 report, 2024.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.scaled_linear(torch.ones(1, 16), torch.full((16, 16), 2.0))[0, :2]
        tensor([32., 32.])
    """
    if type(recipe) is not Fp8Recipe:
        recipe = _scaled_linear.as_recipe(SCALED, recipe)
    if emulate is not True and emulate is not False:
        checks.flags(SCALED, emulate=emulate)
        emulate = bool(emulate)
    if state is not None and not isinstance(state, Fp8State):
        checks.refuse_type(SCALED, "state", "an Fp8State or None", state)
    if not isinstance(weight, Tensor):
        checks.refuse_type(SCALED, "weight", "a tensor", weight)
    return _scaled_linear.layer(x, weight, bias, recipe, state, emulate)


def matmul_symmetric(x: Tensor) -> Tensor:
    r"""The product of matrices and their own transposes: half of the work, and a result that is symmetric bit for bit.

    .. math::
        y = x x^T

    Args:
        x: shape (..., M, K), at least two dimensions; float32, float16, bfloat16, or float64 on the CPU. Any strides;
            a batch whose matrices have adjacent rows or columns and one distance is not copied.

    Returns:
        A contiguous tensor of shape (..., M, M) and the dtype of ``x``, under autocast its dtype.

    Gradient: :math:`(g + g^T) x`, and its own, composed of plain torch operations.

    On Hopper cards 16-bit products of enough tiles are ours (``warpsmith.plan("matmul_symmetric", ...)``), with sums in
    float32, each in the order of k. Elsewhere torch multiplies panels of rows, each from the diagonal on, and what lies
    above the diagonal is copied below it. Deterministic. The host does not wait.

    Raises:
        ValueError: a dtype or shape that does not fit.

    Source: the mirrored store follows flash-muon, https://github.com/nil0x9/flash-muon.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.matmul_symmetric(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[ 5., 11.],
                [11., 25.]])
    """
    return _linear_symmetric.matmul_symmetric(*_linear.under_autocast(_linear_symmetric.NAME, x=x))
