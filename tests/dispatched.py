"""Which of the package's ops run in a block, what torch copies in it, and what it makes without being told where."""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = {"_to_copy", "cat", "clone", "constant_pad_nd", "contiguous", "copy_", "index", "repeat", "stack"}


class Dispatched(TorchDispatchMode):
    """Keeps the op and the positional arguments of each call of one of the package's ops, and the tensors made."""

    def __init__(self):
        super().__init__()
        self.calls, self.made = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op.namespace == "warpsmith":
            self.calls.append((op, args))
            self.made += [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.numel()]
        return result

    @property
    def names(self):
        return [op._schema.name.removeprefix("warpsmith::") for op, _ in self.calls]

    def has(self, op):
        """Whether one of an op's forms ran."""
        return any(f"{name}_".startswith(f"{op}_") for name in self.names)

    def of(self, op):
        """The arguments of each call of an op."""
        return [args for called, args in self.calls if called is op]


class Beside(TorchDispatchMode):
    """The names of torch's ops that make or write at least so many elements, or tell the host a number."""

    def __init__(self, least):
        super().__init__()
        self.least, self.found = least, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        fresh = not op.is_view or op is torch.ops.aten.lift_fresh.default  # of torch.tensor
        if op.namespace != "warpsmith" and fresh:
            made = tree_leaves(result)
            large = any(isinstance(t, Tensor) and t.numel() >= self.least for t in made)
            told = isinstance(result, bool | int | float) and any(isinstance(t, Tensor) for t in args)
            if large or told:
                self.found.append(op.overloadpacket.__name__)
        return result


class Copies(Beside):
    """Those that copy at least so many elements."""

    def __torch_dispatch__(self, *call, **more):
        result = super().__torch_dispatch__(*call, **more)
        self.found = [name for name in self.found if name in COPIES]
        return result


class Made(TorchDispatchMode):
    """How many tensors of so many elements are made in memory of their own."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        def places(tree):
            tensors = (t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.numel() == self.elements)
            return [t.untyped_storage().data_ptr() for t in tensors]

        result = op(*args, **(kwargs or {}))
        self.count += len(set(places(result)) - set(places((args, kwargs))))
        return result


@contextmanager
def other_defaults():
    """What is made without a device has no memory, and what is made without a dtype is in float16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
