"""The forwards of blocks with a norm, the sum and the activation behind it joined: torch.fx reads them."""

from __future__ import annotations

import copy
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from warpsmith._core.modules import is_watched, stock
from warpsmith.integrations._check import in_float64
from warpsmith.integrations._modules import Forward, by_name

_ADDS = {operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__iadd__"}
_IN_PLACE = {operator.iadd, "add_", "__iadd__"}
_ACTS = {
    **dict.fromkeys((nn.ReLU, nn.functional.relu, torch.relu, torch.relu_, "relu", "relu_"), "relu"),
    **dict.fromkeys((nn.SiLU, nn.functional.silu), "silu"),
}
_PLAIN = (bool, int, float, str, tuple, type(None))
_SIZES = (("in_channels", 8), ("num_features", 8), ("num_channels", 8), ("in_features", 0))

Shapes = list[tuple[int, ...]] | None


class Fused(NamedTuple):
    """What may stand behind a norm in one op with it."""

    residual: bool
    act: str


class Unread(Exception):
    """Why a forward cannot be read."""


def _modes() -> tuple[Any, ...]:
    """What a call depends on beside its arguments, and a graph does not hold."""
    autocast = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


class _Tracer(fx.Tracer):
    def __init__(self, inlined: set[nn.Module]) -> None:
        super().__init__()
        self._inlined, self._began = inlined, _modes()

    def create_node(self, *given: Any, **named: Any) -> fx.Node:
        if _modes() != self._began:
            raise Unread("its forward turns gradients or autocast on or off")
        return super().create_node(*given, **named)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._inlined


def _random_states() -> tuple[str, ...]:
    numpy = sys.modules.get("numpy")
    drawn = () if numpy is None else (repr(numpy.random.get_state()[1:3]), numpy.random.get_state()[1].tobytes().hex())
    return repr(random.getstate()), torch.get_rng_state().numpy().tobytes().hex(), *drawn


def _needed(forward: Forward) -> list[str]:
    """The arguments that a forward must get."""
    given = [*inspect.signature(forward).parameters.values()][1:]
    needed = [p for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(p.kind is p.KEYWORD_ONLY for p in needed):
        raise Unread("its forward needs keywords")
    return [p.name for p in needed]


def _trace(module: Any, inlined: set[nn.Module], training: bool) -> fx.Graph:
    """The calls of a module's forward with the arguments that it needs, all its modules training or evaluating."""
    cls = stock(type(module))
    names = ", ".join(_needed(cls.forward))
    # fx reads the names of arguments from the code: *args and those with defaults must not be among them.
    forward = eval(f"lambda self, {names}: forward(self, {names})", {"forward": cls.forward})
    shell = object.__new__(type(cls)(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__}))
    # Containers too: what a forward writes to them must be seen, and not last.
    attributes = {n: copy.copy(v) if isinstance(v, (list, dict, set)) else v for n, v in vars(module).items()}
    for name in ("_parameters", "_buffers", "_modules"):
        attributes[name] = vars(module)[name]
    vars(shell).update(attributes)
    before = {n: copy.copy(v) if isinstance(v, (list, dict, set)) else v for n, v in attributes.items()}
    modes, state = [(m, m.training) for m in (*module.modules(), shell)], _random_states()
    try:
        for m, _ in modes:
            m.training = training
        graph = _Tracer(inlined).trace(shell)
    except Exception as error:
        raise Unread(f"torch.fx cannot follow its forward: {str(error).splitlines()[0]}") from error
    finally:
        for m, mode in modes:
            m.training = mode
    if state != _random_states():
        raise Unread("its forward draws random numbers")
    after = vars(shell)
    if after.keys() != before.keys() or any(not _same(after[n], v) for n, v in before.items() if n != "training"):
        raise Unread("its forward changes an attribute")
    return graph


def _same(value: Any, before: Any) -> bool:
    """Whether an attribute is what it was: the same object, or a container of the same objects."""
    if value is before or type(value) is not type(before):
        return value is before
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(value[k] is before[k] for k in value)
    if isinstance(value, list):
        return len(value) == len(before) and all(map(operator.is_, value, before))
    return isinstance(value, set) and value == before


def _of(node: fx.Node, named: dict[str, nn.Module]) -> Any:
    """What a node calls: a module's class, a function, a method's name."""
    return stock(type(named[str(node.target)])) if node.op == "call_module" else node.target


def _then(node: fx.Node) -> fx.Node | None:
    """The only node that reads another."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(add: fx.Node | None, node: fx.Node) -> fx.Node | None:
    """What a sum adds to a node."""
    if add is None or add.op not in ("call_function", "call_method") or add.target not in _ADDS:
        return None
    if len(add.args) != 2 or add.kwargs or add.target in _IN_PLACE and add.args[0] is not node:
        return None
    other = add.args[1 if add.args[0] is node else 0]
    return other if isinstance(other, fx.Node) and other is not node else None


def _require_calls(module: nn.Module, graphs: Sequence[fx.Graph], inlined: set[nn.Module]) -> None:
    """Refuses a layer that is not called: what a forward reads of it, as `self.drop.p`, would be taken for given."""
    called = {str(n.target) for graph in graphs for n in graph.nodes if n.op in ("call_module", "get_attr")}
    for name, layer in module.named_modules():
        begun = any(c == name or c.startswith(f"{name}.") or name.startswith(f"{c}.") for c in called)
        if (
            name
            and layer not in inlined
            and not begun
            and not isinstance(layer, nn.Identity)
            and vars(layer)["_modules"] == {}
        ):
            raise Unread(f"it does not call its layer {name}")


class Reader:
    """Reads the modules of a model. ``norms``: what may stand behind each kind of norm in one op with it."""

    def __init__(self, norms: dict[type, Fused], join: Callable[..., Tensor], fold: Callable[..., Tensor] | None):
        self._norms, self._join, self._fold = norms, join, fold
        self._tails: dict[nn.Module, bool] = {}

    def is_norm(self, module: Any) -> bool:
        return stock(type(module)) in self._norms

    def _ends_in_norm(self, module: nn.Module) -> bool:
        """Whether the last thing that a module calls is a norm."""
        if module not in self._tails:
            self._tails[module] = False
            self._tails[module] = self._has_norm(module) and self._last_is_norm(module)
        return self._tails[module]

    def _last_is_norm(self, module: nn.Module) -> bool:
        try:
            graph = _trace(module, set(), True)
        except Unread:
            return False
        named, last = dict(module.named_modules()), next(iter(reversed(graph.nodes))).args[0]
        while isinstance(last, fx.Node) and last.op == "call_module":
            called = named[str(last.target)]
            if type(called) is not nn.Identity:
                return self.is_norm(called) or self._ends_in_norm(called)
            last = last.args[0]
        return False

    def _has_norm(self, module: nn.Module) -> bool:
        return any(self.is_norm(c) or self._ends_in_norm(c) for c in module.children())

    def _inlined(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if self._ends_in_norm(child):
                yield child
                yield from self._inlined(child)

    def read(self, module: nn.Module) -> Joined | None:
        """A module's joined forward; None: it joins nothing. Raises Unread."""
        if not self._has_norm(module):
            return None
        inlined, named = set(self._inlined(module)), dict(module.named_modules())
        graphs = [_trace(module, inlined, training) for training in (False, True)]
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            others = [_trace(module, inlined, training) for training in (False, True)]
        if any(a.python_code("self").src != b.python_code("self").src for a, b in zip(graphs, others, strict=True)):
            raise Unread("its forward asks whether gradients are on")
        _require_calls(module, graphs, inlined)
        shapes = _shapes(graphs[1], named)
        if 0 in [self._joined(graph, named) for graph in graphs]:
            return None
        return Joined(
            module, graphs, shapes, [n for n, m in named.items() if m in inlined or type(m) is nn.Identity and n]
        )

    def _joined(self, graph: fx.Graph, named: dict[str, nn.Module]) -> int:
        """Joins what can be; how often."""
        for node in [n for n in graph.nodes if n.op == "call_module" and type(named[str(n.target)]) is nn.Identity]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        norms = [n for n in graph.nodes if n.op == "call_module" and self.is_norm(named[str(n.target)])]
        return sum(self._join_behind(graph, node, named) for node in norms)

    def _join_behind(self, graph: fx.Graph, norm: fx.Node, named: dict[str, nn.Module]) -> bool:
        if len(norm.args) != 1 or norm.kwargs:
            return False
        fused, x = self._norms[_of(norm, named)], cast(fx.Node, norm.args[0])
        behind: list[fx.Node] = [norm]
        act: str | None = None
        conv: fx.Node | None = None
        residual = _other(_then(norm), norm) if fused.residual and len(x.users) == 1 else None
        if residual is not None:
            behind.append(_then(norm))  # type: ignore[arg-type]
        last = _then(behind[-1])
        if last is not None and last.op != "output" and _ACTS.get(_of(last, named)) == fused.act:
            behind.append(last)
            act = str(last.target) if last.op == "call_module" else fused.act
        if self._fold is not None and x.op == "call_module" and _of(x, named) is nn.Conv2d and len(x.users) == 1:
            conv = x
        if len(behind) == 1 and conv is None:
            return False
        with graph.inserting_before(behind[-1 if residual is not None else 0]):
            module = graph.create_node("get_attr", str(norm.target))
            activation: Any = graph.create_node("get_attr", act) if act in named else act
            if conv is None:
                new = graph.call_function(self._join, (module, x, residual, activation))
            else:
                conv_attr = graph.create_node("get_attr", str(conv.target))
                new = graph.call_function(cast(Any, self._fold), (conv_attr, module, *conv.args, residual, activation))
        behind[-1].replace_all_uses_with(new)
        for node in reversed([*([conv] if conv is not None else []), *behind]):
            graph.erase_node(node)
        return True


_OF_ALL = frozenset(vars(nn.Module()))  # attributes that every module has


def _plain(module: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if isinstance(v, _PLAIN) and n not in _OF_ALL}


class _Facts(NamedTuple):
    """What a graph took for given of a module."""

    cls: type
    children: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]


