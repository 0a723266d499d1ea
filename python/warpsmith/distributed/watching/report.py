"""From what each rank said of itself to one report with a likely cause. No ranks needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

EVERYBODY = "all ranks"  # the name of the default group
PAIRS = "pairs of ranks"  # of calls between two: their numbers say nothing about other ranks'
# Calls in which ranks give different tensors: one of them is the root, or each gives its own share.
_BY_RANK = ("all_to_all", "all_to_all_single", "gather", "scatter")
# Lists, in which some backends allow different shapes: suspect only where a rank is stuck in the call.
_LISTS = ("all_gather", "reduce_scatter")
# What a rank raises because another one has gone: gloo's words, the system's, and NCCL's.
_PEER_HAS_GONE = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|remote process (has )?exited|ncclRemoteError",
    re.IGNORECASE,
)


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
    calls: the last call in each group. recent: the last calls in each group, of a rank that does not move.
    waiting: the group in whose call the rank is, for waiting_s seconds.
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
    recent: Mapping[str, Sequence[Said]] = field(default_factory=dict)
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
        read["recent"] = {group: [Said(**said) for said in calls] for group, calls in read["recent"].items()}
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
    come. A rank that raised because its peer has gone is not the cause if another one raised or left."""
    absent = [rank for rank, s in states.items() if s is None]
    if absent:
        return f"{_ranks(absent)} never came to watch()"
    known = {rank: s for rank, s in states.items() if s is not None}
    if silent:
        words = [f"{_ranks(sorted(silent))} died or stopped: no sign of life"]
        return "; ".join(words + [f"rank {rank} was at {known[rank].at}" for rank in sorted(silent)])
    raised = sorted((s for s in known.values() if s.phase == "raised"), key=lambda s: (_lost_its_peer(s), s.order))
    differing = list(_differences(known))
    if raised:
        first = raised[0]
        told = f"rank {first.rank} raised {first.error}"
        if not _lost_its_peer(first):
            return "; ".join([told, *differing])
        return "; ".join([*(differing or _left_before(known, first)), told])
    if differing:
        return differing[0]
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


def _lost_its_peer(s: State) -> bool:
    return _PEER_HAS_GONE.search(s.error) is not None


def _left_before(known: Mapping[int, State], lost: State) -> list[str]:
    """Which rank closed the connection that this one lost."""
    left = [s for s in known.values() if s.phase == "ended"]
    for group, called in lost.calls.items():
        for s in left:
            if s.rank in _members(known, group) and (group not in s.calls or s.calls[group].number < called.number):
                return [f"a collective is missing: rank {s.rank} has left its watch() without {called}, at {called.at}"]
    return [f"{_ranks([s.rank for s in left])} left watch()"] if left else []


def _differences(known: Mapping[int, State]) -> Iterator[str]:
    for group in dict.fromkeys(group for s in known.values() for group in s.calls if group != PAIRS):
        if text := _differing(_members(known, group), group):
            yield text


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
    return f"all ranks are in {called}: the network or the backend is stuck"


def _differing(members: Mapping[int, State], group: str) -> str:
    """What ranks call as the same collective of a group, though it is not the same; empty where it is."""
    calls = {rank: _by_number(s, group) for rank, s in members.items()}
    for number in sorted({number for of_rank in calls.values() for number in of_rank}):
        by_rank = {rank: of_rank[number] for rank, of_rank in calls.items() if number in of_rank}
        first = min(by_rank)
        called = by_rank[first]
        for rank, other in by_rank.items():
            if other.op != called.op:
                return (
                    f"another order, or a missing collective: rank {rank} calls {other}, at {other.at}, where rank "
                    f"{first} calls {called}, at {called.at}"
                )
            stuck = any(members[r].calls[group].number == number for r in by_rank)
            free = called.op in _BY_RANK or "object" in called.op or (called.op in _LISTS and not stuck)
            if other.what != called.what and not free:
                return (
                    f"other tensors: rank {rank} gives {other.what} to {other.op} #{number}, at {other.at}, rank "
                    f"{first} gives {called.what}, at {called.at}"
                )
    return ""


def _by_number(s: State, group: str) -> dict[int, Said]:
    last = [s.calls[group]] if group in s.calls else []
    return {said.number: said for said in [*s.recent.get(group, ()), *last]}


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
