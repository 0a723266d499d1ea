"""init() under real launchers: what a rank is told, where it listens, how it ends, what keeps ranks from meeting."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warpsmith
from programs import by_hand, environment, free_port, start, started, torchrun, wait_for_line
from warpsmith.distributed.launch import context
from warpsmith.distributed.launch.gloo_threads import wait_until_idle

FACTS = """
import json, random, sys, torch, torch.distributed as dist, warpsmith
with warpsmith.distributed.init(device="cpu", timeout_s=60, seed=5) as ctx:
    log = ctx.logger("train")
    log.info("once")
    log.info("from all", extra={"all_ranks": True})
    log.warning("careful")
    total = torch.tensor([ctx.rank + 1])
    dist.all_reduce(total)
    mesh = ctx.mesh(data=2) if ctx.world_size == 2 else None
    for _ in ctx.progress(range(2), desc="bar", file=sys.stdout): pass
    rows = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
    import os
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try: target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError: continue
        if target.startswith("socket:["): inodes.add(target[8:-1])
    rows6 = [line.split() for line in open("/proc/self/net/tcp6").readlines()[1:]]
    listening = [r[1].split(":")[0] for r in rows + rows6 if r[3] == "0A" and r[9] in inodes]
    # One write, on a line of its own: the ranks share a pipe.
    print("\\n" + json.dumps({
        "rank": ctx.rank, "world": ctx.world_size, "local": ctx.local_rank, "device": str(ctx.device),
        "launcher": ctx.launcher, "main": ctx.is_main, "total": int(total), "torch": int(torch.randint(2**60, ())),
        "python": random.random(), "listening": listening, "mesh": mesh and list(mesh.mesh_dim_names),
    }) + "\\n", end="", flush=True)
print(f"group after: {dist.is_initialized()}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def facts_program(tmp_path_factory):
    path = tmp_path_factory.mktemp("init") / "facts.py"
    path.write_text(FACTS)
    return path


def facts_in(output):
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda f: f["rank"])


def assert_a_job_of_two(output, errors, launcher):
    ranks = facts_in(output)
    assert [(f["rank"], f["local"], f["world"], f["total"]) for f in ranks] == [(0, 0, 2, 3), (1, 1, 2, 3)]
    assert [f["main"] for f in ranks] == [True, False]
    assert {(f["launcher"], f["device"], tuple(f["mesh"])) for f in ranks} == {(launcher, "cpu", ("data",))}
    assert ranks[0]["torch"] != ranks[1]["torch"] and ranks[0]["python"] != ranks[1]["python"]
    assert output.count("group after: False") == 2
    assert output.count("bar:") > 0
    for words, times in (("INFO train: once", 1), ("INFO train: from all", 2), ("WARNING train: careful", 2)):
        assert errors.count(words) == times, errors
    assert "rank 1/2 WARNING" in errors
    for f in ranks:
        assert all(address in ("0100007F", "00000000000000000000000001000000") for address in f["listening"]), f
    return ranks


def test_under_torchrun(facts_program):
    done = torchrun(2, facts_program)
    assert done.returncode == 0, done.stderr
    assert_a_job_of_two(done.stdout, done.stderr, "torchrun")


def test_with_variables_set_by_hand(facts_program):
    port = free_port()
    with started([start(FACTS, by_hand(r, 2, port)) for r in range(2)]) as ranks:
        outputs = [p.communicate(timeout=120) for p in ranks]
    ranks = assert_a_job_of_two("".join(o for o, _ in outputs), "".join(e for _, e in outputs), "torchrun")
    assert ranks[0]["listening"], "rank 0 keeps the store, so the list of listeners cannot be empty"


