from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpsmith.optim.adam import Adam


class AdamW(Adam):
    r"""Adam with decoupled weight decay: all parameters of all groups in one launch.

    .. math::
        p &\leftarrow p \, (1 - \gamma \lambda) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t} \, \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Constructor, ``param_groups`` and ``state_dict`` are those of ``torch.optim.AdamW``; each loads the other's state.
    Learning rate schedulers, closures, hooks, ``zero_grad`` and parameter groups work as in torch. The addresses of all
    tensors lie in a table on the device. Each step compares them with those of the tensors as they are then and makes
    the table anew when one differs: ``load_state_dict``, ``add_param_group``, ``.data = ...`` of a parameter or of any
    state, a replaced state tensor, states moved off the device and back, and a new gradient are all seen. (Only a state
    that is made another view of the very memory it has, by ``.data`` or ``t_()``, is not; a parameter of one dimension
    that is, is seen once its gradient has the new length.) The table keeps no memory alive, a captured CUDA graph does
    (parameters and states; the gradients are to be kept as for any graph).

    Args:
        params: tensors, (name, tensor) pairs or dicts of groups. float32, float16, bfloat16, or float64 on the
            CPU; gradients alike, or any of the first three beside any (``p.grad_dtype``). Any number of devices, one
            launch each. DTensor parameters (FSDP2) are updated shard by shard. Elements must fill their memory without
            gaps or overlap, in any order of dimensions.
        lr: a number, or a tensor of one float32 or float64 element. A number goes along in the launch, so a scheduler
            costs no copy; captured in a CUDA graph it is fixed. A tensor on the parameters' device is read by the
            kernel, at each replay too.
        betas: two numbers in [0, 1). eps, weight_decay: numbers >= 0.
        amsgrad: divide by the root of the largest ``v`` so far.
        maximize: go up the gradient.
        foreach, fused: choose among torch's implementations; accepted, without effect on the step. Not both may be
            True. With ``fused=False``, ``torch.amp.GradScaler`` divides the gradients before the step, and the host
            waits, as for torch's unfused optimizers. Lightning without
            :class:`warpsmith.integrations.lightning.MixedPrecision` clips for such optimizers alone.
        capturable: accepted, without effect: every step can be captured. Take one step before the capture, so that
            states exist.
        differentiable: only False.
        precision: what is stored in which dtype; also an option of a group. Arithmetic is float32 (float64 of float64),
            rounded once a step: to nearest, unless the precision says otherwise.

            - None: ``"fp32"`` of float32 and float64 parameters, ``"bf16"`` of 16-bit ones, as in torch.
            - ``"fp32"``: states in the dtype of the parameters, which are float32 or float64.
            - ``"bf16"``: states in the dtype of the parameters, which are bfloat16 or float16. A step smaller than half
              a unit in the last place of a parameter is lost.
            - ``"master"``: 16-bit parameters, of which the state keeps a float32 ``master``; states in float32. The
              parameter is the master, rounded. Values written to a parameter between steps are lost.
            - ``"bf16_states"``: states in bfloat16, of float32 or bfloat16 parameters.
            - ``"bf16_sr"``: bfloat16 parameters and states, rounded up or down at random so that the mean is right. A
              group that counts no steps otherwise has a counter ``step`` then.
            - ``"bf16_kahan"``: bfloat16 parameters and states, and a bfloat16 state ``compensation`` of what rounding
              dropped of the parameter: together 16 significant bits.
            - ``"remainder"``: bfloat16 parameters, and an int16 state ``remainder``: both are the float32 parameter,
              bit by bit; states in float32. The parameter is that float32 rounded to nearest, halfway cases away from
              zero.
            - ``"8bit"``: float32, float16 or bfloat16 parameters, and states of one byte: a uint8 code an element, and
              a float32 scale in the state ``scales``, of shape (states, blocks), for each block of 256 elements in
              memory order. Not with amsgrad, and not for DTensors. Parameters of fewer than 4,096 elements, and those
              that ``keep_fp32`` names, have float32 states, in the same launch.

            ``"bf16_sr"``, ``"bf16_kahan"`` and ``"remainder"`` take float32 parameters as ``"fp32"`` does.
        seed: of ``"bf16_sr"``; also an option of a group. A whole number in [0, 2^53), the same on all ranks that hold
            copies of a parameter. The random bits depend on seed, step and the element's index among those of all
            parameters alone: on no device, launch, thread or cut into tensors. Each parameter begins at an even index.
            A parameter that is a piece of a larger tensor has an attribute ``first_element``, the index of its first
            element, even or odd; it is read before the first step.
        keep_fp32: of ``"8bit"``; also an option of a group. Patterns (``fnmatch``, as ``"*norm*"``) of names of
            parameters whose states stay float32; the optimizer must be given (name, tensor) pairs.
        fp8_weights: steps write the 8-bit casts that layers of :func:`warpsmith.amp.fp8` keep of these weights, with
            the bits of their own casts: by rows and powers of two, of contiguous bfloat16 and float32 weights of at
            most 65,536 columns, their precision ``"fp32"``, ``"bf16"``, ``"master"`` or ``"remainder"``. All else is
            cast by the layers: with amsgrad, gradients of another dtype, a :meth:`fuse` or a capture, and where no
            layer has cast the weight since the step before. A change of a weight behind the step that torch does not
            see, by ``weight.data``, is to be told: ``torch.autograd.graph.increment_version(weight)``.

    ``grad_scale`` and ``found_inf``, which ``torch.amp.GradScaler`` sets, are read on the device: gradients are divided
    by the scale, and where ``found_inf`` is not zero nothing changes, step counters neither. Other than torch's, the
    step does not write the divided gradients back (4 bytes a parameter): after it ``p.grad`` still holds the scaled
    ones.

    Parameters may have any strides without overlap. One with gaps, such as a slice, or with the negative bit is stepped
    in a dense copy, which is then written back.

    Deterministic. The host never waits for the device. Moves 28 bytes of memory a float32 parameter, 36 with amsgrad.
    More than 32 parameter groups take one launch for each 32. Under ``torch.compile`` a step is a graph break and runs
    as it is. As by torch's fused step, version counters do not move: a backward through a graph of before the step is
    not refused.

    Raises:
        ValueError: a hyperparameter out of range; a loaded state of another shape; at ``step``, a parameter, gradient
            or state that does not fit (dtype, device, sparse, strides), named with its group and index. Nothing has
            changed then.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; order of operations as torch's fused
    step.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _op = "AdamW"
    _of_every_group = {**Adam._of_every_group, "decoupled_weight_decay": True}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: str | None = None,
        seed: int = 0,
        keep_fp32: Sequence[str] = (),
        fp8_weights: bool = False,
    ) -> None:
        super(Adam, self).__init__(params, locals())
