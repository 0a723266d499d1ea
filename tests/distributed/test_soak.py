"""A sample of `make soak`, and what it must notice."""

import copy
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warpsmith.distributed import ResumableSampler

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "soak"


def table(*arguments):
    """The rows that the tool prints."""
    command = [sys.executable, str(FOLDER / "run.py"), "--seed", "1", *map(str, arguments)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("count", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_ranks_that_die(count, figure):
    rows = [row.split("|") for row in table("--kills", 0, "--deaths", count).splitlines() if "| a rank dies " in row]
    assert sum(int(row[2]) for row in rows) == count
    figure(f"a rank's death: {count} jobs, no hang, the dead rank named, resumed on another number of ranks")


def killed_writers(*arguments):
    """`kill -9` of a process that writes checkpoints: {what: figure}. The tool ends at the first loss."""
    found = re.search(
        r"\| (?P<kills>[\d,]+) \| nothing lost in (?P<steps>[\d,]+) steps; (?P<unfinished>\d+) came while a checkpoint "
        r"was written, (?P<removed>\d+) while one was removed",
        table("--deaths", 0, *arguments),
    )
    return {name: int(value.replace(",", "")) for name, value in found.groupdict().items()}


@pytest.mark.full
def test_a_kill_at_every_call_that_touches_the_folder(figure):
    state = killed_writers("--every-call")
    assert state["kills"] > 50, state
    assert state["unfinished"] > 5 and state["removed"] > 0, f"the kills came at other times than writing: {state}"
    figure(f"checkpoints: {state['kills']} kill -9, one at each call of four saves, nothing lost")


@pytest.mark.parametrize("kills", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_kills_at_random_times(kills, figure):
    state = killed_writers("--kills", kills)
    assert state["kills"] == kills
    assert state["unfinished"] > kills // 10 and state["steps"] > kills // 2, state
    figure(f"checkpoints: {kills} kill -9 at random times over {state['steps']} steps, nothing lost")


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import run
    import victim

    yield run, victim
    for name in ("run", "victim", "writer", "training"):
        sys.modules.pop(name, None)


def job(run, victim, begin=0, position=0):
    """What two ranks say of a job in which rank 1 dies in its third step."""
    ranks = []
    for rank in range(2):
        sampler = ResumableSampler(victim.SAMPLES, seed=victim.SEED, rank=rank, world_size=2)
        sampler.load_state_dict({"seed": victim.SEED, "length": victim.SAMPLES, "position": position})
        drawn = iter(sampler)
        lines = [["resumed", str(begin), str(position)]]
        for step in range(begin, begin + 2):
            lines += [["step", str(step + 1), *(str(next(drawn)) for _ in range(victim.BATCH))]]
            lines += [["durable", str(step)]] * (rank == 0)
        ranks.append(victim.Ended(1 if rank == 0 else -signal.SIGKILL, lines))
    ranks[0].lines.append(["report", "likely cause: rank 1 died or stopped: no sign of life"])
    return ranks


def check(run, chain, ranks):
    chain._check_end("a job", ranks, 1)
    chain._check_data("a job", ranks)


def test_a_clean_chain_passes(soak):
    run, victim = soak
    chain = run.Chain("", random.Random(0))
    check(run, chain, job(run, victim))
    assert chain.durable == 1
    check(run, chain, job(run, victim, 2, 2 * 2 * victim.BATCH))


WRONG = {
    "hangs": lambda ranks: setattr(ranks[0], "code", None),
    "rank 1 ended with 1": lambda ranks: setattr(ranks[1], "code", 1),
    "rank 0 ended with 0": lambda ranks: setattr(ranks[0], "code", 0),
    "expected one report": lambda ranks: ranks[0].lines.pop(),
    "ranks resume at different places": lambda ranks: ranks[1].lines[0].__setitem__(1, "1"),
    "are not the next ones": lambda ranks: ranks[1].lines[1].__setitem__(3, "0"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_finding_is_one(soak, words):
    run, victim = soak
    ranks = copy.deepcopy(job(run, victim))
    WRONG[words](ranks)
    with pytest.raises(run.Finding, match=words):
        check(run, run.Chain("", random.Random(0)), ranks)


def test_a_report_of_another_rank_is_a_finding(soak):
    run, victim = soak
    ranks = job(run, victim)
    ranks[0].lines[-1][1] = "likely cause: rank 0 died or stopped"
    with pytest.raises(run.Finding, match="expected one report"):
        check(run, run.Chain("", random.Random(0)), ranks)


@pytest.mark.parametrize(("begin", "position"), [(0, 0), (1, 7)])
def test_a_lost_step_is_a_finding(soak, begin, position):
    run, victim = soak
    chain = run.Chain("", random.Random(0))
    check(run, chain, job(run, victim))  # step 1 is durable then, and ended at sample 6
    with pytest.raises(run.Finding, match="durable was step 1"):
        check(run, chain, job(run, victim, begin, position))
