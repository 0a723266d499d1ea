"""The rows of the families' lists of ops, as the compiled package has them, for whatever is generated from them.

python tools/families.py            # every op with its family and the arguments of its row
"""

import itertools
from typing import NamedTuple

from warpsmith import _C

# The order of tables; families that are not named follow by name.
ORDER = (
    *"norm batch_norm group_norm max_pool conv2d rope attention activation".split(),
    *"linear cross_entropy linear_loss quantize optim".split(),
)


class OpRow(NamedTuple):
    """name: the op's. family: its folder of kernels. body: the list's name, ``GATED`` of ``WARPSMITH_GATED_OPS``,
    or COMPOSED. arguments: what else stands in its row."""

    name: str
    family: str
    body: str
    arguments: tuple[str, ...]


# In Python, of torch's ops and those of other families: no list in C++ has them.
_COMPOSED = (OpRow("conv2d", "conv2d", "COMPOSED", ()),)


def _place(family: str) -> int:
    return ORDER.index(family) if family in ORDER else len(ORDER)


def rows(*bodies: str) -> tuple[OpRow, ...]:
    """The ops of these bodies, without any all ops, family after family."""
    every = (*itertools.starmap(OpRow, _C.ops()), *_COMPOSED)
    found = [row for row in every if row.body in bodies or not bodies]
    return tuple(sorted(found, key=lambda row: (_place(row.family), row.family)))


def forms(*bodies: str) -> dict[str, tuple[OpRow, dict[str, str]]]:
    """{name of a test: (a row, the option that selects one function of it)}: two of a row with the flag ``tanh``."""
    found = {}
    for row in rows(*bodies):
        found[row.name] = (row, {})
        if "tanh" in row.arguments:
            found[row.name + ", tanh"] = (row, {"approximate": "tanh"})
    return found


def optimizers() -> tuple[str, ...]:
    """The rows of the lists of optimizers; docs/ops/optim.md has a section for each."""
    return tuple(_C.OPTIMIZERS)


if __name__ == "__main__":
    for row in rows():
        print(f"{row.name:28}{row.family:16}{' '.join(row.arguments)}")
