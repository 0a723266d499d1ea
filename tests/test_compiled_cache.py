"""torch.compile's caches on disk know ops by name: a graph compiled with another version of the package is not used."""

import torch
import warpsmith
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.compiler import config

MARK = f"[warpsmith {warpsmith.__version__}]"


def step():
    """A forward and backward, compiled as in a new process; how often its graph came from the cache, and how often
    not."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.ones(4, 8, requires_grad=True)
    torch.compile(lambda x: warpsmith.swiglu(x).sum(), backend="inductor", fullgraph=True)(x).backward()
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


def test_a_graph_of_another_version_is_not_taken_from_the_cache(monkeypatch):
    assert MARK in config.cache_key_tag
    with fresh_cache():
        assert step() == (0, 1)
        assert step() == (1, 0)
        monkeypatch.setattr(config, "cache_key_tag", config.cache_key_tag.replace(MARK, "[warpsmith 0.0.0]"))
        assert step() == (0, 1)
    torch._dynamo.reset()
