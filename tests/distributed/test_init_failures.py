"""What keeps ranks from meeting: each is a message that names rank and remedy, and no rank hangs."""

import socket
import time

from programs import by_hand, free_port, start, started

PROGRAM = """
import sys, warpsmith
with warpsmith.distributed.init(device="cpu", timeout_s=float(sys.argv[1])) as ctx:
    print("met", flush=True)
"""


def messages(environments, timeout_s=8, limit_s=45, program=PROGRAM):
    """What ranks that cannot meet print, all of them within the limit."""
    begin = time.monotonic()
    with started([start(program, environ, timeout_s) for environ in environments]) as ranks:
        outputs = [p.communicate(timeout=limit_s) for p in ranks]
        assert time.monotonic() - begin < limit_s
        assert all(p.returncode == 1 for p in ranks), outputs
    assert not any("met" in output for output, _ in outputs)
    return [errors for _, errors in outputs]


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [error] = messages([by_hand(0, 2, port)])
    assert f"rank 0 of 2: port {port} is in use on this host: stop the other job, or set MASTER_PORT" in error


def test_nobody_listens():
    port = free_port()
    [error] = messages([by_hand(1, 2, port)], timeout_s=3)
    assert f"rank 1 of 2: no store of this job answers at 127.0.0.1:{port} within 3 s" in error


def test_ranks_that_do_not_come_are_named():
    port = free_port()
    errors = messages([by_hand(r, 4, port) for r in (0, 2)])
    assert "rank 0 of 4: 2 of 4 ranks have not come within 8 s: 1, 3: " in errors[0]


def test_worlds_of_other_sizes():
    port = free_port()
    errors = messages([by_hand(0, 2, port), by_hand(1, 3, port)])
    found = [f"rank {r} of {2 + r}: another rank of this job has a world of {3 - r}: set the same" for r in range(2)]
    assert sum(words in error for words, error in zip(found, errors, strict=True)) == 1, errors  # who came second


def test_a_rank_that_ends_when_all_have_met():
    dying = PROGRAM.replace(
        "with",
        "import os; import torch.distributed as dist\nif os.environ['RANK'] == '1':\n    "
        "dist.init_process_group = lambda *_, **__: sys.exit(1)\nwith",
        1,
    )
    port = free_port()
    error = messages([by_hand(r, 2, port) for r in range(2)], program=dying)[0]
    assert "rank 0 of 2: gloo: the ranks have met, but not connected within 8 s: look for messages of the" in error


def test_two_processes_with_one_rank():
    port = free_port()
    errors = messages([by_hand(0, 3, port), by_hand(1, 3, port), by_hand(1, 3, port)])
    assert sum("rank 1 of 3: another process has come as rank 1" in e for e in errors) == 1


def test_master_addr_missing():
    environ = by_hand(1, 2, free_port())
    del environ["MASTER_ADDR"]
    [error] = messages([environ])
    assert "rank 1 of 2: MASTER_ADDR is not set: start with torchrun, or set it to the host of rank 0" in error


def test_a_master_addr_that_is_no_host():
    environ = by_hand(0, 2, free_port(), MASTER_ADDR="no.such.host.invalid", LOCAL_WORLD_SIZE=1)
    [error] = messages([environ])
    assert "rank 0 of 2: MASTER_ADDR: expected the name or address of this host, got 'no.such.host.invalid'" in error
