"""Random nested states for checkpoints: keys of all types, views of shared memory; and a comparison of two."""

import torch
from warpsmith.train.safetensors_file import DTYPES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
# Few, so that paths of different keys meet: "a" above "b" and "a.b", 1 and "1", None and "None", a tuple and its text.
KEYS = ["a", "b", "a.b", "", "1", 1, 0, "0", True, "True", None, "None", -1, (1, "b"), "(1, 'b')", (), "()", 1.5, "1.5"]
KEYS += ["_extra_state", "a.1", "a.1#2", "1#2", "key", "$tensor", "$dict", b"a", "b'a'"]
KEYS += ["__metadata__", "__metadata__#2"]
PLAIN = [None, True, 0, 3, -1.5, float("inf"), "", "word", b"\x00", (), []]

VIEWS = {
    "whole": lambda t, r: t,
    "parameter": lambda t, r: torch.nn.Parameter(t.detach(), requires_grad=False),
    "slice": lambda t, r: t[r.randint(0, 1) :] if t.dim() else t,
    "step": lambda t, r: t[:: r.randint(1, 2)] if t.dim() else t,
    "transposed": lambda t, r: t.movedim(0, -1) if t.dim() else t,
    "channels last": lambda t, r: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "expanded": lambda t, r: t.expand(r.randint(0, 3), *t.shape),
    "element": lambda t, r: t.flatten()[r.randrange(t.numel())] if t.numel() else t,
    "none": lambda t, r: t[:0] if t.dim() else t,
    "conjugate": lambda t, r: t.conj(),
    "imaginary part of the conjugate": lambda t, r: t.conj().imag if t.is_complex() else t,
    "negative": lambda t, r: torch._neg_view(t) if t.dtype in FLOATS else t,
}


def random_tensor(rng, pool):
    """A new tensor, one of the pool again, or a view of one of the pool."""
    if not pool or rng.random() < 0.3:
        shape = [rng.randint(0, 3) if rng.random() < 0.2 else rng.randint(1, 3) for _ in range(rng.randint(0, 4))]
        values = torch.tensor([rng.randint(0, 1) if rng.random() < 0.2 else rng.uniform(-8, 8) for _ in range(5)])
        count = torch.Size(shape).numel()
        pool.append(values.repeat(count // 5 + 1)[:count].abs().to(rng.choice(list(DTYPES.values()))).view(shape))
        return pool[-1]
    tensor = rng.choice(pool)
    for _ in range(rng.randint(0, 2)):
        tensor = rng.choice(list(VIEWS.values()))(tensor, rng)
    if tensor.numel() < 200:
        pool.append(tensor)
    return tensor


def random_state(rng, leaves, pool=None, depth=0):
    """A state with about that many leaves."""
    pool = [] if pool is None else pool
    if leaves <= 1 or depth == 6:
        return random_tensor(rng, pool) if rng.random() < 0.8 else rng.choice(PLAIN)
    parts, left = [], leaves
    while left > 0:
        parts.append(rng.randint(1, max(1, left - 1)))
        left -= parts[-1]
    values = [random_state(rng, part, pool, depth + 1) for part in parts]
    kind = rng.choice([list, tuple, dict, dict, dict])
    return dict(zip(rng.sample(KEYS, len(KEYS)), values, strict=False)) if kind is dict else kind(values)


class Stateful(torch.nn.Module):
    """A module with buffers and submodules, and a nested state beside them, which it keeps as it gets it."""

    def __init__(self, rng, pool, depth=0):
        super().__init__()
        self.held = [random_state(rng, rng.randint(1, 6), pool)]  # in a list: a Parameter would be registered
        for name in rng.sample(["a", "b", "x"], 2):
            self.register_buffer(name, random_tensor(rng, pool).clone())
        if depth < 2:
            for name in rng.sample(["c", "d", "_extra_state"], 2):
                self.add_module(name, Stateful(rng, pool, depth + 1))

    def get_extra_state(self):
        return self.held[0]

    def set_extra_state(self, state):
        self.held = [state]


def as_bits(tensor):
    """The values of a tensor as bytes: torch.equal takes no 8-bit floats and finds NaN unequal."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return plain.copy_(tensor.detach().flatten()).view(torch.uint8)


def differences(a, b, path=""):
    """Where two states differ in value, type or order of keys."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return [path]
        return [] if torch.equal(as_bits(a), as_bits(b)) else [path]
    if type(a) is not type(b):
        return [path]
    if isinstance(a, dict):
        if [(type(k), k) for k in a] != [(type(k), k) for k in b]:
            return [f"{path}: keys"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}[{k!r}]")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: length"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [path]


def tensors_of(state):
    """The tensors of a state in its order."""
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]


def loose_ties(a, b):
    """Pairs of places that hold one tensor in the one state and not in the other, or memory that is shared anew."""
    pairs, found = list(zip(tensors_of(a), tensors_of(b), strict=True)), []
    for i, (x, loaded) in enumerate(pairs):
        for j, (y, other) in enumerate(pairs[:i]):
            if x is y and x.numel() and loaded is not other:
                found.append((j, i, "lost"))
            if loaded is other and (x.data_ptr() != y.data_ptr() or x.is_neg() != y.is_neg()):
                found.append((j, i, "made"))
            if loaded is not other and loaded.numel() and other.numel() and loaded.data_ptr() == other.data_ptr():
                found.append((j, i, "shared"))
    return found
