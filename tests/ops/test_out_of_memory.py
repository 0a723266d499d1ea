"""A failed allocation names op and tensor, in the words that become torch.OutOfMemoryError on a GPU: that of an output,
and that of the copy which columns that are not adjacent need."""

import pytest
import torch
import warpsmith

COUNT = 2**40
TABLE = torch.ones(8, 2)
CALLS = {
    "rms_norm": warpsmith.rms_norm,
    "swiglu": warpsmith.swiglu,
    "rope": lambda x: warpsmith.rope(x[:, None, None].expand(-1, 8, 1, 4), None, TABLE, TABLE),
}


@pytest.mark.parametrize(("step", "what"), [(1, r"\w+"), (2, "a contiguous copy")])
@pytest.mark.parametrize("op", CALLS)
def test_what_does_not_fit_is_named(op, step, what):
    x = torch.ones(1, 4 * step)[:, ::step].expand(COUNT, 4)
    with pytest.raises(RuntimeError, match=rf"^{op}: out of memory: {what} of shape \({COUNT}, .*\) on a CPU tensor"):
        CALLS[op](x)
