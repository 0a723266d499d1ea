"""The rows of the families' lists of ops, csrc/kernels/<family>/<family>_ops.h, for whatever is generated from them.

python tools/families.py            # every op with its family and the arguments of its row
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The order of tables; families that are not named follow by name.
ORDER = ("norm", "rope", "attention", "activation", "cross_entropy", "linear_loss", "optim")


@dataclass(frozen=True)
class OpRow:
    """name: the op's. family: its folder of kernels. body: the list's name, ``GATED`` of ``WARPSMITH_GATED_OPS``.
    arguments: what else stands in its row."""

    name: str
    family: str
    body: str
    arguments: tuple[str, ...]


def rows_in(text: str, family: str) -> list[OpRow]:
    """The rows of one list file."""
    found = []
    for body, block in re.findall(r"^#define WARPSMITH_(\w+)_OPS\(ROW\)((?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE):
        for name, rest in re.findall(r"\bROW\((\w+)((?:,\s*\w+)*)\)", block):
            found.append(OpRow(name, family, body, tuple(re.findall(r"\w+", rest))))
    return found


def rows(root: Path = ROOT) -> tuple[OpRow, ...]:
    """All ops, family after family."""
    files = {path.parent.name: path for path in (root / "csrc/kernels").glob("*/*_ops.h")}
    families = [f for f in ORDER if f in files] + sorted(f for f in files if f not in ORDER)
    return tuple(row for family in families for row in rows_in(files[family].read_text(), family))


def optimizers(root: Path = ROOT) -> tuple[str, ...]:
    """The rows of the lists of optimizers, whose pages are docs/optim/<row>.md, or that of an op of the same name."""
    text = (root / "csrc/kernels/optim/optim_ops.h").read_text()
    lists = r"^#define WARPSMITH_(?:LAYERWISE_)?OPTIMIZERS\(ROW\)((?:[^\n]*\\\n)*[^\n]*)"
    blocks = re.findall(lists, text, re.MULTILINE)
    assert blocks
    return tuple(name for block in blocks for name in re.findall(r"\bROW\((\w+),", block))


def family_of(op: str, root: Path = ROOT) -> str:
    """The family of an op."""
    return next(row.family for row in rows(root) if row.name == op)


if __name__ == "__main__":
    for row in rows():
        print(f"{row.name:28}{row.family:16}{' '.join(row.arguments)}")
