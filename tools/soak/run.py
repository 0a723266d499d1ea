"""Kills processes of training jobs, many times, and stops at the first thing that goes wrong.

    make soak                                                        1,000 kills, 200 deaths; table into docs/soak.md
    python tools/soak/run.py --kills 100 --deaths 24 --seed 2        fewer, at other times; prints the table

Two parts. `kills`: a process that trains and writes checkpoints gets SIGKILL at a random time; its successor must find
the last durable step, bit for bit as in a run without kills. `deaths`: a rank of a job of 2 to 4 gloo ranks dies at one
of 12 points of a step. The other ranks must end, the report of `watch` must name the dead rank, and a job with another
number of ranks, sharded or not, must go on at the last durable step with the samples that come next.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import victim as jobs
import writer
from tqdm import tqdm
from warpsmith.distributed import ResumableSampler

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "soak.md"
BEGIN, END = "<!-- table -->", "<!-- end -->"
KINDS = ("ddp", "zero1", "zero2")
STEPS = 3  # of a job
PIECE = 50  # kills between two movements of the bar


class Finding(Exception):
    """Something went wrong in a job."""


def drive(how, *given):
    with tempfile.TemporaryDirectory(prefix="warpsmith-soak-") as folder:
        try:
            return writer.drive(f"{folder}/run", how, *given)
        except AssertionError as error:
            raise Finding(f"checkpoints, killed {how} {given}: {error}") from error


def kills(count, seed, bar):
    """{what: figure} of `count` kills of a process that writes checkpoints. Raises where anything is lost."""
    total = dict.fromkeys(("kills", "unfinished", "removed", "steps"), 0)
    while total["kills"] < count:
        piece = min(PIECE, count - total["kills"])
        for name, value in drive("at-random", piece, seed).items():
            total[name] += value
        seed += 1
        bar.update(piece)
    return total


class Chain:
    """Jobs in one folder, each of which goes on where the one before died, with another number of ranks."""

    def __init__(self, folder, numbers):
        self.folder, self.numbers = folder, numbers
        self.size, self.step, self.durable = 2, 0, 0
        self.positions = {0: 0}  # samples that have been used, by step
        self.used = {}  # the samples of a step, as the last job took them

    def die(self, number):
        """One job with a death. Returns the point."""
        self.size = self.numbers.choice([n for n in (2, 3, 4) if n != self.size])
        point = jobs.POINTS[5 * number % len(jobs.POINTS)]  # few jobs have points of all kinds
        kind = KINDS[self.numbers.randrange(len(KINDS))]
        victim, doomed = self.numbers.randrange(self.size), self.numbers.randrange(STEPS - 1)
        ranks = jobs.run_job(self.folder, kind, self.size, STEPS, victim, point, doomed)
        what = f"death {number}, {kind}, rank {victim} of {self.size} {point}, step {doomed}"
        self._check_end(what, ranks, victim)
        self._check_data(what, ranks)
        return point

    def finish(self):
        """A job in which nobody dies, on one rank: the last word on data and states."""
        self.size = 1
        ranks = jobs.run_job(self.folder, "ddp", 1, STEPS, None, "", 0)
        if ranks[0].code != 0:
            raise Finding(f"the last job ended with {ranks[0].code}: {ranks[0].said('error')}")
        self._check_data("the last job", ranks)

    def _check_end(self, what, ranks, victim):
        for rank, it in enumerate(ranks):
            if it.code is None:
                raise Finding(f"{what}: rank {rank} hangs")
            if it.killed != (rank == victim) or (rank != victim and it.code != 1):
                raise Finding(f"{what}: rank {rank} ended with {it.code}: {it.said('error')}")
        reports = [" ".join(words) for it in ranks for words in it.said("report")]
        named = f"likely cause: rank {victim} died or stopped"
        if len(reports) != 1 or named not in reports[0]:
            raise Finding(f"{what}: expected one report with {named!r}, got {reports}")

    def _check_data(self, what, ranks):
        begun = {tuple(map(int, words)) for it in ranks for words in it.said("resumed")}
        if len(begun) != 1:
            raise Finding(f"{what}: ranks resume at different places: {begun}")
        step, position = begun.pop()
        if step < self.durable or position != self.positions.get(step):
            raise Finding(
                f"{what}: resumed at step {step}, sample {position}; durable was step {self.durable}, and step {step} "
                f"ended at sample {self.positions.get(step)}"
            )
        by_step = {}
        for rank, it in enumerate(ranks):
            for words in it.said("step"):
                by_step.setdefault(int(words[0]), {})[rank] = [int(i) for i in words[1:]]
        for at in range(step + 1, step + STEPS + 1):
            before = self.positions[at - 1]
            after = before + jobs.BATCH * len(ranks)
            self.positions[at] = after
            for rank, batch in by_step.get(at, {}).items():
                if batch != stream(before + rank, after, len(ranks)):
                    raise Finding(f"{what}: step {at}, rank {rank}: samples {batch} are not the next ones")
        self.durable = max([self.durable, *(int(words[0]) for words in ranks[0].said("durable"))])


def stream(begin, end, stride):
    """Samples of the job, by their places in the order of all epochs."""
    found, epochs = [], {}
    for place in range(begin, end, stride):
        epoch, at = divmod(place, jobs.SAMPLES)
        if epoch not in epochs:
            sampler = ResumableSampler(jobs.SAMPLES, seed=jobs.SEED, rank=0, world_size=1)
            sampler.load_state_dict({"seed": jobs.SEED, "length": jobs.SAMPLES, "position": epoch * jobs.SAMPLES})
            epochs[epoch] = list(sampler)
        found.append(epochs[epoch][at])
    return found


def deaths(count, seed, bar):
    """{point: jobs} of `count` deaths. Raises at the first finding."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="warpsmith-soak-") as folder:
        chain = Chain(folder, random.Random(seed))
        for number in range(count):
            point = chain.die(number)
            found[point] = found.get(point, 0) + 1
            bar.update(1)
        chain.finish()
    return found


