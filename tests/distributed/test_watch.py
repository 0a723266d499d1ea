"""watch(): what is reported of faults on real ranks, and the likely cause from what ranks say."""

import contextlib
import io
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warpsmith.distributed import watch
from warpsmith.distributed.watching.record import CALLS, CALLS_OF_PAIRS
from warpsmith.distributed.watching.report import EVERYBODY, Said, State, is_trouble, likely_cause, report
from warpsmith.testing.distributed import InjectedFault, fault, multirank

TIMEOUT_S = 2.0


@pytest.fixture
def shared(tmp_path):
    return str(tmp_path)


class Reports:
    """One file for each report, in a folder that the ranks share."""

    def __init__(self, shared, rank):
        self.folder, self.rank = Path(shared), rank

    def __call__(self, text):
        self.file.with_suffix(".part").write_text(text)
        self.file.with_suffix(".part").rename(self.file)

    @property
    def file(self):
        return self.folder / f"report-{self.rank}"

    def all(self):
        return [path.read_text() for path in sorted(self.folder.glob("report-?"))]

    def wait(self):
        deadline = time.monotonic() + 200
        while not self.all():
            assert time.monotonic() < deadline, "no report"
            time.sleep(0.02)
        return self.all()[0]


def the_report(shared):
    found = Reports(shared, 0).all()
    assert len(found) == 1, found
    return found[0].splitlines()


@multirank(2, timeout_s=300)
def slow_rank(rank, world_size, shared):
    reports = Reports(shared, rank)
    with watch(TIMEOUT_S, on_report=reports):
        dist.barrier()
        if rank == 1:
            reports.wait()
        dist.all_reduce(torch.ones(3))


def test_a_slow_rank(shared):
    slow_rank(shared=shared)
    _, cause, of_0, of_1 = the_report(shared)
    assert "rank 1 has not come to all_reduce #2 of float32 (3,); it is at " in cause
    assert re.search(r"test_watch.py:\d+ in wait$", cause)
    assert re.match(
        r"rank 0: for \d+\.\d s in all_reduce #2 of float32 \(3,\) \(all ranks\), at \S+test_watch.py", of_0
    )
    assert re.search(r"test_watch.py:\d+ in slow_rank$", of_0)
    assert of_1.startswith("rank 1: outside of collectives, at ")
    assert of_1.endswith("last collective barrier #1 (all ranks)")


@multirank(2, timeout_s=300)
def missing_collective(rank, world_size, shared):
    reports = Reports(shared, rank)
    with watch(TIMEOUT_S, on_report=reports):
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(3))
    if rank == 1:
        reports.wait()
        dist.all_reduce(torch.ones(3))


def test_a_missing_collective(shared):
    missing_collective(shared=shared)
    _, cause, _, of_1 = the_report(shared)
    assert "a collective is missing: rank 1 has left its watch() without all_reduce #2 of float32 (3,), at " in cause
    assert of_1.startswith("rank 1: left watch()")


@multirank(2, ends={0: "raised", 1: "died"}, timeout_s=300)
def leaver(rank, world_size, shared):
    with watch(TIMEOUT_S, on_report=Reports(shared, rank)):
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(3))
    os._exit(1)


def test_a_rank_that_left_and_closed_its_connections(shared):
    """The other rank raises because of that, and is not blamed."""
    leaver(shared=shared)
    _, cause, of_0, of_1 = the_report(shared)
    assert (
        "cause: a collective is missing: rank 1 has left its watch() without all_reduce #2 of float32 (3,), at" in cause
    )
    assert "rank 0 raised " in cause
    assert of_0.startswith("rank 0: raised") and of_1.startswith("rank 1: left watch()")


@multirank(2, ends={0: "raised", 1: "died"}, timeout_s=300)
def other_shapes(rank, world_size, shared):
    """In gloo's sum the rank with the smaller tensor goes on, and waits in the next one."""
    reports = Reports(shared, rank)

    def end():
        reports.wait()
        os._exit(1)

    with watch(TIMEOUT_S, on_report=reports):
        if rank == 1:
            threading.Thread(target=end).start()
        dist.all_reduce(torch.ones(3 + rank))
        dist.all_reduce(torch.ones(2))
        dist.barrier()


