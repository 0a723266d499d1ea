"""Ends a rank on SIGTERM and SIGINT: through its context manager where it can, by force where it hangs."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Turns SIGTERM into ``SystemExit(143)`` in the main thread, so that context managers and ``finally`` run.

    Python runs signal handlers between bytecodes, so a rank that waits in a collective would see neither signal until
    the collective's timeout. A thread hears of signals at once. When the handler has not run ``GRACE_S`` later, the
    thread calls ``last_words`` and ends the process; so does ``or_by_force`` where the teardown after the handler takes
    as long. A signal for which the program has a handler is left alone.
    """

    def __init__(self, last_words: Callable[[int], None]) -> None:
        self._last_words = last_words
        self._seen = threading.Event()
        self._number = 0  # the signal that was handled
        self._earlier: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in _SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._earlier[number] = signal.signal(number, self._handle)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop's: it needs to hear of signals more than we do
            signal.set_wakeup_fd(previous)
            self._close_sockets()
            return
        self._thread = threading.Thread(target=self._watch, name="warpsmith-stopping", daemon=True)
        self._thread.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._seen.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _watch(self) -> None:
        while True:
            heard = self._reader.recv(1)
            if not heard or heard == b"\0":
                return
            number = heard[0]
            if number in self._earlier and signal.getsignal(number) == self._handle and not self._seen.wait(GRACE_S):
                self._end(number)

    def _end(self, number: int) -> None:
        self._last_words(number)
        os._exit(128 + number)

    @contextmanager
    def or_by_force(self) -> Iterator[None]:
        """A teardown: after a signal it may take ``GRACE_S``. A collective that the handler interrupted between its
        start and its wait would hold it up until the collective's timeout."""
        if not self._number:
            yield
            return
        timer = threading.Timer(GRACE_S, self._end, (self._number,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Restores the handlers that were there before."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, earlier)
        self._earlier = {}
        if self._thread is not None:
            signal.set_wakeup_fd(-1)
            self._writer.send(b"\0")
            self._thread.join()
            self._thread = None
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._reader.close()
        self._writer.close()
