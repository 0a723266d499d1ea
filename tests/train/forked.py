"""Children forked from a warm process: none imports torch, and they tell their parent through a pipe what they do."""

import contextlib
import os
import select
import signal
import time
import traceback
from dataclasses import dataclass, field


@dataclass
class Ended:
    """What became of a process. code: of its end, None where it hung; lines: what it said."""

    code: int | None = None
    lines: list[list[str]] = field(default_factory=list)

    @property
    def killed(self):
        return self.code == -signal.SIGKILL

    def said(self, word):
        return [line[1:] for line in self.lines if line[0] == word]


def fork(body):
    """A child that calls body(say) and ends; its process and the reading end of its pipe."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 1
    try:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)

        def say(*words):
            os.write(write, (" ".join(map(str, words)) + "\n").encode())

        try:
            body(say)
            code = 0
        except BaseException:
            say("error", traceback.format_exc().replace("\n", " | ")[-1500:])
    finally:
        os._exit(code)


def collect(children, limit_s):
    """How the children end, within a time; one that does not end is killed."""
    said = {pipe: [] for _, pipe in children}
    deadline = time.monotonic() + limit_s
    open_pipes = set(said)
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(open_pipes), [], [], left)[0]:
            data = os.read(pipe, 1 << 16)
            said[pipe].append(data)
            if not data:
                open_pipes.discard(pipe)
    found = []
    for pid, pipe in children:
        hung = pipe in open_pipes
        if hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        text = b"".join(said[pipe]).decode()
        lines = [line.split(" ") for line in text.splitlines()]
        found.append(Ended(None if hung else os.waitstatus_to_exitcode(status), lines))
    return found