def test_both_shapes_of_an_earlier_collective_are_told(shared):
    other_shapes(shared=shared)
    cause = the_report(shared)[1]
    assert "other tensors: rank 1 gives float32 (4,) to all_reduce #1, at " in cause
    assert "rank 0 gives float32 (3,), at " in cause


@multirank(2, timeout_s=300)
def another_order(rank, world_size, shared):
    reports = Reports(shared, rank)
    groups, sizes = (dist.new_group([0, 1]), dist.new_group([0, 1])), (3, 4)
    subset = dist.new_group([0])

    def release():
        reports.wait()
        dist.all_reduce(torch.ones(sizes[1 - rank]), group=groups[1 - rank])

    with watch(TIMEOUT_S, on_report=reports):
        releasing = threading.Thread(target=release)
        releasing.start()
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=subset)
        dist.all_reduce(torch.ones(sizes[rank]), group=groups[rank])
        releasing.join()


def test_other_tensors_or_another_order(shared):
    another_order(shared=shared)
    cause = the_report(shared)[1]
    assert "other tensors: rank 1 gives float32 (4,) to all_reduce #1" in cause
    assert "rank 0 gives float32 (3,)" in cause


@multirank(2, timeout_s=300)
def exception(rank, world_size, shared):
    planted = fault("exception", rank=1, call="all_reduce", nth=3)
    with contextlib.suppress(InjectedFault), watch(TIMEOUT_S, on_report=Reports(shared, rank)), planted:
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
    if rank == 1:
        dist.all_reduce(torch.ones(3))  # rank 0 goes on, and the next test has its ranks


def test_an_exception_on_one_rank(shared):
    exception(shared=shared)
    _, cause, of_0, of_1 = the_report(shared)
    assert "likely cause: rank 1 raised InjectedFault: planted before all_reduce on rank 1" in cause
    assert re.search(r"test_watch.py:\d+$", cause)  # not the line of the fault, nor of torch
    assert "all_reduce #3" in of_0
    assert of_1.endswith("last collective all_reduce #2 of float32 (3,) (all ranks)")


@multirank(2, timeout_s=300)
def failing_function(rank, world_size, shared):
    reports = Reports(shared, rank)

    def fails(text):
        reports(text)
        raise KeyError("planted")

    with contextlib.redirect_stderr(io.StringIO()) as errors, watch(TIMEOUT_S, on_report=fails) as watching:
        if rank == 1:
            reports.wait()
        dist.all_reduce(torch.ones(3))
        deadline = time.monotonic() + 200
        while reports.file.exists() and not watching.reported:  # this rank has reported
            assert time.monotonic() < deadline, "the thread has ended"
            time.sleep(0.02)
    if reports.file.exists():
        assert errors.getvalue() == f"{reports.all()[0]}warpsmith: watch: on_report: KeyError: 'planted'\n"


def test_a_report_whose_function_fails(shared):
    failing_function(shared=shared)
    assert len(the_report(shared)) == 4


@multirank(2, timeout_s=300)
def stopped(rank, world_size, shared):
    reports, number = Reports(shared, rank), Path(shared) / "pid"

    def wake(text):
        reports(text)
        os.kill(int(number.read_text()), signal.SIGCONT)

    with watch(TIMEOUT_S, on_report=wake):
        if rank == 1:
            number.with_suffix(".part").write_text(str(os.getpid()))
            number.with_suffix(".part").rename(number)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(3))
        dist.barrier()


def test_a_stopped_rank(shared):
    stopped(shared=shared)
    assert "likely cause: rank 1 died or stopped" in the_report(shared)[1]


