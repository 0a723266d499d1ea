"""torch.compile's caches on disk know ops by name: a graph compiled with another version of the package is not used."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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


def test_a_graph_of_another_version_is_not_taken_from_the_cache():
    assert MARK in config.cache_key_tag
    with fresh_cache():
        assert step() == (0, 1)
        assert step() == (1, 0)
        # Not monkeypatch of pytest 9.2: it ends by deleting the name, after which nothing compiles in this process.
        with config.patch(cache_key_tag=config.cache_key_tag.replace(MARK, "[warpsmith 0.0.0]")):
            assert step() == (0, 1)
    torch._dynamo.reset()


def test_every_thread_compiles_under_the_mark():
    with ThreadPoolExecutor(1) as pool:
        tag = pool.submit(lambda: config.cache_key_tag).result()
    assert tag.count(MARK) == config.cache_key_tag.count(MARK) == 1


def test_a_tag_of_the_users_stays():
    asked = [sys.executable, "-c", "import warpsmith; from torch.compiler import config; print(config.cache_key_tag)"]
    env = {**os.environ, "TORCH_COMPILE_CACHE_KEY_TAG": "mine"}
    assert subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout.strip() == "mine" + MARK
