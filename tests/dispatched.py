"""Which of the package's ops run in a block."""

from torch.utils._python_dispatch import TorchDispatchMode


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
