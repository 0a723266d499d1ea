"""From what each rank said of itself to one report with a likely cause. No ranks needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

EVERYBODY = "all ranks"  # the name of the default group
# Calls in which ranks may give tensors of different shapes.
_UNEVEN = ("all_to_all", "gather", "scatter", "object")


@dataclass(frozen=True)
class Said:
    """A call of torch.distributed as a rank reports it."""

    op: str
    number: int
    what: str
    at: str

    def __str__(self) -> str:
        return f"{self.op} #{self.number}" + (f" of {self.what}" if self.what else "")


@dataclass(frozen=True)
class State:
    """What a rank says of itself.

    beat: counts up as long as the process runs.
    phase: "running"; "raised", an exception left the watch's block; "ended", the block was left.
    error: the exception. order: which rank raised first, from 1.
    calls: the last call in each group. waiting: the group in whose call the rank is, for waiting_s seconds.
    at: where its program is now. still_s: for how long nothing has changed there.
    work: how many collectives the backend has run, DDP's too, where it tells.
    pending: collectives that torch's flight recorder has begun and not completed, where the rank is in no call itself.
    steps: that the program has counted. step_ms, own_ms: the median of the last ones, whole and outside of collectives.
    """

    rank: int
    beat: int
    phase: str = "running"
    error: str = ""
    order: int = 0
    calls: Mapping[str, Said] = field(default_factory=dict)
    waiting: str | None = None
    waiting_s: float = 0.0
    at: str = ""
    still_s: float = 0.0
    work: int = 0
    pending: str = ""
    steps: int = 0
    step_ms: float = 0.0
    own_ms: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> State:
        read: dict[str, Any] = json.loads(text)
        read["calls"] = {group: Said(**said) for group, said in read["calls"].items()}
        return State(**read)


def is_trouble(states: Mapping[int, State | None], silent: set[int], timeout_s: float) -> bool:
    """Whether ranks wait for something that does not come. All computing without a word is none, and neither are ranks
    that have moved on since the first look."""
    known = [s for s in states.values() if s is not None]
    if silent or any(s.phase == "raised" or (s.waiting and s.waiting_s >= timeout_s) for s in known):
        return True
    if not any(s.still_s >= timeout_s for s in known):
        return False
    return len({(s.work, s.calls[EVERYBODY].number if EVERYBODY in s.calls else 0) for s in known}) > 1


def likely_cause(states: Mapping[int, State | None], silent: set[int]) -> str:
    """The first of these that fits: a rank is gone, raised, calls another collective, has other tensors, or has not
    come."""
    absent = [rank for rank, s in states.items() if s is None]
    if absent:
        return f"{_ranks(absent)} never came to watch()"
    known = {rank: s for rank, s in states.items() if s is not None}
    if silent:
        words = [f"{_ranks(sorted(silent))} died or stopped: no sign of life"]
        return "; ".join(words + [f"rank {rank} was at {known[rank].at}" for rank in sorted(silent)])
    raised = sorted((s for s in known.values() if s.phase == "raised"), key=lambda s: s.order)
    if raised:
        differing = [text for group in raised[0].calls if (text := _differing(_members(known, group), group))]
        return "; ".join([f"rank {raised[0].rank} raised {raised[0].error}", *differing])
    waiting = [s for s in known.values() if s.waiting is not None and s.phase == "running"]
    if not waiting:
        return _nobody_waits(known)
    longest = max(waiting, key=lambda s: s.waiting_s)
    return _in_group(known, longest.waiting or "")


def _members(known: Mapping[int, State], group: str) -> dict[int, State]:
    if not group.startswith("ranks "):
        return dict(known)
    named = {int(rank) for rank in group.removeprefix("ranks ").split(", ")}
    return {rank: s for rank, s in known.items() if rank in named}


def _in_group(known: Mapping[int, State], group: str) -> str:
    members = _members(known, group)
    numbers = {rank: s.calls[group].number if group in s.calls else 0 for rank, s in members.items()}
    first = max(numbers, key=lambda rank: numbers[rank])
    called = members[first].calls[group]
    behind = [members[rank] for rank, number in numbers.items() if number < numbers[first]]
    for s in behind:
        if s.phase == "ended":
            return f"a collective is missing: rank {s.rank} has left its watch() without {called}, at {called.at}"
        if s.waiting is not None and s.waiting != group:
            there = s.calls[s.waiting]
            return (
                f"another order: rank {s.rank} waits in {there} ({s.waiting}), at {there.at}, rank {first} in {called} "
                f"({group}), at {called.at}"
            )
    if behind:
        s = behind[0]
        return f"a slow or stuck rank, or a missing collective: rank {s.rank} has not come to {called}; it is at {s.at}"
    return _differing(members, group) or f"all ranks are in {called}: the network or the backend is stuck"


def _differing(members: Mapping[int, State], group: str) -> str:
    """What ranks call as the same collective of a group, though it is not the same; empty where it is."""
    calls = {rank: s.calls[group] for rank, s in members.items() if group in s.calls}
    first = min(calls)
    called = calls[first]
    for rank, other in calls.items():
        if other.number != called.number:
            continue
        if other.op != called.op:
            return (
                f"another order, or a missing collective: rank {rank} calls {other}, at {other.at}, where rank {first} "
                f"calls {called}, at {called.at}"
            )
        if other.what != called.what and not any(word in called.op for word in _UNEVEN):
            return (
                f"other tensors: rank {rank} gives {other.what} to {other.op} #{other.number}, at {other.at}, rank "
                f"{first} gives {called.what}, at {called.at}"
            )
    return ""


def _nobody_waits(known: Mapping[int, State]) -> str:
    fewest = min(known.values(), key=lambda s: (s.work, sum(c.number for c in s.calls.values())))
    return f"a slow or stuck rank: rank {fewest.rank} is behind the others, at {fewest.at}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def report(states: Mapping[int, State | None], silent: set[int], timeout_s: float) -> str:
    """The text: the likely cause, then a line for each rank, then what torch's flight recorder adds."""
    lines = [f"warpsmith: watch: {len(states)} ranks are stuck, or one has failed (timeout {timeout_s:g} s)"]
    lines.append(f"likely cause: {likely_cause(states, silent)}")
    lines += [f"rank {rank}: {_line(s, rank in silent)}" for rank, s in sorted(states.items())]
    recorded = {rank: s.pending for rank, s in sorted(states.items()) if s is not None and s.pending}
    lines += [f"torch's flight recorder, rank {rank}: not completed: {text}" for rank, text in recorded.items()]
    return "\n".join(lines) + "\n"


def _line(s: State | None, silent: bool) -> str:
    if s is None:
        return "never came to watch()"
    last = ", ".join(f"{call} ({group})" for group, call in s.calls.items()) or "none"
    if silent:
        return f"no sign of life; last seen at {s.at}; last collective {last}"
    if s.phase == "raised":
        return f"raised {s.error}; last collective {last}"
    if s.phase == "ended":
        return f"left watch(); last collective {last}"
    if s.waiting is not None:
        call = s.calls[s.waiting]
        return f"for {s.waiting_s:.1f} s in {call} ({s.waiting}), at {call.at}"
    return f"outside of collectives, at {s.at}; last collective {last}"
