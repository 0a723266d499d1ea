"""ResumableSampler: over any sequence of world sizes and restarts the ranks' stream repeats and loses nothing."""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from warpsmith.distributed import ResumableSampler


def job(length, seed, world_size, state=None):
    ranks = [ResumableSampler(length, seed=seed, rank=r, world_size=world_size) for r in range(world_size)]
    for sampler in ranks:
        if state is not None:
            sampler.load_state_dict(state)
    return ranks


def steps(ranks, count):
    """``count`` steps of all ranks, in the stream's order; passes follow each other."""
    endless = [itertools.chain.from_iterable(iter(lambda s=s: s, None)) for s in ranks]
    return [next(rank) for _ in range(count) for rank in endless]


def assert_epochs(stream, length):
    """Each epoch that the stream covers is a permutation; a last, partial one repeats nothing."""
    for start in range(0, len(stream), length):
        epoch = stream[start : start + length]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(length))


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(1, 60),
    seed=st.integers(-(2**63), 2**63 - 1),
    lives=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 25)), min_size=1, max_size=5),
)
def test_any_sequence_of_world_sizes_yields_one_stream(length, seed, lives):
    stream, state = [], None
    for world_size, count in lives:
        ranks = job(length, seed, world_size, state)
        stream += steps(ranks, count)
        states = [s.state_dict() for s in ranks]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert_epochs(stream, length)
    assert stream == steps(job(length, seed, 1), len(stream))  # the order does not depend on the ranks
    assert state == {"seed": seed, "length": length, "position": len(stream)}


@settings(deadline=None, max_examples=50)
@given(length=st.integers(1, 40), world_size=st.integers(1, 9), passes=st.integers(1, 4))
def test_every_rank_takes_equally_many_steps(length, world_size, passes):
    ranks = job(length, 3, world_size)
    seen = []
    for _ in range(passes):
        expected = {len(s) for s in ranks}
        drawn = [list(s) for s in ranks]
        assert {len(d) for d in drawn} == expected and len(expected) == 1
        seen += [index for step in zip(*drawn, strict=True) for index in step]
        assert len({s.epoch for s in ranks}) == 1
    assert_epochs(seen, length)
    assert len(seen) >= passes * length or world_size > length


@settings(deadline=None, max_examples=50)
@given(world_size=st.integers(1, 4), batch=st.integers(1, 5), trained=st.integers(0, 6), ahead=st.integers(0, 9),
       begun=st.integers(0, 40))  # fmt: skip
def test_what_was_drawn_ahead_is_not_lost(world_size, batch, trained, ahead, begun):
    length = 200
    ranks = job(length, 11, world_size, {"seed": 11, "length": length, "position": begun})
    drawn = [list(itertools.islice(iter(s), trained * batch + ahead)) for s in ranks]
    for sampler in ranks:
        sampler.advance(0)
        for _ in range(trained):
            sampler.advance(batch)
    used = [index for step in zip(*drawn, strict=True) for index in step][: trained * batch * world_size]
    state = ranks[0].state_dict()
    rest = steps(job(length, 11, 1, state), length - begun - len(used))
    assert used + rest == steps(job(length, 11, 1), length)[begun:]
    with pytest.raises(ValueError, match="samples: expected 0 to"):
        ranks[0].advance(ahead + 1)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(steps(job(50, seed, 1), 100)) for seed in (0, 1, 2, -1)]
    assert len(set(orders)) == 4
    assert all(order[:50] != order[50:] for order in orders)


def test_orders_are_uniform():
    """Over 4,000 seeds, each of the 24 orders of 4 samples comes about equally often (chi-square, 23 degrees)."""
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for seed in range(4000):
        counts[tuple(ResumableSampler(4, seed=seed, rank=0, world_size=1))] += 1
    expected = 4000 / 24
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 49.7  # p = 0.001


def test_the_order_is_that_of_every_machine_and_thread_count():
    text = "from warpsmith.distributed import ResumableSampler as S; import torch; torch.set_num_threads({}); "
    text += "print([i for i in S(100_000, seed=7, rank=0, world_size=1)][:8])"
    runs = {
        subprocess.run([sys.executable, "-c", text.format(n)], capture_output=True, text=True, check=True).stdout
        for n in (1, 4)
    }
    assert runs == {"[15318, 8855, 80045, 98238, 10232, 80226, 37449, 71995]\n"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_resumes_by_advance(workers):
    def loader(sampler):
        return DataLoader(torch.arange(60), batch_size=4, sampler=sampler, num_workers=workers)

    [whole] = job(60, 5, 1)
    expected = torch.cat(list(loader(whole))).tolist()
    [sampler] = job(60, 5, 1)
    seen = []
    for batch in itertools.islice(loader(sampler), 6):
        seen += batch.tolist()
        sampler.advance(len(batch))
    [resumed] = job(60, 5, 1, sampler.state_dict())
    assert seen + torch.cat(list(loader(resumed))).tolist() == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 0}, "length: expected at least 1, got 0"),
        ({"seed": 2**63}, "seed: expected an int of 64 bits"),
        ({"world_size": 0}, "world_size: expected at least 1, got 0"),
        ({"rank": 2}, "rank: expected 0 to 1, got 2"),
        ({"rank": -1}, "rank: expected 0 to 1, got -1"),
    ],
)
def test_bad_arguments_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        ResumableSampler(**({"length": 10, "seed": 0, "rank": 0, "world_size": 2} | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed: expected 0, got 1"),
        ({"length": 11}, "length: expected 10, got 11"),
        ({"position": -1}, "position: expected at least 0"),
        ({"position": None}, "position: expected an int"),
    ],
)
def test_the_state_of_something_else_is_refused_unchanged(change, words):
    [sampler] = job(10, 0, 1)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict(before | change)
    assert sampler.state_dict() == before
