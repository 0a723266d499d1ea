"""Context parallel attention on real ranks and compiled: masks and modes against an oracle, blocks, refusals."""

import itertools
import statistics

import pytest
import torch
import torch.distributed as dist
import warpsmith
from context_cases import ALIBI, HEAD_DIM, MASKS, REFUSED, SEED, Problem
from torch.utils.checkpoint import checkpoint
from warpsmith.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from warpsmith.distributed.context.blocks import KEY_STEP, QUERY_STEP, gather_block, ring_block
from warpsmith.distributed.context.sequence import chunks_of, in_sequence_order, of_rank
from warpsmith.reference.attention import window_of
from warpsmith.testing.distributed import fault, multirank
from warpsmith.testing.law import MEDIAN_LIMIT, measure

MODES = ("all_gather", "ring", "ulysses")
SHARDINGS = ("zigzag", "contiguous")


def check_exact(problem, mode, sharding, group=None):
    """All results of this rank in float64, against the oracle's."""
    got, want = problem.sharded(mode, sharding, group), problem.oracle()
    if "sink" in got:
        dist.all_reduce(got["sink"], group=group)
    for name, t in got.items():
        part = want[name] if name == "sink" else problem.part_of(name, want[name], sharding, group)
        torch.testing.assert_close(t, part, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{mode} {sharding} {n}: {m}")


def every_mask(shardings):
    """In float64. Masks and modes take the shardings in turns: on two ranks those that they do not take on four."""
    checked = 0
    for mode, (i, name) in itertools.product(MODES, enumerate(MASKS)):
        if name in REFUSED.get(mode, ()):
            continue
        layout = ("bshd", "bhsd", "thd")[(i + MODES.index(mode)) % 3]
        sharding = shardings[(i + MODES.index(mode)) % 2]
        batch = 2 if name in ALIBI else 1  # of slopes of each sequence
        check_exact(Problem(name, torch.float64, layout=layout, batch=batch), mode, sharding)
        checked += 1
    assert checked == 3 * len(MASKS) - len(REFUSED["ring"])


@multirank(2, timeout_s=300)
def test_every_mask_of_every_mode_on_two_ranks(rank, world_size):
    every_mask(["zigzag", "contiguous"])


@multirank(4, timeout_s=300)
def test_every_mask_of_every_mode_on_four_ranks(rank, world_size):
    every_mask(["contiguous", "zigzag"])


def errors_beside_one_rank(problem, of):
    """The error of each result of each mode, which is within the law, and whether its bits are those of one rank."""
    oracle, alone = problem.oracle(), problem.one_rank()
    for mode in MODES:
        for result, t in problem.sharded(mode, "zigzag").items():
            if result == "sink":
                continue  # a part of a sum over ranks
            whole = unshard_sequence(t, -1 if result == "lse" else problem.dim)
            error = measure(f"{mode} {of} {result}", whole, oracle[result], alone[result])
            assert error.ok, str(error)
            yield error, torch.equal(whole, alone[result])


def check_errors():
    """Against one rank's kernel as the law holds an op against PyTorch. In 16 bits, where rounding and not the order of
    sums decides, out and gradients are also held to 1.1 one by one."""
    ratios = []
    for dtype, name in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), ("all", "causal", "causal window", "packed sink")
    ):
        for error, _ in errors_beside_one_rank(Problem(name, dtype), f"{name} {dtype}"):
            if dtype.itemsize == 2 and not error.name.endswith("lse"):
                assert error.ratio <= MEDIAN_LIMIT, f"{error}, ratio {error.ratio:.2f}"
            ratios.append(error.ratio)
    assert statistics.median(ratios) <= MEDIAN_LIMIT


@multirank(2, timeout_s=300)
def test_errors_on_two_ranks_are_at_most_1_1_times_those_of_one(rank, world_size):
    check_errors()


@multirank(4, timeout_s=300)
def test_errors_on_four_ranks_are_at_most_1_1_times_those_of_one(rank, world_size):
    check_errors()