def test_as_tasks_of_srun(facts_program):
    """The variables that srun sets; there is no Slurm here."""
    job = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NODELIST": "gpu[07-08]"}
    port = {"SLURM_JOB_ID": 1000, "SLURM_STEP_ID": 0, "MASTER_PORT": free_port()}
    tasks = [environment(**job, **port, SLURM_PROCID=r, SLURM_LOCALID=r) for r in range(2)]
    with started([start(FACTS, task) for task in tasks]) as ranks:
        outputs = [p.communicate(timeout=120) for p in ranks]
    assert_a_job_of_two("".join(o for o, _ in outputs), "".join(e for _, e in outputs), "slurm")


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_plain_process_is_a_world_of_one(alone):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with warpsmith.distributed.init(device="cpu") as ctx:
        assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.launcher) == (0, 1, 0, "none")
        gathered = [torch.zeros(1)]
        dist.all_gather(gathered, torch.ones(1))
        assert gathered[0] == 1
        ctx.barrier()
        with pytest.raises(RuntimeError, match="expected no process group, got one"):
            warpsmith.distributed.init()
        for sizes in ({"data": 2}, {"data": -1, "tensor": -1}, {}):
            with pytest.raises(ValueError, match="expected a product of 1, the world size, got {"):
                ctx.mesh(**sizes)
        with pytest.raises(TypeError, match="Context.mesh: data: expected an int, got the float 1.0"):
            ctx.mesh(data=1.0)
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="Context.barrier: expected an open process group, got one that close"):
        ctx.barrier()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    ctx.close()  # again
    with warpsmith.distributed.init("GLOO", device=torch.device("cpu")):  # and a second life
        assert dist.is_initialized()


def test_seeds_are_a_function_of_seed_and_rank(alone):
    drawn = []
    for seed in (1, 1, 2, None):
        torch.manual_seed(0)
        random.seed(0)
        with warpsmith.distributed.init(device="cpu", seed=seed):
            drawn.append((torch.rand(1).item(), random.random()))
    torch.manual_seed(0)
    random.seed(0)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
    assert drawn[3] == (torch.rand(1).item(), random.random())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"timeout_s": float("inf")}, ValueError, "timeout_s: expected more than 0 seconds and at most 1e.09, got inf"),
        ({"timeout_s": None}, TypeError, "init: timeout_s: expected a number, got None"),
        ({"device": "cuda:1"}, ValueError, "got cuda:1: each rank takes the GPU of its LOCAL_RANK"),
        ({"backend": ""}, ValueError, "init: backend: expected one of gloo, .*, got ''"),
        (
            {"backend": "nccl", "device": "cpu"},
            RuntimeError,
            "rank 0 of 1: backend: expected gloo, got nccl, but device",
        ),
    ],
)
def test_bad_arguments_are_named(alone, arguments, error, words):
    with pytest.raises(error, match=words):
        warpsmith.distributed.init(**arguments)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "nccl"}, "rank 0 of 1: backend: expected gloo, got nccl, but there is no CUDA device"),
        ({"device": "cuda"}, "rank 0 of 1: device: expected cpu, since no CUDA device is visible, got cuda"),
    ],
)
def test_a_missing_gpu_is_named(alone, arguments, words):
    with pytest.raises(RuntimeError, match=words):
        warpsmith.distributed.init(**arguments)


WITHOUT_WITH = """
import sys, torch.distributed as dist, warpsmith
ctx = warpsmith.distributed.init(device="cpu")
print("open", dist.is_initialized(), flush=True)
if sys.argv[1] == "raise": raise ValueError("planted")
"""


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("raise", 1)])
def test_the_programs_end_closes_what_nobody_closed(end, code):
    command = [sys.executable, "-c", WITHOUT_WITH, end]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == code and "open True" in done.stdout
    assert "destroy_process_group" not in done.stderr  # torch warns of a group that is left open
    assert ("ValueError: planted" in done.stderr) == (end == "raise")


ENDS = """
import signal, sys, time, torch, torch.distributed as dist, warpsmith
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored, and stay so
with warpsmith.distributed.init(device="cpu", timeout_s=100) as ctx:
    print("ready", flush=True)
    if sys.argv[1] == "raise" and ctx.rank == 1: raise ValueError("planted")
    if sys.argv[1] == "busy" and ctx.rank == 1: time.sleep(100)
    dist.all_reduce(torch.ones(1))
    if sys.argv[1] == "own handler": pass
"""