@multirank(2, timeout_s=300)
def slow_backward(rank, world_size, shared):
    reports = Reports(shared, rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    with watch(TIMEOUT_S, on_report=reports):
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            reports.wait()
        loss.backward()


def test_the_flight_recorder_names_what_ddp_calls(shared):
    slow_backward(shared=shared)
    _, cause, of_0, _, recorded = the_report(shared)
    assert "rank 1 is behind the others, at " in cause
    assert re.search(r"outside of collectives, at \S+test_watch.py:\d+ in slow_backward; ", of_0)
    assert re.fullmatch(
        r"torch's flight recorder, rank 0: not completed: all_?reduce #\d+ of Float \(15,\) \(default_pg\)", recorded
    )


@multirank(2, timeout_s=300)
def nothing_wrong(rank, world_size, shared):
    reports = Reports(shared, rank)
    originals = dist.all_reduce, dist.barrier
    with watch(60, on_report=reports) as watching:
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.broadcast(torch.ones(3), src=7)
        dist.barrier()
        assert watching._recorder.last[EVERYBODY].op == "barrier"  # a call that raised is no call that waits
        assert dist.barrier != originals[1]
        assert not watching.reported
    assert (dist.all_reduce, dist.barrier) == originals
    assert reports.all() == []
    with contextlib.suppress(ValueError), watch(TIMEOUT_S, on_report=reports):  # all ranks raise: one reports
        raise ValueError("both")
    dist.barrier()
    assert len(reports.all()) == 1


def test_no_report_where_nothing_is_wrong(shared):
    nothing_wrong(shared=shared)


@multirank(2, timeout_s=300)
def calls_of_others(rank, world_size, shared):
    """Every rank calls, as torch allows: one that is not in the group returns at once, and is not ahead of others."""
    group = dist.new_group([0])
    with watch(60, on_report=Reports(shared, rank)) as watching, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM, group)
        dist.barrier()
        assert watching._recorder.last[EVERYBODY].number == 1  # the barrier
        assert watching._recorder.calls == (1 if rank else 3)


def test_calls_of_a_group_without_this_rank_do_not_count(shared):
    calls_of_others(shared=shared)


@multirank(2, ends={0: "raised", 1: "died"}, timeout_s=300)
def death(rank, world_size, shared):
    with watch(TIMEOUT_S, on_report=Reports(shared, rank)), fault("kill", rank=1, call="all_reduce", nth=2):
        for _ in range(3):
            dist.all_reduce(torch.ones(3))


def test_a_rank_that_dies(shared):
    death(shared=shared)
    _, cause, of_0, of_1 = the_report(shared)
    assert "likely cause: rank 1 died or stopped: no sign of life; rank 1 was at " in cause
    assert "raised" in of_0
    assert of_1.startswith("rank 1: no sign of life; last seen at ")


def test_a_world_of_one_and_bad_arguments():
    original = dist.all_reduce
    with watch() as watching:
        assert dist.all_reduce is original
    assert not watching.reported
    with pytest.raises(ValueError, match="watch: timeout_s: expected more than 0 seconds, got 0"):
        watch(0)


def said(op="all_reduce", number=3, what="float32 (4,)"):
    return Said(op, number, what, "train.py:7 in step")


def inside(rank, call=None, group="all ranks", **more):
    return State(rank, 9, calls={group: call or said()}, waiting=group, waiting_s=10.0, at="train.py:7 in step", **more)


def outside(rank, number=2, **more):
    calls = {"all ranks": said(number=number)} if number else {}
    return State(rank, 9, calls=calls, at="data.py:3 in load", **more)


