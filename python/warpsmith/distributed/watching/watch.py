"""``watch``: one report on a job whose ranks wait for each other."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from warpsmith._core import checks
from warpsmith.distributed.launch.environment import launch_environment
from warpsmith.distributed.watching.flight import pending
from warpsmith.distributed.watching.record import Call, Recorder, is_not_the_users, user_line
from warpsmith.distributed.watching.report import Said, State, is_trouble, report
from warpsmith.distributed.watching.steps import Steps, table

_LONGEST_BEAT_S = 0.5
_BEATS_OF_SILENCE = 5
_started = 0  # watches of this process: each has keys of its own in the store


class Watch:
    """What :func:`watch` returns: a context manager that watches its block.

    Example:
        >>> import warpsmith
        >>> with warpsmith.distributed.watch() as watching:
        ...     watching.reported
        False
    """

    def __init__(self, timeout_s: float, on_report: Callable[[str], None]) -> None:
        self._timeout_s, self._on_report = timeout_s, on_report
        self._recorder, self._steps = Recorder(), Steps()
        self._stop, self._done = threading.Event(), threading.Event()
        self._phase, self._error, self._order, self._beats = "running", "", 0, 0
        self._place: Any = None
        self._still_since = self._next_look = time.monotonic()
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s / 4)
        self._program = threading.get_ident()
        self._thread: threading.Thread | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._open()

    @property
    def reported(self) -> bool:
        """Whether this rank has reported, or has seen why another one did."""
        return self._done.is_set()

    def step(self, **values: float | Tensor) -> None:
        """Says that a training step has ended, for :meth:`step_times`.

        values: numbers of the step or tensors, such as ``loss=loss``. When one is first NaN or infinite, this rank
        reports its name and the step. The watch's thread reads the tensors, within half a second, so the program does
        not wait for the device. Give it tensors that are not written to meanwhile, and none while a CUDA graph is
        captured.

        Example:
            >>> import warpsmith
            >>> with warpsmith.distributed.watch() as watching:
            ...     for _ in range(3):
            ...         watching.step(loss=0.5)
        """
        for name, value in values.items():
            if not isinstance(value, Tensor):
                checks.refuse_non_number("Watch.step", name, value)
        if self._thread is not None:
            self._steps.end(self._recorder.waited_s, values)

    def step_times(self) -> str:
        """A table of the ranks: steps, the median milliseconds of the last 50, and those outside of collectives.

        A rank that takes over 1.25 times the ranks' median outside of collectives is marked as a straggler. Counted as
        collectives are calls through ``torch.distributed.<name>`` in which the host waits: on GPUs it seldom does, and
        then no rank is marked. Not a collective; other ranks' numbers are up to half a second old. Empty in a world of
        one.

        Example:
            >>> import warpsmith
            >>> with warpsmith.distributed.watch() as watching:
            ...     watching.step_times()
            ''
        """
        if self._thread is None:
            return ""
        self._publish()
        return table(self._states())

    def _open(self) -> None:
        global _started
        _started += 1
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        # A connection of its own, where there is such a thing: the program may wait in the store.
        store = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore(f"warpsmith/watch/{_started}", store)
        self._recorder.open()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="warpsmith-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._fail(error)
        self.close()

    def close(self) -> None:
        """Ends the watch; calling it again does nothing."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(2 * _BEATS_OF_SILENCE * self._beat_s)
        self._thread = None
        self._tell_not_finite()
        self._recorder.close()
        if self._phase == "running":
            self._phase = "ended"
        try:
            self._publish()
        except RuntimeError:  # the store's process has ended: nobody is left to read it
            return

    def _fail(self, error: BaseException) -> None:
        """Tells the others of an exception, and gives the report time to be made before the process ends."""
        if self._thread is None:
            return
        every = traceback.extract_tb(error.__traceback__)
        frames = [f for f in every if not is_not_the_users(f.filename)] or every
        at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        first = str(error).splitlines()[0] if str(error) else ""
        self._error = f"{type(error).__name__}: {first}{at}"
        try:
            self._order = self._store.add("raised", 1)
        except RuntimeError:
            return
        self._phase = "raised"
        self._done.wait((_BEATS_OF_SILENCE + 3) * self._beat_s + 1)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._beat_s):
                self._publish()
                self._tell_not_finite()
                now = time.monotonic()
                stuck = now - self._still_since >= self._timeout_s and now >= self._next_look
                if not self._done.is_set() and (stuck or self._phase == "raised"):
                    self._look()
                    self._next_look = now + self._timeout_s  # where there was no trouble
        except RuntimeError as error:
            if not self._stop.is_set():
                self._tell(
                    f"warpsmith: watch: rank {self._rank} of {self._ranks}: the store of this job is gone, with the "
                    f"process that held it: {str(error).splitlines()[0]}\n"
                )

    def _look(self) -> None:
        """Reads what all ranks say, twice, so that silence shows; one rank reports."""
        before = self._states()
        for _ in range(_BEATS_OF_SILENCE):
            time.sleep(self._beat_s)
            self._publish()
        states = self._states()
        silent = {
            rank
            for rank, s in states.items()
            if s is not None and s.phase == "running" and s == before[rank] and rank != self._rank
        }
        if not is_trouble(states, silent, self._timeout_s):
            return
        if self._store.add("reports", 1) == 1:
            self._tell(report(states, silent, self._timeout_s))
        self._done.set()

    def _tell(self, text: str) -> None:
        self._hand_over(text)
        self._done.set()

    def _hand_over(self, text: str) -> None:
        """To the user's function. Where that fails, the text must still be seen, and the watch goes on."""
        try:
            self._on_report(text)
        except Exception as error:
            _to_stderr(f"{text}warpsmith: watch: on_report: {type(error).__name__}: {error}\n")

    def _tell_not_finite(self) -> None:
        for words in self._steps.not_finite():
            self._hand_over(f"warpsmith: watch: rank {self._rank} of {self._ranks}: {words}\n")

    def _states(self) -> dict[int, State | None]:
        keys = [str(rank) for rank in range(self._ranks)]
        store: Any = self._store  # torch's stubs lack some of its methods
        texts: list[bytes | None]
        if store.has_extended_api() and store.check(keys):
            texts = store.multi_get(keys)
        else:
            texts = [store.get(key) if store.check([key]) else None for key in keys]
        return {rank: None if text is None else State.from_json(text) for rank, text in enumerate(texts)}

    def _publish(self) -> None:
        recorder, now = self._recorder, time.monotonic()
        frame = sys._current_frames().get(self._program)
        work, waiting = _work_of_backend(), recorder.waiting
        place = (id(frame), frame.f_lasti if frame is not None else 0, recorder.calls, work)
        if place != self._place:
            self._place, self._still_since = place, now
        self._beats += 1
        still_s = now - self._still_since
        blind = waiting is None and (still_s >= self._timeout_s or self._phase == "raised")
        step_ms, own_ms = self._steps.medians_ms()
        calls = {group: _said(call) for group, call in list(recorder.last.items())}
        # A rank that moves needs no history: the store is spared.
        tells_all = still_s >= self._beat_s or self._phase != "running"
        recent = {group: [_said(c) for c in list(kept)] for group, kept in list(recorder.recent.items()) if tells_all}
        state = State(
            rank=self._rank,
            beat=self._beats,
            phase=self._phase,
            error=self._error,
            order=self._order,
            calls=calls,
            recent=recent,
            waiting=None if waiting is None else waiting.group,
            waiting_s=0.0 if waiting is None else now - waiting.since,
            at=user_line(frame),
            still_s=still_s,
            work=work,
            pending=pending() if blind else "",
            steps=self._steps.count,
            step_ms=step_ms,
            own_ms=own_ms,
        )
        self._store.set(str(self._rank), state.to_json())


