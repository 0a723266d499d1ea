"""What the tests of context parallel attention share: whole problems, their oracle, and a rank's part of them."""

import math

import torch
import warpsmith
from warpsmith.distributed import context_parallel_attention, shard_sequence
from warpsmith.reference.attention import attention as reference
from warpsmith.reference.attention import attention_varlen as reference_varlen

from tests.dispatched import Beside

TOKENS, HEADS, HEAD_DIM, DIM_V = 96, 8, 16, 24
SEED = torch.tensor([5**25, 7**20])  # of dropout
LENGTHS = (5, 0, 31, 1, 40, 12)  # of documents; 7 tokens follow the last one

# Masks by name; `packed` ones have documents.
MASKS = {
    "all": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (20, 0)},
    "narrow causal window": {"causal": True, "window_size": (3, 0)},
    "window": {"window_size": (10, 7)},
    "far window": {"window_size": (40, 30)},
    "window to the left alone": {"window_size": (9, -1)},
    "window to the right alone": {"window_size": (-1, 9)},
    "softcap": {"causal": True, "softcap": 2.0, "softmax_scale": 0.4},
    "sink": {"causal": True, "sink": True},
    "sink in a window": {"window_size": (10, 7), "sink": True},
    "alibi of each": {"causal": True, "alibi": "each"},
    "alibi": {"causal": True, "alibi": "all"},
    "packed": {"packed": True},
    "packed alibi of each": {"packed": True, "causal": True, "alibi": "each"},
    "packed causal": {"packed": True, "causal": True},
    "packed sink": {"packed": True, "causal": True, "sink": True},
    "packed causal window": {"packed": True, "causal": True, "window_size": (6, 0)},
    "packed window": {"packed": True, "window_size": (6, 9)},
    "packed window to the left alone": {"packed": True, "window_size": (6, -1)},
}
ALIBI = ("alibi", "alibi of each", "packed alibi of each")
REFUSED = {"ring": (*ALIBI, "packed causal window", "packed window", "packed window to the left alone")}


def offsets():
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


class Problem:
    """A whole problem, the same on every rank: inputs, upstream gradients and options."""

    def __init__(self, name, dtype, kv_heads=4, layout="bshd", batch=2, tokens=TOKENS, dropout_p=0.0):
        mask = dict(MASKS[name])
        if dropout_p > 0:
            mask |= {"dropout_p": dropout_p, "seed": SEED}
        self.packed = mask.pop("packed", False)
        self.layout = "thd" if self.packed else layout
        draw = torch.Generator().manual_seed(7)

        def normal(*shape):
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

        lead = () if self.layout == "thd" else (batch,)
        sizes = {"q": (HEADS, HEAD_DIM), "k": (kv_heads, HEAD_DIM), "v": (kv_heads, DIM_V)}
        self.inputs = {name: normal(*lead, tokens, *size) for name, size in sizes.items()}
        self.dout, self.dlse = (
            normal(*lead, tokens, HEADS, DIM_V),
            normal(*lead, HEADS, tokens).to(torch.promote_types(dtype, torch.float32)),
        )
        if self.layout == "bhsd":
            self.inputs = {name: t.transpose(1, 2) for name, t in self.inputs.items()}
            self.dout = self.dout.transpose(1, 2)
        if mask.pop("sink", False):
            self.inputs["sink"] = normal(HEADS)
        if (alibi := mask.pop("alibi", None)) is not None:
            sequences = len(LENGTHS) if self.packed else batch if lead else 1
            of_each = (sequences,) if alibi == "each" else ()
            mask["alibi_slopes"] = torch.rand(*of_each, HEADS, generator=draw) / 4
        self.options = mask
        self.dim = {"bshd": 1, "bhsd": 2, "thd": 0}[self.layout]

    def _results(self, inputs, call, dout, dlse):
        leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
        out, lse = call(**leaves, **self.options, return_lse=True)
        seen = lse > -torch.inf
        loss = (out.double() * dout.double()).sum() + (lse.double() * dlse.double())[seen].sum()
        with Beside(math.inf) as told:
            grads = torch.autograd.grad(loss, list(leaves.values()))
        assert told.found == [], "the host waits"
        return {"out": out.detach(), "lse": lse.detach()} | dict(zip(leaves, grads, strict=True))

    def _whole(self, dense, varlen, inputs, dout, dlse):
        if not self.packed:
            return self._results(inputs, lambda **o: dense(**o, layout=self.layout), dout, dlse)
        cu, longest = offsets(), max(LENGTHS)
        return self._results(
            inputs, lambda **o: varlen(**o, cu_seqlens_q=cu, max_seqlen_q=longest, max_seqlen_k=longest), dout, dlse
        )

    def oracle(self):
        """In float64, from the same rounded inputs."""
        wide = {name: t.double() for name, t in self.inputs.items()}
        return self._whole(reference, reference_varlen, wide, self.dout, self.dlse)

    def one_rank(self):
        return self._whole(warpsmith.attention, warpsmith.attention_varlen, self.inputs, self.dout, self.dlse)

    def sharded(self, mode, sharding, group=None):
        """This rank's tokens of out, lse and of the gradients; its part of the sinks' gradient."""

        def part(t, dim):
            return shard_sequence(t, dim, sharding=sharding, process_group=group)

        inputs = {name: t if name == "sink" else part(t, self.dim) for name, t in self.inputs.items()}
        more = {"cu_seqlens": offsets(), "max_seqlen": max(LENGTHS)} if self.packed else {}

        def call(**options):
            more["layout"] = self.layout
            with Beside(math.inf) as told:
                out = context_parallel_attention(**options, **more, mode=mode, sharding=sharding, process_group=group)
            assert told.found == [], "the host waits"
            return out

        return self._results(inputs, call, part(self.dout, self.dim), part(self.dlse, -1))

    def part_of(self, name, whole, sharding, group=None):
        """A rank's tokens of a whole result."""
        return shard_sequence(whole, -1 if name == "lse" else self.dim, sharding=sharding, process_group=group)
