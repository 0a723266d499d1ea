"""How faults are planted and caught."""

from dataclasses import replace

import pytest
from toy_op import SPEC


def caught(check, *arguments, match):
    with pytest.raises((AssertionError, RuntimeError), match=match):
        check(*arguments)


def with_op(op, **changes):
    return replace(SPEC, op=op, **changes)
