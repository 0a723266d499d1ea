"""Starts programs as the ranks of a job: by torchrun, or by hand with the variables that torchrun would set."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("SLURM_")}
    return kept | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}


def by_hand(rank, world_size, port, **more):
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    return environment(**(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more))


def start(program, environ, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def started(programs):
    """Processes that are gone when the block ends."""
    try:
        yield programs
    finally:
        for process in programs:
            process.kill()
            process.communicate()


def wait_for_line(process, words, limit_s=60):
    """Reads standard output until a line holds the words."""
    deadline = time.monotonic() + limit_s
    for line in process.stdout:
        if words in line:
            return line
        assert time.monotonic() < deadline
    raise AssertionError(f"ended without {words!r}: {process.stderr.read()}")


def torchrun(world_size, program, *arguments, **variables):
    """Runs a file under torchrun, all ranks on this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [*launcher, str(program), *map(str, arguments)]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=180)