CAUSES = [
    ("rank 1 never came", {1: None}, ()),
    ("rank 1 died or stopped: no sign of life; rank 1 was at data.py:3 in load", {1: outside(1)}, (1,)),
    ("rank 2 raised E", {1: outside(1, phase="raised", error="F", order=2),
                         2: outside(2, phase="raised", error="E", order=1)}, ()),
    ("rank 1 raised E; other tensors: rank 1 gives int8", {1: State(1, 9, "raised", "E", 1, {
        "all ranks": said(what="int8 (4,)")})}, ()),
    ("a collective is missing: rank 1 has left its watch() without all_reduce #3", {1: outside(1, phase="ended")}, ()),
    ("another order: rank 1 waits in broadcast #1 of float32 (4,) (ranks 0, 1)", {1: State(
        1, 9, calls={"ranks 0, 1": said("broadcast", 1)}, waiting="ranks 0, 1", waiting_s=3.0)}, ()),
    ("a slow or stuck rank, or a missing collective: rank 1 has not come to all_reduce #3", {1: outside(1)}, ()),
    ("a slow or stuck rank, or a missing collective: rank 1 has not come", {1: outside(1, number=0)}, ()),
    ("another order, or a missing collective: rank 1 calls barrier #3", {1: inside(1, said("barrier", what=""))}, ()),
    ("other tensors: rank 1 gives float32 (5,) to all_reduce #3", {1: inside(1, said(what="float32 (5,)"))}, ()),
    ("all ranks are in all_reduce #3 of float32 (4,): the network", {}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("words", "states", "silent"), CAUSES, ids=[c[0][:40] for c in CAUSES])
def test_the_likely_cause(words, states, silent):
    everything = {rank: inside(rank) for rank in range(3)} | states
    assert likely_cause(everything, set(silent)).startswith(words)
    text = report(everything, set(silent), 10.0)
    assert text.count("\n") == 5
    assert [line.split(":")[0] for line in text.splitlines()[2:]] == ["rank 0", "rank 1", "rank 2"]
    assert is_trouble(everything, set(silent), 10.0)


GONE = "RuntimeError: [/x/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("rank 2 raised E", {1: outside(1, phase="raised", error=GONE, order=1),
                             2: outside(2, phase="raised", error="E", order=2)}),
        ("a collective is missing: rank 1 has left its watch() without all_reduce #3", {
            0: inside(0, phase="raised", error=GONE, order=1), 1: outside(1, phase="ended")}),
        ("rank 1 left watch(); rank 0 raised", {
            0: inside(0, phase="raised", error=GONE, order=1), 1: outside(1, number=3, phase="ended")}),
        ("other tensors: rank 1 gives int8 (4,) to all_reduce #3", {
            0: inside(0, phase="raised", error=GONE, order=1),
            1: State(1, 9, "ended", calls={"all ranks": said(what="int8 (4,)")})}),
        ("rank 0 raised RuntimeError", {0: inside(0, phase="raised", error=GONE, order=1)}),
    ],
)  # fmt: skip
def test_who_lost_its_peer_is_not_blamed(words, states):
    assert likely_cause({rank: inside(rank) for rank in range(3)} | states, set()).startswith(words)


@pytest.mark.parametrize("op", [name for name in CALLS if name not in CALLS_OF_PAIRS])
@pytest.mark.parametrize("ahead", [0, 1, 30])
def test_of_every_call_that_wants_equal_tensors_both_are_told(op, ahead):
    """Whether the rank with the smaller tensor waits in the same call or has gone on, as far as calls are kept."""
    mine, other = (said(op, 3, what) for what in ("float32 (4,)", "float32 (5,)"))
    later = [said(number=4 + i) for i in range(ahead)]
    states = {0: inside(0, mine), 1: inside(1, [other, *later][-1], recent={"all ranks": [other, *later]})}
    cause = likely_cause(states, set())
    by_rank = "object" in op or op in ("all_to_all", "all_to_all_single", "gather", "scatter")
    assert ("float32 (4,)" in cause and "float32 (5,)" in cause) is not by_rank
    assert by_rank or cause.startswith(f"other tensors: rank 1 gives float32 (5,) to {op} #3")


def test_ranks_may_give_uneven_tensors_to_some_calls():
    earlier = {rank: [said("all_gather", 2, f"float32 ({rank},)"), said()] for rank in range(2)}
    states = {rank: inside(rank, recent={"all ranks": calls}) for rank, calls in earlier.items()}
    assert likely_cause(states, set()).startswith("all ranks are in all_reduce #3")
    calls = {rank: inside(rank, said("all_to_all_single", what=f"float32 ({rank},)")) for rank in range(2)}
    assert likely_cause(calls, set()).startswith("all ranks are in all_to_all_single")


def test_ranks_outside_a_group_are_not_behind_in_it():
    states = {0: inside(0, group="ranks 0, 2"), 1: outside(1), 2: inside(2, group="ranks 0, 2")}
    assert likely_cause(states, set()).startswith("all ranks are in all_reduce #3")


def test_computing_is_no_trouble_and_other_counts_are():
    states = {rank: outside(rank, work=5, still_s=99.0) for rank in range(3)}
    assert not is_trouble(states, set(), 10.0)
    assert is_trouble(states | {1: outside(1, work=4)}, set(), 10.0)
    assert likely_cause(states | {1: outside(1, work=4)}, set()).startswith("a slow or stuck rank: rank 1 is behind")
    assert not is_trouble({rank: outside(rank, work=4 + rank, still_s=1.0) for rank in range(3)}, set(), 10.0)


def test_a_state_survives_the_store():
    state = inside(1, phase="raised", error="E: ü", order=2, work=7, recent={"all ranks": [said(), said("barrier", 4)]})
    assert State.from_json(state.to_json()) == state
