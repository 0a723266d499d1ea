"""Whether what ``patch`` puts in computes what was there: each formula runs beside the module's own on random rows."""

import copy
import inspect
import math
import types
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith._core.modules import CALL_HOOKS, GLOBAL_HOOKS, stock
from warpsmith.integrations._modules import Forward, StandIn
from warpsmith.integrations._torch_parts import pair_of

_ROWS, _VOCABULARY = 8, 64
_STEPS = 2  # of rounding, as in the error law
Candidates = dict[nn.Module, type]


class _Experts(nn.Module):
    """In the place of experts, which stay as they are and may be large."""

    def forward(self, hidden_states: Tensor, *_: Any) -> Tensor:
        return hidden_states / 2


class _Outputs:
    """What the body of a model returns: the last hidden states, and nothing else."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Small(StandIn):
    """A config with few words."""

    vocab_size, output_router_logits = _VOCABULARY, False


class _Sample(StandIn):
    """A model with a head, in training, whose body gives rows and whose head has few words of random weights."""

    training, vocab_size = True, _VOCABULARY

    def __init__(self, model: Any, name: str, rows: Tensor) -> None:
        super().__init__(model)
        head = nn.Linear(rows.shape[-1], _VOCABULARY, bias=getattr(model, name).bias is not None)
        setattr(self, name, head.to(rows.dtype))
        setattr(self, model.base_model_prefix, lambda *_, **__: _Outputs(rows))
        self.config = _Small(model.config)

    def head(self, rows: Tensor) -> Tensor:
        return rows


def in_float64(module: nn.Module) -> Any:
    """A copy in float64 without hooks, with eager attention and without its experts."""
    experts = [m for m in module.modules() if type(m).__name__.endswith("Experts")]
    memo: dict[int, Any] = {id(m): _Experts() for m in experts}
    inside = {p for m in experts for p in m.parameters()}
    for p in module.parameters():
        if p.is_floating_point() and p not in inside:
            memo[id(p)] = nn.Parameter(p.detach().to(torch.float64, copy=True))
    for m in module.modules():
        memo.update((id(getattr(m, hooks)), OrderedDict()) for hooks in CALL_HOOKS)
    copied: Any = copy.deepcopy(module, memo).double().requires_grad_(False)
    for m in copied.modules():
        if hasattr(m, "config"):
            m.config._attn_implementation = "eager"
    return copied


def _sample_of(module: Any) -> Any:
    """What is compared of a module: of a linear layer few outputs, of a sequence a linear layer and its activation."""
    if stock(type(module)) is nn.Linear:
        few = min(module.out_features, _VOCABULARY)
        sample = nn.Linear(module.in_features, few, module.bias is not None, device="meta")
        for name in ("weight", "bias"):
            if (t := getattr(module, name)) is not None:
                setattr(sample, name, nn.Parameter(t.detach()[:few], requires_grad=False))
        return sample
    pair = pair_of(module) if isinstance(module, nn.Sequential) else None
    return module if pair is None else nn.Sequential(_sample_of(pair[0]), pair[1])


def _width(module: Any) -> tuple[int, ...]:
    """The shape of what a module reads of each token."""
    if hasattr(module, "normalized_shape"):
        return module.normalized_shape
    if isinstance(module, nn.CrossEntropyLoss):
        return (_VOCABULARY if module.weight is None else len(module.weight),)
    linear = next((m for m in module.modules() if hasattr(m, "in_features")), None)
    if linear is not None:
        return (linear.in_features,)
    weight = next(module.parameters())
    return tuple(weight.shape) if next(module.children(), None) is None else (len(weight),)


def _arguments(module: Any, forward: Forward, rotary: Any) -> tuple[Tensor, dict[str, Any]]:
    """The arguments of a module's forward, in float32: random rows, and by name tables of rotation and a sum's rows."""
    names = inspect.signature(forward).parameters
    device = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    rows = torch.randn(1, _ROWS, *_width(module), device=device)
    given: dict[str, Any] = {"attention_mask": None} if "attention_mask" in names else {}
    if "target" in names:
        return rows[0], {"target": torch.randint(rows.shape[-1], (_ROWS,), device=device)}
    if "query" in names:
        sizes = {"key": module.kdim, "value": module.vdim}
        of_keys = {name: torch.randn(_ROWS, size, device=device) for name, size in sizes.items()}
        return rows[0], {**of_keys, "need_weights": False}
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return rows[0], {"memory": torch.randn_like(rows[0])} if "memory" in names else {}
    if "input_tensor" in names:
        given["input_tensor"] = torch.randn(1, _ROWS, module.dense.out_features, device=device)
    if "position_embeddings" in names:
        by_layer = "layer_type" in inspect.signature(rotary.forward).parameters
        options = {"layer_type": rotary.config.layer_types[0]} if by_layer else {}
        positions = torch.arange(_ROWS, device=device)[None]
        given["position_embeddings"] = type(rotary).forward(rotary, rows, positions, **options)  # without its hooks
    return rows, given


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(v, dtype) for v in value)
    return value.to(dtype, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(forward: Forward, module: Any, given: tuple[Tensor, dict[str, Any]], dtype: torch.dtype) -> Tensor:
    """The first output, with the same random numbers each time."""
    torch.manual_seed(0)
    rows, options = given
    out = forward(module, _cast(rows, dtype), **{name: _cast(value, dtype) for name, value in options.items()})
    return (out[0] if isinstance(out, tuple) else out).double()


def _train(forward: Forward, module: nn.Module, given: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, int]:
    """The first output in training, and the bytes a row that its graph keeps beside parameters."""
    ours, kept = {p.untyped_storage().data_ptr() for p in module.parameters()}, dict[int, Tensor]()

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t  # held, so that no other gets its address
        return t

    module.train().requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = _run(forward, module, (given[0].detach().requires_grad_(), given[1]), torch.float32)
    module.requires_grad_(False)
    return out.detach(), sum(t.untyped_storage().nbytes() for a, t in kept.items() if a not in ours) // _ROWS


def _steps(found: Tensor, theirs: Tensor, exact: Tensor) -> float:
    """How many times too wrong a result in float32 is by the error law; up to 1 is right."""
    if found.shape != exact.shape or not found.isfinite().all():
        return math.inf
    step = math.ldexp(torch.finfo(torch.float32).eps, math.frexp(float(exact.abs().max()))[1] - 2)
    error, base = (float((t - exact).abs().max()) for t in (found, theirs))
    return error / (2 * max(base, 2 * step) + _STEPS * step)


def _replaced(copied: nn.Module, module: nn.Module, classes: Candidates) -> nn.Module:
    for name, m in module.named_modules():
        if m in classes:
            copied.get_submodule(name).__class__ = classes[m]
    return copied


def _times_too_wrong(whole: nn.Module, classes: Candidates, rotary: nn.Module | None) -> tuple[float, int]:
    """Also the bytes a row that are kept less. Compares in training too, to the digits that sums in another order
    leave, so that no dropout is lost."""
    theirs, ours = stock(type(whole)).forward, classes[whole].forward  # type: ignore[attr-defined]
    module = _sample_of(whole)
    wide, given = in_float64(module), _arguments(module, theirs, rotary)
    exact = _run(theirs, wide.eval(), given, torch.float64)
    narrow = wide.float()
    expected = _run(theirs, narrow.eval(), given, torch.float32)
    trained, before = _train(theirs, narrow, given)
    _replaced(narrow, module, classes)
    times = _steps(_run(ours, narrow.eval(), given, torch.float32), expected, exact)
    found, kept = _train(ours, narrow, given)
    same = torch.allclose(found, trained, rtol=1e-3, atol=1e-3 * float(trained.abs().max()))
    return times if same else math.inf, before - kept


def _head_times_too_wrong(model: Any, ours: Forward) -> float:
    name: str = ours.head  # type: ignore[attr-defined]
    sample = _Sample(model, name, torch.randn(1, _ROWS, getattr(model, name).in_features))
    given = dict.fromkeys(("input_ids", "labels"), torch.randint(_VOCABULARY, (1, _ROWS)))
    theirs = stock(type(model)).forward
    expected, found = (float(forward(sample, **given, return_dict=True).loss) for forward in (theirs, ours))
    return abs(found / expected - 1) * 2**17


def _key(module: nn.Module) -> tuple[Any, ...]:
    """A class and what its modules may differ in."""
    kinds = (int, float, str, bool, type(None), types.FunctionType, types.BuiltinFunctionType)
    own = {n: v for n, v in vars(module).items() if isinstance(v, kinds) and n not in ("layer_idx", "training")}
    pair = pair_of(module) if isinstance(module, nn.Sequential) else None
    return type(module), tuple(sorted(own.items())), repr(pair)


def _unreadable(module: nn.Module, sharded: bool) -> str | None:
    if any(GLOBAL_HOOKS):
        return "hooks hang on the calls of all modules"
    if any(p.is_meta for p in module.parameters()):
        return "its weights are on the meta device"
    sharded = sharded or any(type(p.data) is not Tensor for p in module.parameters())
    return "its weights are sharded" if sharded else None


def check(model: nn.Module, candidates: Candidates) -> tuple[dict[nn.Module, str], dict[str, str], dict[str, int]]:
    """({module: why it must not be replaced}, {class: why that is not known}, {class: bytes a token that its modules
    keep less in training, where they were compared}).

    Layers come before their modules: where a layer is right, so are the modules in it. Where it is not, they are
    compared alone, and then it is once more, with those of them that are right.
    """
    failed, unknown, passed, saved = dict[Any, str](), dict[str, str](), set[Any](), dict[Any, int]()
    keys = {module: _key(module) for module in candidates}
    rotaries = {type(m).__module__: m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")}

    def passes(module: Any) -> bool:
        classes = {m: c for m, c in candidates.items() if keys[m] not in failed}
        ours: Any = candidates[module]
        try:
            if hasattr(ours.forward, "head"):
                times, bytes_less = _head_times_too_wrong(module, ours.forward), 4 * module.config.vocab_size
            else:
                times, bytes_less = _times_too_wrong(
                    module, classes, copy.deepcopy(rotaries.get(stock(type(module)).__module__))
                )
        except Exception as error:
            failed[keys[module]] = f"on random rows it raises {type(error).__name__}: {error}"
            return False
        if times <= 1:
            width = next((p.element_size() for p in module.parameters()), 4)
            saved[keys[module]] = bytes_less if hasattr(ours.forward, "head") else bytes_less * width // 4
            return True
        failed[keys[module]] = f"on random rows it is {times:.3g} times as wrong as the error law allows"
        return False

    sharded = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())  # views of one parameter
    devices = {p.device for p in model.parameters() if p.is_cuda}
    narrow = torch.autocast("cuda" if devices else "cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), narrow, torch.random.fork_rng(list(devices)):
        torch.manual_seed(0)
        for module, key in keys.items():
            why = _unreadable(module, sharded)
            if why is not None:
                unknown[type(module).__name__] = why
            elif key not in passed and key not in failed and passes(module):
                alone = hasattr(candidates[module].forward, "head")  # type: ignore[attr-defined]
                alone = alone or _sample_of(module) is not module
                passed |= {key} if alone else {keys[m] for m in module.modules() if m in keys}
        for module in reversed(keys):
            if keys[module] in failed:
                del failed[keys[module]]
                passes(module)
    less = Counter[str]()
    for module, key in keys.items():
        if saved.get(key, 0) > 0 and key not in failed:
            less[type(module).__name__] += saved[key]
    return {m: failed[key] for m, key in keys.items() if key in failed}, unknown, dict(less)
