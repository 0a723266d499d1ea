"""attention and attention_varlen on problems that the case tables do not list: long ones, and draws of all options.

Options of a table's row stand alone or in pairs; kernels, tiles and tails depend on all of them at once."""

import random

import pytest
from warpsmith.testing import Case
from warpsmith.testing.checks.numerics import check_error_law
from warpsmith.testing.sim import is_loaded

from tests.ops.attention_cases import BF16, FP16, FP32, SLOPES
from tests.ops.test_attention import SPEC
from tests.ops.test_attention_varlen import SPEC as VARLEN

LONG = [
    # More queries of a key head than a block of the Hopper backward takes: parts of dk and dv are summed afterwards.
    Case((1, 1100, 16, 8), BF16, options={"k_heads": 1, "seqlen_k": 10, "dim_v": 24}),
    # So narrow a window that all blocks of a head are visited before the next head's, unless there is a bias.
    *(Case((1, 900, 3, 8), BF16, options={"k_heads": 1, "seqlen_k": 930, "window_size": (60, 20), **more})
      for more in ({}, {"bias": "0101"})),
    # So many queries that their sum in one chain would miss the law.
    Case((1, 2000, 1, 8), FP32, options={"seqlen_k": 20}),
    # Several tiles of keys that no query sees, more than the loader may be ahead.
    Case((2, 100, 1, 64), BF16, options={"seqlen_k": 900, "causal": True, "causal_align": "top_left"}),
    # The ring of biases comes round.
    Case((1, 200, 2, 64), BF16, options={"k_heads": 1, "seqlen_k": 400, "bias": "0111", "causal": True}),
]  # fmt: skip
LONG_VARLEN = [
    Case((71 + 200, 1, 64), BF16, options={"lengths": (70, 0, 1), "lengths_k": (70, 900, 300), "rest": 200}),
    Case((417, 2, 64), BF16, options={"lengths": (150, 0, 3, 200, 64), "lengths_k": (150, 10, 7, 230, 0), "k_heads": 1,
                                      "causal": True}),
    Case((417, 2, 128), BF16, options={"lengths": (150, 0, 3, 200, 64), "lengths_k": (150, 10, 7, 230, 0), "k_heads": 1,
                                       "window_size": (90, 0), "dropout_p": 0.2}),
]  # fmt: skip


def drawn(number: int):
    """Problem `number`: dtype, head dimension and op take turns, all else is drawn."""
    draw = random.Random(number)
    dtype = (BF16, FP16, BF16, FP32)[number % 4]
    dim = draw.choice([(64, 40, 32), (128, 72, 104), (256, 136, 200)][number // 4 % 3])
    k_heads = draw.choice((1, 1, 2))
    heads = k_heads * draw.choice((1, 2))
    o: dict[str, object] = {"k_heads": k_heads}
    if draw.random() < 0.3:
        o["dim_v"] = draw.choice([8 * n for n in range(1, 33)])
    if draw.random() < 0.4:
        o["causal"] = True
    if draw.random() < 0.4:
        o["window_size"] = draw.choice(((60, -1), (-1, 40), (100, 0), (0, 0), (128, 60), (20, 5)))
    if (
        draw.random() < 0.3 and dtype != FP32
    ):  # of a few sinks in float32 the largest error is chance, ours or PyTorch's
        o["sink"] = draw.choice((0.0, 3.0))
    extra = draw.choice(("", "", "bias", "mask", "alibi", "dropout", "softcap", "all"))
    kept = "".join(draw.choice("01") for _ in range(3)) + draw.choice("1110")
    if extra in ("bias", "mask"):
        o[extra] = kept
    if extra == "all":
        o["bias"] = kept
    if extra in ("alibi", "all"):
        o["alibi"] = draw.choice((1, 2))
    if extra in ("dropout", "all"):
        o["dropout_p"] = draw.choice((0.002, 0.1, 0.5))
    if extra in ("softcap", "all"):
        o["softcap"] = draw.choice((1.5, 20.0))

    def length(most: int) -> int:
        return draw.choice(
            (draw.randint(1, most), draw.choice((63, 64, 65, 127, 128, 129)), 8 * draw.randint(1, most // 8))
        )

    dtypes = SLOPES if "alibi" in o else {}
    if draw.random() < 0.35:
        sequences = draw.randint(1, 3)
        lengths = [draw.choice((0, length(130))) for _ in range(sequences)] + [length(100)]
        o["lengths"], o["lengths_k"] = tuple(lengths), tuple(draw.choice((0, length(200), n)) for n in lengths)
        o["rest"] = draw.choice((0, 0, 5))
        if sum(o["lengths_k"]) == 0:
            o["lengths_k"] = (5, *o["lengths_k"][1:])
        return VARLEN, Case((sum(lengths) + o["rest"], heads, dim), dtype, dtypes=dtypes, options=o)
    batch, queries = draw.randint(1, 2), length(150)
    o["seqlen_k"] = draw.choice((length(300), queries))
    o["layout"] = draw.choice(("bshd", "bhsd"))
    o["causal_align"] = draw.choice(("bottom_right", "top_left"))
    return SPEC, Case((batch, queries, heads, dim), dtype, dtypes=dtypes, options=o)


def obeys(spec, case, device):
    check_error_law(spec, case, "sim" if is_loaded() else device)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("case", [*LONG, *LONG_VARLEN], ids=str)
def test_error_law_of_long_problems(case, device):
    obeys(SPEC if len(case.shape) == 4 else VARLEN, case, device)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("number", range(72))
def test_error_law_of_drawn_problems(number, device):
    obeys(*drawn(number), device)
