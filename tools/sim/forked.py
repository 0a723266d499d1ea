"""Sessions of pytest that begin as copies of a process which has imported torch.

`tests/nn/test_options.py -k "new_module and BiasGELU"` takes 0.6 s so, and 2.6 s as a process of its own (two cores).
"""

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path


@cache
def _server() -> subprocess.Popen[bytes]:
    """It ends with this process, which holds the other end of its pipe. Without buffers: select sees the pipe alone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # which OpenMP reads when it is loaded
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment)


def pytest(
    arguments: Sequence[str], timeout: float | None, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """`python -m pytest` in a folder. What is already imported, torch, has not seen the environment.

    After `timeout` seconds the session is asked to say which test runs, and ended; subprocess.TimeoutExpired.
    """
    server, command = _server(), list(arguments)
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as written:
        files = [Path(written) / name for name in ("out", "error")]
        call = command, str(folder), {**os.environ, **environment}, [str(file) for file in files]
        server.stdin.write(json.dumps(call).encode() + b"\n")
        child, late = int(server.stdout.readline()), False
        for number, left in ((signal.SIGTERM, timeout), (signal.SIGKILL, 5)):
            if select.select([server.stdout], [], [], left)[0]:
                break
            late = True
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, number)
        status = int(server.stdout.readline())
        out, error = (file.read_text(errors="replace") for file in files)
    if late:
        raise subprocess.TimeoutExpired(command, timeout or 0, out, error)
    return subprocess.CompletedProcess(command, status, out, error)


def _become(arguments: list[str], folder: str, environment: dict[str, str], files: list[str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["pytest", *arguments]
    import pytest

    sys.exit(pytest.main(arguments))  # not os._exit: counts of coverage are written at the end


def _serve() -> None:
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401

    gc.freeze()
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            _become(*json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
