"""``CapturedStep``: a training step as one CUDA graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from warpsmith import _C
from warpsmith._core import captures, checks
from warpsmith.train.backward_waits import NotedCalls, backward_waits
from warpsmith.train.cuda_graphs import CudaGraphs
from warpsmith.train.device_values import DeviceValues
from warpsmith.train.self_test import Differs, compare
from warpsmith.train.source_lines import Line, callers, in_backward, line_of
from warpsmith.train.step_inputs import fill, input_key, on_device, shapes_text, static_copies
from warpsmith.train.step_state import Gradients, StepState, is_known, names_of, parameters_of

_OP = "CapturedStep"
_RECAPTURES = 8
_STATEFUL = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)


class CaptureError(RuntimeError):
    """A step that cannot be captured, where ``CapturedStep`` was given ``fallback=False``; the message says why.

    Example:
        >>> import warpsmith
        >>> issubclass(warpsmith.train.CaptureError, RuntimeError)
        True
    """


class _CannotCapture(Exception):
    """Why; nothing has changed."""


class _Bucket:
    """Inputs of one kind: their static copies, and the graph that reads them."""

    def __init__(self, eager_steps: int, leaves: Sequence[Any]) -> None:
        self.eager_steps = eager_steps  # until the capture
        self.waits_in_backward = False  # which the next step looks into
        self.text = shapes_text(leaves)
        self.forget()

    def forget(self) -> None:
        self.replay: Callable[[], None] | None = None
        self.inputs: list[Any] = []  # the graph reads these tensors
        self.outputs: Any = None  # and writes these
        self.params: list[Tensor] = []
        self.gradients: list[tuple[Tensor, Tensor | None]] = []  # of parameters after the step, where it changes them
        self.without_gradients = False  # there were none before the step


class CapturedStep:
    """Runs a training step as one CUDA graph: forward, backward, scaler, clipping, optimizer and schedule.

    A step is then one launch of the host in place of one a kernel. That pays where a step waits for its host: small
    models, many small layers, slow CPUs. The first calls run as they are. Then the step is captured, compared bit by
    bit with eager steps, and replayed from then on. Every call is one step of training, the first ones too.

    A step that cannot be captured runs eagerly for good. One warning names the operation and the line of source that
    prevented the capture, most often a wait of the host such as ``loss.item()``. On the CPU every step is eager.

    Args:
        step_fn: a function of the batch that takes one whole step, ``zero_grad`` included. Tensors may be in tuples,
            lists and dicts; they come to ``step_fn`` on the device. Other arguments (numbers, strings) are part of
            the capture: other values are another capture.
        state: all that the step changes or reads: modules, optimizers, scaler, ``DeviceLR``, ``EMA``, containers of
            tensors. Modules, optimizers, scalers, schedules and averages that ``step_fn`` names must be among them.
        warmup: eager steps for each kind of inputs before its capture, at least 2; 11 under DDP (docs/step.md).
        self_test: for so many steps a new capture is compared with eager steps from the same state. Afterwards
            parameters, buffers, states, scaler, gradients and random numbers are as before. Needs memory for two copies
            of the state; they lie on the host if the device has no room. 0 leaves the comparison out.
        max_buckets: kinds of inputs (shapes, dtypes, other values) that are captured. One more is refused.
        watch: False leaves out, before a replay, the look at what a capture fixes, whose time grows with the number of
            parameters: all of the paragraphs below on what is noticed, and the error for gradients that are there
            before the step, are then up to you. After such a change call :meth:`forget`. Hyperparameters that kernels
            read on the device are brought up to date all the same.
        generators: random generators on the device that the step uses beside torch's default one.
        fallback: False raises :class:`CaptureError` where a step on a GPU would run eagerly for good.

    A call returns what ``step_fn`` returns, tensors detached; the tensors of one call are not written by the next.

    Attributes:
        fallback_reason: why all steps are eager; None while they are captured or will be.
        self_test_result: what the last self-test found, in words; None before.

    **What may change between calls.** Values of inputs, parameters and states; with optimizers of
    :mod:`warpsmith.optim` the learning rate, weight decay, betas, momentum and ``eps``, also by a scheduler of torch:
    kernels then read them on the device. With other optimizers a learning rate that is a tensor on the device. Other
    numbers of an optimizer's groups, ``train()`` and ``eval()``, loaded optimizer states and replaced parameters are
    noticed: two steps are eager, and the next is captured anew. After 8 such changes all steps are eager.

    **What a replay does not repeat.** Anything that Python does in the step: ``print``, counters, ``scheduler.step()``
    of torch, ``random``. Where that changes ``state`` or a random state it is noticed, and the steps stay eager.

    Deterministic: a replay has the bits of the eager step. Where eager steps differ among themselves, by operators of
    torch that are not deterministic, the self-test accepts a capture that differs from them by at most 8 times as much.

    Raises:
        ValueError: an input that requires a gradient or is sparse; a kind of inputs beyond ``max_buckets``; a module or
            optimizer that ``step_fn`` names and ``state`` lacks; gradients before a step that was captured without.
            Nothing has changed then.
        TypeError: an input that is neither a tensor nor hashable.

    Source: NVIDIA's CUDA graphs as in ``torch.cuda.graph``, with the recipe of its documentation.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> step = warpsmith.train.CapturedStep(step, state=[model, optimizer])
        >>> losses = [step(torch.ones(1, 4)) for _ in range(6)]
        >>> step.fallback_reason
        'the state lies on no GPU'
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        *,
        state: Sequence[Any],
        warmup: int = 3,
        self_test: int = 3,
        max_buckets: int = 4,
        watch: bool = True,
        generators: Sequence[torch.Generator] = (),
        fallback: bool = True,
    ) -> None:
        for name, value, least in (("warmup", warmup, 2), ("self_test", self_test, 0), ("max_buckets", max_buckets, 1)):
            if not isinstance(value, int) or value < least:
                checks.refuse(_OP, name, f"a number >= {least}", str(value))
        if not callable(step_fn):
            checks.refuse_type(_OP, "step_fn", "a function", step_fn)
        if not isinstance(state, (list, tuple)) or not state:
            checks.refuse(_OP, "state", "a list of what the step changes, such as [model, optimizer]", str(state))
        self._step_fn, self._given = step_fn, list(state)
        self._warmup, self._tests, self._most, self._fallback = warmup, self_test, max_buckets, fallback
        self._watch = bool(watch)
        self.fallback_reason: str | None = None
        self.self_test_result: str | None = None
        self._graphs: CudaGraphs | None = None
        self._recaptures = 0
        self._buckets: dict[Any, _Bucket] = {}
        self._state: StepState | None = None  # as at the captures
        found = StepState(self._roots())
        self._refuse_missing(found)
        devices = {t.device for t in found.tensors if CudaGraphs.serves(t.device)}
        if len(devices) == 1:
            self._graphs = CudaGraphs(devices.pop(), generators)
        else:
            self._give_up(f"the state lies on {len(devices)} GPUs" if devices else "the state lies on no GPU")

    # State.

    def _roots(self) -> list[tuple[str, Any, Any]]:
        """What was given as state, and the tensors, lists and dicts that the function names."""
        roots: list[tuple[str, Any, Any]] = [(f"state[{i}]", self._given, i) for i in range(len(self._given))]
        for name, (scope, key) in names_of(self._step_fn).items():
            if isinstance(scope[key], (Tensor, list, dict)):
                roots.append((name, scope, key))
        return roots

    def _refuse_missing(self, found: StepState) -> None:
        known = {id(o) for o in found.objects}
        for name, (scope, key) in names_of(self._step_fn).items():
            if (isinstance(scope[key], _STATEFUL) or is_known(scope[key])) and id(scope[key]) not in known:
                checks.refuse(_OP, "state", f"all that step_fn changes, {name} too", f"a list without {name}")

    def _look(self) -> StepState:
        """The state to capture, with hyperparameters on the device where that is possible."""
        assert self._graphs is not None
        optimizers = [o for o in StepState(self._roots()).objects if isinstance(o, torch.optim.Optimizer)]
        self._values = DeviceValues(optimizers, self._graphs.device)
        return StepState(self._roots(), self._graphs.device, self._values.holds)

    def forget(self) -> None:
        """Drops all captures: two steps of each kind of inputs are eager, and the next one is captured anew."""
        self._state = None
        for bucket in self._buckets.values():
            if bucket.replay is not None:
                bucket.forget()
                bucket.eager_steps = 2  # a schedule may put its learning rate back first
        if self._graphs is not None:
            self._graphs.forget()

    def _notice_changes(self) -> None:
        """Drops all captures if something is not as they have fixed it."""
        if self._state is None:
            return
        changed = (self._state.changed() if self._watch else None) or self._values.refresh()
        if changed is None:
            return
        self.forget()
        self._recaptures += 1
        if self._recaptures > _RECAPTURES:
            self._give_up(f"what a capture fixes changed {self._recaptures} times, at last: {changed}")

    # Calls.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        key = input_key(_OP, leaves, spec)
        if self.fallback_reason is None:
            bucket = self._bucket(key, leaves)
            self._notice_changes()
        if self.fallback_reason is not None:
            return self._eager(leaves, spec)
        if bucket.replay is not None:
            return self._replay(bucket, leaves)
        bucket.eager_steps -= 1
        if bucket.eager_steps > 0:
            return self._eager(leaves, spec)
        if bucket.eager_steps == 0:
            return self._audited(bucket, leaves, spec)
        try:
            self._capture(bucket, leaves, spec)
        except _CannotCapture as why:
            self._give_up(str(why), why.__cause__)
            return self._eager(leaves, spec)
        return self._replay(bucket, leaves)

    def _bucket(self, key: Any, leaves: Sequence[Any]) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) == self._most:
                known = "; ".join(b.text for b in self._buckets.values())
                checks.refuse(_OP, "inputs", f"one of max_buckets = {self._most} kinds ({known})", shapes_text(leaves))
            bucket = self._buckets[key] = _Bucket(self._warmup, leaves)
        return bucket

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """All steps from now on are eager."""
        self.fallback_reason = reason
        self._buckets, self._state = {}, None
        if not self._fallback and self._graphs is not None:
            raise CaptureError(f"{_OP}: {reason}") from cause
        warnings.warn(f"{_OP}: steps run eagerly: {reason}", RuntimeWarning, stacklevel=3)

    def _call(self, leaves: Sequence[Any], spec: Any) -> Any:
        args, kwargs = tree_unflatten(list(leaves), spec)
        torch.clear_autocast_cache()  # of casts that were made in a capture, or are to be part of one
        try:
            return tree_map_only(Tensor, Tensor.detach, self._step_fn(*args, **kwargs))
        finally:
            torch.clear_autocast_cache()

    def _eager(self, leaves: Sequence[Any], spec: Any) -> Any:
        """The step as it is; where there is a GPU with its inputs there, and on the stream of the other steps."""
        if self._graphs is None:
            return self._call(leaves, spec)
        inputs = on_device(leaves, self._graphs.device)
        with self._graphs.aside():
            outputs = self._call(inputs, spec)
        return _cloned(outputs)

    def _audited(self, bucket: _Bucket, leaves: Sequence[Any], spec: Any) -> Any:
        """An eager step that shows what a capture would get wrong."""
        assert self._graphs is not None
        found: list[tuple[Line, bool]] = []
        state, host = StepState(self._roots(), self._graphs.device), self._graphs.host_random_state()
        calls = NotedCalls()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._graphs.watched(lambda f: found.append((line_of(callers(f)), in_backward(f)))))
            if bucket.waits_in_backward:
                within = stack.enter_context(backward_waits())
                stack.enter_context(calls)
            outputs = self._eager(leaves, spec)
        if found and found[0][1] and not bucket.waits_in_backward:
            bucket.waits_in_backward, bucket.eager_steps = True, 1
        elif found:
            gradients = within.text(calls.lines) if bucket.waits_in_backward else ""
            where = f" in {gradients}" if gradients else ""
            self._give_up(f"{found[0][0]}: the host waits for the device{where}")
        elif (changed := state.changed()) is not None:
            self._give_up(f"the step changes what a replay would not change: {changed}")
        elif drawn := [name for name, value in self._graphs.host_random_state().items() if value != host[name]]:
            self._give_up(f"the step draws from the random numbers of {drawn[0]}, which a replay would repeat")
        return outputs

    def _capture(self, bucket: _Bucket, leaves: Sequence[Any], spec: Any) -> None:
        assert self._graphs is not None
        if self._state is None:
            self._state = self._look()
        state, graphs = self._state, self._graphs
        params = parameters_of(state)
        before = Gradients(params)
        bucket.inputs = static_copies(leaves, graphs.device)
        bucket.without_gradients = all(g is None for g in before.tensors)
        before.clear()  # the graph's gradients shall lie in its own memory
        try:
            with self._values.on_device():
                replay, outputs = graphs.capture(lambda: self._call(bucket.inputs, spec))
        except Exception as error:
            before.restore()
            state.restore_numbers()
            for scaler in (o for o in state.objects if isinstance(o, torch.amp.GradScaler)):
                if scaler.is_enabled():
                    scaler._per_optimizer_states.clear()  # half a step's notes
            raise _CannotCapture(_blamed(error)) from error
        bucket.replay, bucket.outputs = replay, outputs
        captures.alive.add(self)
        bucket.params = params
        bucket.gradients = [(p, p.grad) for p in params if p.grad is not None or not bucket.without_gradients]
        before.restore()
        if (changed := state.changed()) is not None:
            raise _CannotCapture(f"the step changes what a replay would not change: {changed}")
        if self._tests:
            self._test(bucket, leaves, spec)

    def _test(self, bucket: _Bucket, leaves: Sequence[Any], spec: Any) -> None:
        """Compares replays with eager steps, and takes all of them back."""
        assert self._graphs is not None and self._state is not None
        graphs, state = self._graphs, self._state
        gradients, numbers = Gradients(parameters_of(state)), graphs.random_state()
        copies, inputs = state.copies(), static_copies(leaves, graphs.device)

        def rewind() -> None:
            state.restore(copies)
            gradients.restore()
            graphs.set_random_state(numbers)

        def changed() -> list[tuple[str, Tensor]]:
            grads = [(f"the gradient of {path}", t.grad) for path, t in zip(state.paths, state.tensors, strict=True)]
            return [*zip(state.paths, state.parts, strict=True), *((path, g) for path, g in grads if g is not None)]

        def eager() -> Any:
            if bucket.without_gradients:
                gradients.clear()
            return self._eager(static_copies(inputs, graphs.device), spec)  # the step may write to its inputs

        def replay() -> Any:
            if bucket.without_gradients:
                gradients.clear()
            return self._replay(bucket, inputs)

        try:
            self.self_test_result = compare(self._tests, changed, eager, replay, rewind)
        except Differs as difference:
            raise _CannotCapture(str(difference)) from difference

    def _replay(self, bucket: _Bucket, leaves: Sequence[Any]) -> Any:
        if self._watch and bucket.without_gradients and _C.have_gradients(bucket.params):
            checks.refuse(
                _OP, "gradients", "none before the step, as at its capture", "some: call zero_grad in the step"
            )
        fill(bucket.inputs, leaves)
        assert bucket.replay is not None
        bucket.replay()
        for p, grad in bucket.gradients:
            if p.grad is not grad:
                p.grad = grad
        return _cloned(bucket.outputs)


def _cloned(outputs: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, outputs)


def _blamed(error: BaseException) -> str:
    """The line of the user's code that raised the first of a chain of errors, and its message."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    frames = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    message = next(iter(str(error).splitlines()), "")
    return f"{line_of(reversed(frames))}: {type(error).__name__}: {message}"