def table(when, state, found):
    """The rows of the page."""
    rows = ["| what | times | result |", "|---|---|---|"]
    if state["kills"]:
        rows.append(
            f"| `kill -9` of a process that writes checkpoints, {when} | {state['kills']:,} | nothing lost in "
            f"{state['steps']:,} steps; {state['unfinished']} came while a checkpoint was written, {state['removed']} "
            "while one was removed |"
        )
    for point in jobs.POINTS:
        if point in found:
            result = "no hang, the dead rank named, resumed on another number of ranks"
            rows.append(f"| a rank dies {point} | {found[point]} | {result} |")
    return rows


def write_page(rows):
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    day = time.strftime("%Y-%m-%d")
    lines = [BEGIN, f"Run of {day}, torch {torch.__version__}, {os.cpu_count()} CPU cores:", "", *rows, END]
    PAGE.write_text(head + "\n".join(lines) + tail)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="of a process that writes checkpoints")
    parser.add_argument("--deaths", type=int, default=200, help="of a rank")
    parser.add_argument("--every-call", action="store_true", help="not at random times, but at each call of four saves")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="the table of docs/soak.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        with tqdm(total=args.deaths, desc="ranks that die", unit="", disable=None) as bar:
            found = deaths(args.deaths, args.seed, bar) if args.deaths else {}
        with tqdm(total=args.kills, desc="kill -9 of a writer", unit="", disable=None) as bar:
            state = drive("at-every-call") if args.every_call else kills(args.kills, args.seed, bar)
    except Finding as finding:
        sys.exit(f"FOUND {finding}")
    rows = table("at each call of four saves" if args.every_call else "at random times", state, found)
    print("\n".join(rows))
    if args.write:
        write_page(rows)


if __name__ == "__main__":
    main()