def _facts(module: nn.Module) -> _Facts:
    plain = _plain(module)
    children = tuple(n for n, m in module._modules.items() if m is not None)
    return _Facts(stock(type(module)), children, tuple(plain), tuple(plain.values()))


def _hold(facts: _Facts, module: Any) -> bool:
    return (
        stock(type(module)) is facts.cls
        and tuple(n for n, m in module._modules.items() if m is not None) == facts.children
        and _plain(module) == dict(zip(facts.names, facts.values, strict=True))
    )


def _function(graph: fx.Graph) -> Forward:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<warpsmith.integrations.vision>", "exec"), names)
    return names["forward"]


class Joined:
    """A forward that stands in the place of a module's where nothing has changed that its graph took for given."""

    def __init__(self, module: nn.Module, graphs: list[fx.Graph], shapes: Shapes, inside: list[str]) -> None:
        self._codes = [_function(graph) for graph in graphs]  # of evaluation and training
        self._facts = _facts(module)
        self._inside = [(name.split("."), _facts(module.get_submodule(name))) for name in inside]
        self.key = (repr(self._facts), repr(self._inside), *(graph.python_code("self").src for graph in graphs))
        self._shapes = shapes

    def _applies(self, module: Any) -> bool:
        if not _hold(self._facts, module):
            return False
        for path, facts in self._inside:
            inner = module
            for name in path:
                inner = inner._modules.get(name)
                if inner is None:
                    return False
            if inner.training != module.training or is_watched(inner) or "forward" in vars(inner):
                return False
            if not _hold(facts, inner):
                return False
        return True

    def make(self, old: Forward) -> Forward:
        given, names = by_name(old), _needed(old)

        def forward(self_: Any, *arguments: Any, **options: Any) -> Any:
            if len(arguments) + len(options) == len(names) and self._applies(self_):
                values = arguments
                if options:
                    named = given(arguments, options)
                    values = tuple(named.get(n) for n in names)
                if all(isinstance(t, Tensor) for t in values):
                    return self._codes[self_.training](self_, *values)
            return old(self_, *arguments, **options)

        return forward

    def why_not(self, module: Any, ours: Any) -> str | None:
        """Why it must not stand in the place of a module's: it runs beside that on random values, in float64."""
        if self._shapes is None:
            return "its layers do not tell what it takes"
        copied = in_float64(module).cpu().to(memory_format=torch.channels_last)
        torch.manual_seed(0)
        given = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in self._shapes]
        given = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in given]
        for training in (True, False):
            found: list[list[Tensor]] = []
            for cls in (type(copied), ours):
                one = copy.deepcopy(copied).train(training)
                one.__class__ = cls
                torch.manual_seed(0)
                try:
                    out = one(*(t.clone() for t in given))
                except Exception as error:
                    return f"on random values it raises {type(error).__name__}: {error}"
                leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
                found.append([t.detach().double() for t in (*leaves, *one.buffers())])
            if len(found[0]) != len(found[1]) or not all(map(_close, *found)):
                return "on random values it computes something else"
        return None


def _shapes(graph: fx.Graph, named: dict[str, nn.Module]) -> Shapes:
    """Shapes that a graph takes, told by the layers that read its arguments; None: they do not tell."""
    found: list[tuple[int, ...]] = []
    for placeholder in (n for n in graph.nodes if n.op == "placeholder"):
        waiting, seen = [placeholder], 0
        while waiting and seen < 64:
            node, seen = waiting.pop(0), seen + 1
            inside = named[str(node.target)].modules() if node.op == "call_module" else ()
            sizes = ((getattr(m, n), s) for m in inside for n, s in _SIZES if hasattr(m, n))
            size, side = next(sizes, (None, 0))
            if isinstance(size, int):
                found.append((4, size, side, side) if side else (4, size))
                break
            waiting += node.users
        else:
            return None
    return found


def _close(ours: Tensor, theirs: Tensor) -> bool:
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * (1 + largest))
