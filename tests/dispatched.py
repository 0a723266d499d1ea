"""Which of the package's ops run in a block, and what torch copies in it."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {"_to_copy", "cat", "clone", "constant_pad_nd", "contiguous", "copy_", "index", "repeat", "stack"}


class Dispatched(TorchDispatchMode):
    """Keeps the op and the positional arguments of each call of one of the package's ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "warpsmith":
            self.calls.append((op, args))
        return op(*args, **(kwargs or {}))

    def of(self, op):
        """The arguments of each call of an op."""
        return [args for called, args in self.calls if called is op]


class Copies(TorchDispatchMode):
    """The names of torch's ops that copy at least so many elements."""

    def __init__(self, least):
        super().__init__()
        self.least, self.found = least, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if name in COPIES and isinstance(result, Tensor) and result.numel() >= self.least:
            self.found.append(name)
        return result