@multirank(4, timeout_s=300)
def test_groups_of_two_of_four_ranks(rank, world_size):
    """Two sequences at the same time, each on two ranks."""
    groups = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))]
    for mode in MODES:
        check_exact(Problem("causal", torch.float64, batch=1 + rank % 2), mode, "zigzag", groups[rank % 2])
        check_drawn_seed(mode, groups[rank % 2])


def drawn_seed():
    """What an op without ``seed`` draws."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64)


def check_drawn_seed(mode, group=None):
    """Without ``seed``, rank 0 of a group draws for all, whatever the generators of the others."""
    problem = Problem("causal", torch.float64, batch=1, tokens=128, dropout_p=0.3)
    rank, first = dist.get_rank(), 0 if group is None else dist.get_global_rank(group, 0)
    torch.manual_seed(100 + first)
    problem.options["seed"] = drawn_seed()
    want = problem.oracle()
    problem.options["seed"] = None
    torch.manual_seed(100 + rank)
    drawn_seed()
    after = torch.rand(())
    torch.manual_seed(100 + rank)
    got = problem.sharded(mode, "zigzag", group)
    assert torch.equal(torch.rand(()), after)  # every generator has moved by a seed
    for name, t in got.items():
        torch.testing.assert_close(t, problem.part_of(name, want[name], "zigzag", group), rtol=1e-11, atol=1e-11)


@multirank(2, timeout_s=300)
def test_dropout_drops_what_one_rank_drops(rank, world_size):
    """In float64 a single weight more or less would show."""
    names = ("all", "causal", "far window", "window", "softcap", "sink in a window")
    for mode, (i, name) in itertools.product(MODES, enumerate(names)):
        layout, sharding = ("bshd", "bhsd", "thd")[i % 3], SHARDINGS[i % 2]
        problem = Problem(name, torch.float64, layout=layout, batch=2, tokens=128, dropout_p=0.3)
        check_exact(problem, mode, sharding)
    check_exact(Problem("packed causal", torch.float64, dropout_p=0.3), "ulysses", "zigzag")
    check_exact(Problem("alibi", torch.float64, tokens=64, dropout_p=0.3), "all_gather", "zigzag")
    for mode in MODES:
        check_drawn_seed(mode)


@multirank(2, timeout_s=300)
def test_dropout_has_the_errors_of_one_rank(rank, world_size):
    for dtype in (torch.bfloat16, torch.float32):
        problem = Problem("causal", dtype, tokens=128, dropout_p=0.3)
        for error, equal in errors_beside_one_rank(problem, str(dtype)):
            assert equal or not (error.name.startswith("ulysses") and error.name.endswith("out"))


@multirank(2, timeout_s=300)
def test_the_same_bits_at_every_run(rank, world_size):
    for mode in MODES:
        problem = Problem("packed sink", torch.bfloat16)
        first, second = problem.sharded(mode, "zigzag"), problem.sharded(mode, "zigzag")
        assert all(torch.equal(first[name], second[name]) for name in first)


@multirank(2, timeout_s=300)
def test_an_activation_checkpoint_gives_the_same_bits(rank, world_size):
    """It draws the same seed again."""
    tokens = shard_sequence(Problem("causal", torch.float32, tokens=128).inputs["k"])
    for mode, options in itertools.product(MODES, ({"causal": True}, {"dropout_p": 0.5})):
        grads = []
        for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
            torch.manual_seed(rank)
            x = tokens.clone().requires_grad_()
            out = run(lambda x, o={"mode": mode, **options}: context_parallel_attention(2 * x, x, x + 1, **o), x)
            grads.append(torch.autograd.grad(out.square().sum(), x)[0])
        assert torch.equal(*grads)


@multirank(2, timeout_s=300)
def test_autocast_and_second_derivatives(rank, world_size):
    q = shard_sequence(Problem("causal", torch.float32).inputs["q"]).requires_grad_()
    for mode in MODES:
        with torch.autocast("cpu", torch.bfloat16):
            assert context_parallel_attention(q, q, q, mode=mode).dtype == torch.bfloat16
        out = context_parallel_attention(q, q, q, mode=mode)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="expected one derivative, got a second"):
            grad.sum().backward()


@multirank(2, timeout_s=300)
def test_unshard_is_the_inverse_of_shard_and_sums_gradients(rank, world_size):
    whole = torch.arange(24.0).view(2, 12)
    for sharding in SHARDINGS:
        part = shard_sequence(whole, sharding=sharding)
        held = (0, 1, 2, 9, 10, 11) if sharding == "zigzag" else (0, 1, 2, 3, 4, 5)
        if rank == 0:
            assert torch.equal(part, whole[:, held])
        part.requires_grad_()
        again = unshard_sequence(part, sharding=sharding)
        assert torch.equal(again, whole)
        (again * whole * (rank + 1)).sum().backward()
        assert torch.equal(part.grad, 3 * part)


@multirank(4, timeout_s=300)
def test_gradients_of_ranks_are_added_in_rank_order(rank, world_size):
    """2^24 + 1 is 2^24 in float32: the order shows in the result."""
    grad = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)][rank]).expand(1, 8)
    part = torch.zeros(1, 2, requires_grad=True)
    unshard_sequence(part).backward(grad)
    assert torch.equal(part.grad, torch.zeros(1, 2))


def refused(words, *tensors, **options):
    with pytest.raises(ValueError, match=words):
        context_parallel_attention(*tensors, **options)


WRONG_TYPES = [
    ("seed", r"a tensor or None, got the int 5", 5),
    ("sink", r"a tensor or None, got the list \[0.0, 0.0\]", [0.0, 0.0]),
    ("dropout_p", r"a number in \[0, 1\), got the str '0.1'", "0.1"),
    ("dropout_p", r"a number in \[0, 1\), got Tensor", torch.tensor([0.1, 0.2])),
    ("softmax_scale", "a number or None, got the str", "1"),
    ("softcap", "a number, got None", None),
]


@multirank(2, timeout_s=300)
def test_what_does_not_fit_is_refused_on_every_rank(rank, world_size):
    def heads(tokens, q_heads, k_heads=None, lead=(1,)):
        k = torch.zeros(*lead, tokens, k_heads or q_heads, HEAD_DIM)
        return torch.zeros(*lead, tokens, q_heads, HEAD_DIM), k, k

    own = f"context_parallel_attention: rank {rank} of 2: "
    of_one = "context_parallel_attention: rank 1 of 2: "
    cu, documents = torch.tensor([0, 5], dtype=torch.int32), heads(4, 2, lead=())
    slopes = torch.ones(2)
    refused(own + "q: .* heads that 2 ranks divide, in mode ulysses, got 3: take mode=", *heads(4, 3), mode="ulysses")
    refused(own + "k: .* heads that 2 ranks divide, in mode ulysses, got 1", *heads(4, 4, 1), mode="ulysses")
    refused(own + "q: expected an even number of tokens .* got 3: pad the sequence to a multiple of 4", *heads(3, 2))
    for mode, step in (("all_gather", 16), ("ring", 32)):
        words = (
            f"q: expected chunks of a multiple of {step} tokens for dropout in mode {mode}, got 24: pad the sequence "
        )
        refused(
            own + words + f"to a multiple of {4 * step}, or take mode='ulys", *heads(48, 2), mode=mode, dropout_p=0.1
        )
    refused(own + r"seed: expected shape \(2\), got \(3\)", *heads(64, 2), dropout_p=0.1, seed=torch.zeros(3).long())
    refused(own + "alibi_slopes: expected None in mode ring", *heads(4, 2), mode="ring", alibi_slopes=slopes)
    refused(own + "alibi_slopes: .* without causal=True", *heads(4, 2), alibi_slopes=slopes)
    packed = {"layout": "thd", "cu_seqlens": cu, "max_seqlen": 5}
    for mode in ("all_gather", "ring"):
        words = rf"dropout_p: expected 0 with cu_seqlens in mode {mode} \(the mask counts .*, got 0.1: take"
        refused(own + words, *documents, mode=mode, dropout_p=0.1, **packed)
    refused(own + "window_size: .* in mode ring", *documents, mode="ring", window_size=(2, 0), **packed)
    refused(own + "layout: expected thd with cu_seqlens, got bshd", *heads(4, 2), cu_seqlens=cu, max_seqlen=5)
    refused(own + "max_seqlen: expected an integer", *documents, layout="thd", cu_seqlens=cu)
    refused(own + "k: expected 4 tokens, as q has, got 6", heads(4, 2)[0], *heads(6, 2)[1:])
    refused("mode: expected one of all_gather, ring, ulysses, got both", *heads(4, 2), mode="both")
    refused("sharding: expected one of zigzag, contiguous, got striped", *heads(4, 2), sharding="striped")
    with pytest.raises(ValueError, match=f"shard_sequence: rank {rank} of 2: t: expected a multiple of 4 tokens"):
        shard_sequence(torch.zeros(1, 6))

    for name, words, wrong in WRONG_TYPES:
        with pytest.raises(TypeError, match=f"^context_parallel_attention: {name}: expected {words}"):
            context_parallel_attention(*heads(64, 2), **({"dropout_p": 0.1} | {name: wrong}))

    # Mistakes of one rank: all ranks raise, and none waits for another.
    more = 2 * rank
    refused(of_one + r"q: expected float32 \(1, 4, 2, 16\), as on rank 0, got float32 \(1, 6", *heads(4 + more, 2))
    refused(of_one + "q: expected float32", *(t.to((torch.float32, torch.float64)[rank]) for t in heads(4, 2)))
    refused(of_one + "k: expected 4 tokens", heads(4, 2)[0], *heads(4 + more, 2)[1:])
    refused(of_one + "mode: expected ring, as on rank 0", *heads(4, 2), mode=("ring", "ulysses")[rank])
    refused(of_one + "window_size: expected", *heads(4, 2), causal=rank == 1)
    refused(of_one + "dropout_p: expected 0.1, as on rank 0, got 0.2", *heads(64, 2), dropout_p=(0.1, 0.2)[rank])
    seed = torch.zeros(2).long() if rank else None
    refused(of_one + "seed: expected None, as on rank 0, got int64", *heads(64, 2), dropout_p=0.1, seed=seed)
    if rank == 1:
        with pytest.raises(TypeError, match="seed: expected a tensor or None, got the int 5"):
            context_parallel_attention(*heads(64, 2), dropout_p=0.1, seed=5)
    else:
        refused(of_one + "seed: expected a tensor or None, got the int 5", *heads(64, 2), dropout_p=0.1, seed=SEED)
    refused(of_one + "sink: expected None", *heads(4, 2), sink=torch.zeros(2) if rank else None)
    layouts = heads(2, 2)  # of the same shape in both
    refused(of_one + "layout: expected bshd, as on rank 0, got bhsd", *layouts, layout=("bshd", "bhsd")[rank])
    ulysses = {"mode": "ulysses", "return_lse": rank == 1}
    refused(of_one + "return_lse: expected False, as on rank 0, got True", *heads(4, 2), **ulysses)
    of_a_leaf = [t.requires_grad_(rank == 1) for t in heads(4, 2)[:2]]
    refused(of_one + "requires_grad: expected none.*got q, k or v", *of_a_leaf, of_a_leaf[1])
    for argument, value in {"mode": "both", "layout": "bhds", "sharding": "striped", "window_size": (1,)}.items():
        refused(of_one + argument, *heads(4, 2), **({argument: value} if rank else {}))
    with pytest.raises(TypeError if rank else ValueError, match="" if rank else of_one):
        context_parallel_attention(*heads(4, 2), softcap="much" if rank else 0.0)
    assert context_parallel_attention(*heads(4, 2)).shape == (1, 4, 2, HEAD_DIM)  # and the group still works


@multirank(2, timeout_s=300)
def test_calls_that_all_ranks_have_made_are_not_mixed_up(rank, world_size):
    q = torch.zeros(1, 4, 2, HEAD_DIM)
    for mode in MODES:
        context_parallel_attention(q, q, q, mode=mode)
    refused("rank 1 of 2: mode: expected ring, as on rank 0, got ulysses", q, q, q, mode=("ring", "ulysses")[rank])
    refused("rank 0 of 2: dropout_p", q, q, q, mode="ring", dropout_p=0.0 if rank else 1.5)
    assert context_parallel_attention(q, q, q, mode="ring").shape == q.shape


@multirank(2, ends={0: "raised", 1: "died"}, timeout_s=300)
def test_a_rank_that_dies_in_the_ring_is_an_error_of_the_other(rank, world_size):
    q = torch.zeros(1, 4, 2, HEAD_DIM)
    with fault("kill", rank=1, call="batch_isend_irecv", nth=2):
        for _ in range(3):
            context_parallel_attention(q, q, q, mode="ring")


@pytest.mark.parametrize("mode", MODES)
def test_a_world_of_one(mode):
    problem = Problem("packed causal", torch.bfloat16)
    got, want = problem.sharded(mode, "zigzag"), problem.one_rank()
    assert all(torch.equal(got[name], want[name]) for name in want)
    q = torch.randn(1, 3, 2, HEAD_DIM)  # an odd number of tokens, which one rank may have with dropout too
    dropped = context_parallel_attention(q, q, q, mode=mode, dropout_p=0.5, seed=SEED)
    assert torch.equal(dropped, warpsmith.attention(q, q, q, dropout_p=0.5, seed=SEED))
    assert torch.equal(context_parallel_attention(q, q, q, mode=mode), warpsmith.attention(q, q, q))


def test_a_world_of_one_is_exported_for_every_length():
    class Block(torch.nn.Module):
        def forward(self, q, seed):
            return context_parallel_attention(q, q, q, causal=True, dropout_p=0.5, seed=seed)

    lengths = {1: torch.export.Dim("tokens", min=2, max=1024)}
    program = torch.export.export(Block(), (torch.randn(1, 64, 2, HEAD_DIM), SEED), dynamic_shapes=(lengths, None))
    q = torch.randn(1, 48, 2, HEAD_DIM)
    assert torch.equal(program.module()(q, SEED), Block()(q, SEED))


CALLS = {
    "all_gather": {"causal": True, "softcap": 2.0},
    "ring": {"window_size": (5, 0), "softmax_scale": 0.3},
    "ulysses": {"causal": True, "dropout_p": 0.2},
}


def same_bits(compiled, mode, tokens):
    """Out and gradients, of this rank's part of a sequence."""
    found = []
    for attend in (compiled, lambda q, k, v: context_parallel_attention(q, k, v, mode=mode, **CALLS[mode]) * 2):
        torch.manual_seed(tokens)
        whole = torch.randn(3, 1, tokens, 4, HEAD_DIM)
        q, k, v = (shard_sequence(t).requires_grad_() for t in whole)
        out = attend(q, k, v)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(map(torch.equal, *found)), (mode, tokens)


@pytest.mark.parametrize("mode", CALLS)
def test_one_rank_in_one_graph_for_every_length(mode):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def attend(q, k, v):
        return context_parallel_attention(q, k, v, mode=mode, **CALLS[mode]) * 2

    for tokens in (16, 24, 7):
        same_bits(attend, mode, tokens)


@multirank(2, timeout_s=300)
def test_two_ranks_with_changing_lengths(rank, world_size):
    for mode in CALLS:
        torch._dynamo.reset()

        @torch.compile(dynamic=True, backend="aot_eager")
        def attend(q, k, v, mode=mode):
            return context_parallel_attention(q, k, v, mode=mode, **CALLS[mode]) * 2

        for tokens in (64, 96, 128):
            same_bits(attend, mode, tokens)
        q = torch.zeros(1, 8, 4, HEAD_DIM)
        traced = torch._dynamo.explain(attend)(q, q, q)
        assert traced.op_count == 1, traced  # the doubling: the call runs as it is


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
