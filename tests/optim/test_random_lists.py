"""Random lists of parameters: a step over the list leaves each tensor the bits that a step over it alone leaves."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from warpsmith.testing import bitwise_equal

from .adamw_runs import ON_SIM
from .optimizers import LAMB
from .test_kernels import ALL, EIGHT
from .test_layouts import LAYOUTS

CASES = 500 if ON_SIM else 2000
# The random bits of bf16_sr follow an element's place in the whole list.
KINDS = [kind for kind in (*ALL, *EIGHT) if kind[1] != "bf16_sr"]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]


def stepped(options, precision, tensors, gradients, steps):
    """Parameters and states of a list after so many steps."""
    params = [
        nn.Parameter(t.clone()) if layout == "plain" else nn.Parameter(LAYOUTS[layout](t)) for t, layout in tensors
    ]
    optimizer = options.ours(params, lr=1e-2, **({} if precision is None else {"precision": precision}))
    for step in range(steps):
        for p, (g, layout) in zip(params, gradients, strict=True):
            p.grad_dtype = None
            p.grad = LAYOUTS[layout](g * (step + 1))
        optimizer.step()
    states = ({name: s for name, s in optimizer.state.get(p, {}).items() if name != "step"} for p in params)
    return list(zip(params, states, strict=True))


@pytest.mark.full
def test_a_list_steps_as_its_tensors_do_alone():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    sizes = st.one_of(st.sampled_from([0, 1, 3, 255, 256, 257, 1023, 1024, 1025, 2049]), st.integers(0, 3000))
    layouts = st.sampled_from(["plain", "plain", "plain", "misaligned", "gaps", "negated"])
    one = st.tuples(sizes, layouts, layouts, st.sampled_from(GRADIENTS))

    @hypothesis.settings(
        max_examples=CASES, deadline=None, database=None, derandomize=True,
        suppress_health_check=[*hypothesis.HealthCheck],
    )  # fmt: skip
    @hypothesis.given(st.sampled_from(KINDS), st.lists(one, min_size=1, max_size=6), st.integers(1, 2), st.data())
    def holds(kind, entries, steps, data):
        options, precision, dtype = kind
        draw = torch.Generator().manual_seed(sum(size for size, *_ in entries))
        tensors = [(torch.randn(size, generator=draw).to(dtype), layout) for size, layout, *_ in entries]
        gradients = [(torch.randn(size, generator=draw).to(grad), layout) for size, _, layout, grad in entries]
        whole = stepped(options, precision, tensors, gradients, steps)
        one = data.draw(st.integers(0, len(entries) - 1))
        alone = stepped(options, precision, tensors[one : one + 1], gradients[one : one + 1], steps)
        for a, b in zip(tensors_of(whole[one]), tensors_of(alone[0]), strict=True):
            if options is LAMB:  # adds up squares in another order
                assert_close(a, b, rtol=1e-6, atol=1e-7)
            else:
                assert bitwise_equal(a, b)

    holds()


def tensors_of(found):
    p, states = found
    return [t.detach().resolve_neg() for t in (p, *states.values()) if isinstance(t, torch.Tensor)]