def _said(call: Call) -> Said:
    return Said(call.op, call.number, call.what, call.at)


def _work_of_backend() -> int:
    """How many collectives the default group has run, those of DDP too; 0 where the backend does not tell."""
    group: Any = dist.group.WORLD
    try:
        return 0 if group is None else group._get_sequence_number_for_group()
    except RuntimeError:
        return 0


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def watch(timeout_s: float = 300.0, *, on_report: Callable[[str], None] | None = None) -> Watch:
    """Watches the ranks of a job, and says once what holds them up.

    Every rank tells the others through the job's store, twice a second, which collective it is in and at which line of
    Python. When a rank has not moved for ``timeout_s`` while others differ from it, or an exception leaves the block,
    one rank writes one report within 5 seconds: the likely cause (a dead, stopped or slow rank, an exception, a missing
    collective, another order, other shapes or dtypes) and a line for each rank with its collective, the number of that
    among the group's, the tensors, and the line. Nothing is ended: that is up to the process group's timeout, which
    should be longer.

    With ``watching.step(loss=loss)`` once a step, a rank also reports a loss that is not finite, and
    ``watching.step_times()`` is a table of the ranks that marks stragglers.

    Args:
        timeout_s: how long a rank may stay where it is.
        on_report: what to do with the text, on the rank and in the thread that reports. Default: standard error.

    Seen are calls through ``torch.distributed.<name>``. Collectives that DDP and FSDP make in C++ are counted where the
    backend tells, and the report has the line of ``backward()``. In a world of one nothing is watched.

    Returns:
        A :class:`Watch`: use it in a ``with`` statement, on every rank, after ``init``.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: ``timeout_s`` is not more than 0.
        RuntimeError: the environment has several ranks, and no process group has been made yet.

    Example:
        >>> import warpsmith
        >>> with warpsmith.distributed.init(device="cpu") as ctx, warpsmith.distributed.watch(timeout_s=120):
        ...     ctx.barrier()
    """
    checks.refuse_non_number("watch", "timeout_s", timeout_s)
    if not timeout_s > 0:
        raise ValueError(f"watch: timeout_s: expected more than 0 seconds, got {timeout_s}")
    if on_report is not None and not callable(on_report):
        checks.refuse_type("watch", "on_report", "a function of the text, or None", on_report)
    if not dist.is_initialized() and (place := launch_environment(os.environ)).world_size > 1:
        raise RuntimeError(f"watch: {place.name}: expected a process group, got none: call init() before watch()")
    return Watch(timeout_s, on_report or _to_stderr)