def test_an_exception_names_its_rank_and_the_others_end():
    port = free_port()
    with started([start(ENDS, by_hand(r, 2, port), "raise") for r in range(2)]) as ranks:
        begin = time.monotonic()
        errors = [p.communicate(timeout=95)[1] for p in ranks]
        assert time.monotonic() - begin < 90, "the collective's timeout is 100 s"
        assert all(p.returncode == 1 for p in ranks), errors
    assert "rank 1 of 2: ValueError: planted" in errors[1]
    assert "rank 0 of 2: RuntimeError: " in errors[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_ends_a_rank_in_a_collective(waits, number, code):
    """Where the collective is pending alone, the handler runs, and the teardown must not wait for the other rank."""
    pending = "dist.all_reduce(torch.ones(1), async_op=True); time.sleep(100)"
    program = ENDS if waits else ENDS.replace("dist.all_reduce(torch.ones(1))", pending)
    port = free_port()
    with started([start(program, by_hand(r, 2, port), "busy") for r in range(2)]) as ranks:
        for process in ranks:
            wait_for_line(process, "ready")
        time.sleep(0.5)  # into the collective
        ranks[0].send_signal(number)
        begin = time.monotonic()
        assert ranks[0].wait(timeout=90) == code
        assert not waits or 3 < time.monotonic() - begin < 90  # a grace of 5 s, then by force
        said = f"signal {int(number)} while waiting" if waits else ""
        assert f"rank 0 of 2: {said}" in ranks[0].stderr.read()


def test_sigterm_unwinds_the_main_thread():
    program = ENDS.replace("dist.all_reduce(torch.ones(1))", "time.sleep(100)") + "\n"
    program = program.replace("    print(", "    import atexit; atexit.register(print, 'unwound')\n    print(")
    # On a busy machine the way out may take longer than it is given before the process is ended by force.
    program = "import warpsmith.distributed.launch.stopping as s; s.GRACE_S = 60.0\n" + program
    with started([start(program, environment(), "sleep")]) as [process]:
        wait_for_line(process, "ready")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 143 and "unwound" in output
        assert "rank 0 of 1: SystemExit: 143" in errors


def test_a_handler_of_the_program_is_left_alone(alone):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with warpsmith.distributed.init(device="cpu"):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


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


@pytest.fixture
def tasks(tmp_path):
    def thread(number, state, name):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        (folder / "part").write_text(f"{number} ({name}) {state} 1 2 3\n")
        (folder / "part").rename(folder / "stat")

    thread(1, "R", "python")
    thread(2, "R", "a ) S (name")
    thread(3, "S", "pt_gloo_runloop")
    (tmp_path / "4").mkdir()  # a thread that has ended
    return str(tmp_path), thread


def test_only_workers_that_run_are_waited_for(tasks):
    folder, thread = tasks
    assert wait_until_idle(60, folder)
    thread(5, "R", "pt_gloo_runloop")
    assert not wait_until_idle(0.05, folder)
    later = threading.Timer(0.2, thread, (5, "S", "pt_gloo_runloop"))
    later.start()
    began = time.monotonic()
    assert wait_until_idle(120, folder)
    assert time.monotonic() - began > 0.1
    assert wait_until_idle(0.05, f"{folder}/nowhere")


def test_the_end_of_a_job_waits(monkeypatch):
    seen = []
    monkeypatch.setattr(context, "wait_until_idle", lambda: seen.append(dist.is_initialized()))
    with warpsmith.distributed.init(device="cpu"):
        dist.all_reduce(torch.ones(3))
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert "pt_gloo_runloop" in names  # by this name the threads are found
        assert seen == []
    assert seen == [False]  # once, when torch has let go of the group
