"""Where the environment says that a process stands: torchrun, Slurm, by hand, alone."""

import os

import pytest
from warpsmith.distributed.launch.environment import LaunchEnvironment, first_host, launch_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
}


def test_torchrun():
    assert launch_environment(TORCHRUN) == LaunchEnvironment("torchrun", 3, 8, 1, 2, "host0", 29400, True)
    assert not launch_environment(TORCHRUN).one_host
    assert launch_environment(TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}).one_host


def test_ranks_started_by_hand():
    by_hand = {k: TORCHRUN[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert launch_environment(by_hand) == LaunchEnvironment("torchrun", 3, 8, 1, 1, "host0", 29400, False)
    assert launch_environment(by_hand | {"MASTER_ADDR": "localhost"}).one_host
    assert launch_environment({"RANK": "0", "WORLD_SIZE": "1"}) == LaunchEnvironment("torchrun", 0, 1, 0, 1, None, None)


def test_srun():
    place = launch_environment(SRUN)
    assert place == LaunchEnvironment("slurm", 5, 8, 1, 1, "gpu07", 20_000 + (7 * 1000 + 2) % 10_000, False)
    assert launch_environment(SRUN | {"SLURM_PROCID": "0"}).port == place.port
    assert launch_environment(SRUN | {"SLURM_STEP_ID": "3"}).port != place.port
    elsewhere = SRUN | {"MASTER_ADDR": "other", "MASTER_PORT": "5"}
    assert launch_environment(elsewhere) == LaunchEnvironment("slurm", 5, 8, 1, 1, "other", 5)
    one = launch_environment(SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    assert one.one_host and one.address == "127.0.0.1"
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert launch_environment(SRUN | alone) == LaunchEnvironment("slurm", 0, 1, 0, 1, None, None)
    assert launch_environment(SRUN | TORCHRUN).launcher == "torchrun"  # torchrun under srun


def test_a_batch_script_itself_is_one_process():
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1000"}
    assert launch_environment(batch) == launch_environment({}) == LaunchEnvironment("none", 0, 1, 0, 1, None, None)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-07,11],login1", "gpu03"),
        ("gpu[1,3]-ib,x", "gpu1-ib"),
        ("a-1,b-2", "a-1"),
        ("single.example.org", "single.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def without(name):
    return {k: v for k, v in TORCHRUN.items() if k != name}


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        (
            without("MASTER_ADDR"),
            RuntimeError,
            r"rank 3 of 8: MASTER_ADDR is not set: start with torchrun, or set it to",
        ),
        (without("MASTER_PORT"), RuntimeError, r"rank 3 of 8: MASTER_PORT is not set: .* a free port"),
        (without("RANK"), RuntimeError, r"init: RANK is not set, WORLD_SIZE is 8"),
        (without("WORLD_SIZE"), RuntimeError, r"init: WORLD_SIZE is not set, RANK is 3"),
        (without("LOCAL_RANK"), RuntimeError, r"rank 3 of 8: LOCAL_RANK is not set"),
        (TORCHRUN | {"RANK": "8"}, ValueError, r"RANK: expected a number from 0 to 7, got '8'"),
        (TORCHRUN | {"RANK": "one"}, ValueError, r"RANK: expected a number from 0 to 7, got 'one'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ValueError, r"WORLD_SIZE: expected a number from 1"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ValueError, r"MASTER_PORT: expected a number from 1 to 65535"),
        (
            {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NODELIST"},
            RuntimeError,
            r"rank 5 of 8: SLURM_STEP_NODELIST is not set",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_rank_and_remedy(environ, error, words):
    assert os.environ.get("RANK") is None  # the function reads what it is given
    with pytest.raises(error, match=words):
        launch_environment(environ)
