"""Which blocks of queries and keys a rank computes: together the whole mask, and nothing twice. No ranks needed."""

import itertools

import pytest
import torch
from warpsmith.distributed.context.blocks import KEY_STEP, QUERY_STEP, gather_block, ring_block
from warpsmith.distributed.context.sequence import chunks_of, in_sequence_order, of_rank
from warpsmith.reference.attention import window_of

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (40, 0), (5, 2), (2, 11), (0, 9), (11, 30), (-1, 4), (4, -1), (100, 100)]


def seen(block, at, tokens):
    """How often the block shows key j to query i, both of the whole sequence; ``at``: where its queries and keys
    begin."""
    counts = torch.zeros(tokens, tokens, dtype=torch.int)
    _, visible = window_of(block.q_len, block.k_len, False, "bottom_right", (block.left, block.right))
    rows, keys = slice(at[0], at[0] + block.q_len), slice(at[1], at[1] + block.k_len)
    counts[rows, keys] = visible.int()
    return counts


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mode", ["all_gather", "ring"])
def test_blocks_cover_every_mask_once(mode, sharding):
    sizes = [*itertools.product((1, 2, 3, 5), (1, 2, 7)), (2, 43)]  # 43: parts of a chunk begin at steps of 16 and 32
    for (ranks, length), (left, right) in itertools.product(sizes, WINDOWS):
        chunks = len(chunks_of(0, ranks, sharding))
        tokens = ranks * chunks * length
        total = torch.zeros(tokens, tokens, dtype=torch.int)
        for rank in range(ranks):
            for place, chunk in enumerate(chunks_of(rank, ranks, sharding)):
                q_start, q_at = place * length, chunk * length
                if mode == "all_gather":
                    block = gather_block(q_start, q_at, length, tokens, left, right, False)
                    assert (block.q_at, block.k_at) == (q_at, 0)
                    assert block.sink
                    total += seen(block, (q_at, block.k_start), tokens)
                    continue
                sinks = 0
                for key_chunk in range(ranks * chunks):
                    k_start, k_at = 3 * length, key_chunk * length  # anywhere in what came in
                    block = ring_block(q_start, k_start, q_at, k_at, length, left, right)
                    if block is not None:
                        begin = q_at + block.q_start - q_start, k_at + block.k_start - k_start
                        assert (block.q_at, block.k_at) == begin
                        assert (block.q_at - q_at) % QUERY_STEP == (block.k_at - k_at) % KEY_STEP == 0
                        total += seen(block, begin, tokens)
                        sinks += block.sink
                        assert not block.sink or block.q_len == length  # every query of the chunk counts the sink
                assert sinks == 1
        _, want = window_of(tokens, tokens, False, "bottom_right", (left, right))
        assert torch.equal(total, want.int()), (ranks, length, left, right)


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
def test_the_parts_of_all_ranks_are_the_sequence(sharding):
    for ranks in (1, 2, 3, 8, 64):
        whole = torch.arange(ranks * 8).view(2, -1, 1)
        parts = [of_rank(whole, 1, sharding, rank, ranks) for rank in range(ranks)]
        assert {part.shape for part in parts} == {(2, 4, 1)}
        assert torch.equal(in_sequence_order(parts, 1, sharding), whole)


def test_zigzag_gives_all_ranks_equal_work_under_a_causal_mask():
    ranks, length = 8, 4
    work = []
    for rank in range(ranks):
        chunks = chunks_of(rank, ranks, "zigzag")
        work.append(sum(length * (chunk * length) + length * (length + 1) // 2 for chunk in chunks))
    assert len(set(work)) == 1
