"""Muon beside torch's, step for step; its Gram form, precisions, other parameters, states and refusals."""

import copy
import io
import math
import os

import pytest
import torch
import warpsmith
from torch import nn
from warpsmith.testing import bitwise_equal, measure
from warpsmith.testing.sim import is_loaded

from .adamw_runs import on_each_device

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(8, 24), (24, 8), (16, 16), (8, 24), (1, 40), (40, 1), (7, 13)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def matrices(dtype=FP32, shapes=SHAPES, device="cpu"):
    g = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=g).to(device, dtype)) for s in shapes]


def set_grads(params, step):
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.device, p.dtype)


def exact_update(u, coefficients=COEFFICIENTS, steps=5, eps=1e-7):
    """The iteration in float64."""
    a, b, c = coefficients
    x = u.double()
    x = x.T if u.shape[0] > u.shape[1] else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        r = x @ x.T
        x = a * x + (b * r + c * r @ r) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def exact_step(p, grad, buffer, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=None, **more):
    """A step in float64; returns the buffer."""
    grad = grad.double()
    buffer = momentum * buffer.double() + (1 - momentum) * grad
    u = (1 - momentum) * grad + momentum * buffer if nesterov else buffer
    rows, columns = p.shape
    ratio = (
        0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    )
    given = {"coefficients": more.get("ns_coefficients", COEFFICIENTS), "steps": more.get("ns_steps", 5)}
    given["eps"] = more.get("eps", 1e-7)
    return p.double() * (1 - lr * weight_decay) - lr * ratio * exact_update(u, **given), buffer


OPTIONS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"momentum": 0.0, "lr": 0.5},
    {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"ns_steps": 0},
    {"eps": 20.0, "momentum": 0.5, "ns_steps": 1},
    {"eps": 20.0, "momentum": 0.5, "ns_steps": 1, "nesterov": False},
]


@on_each_device
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_obey_the_law_beside_torchs(options, dtype, device):
    """From equal parameters and buffers, over all shapes together. Without Nesterov torch normalises a bfloat16 buffer
    in its place, and goes on with that; so there its first step alone is compared."""
    ours, theirs = (matrices(dtype, device=device) for _ in range(2))
    given = {"lr": 0.02} | options
    a, b = warpsmith.optim.Muon(ours, **given), torch.optim.Muon(theirs, **given)
    for i in range(1 if dtype == BF16 and options.get("nesterov") is False else 3):
        set_grads(ours, i)
        set_grads(theirs, i)
        befores = (
            [p.detach().clone() for p in ours],
            [a.state[p].get("momentum_buffer", torch.zeros_like(p)).clone() for p in ours],
        )
        a.step()
        b.step()
        errors, bound = [0.0, 0.0], 0.0
        for p, q, before, buffer in zip(ours, theirs, *befores, strict=True):
            right, right_buffer = exact_step(before, p.grad, buffer, **given)
            errors = [max(e, float((t.detach() - right).abs().max())) for e, t in zip(errors, (p, q), strict=True)]
            # Two rounding steps of the parameter, and two of the update, which is bfloat16.
            update = float((right - before * (1 - given["lr"] * given.get("weight_decay", 0.1))).abs().max())
            bound = max(bound, float(right.abs().max()) * torch.finfo(dtype).eps + update * torch.finfo(BF16).eps)
            found = a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"]
            if dtype != BF16 or given.get("nesterov", True):
                error = measure("momentum_buffer", found[0], right_buffer, found[1])
                assert error.ok, str(error)
            q.data.copy_(p.data)
            found[1].copy_(found[0])
        assert errors[0] <= 2 * errors[1] + bound, (errors, bound)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_both_forms_are_near_the_exact_iteration(form, shape, steps):
    """Singular values over four decades. Float16 has three bits more than torch's bfloat16, so the Gram form may be no
    further off than torch's iteration is."""
    g = torch.Generator().manual_seed(2)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=g), full_matrices=False)
    grad = u @ torch.diag(torch.logspace(0, -4, min(shape))) @ v
    right = exact_update(grad.to(BF16), steps=steps)
    moved = []
    for kind, more in ((warpsmith.optim.Muon, {"newton_schulz": form}), (torch.optim.Muon, {})):
        p = nn.Parameter(torch.zeros(shape))
        p.grad = grad.clone()
        kind([p], lr=1.0, momentum=0.0, weight_decay=0.0, ns_steps=steps, **more).step()
        moved.append(-p.detach() / math.sqrt(max(1, shape[0] / shape[1])))
    errors = [float((x - right).norm()) for x in moved]
    assert errors[0] <= 1.1 * errors[1] + 1e-3 * float(right.norm()), errors


def test_products_together_have_the_bits_of_each_alone():
    together, alone = matrices(), matrices()
    both = warpsmith.optim.Muon(together, lr=0.02), [warpsmith.optim.Muon([p], lr=0.02) for p in alone]
    for i in range(2):
        for params in (together, alone):
            set_grads(params, i)
        both[0].step()
        for optimizer in both[1]:
            optimizer.step()
    assert all(bitwise_equal(p, q) for p, q in zip(together, alone, strict=True))


@pytest.mark.skipif(not is_loaded(), reason="asks the simulated device for our products")
def test_our_products_step_too():
    """Sizes of 16 bytes, by the Hopper kernels: near the step by torch's products."""
    shapes = [(16, 40), (40, 16), (24, 24)]
    results = []
    for own in ("0", "1"):
        before = torch.ops.warpsmith._own_product(own)
        params = matrices(shapes=shapes)
        optimizer = warpsmith.optim.Muon(params, lr=0.02)
        set_grads(params, 0)
        optimizer.step()
        launched = torch.ops.warpsmith._own_product(os.environ.get("WARPSMITH_OWN_PRODUCT", "auto")) - before
        assert launched == (30 if own == "1" else 0)  # two of each of five steps of three shapes
        results.append([p.detach() for p in params])
    for p, q in zip(*results, strict=True):
        assert float((p - q).abs().max()) < 0.02 * 2**-5


@pytest.mark.parametrize("precision", ["master", "bf16_kahan", "remainder", "bf16_sr", "bf16"])
def test_precisions_keep_small_steps(precision):
    """A hundred steps of a two hundredth of a unit in the last place: lost in bfloat16 alone."""
    ours, wide = nn.Parameter(torch.ones(16, 32, dtype=BF16)), nn.Parameter(torch.ones(16, 32))
    given = {"lr": 1e-4, "weight_decay": 0.0}
    a = warpsmith.optim.Muon([ours], precision=precision, **given)
    b = warpsmith.optim.Muon([wide], **given)
    for i in range(100):
        set_grads([wide], i % 3)
        ours.grad = wide.grad.to(BF16)
        wide.grad = ours.grad.float()
        a.step()
        b.step()
    off, moved = float((ours - wide).abs().max()), float((wide - 1).abs().max())
    assert moved > 2**-8
    if precision == "bf16":
        assert off > moved / 2
    else:
        assert off <= 2**-7 * (4 if precision == "bf16_sr" else 1)  # units in the last place
    assert a.state[ours]["momentum_buffer"].dtype == (FP32 if precision in ("master", "remainder") else BF16)


def test_states_go_both_ways():
    ours, theirs = matrices(), matrices()
    a, b = warpsmith.optim.Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3)
    for optimizer, params in ((a, ours), (b, theirs)):
        set_grads(params, 0)
        optimizer.step()
    saved = io.BytesIO()
    torch.save(a.state_dict(), saved)
    saved.seek(0)
    c, d = torch.optim.Muon(matrices()), warpsmith.optim.Muon(matrices())
    c.load_state_dict(torch.load(saved))
    d.load_state_dict(b.state_dict())
    for loaded, of in ((c, a), (d, b)):
        assert loaded.param_groups[0]["weight_decay"] == of.param_groups[0]["weight_decay"]
        for p, q in zip(loaded.param_groups[0]["params"], of.param_groups[0]["params"], strict=True):
            assert bitwise_equal(loaded.state[p]["momentum_buffer"], of.state[q]["momentum_buffer"])
    set_grads(d.param_groups[0]["params"], 1)
    d.step()


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("precision", [None, "master"])
def test_a_resumed_run_has_the_same_bits(how, precision):
    def made():
        params = matrices(BF16) + [nn.Parameter(torch.ones(9, dtype=BF16))]
        return params, warpsmith.optim.Muon(params, lr=0.02, others="adamw", precision=precision)

    params, optimizer = made()
    for i in range(4):
        if i == 2 and how == "state_dict":
            state, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
            params, optimizer = made()
            for p, value in zip(params, values, strict=True):
                p.data.copy_(value)
            optimizer.load_state_dict(state)
        elif i == 2:
            params, optimizer = copy.deepcopy((params, optimizer))
        set_grads(params, i)
        optimizer.step()
    straight, reference = made()
    for i in range(4):
        set_grads(straight, i)
        reference.step()
    assert all(bitwise_equal(p, q) for p, q in zip(params, straight, strict=True))


def test_other_parameters_are_stepped_by_adamw():
    def model():
        torch.manual_seed(3)
        return nn.ModuleDict({"embed": nn.Embedding(9, 8), "body": nn.Linear(8, 16), "lm_head": nn.Linear(16, 9)})

    ours, apart = model(), model()
    given = {"others_lr": 1e-3, "others_betas": (0.8, 0.9), "others_weight_decay": 0.2}
    a = warpsmith.optim.Muon(ours.named_parameters(), lr=0.02, others="adamw", **given)
    assert [[tuple(p.shape) for p in g["params"]] for g in a.param_groups] == [
        [(16, 8)],
        [(9, 8), (16,), (9, 16), (9,)],
    ]
    others = [p for n, p in apart.named_parameters() if n != "body.weight"]
    b = warpsmith.optim.Muon([apart["body"].weight], lr=0.02)
    c = warpsmith.optim.AdamW(others, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.2)
    for i in range(3):
        for m in (ours, apart):
            set_grads(list(m.parameters()), i)
        for optimizer in (a, b, c):
            optimizer.step()
        a.param_groups[1]["lr"] = c.param_groups[0]["lr"] = 2e-3
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.01
    assert all(bitwise_equal(p, q) for p, q in zip(ours.parameters(), apart.parameters(), strict=True))


def test_groups_choose():
    p, q = matrices(shapes=[(4, 8), (4, 8)])
    optimizer = warpsmith.optim.Muon([{"params": [p], "newton_schulz": "gram"}], others="adamw")
    optimizer.add_param_group({"params": [q], "others": True, "lr": 0.25, "betas": (0.5, 0.5)})
    assert [g.get("others", False) for g in optimizer.param_groups] == [False, True]
    set_grads([p, q], 0)
    before = q.detach().clone()
    optimizer.step()
    assert {*optimizer.state[p]} == {"momentum_buffer"} and "exp_avg" in optimizer.state[q]
    assert float((q - before).abs().max()) > 0.2


@pytest.mark.parametrize("others", [None, "adamw"])
def test_scaled_and_skipped_steps(others):
    plain, scaled = matrices(), matrices()
    a, b = (warpsmith.optim.Muon(p, lr=0.02, others=others) for p in (plain, scaled))
    for i in range(3):
        set_grads(plain, i)
        set_grads(scaled, i)
        a.step()
        for p in scaled:
            p.grad *= 1024
        b.grad_scale, b.found_inf = torch.tensor(1024.0), torch.zeros(())
        b.step()
    assert all(bitwise_equal(p, q) for p, q in zip(plain, scaled, strict=True))
    kept = copy.deepcopy((scaled, b.state_dict()["state"]))
    scaled[0].grad[0, 0] = math.inf
    b.found_inf = torch.ones(())
    b.step()
    assert all(bitwise_equal(p, q) for p, q in zip(kept[0], scaled, strict=True))
    for before, now in zip(kept[1].values(), b.state_dict()["state"].values(), strict=True):
        assert bitwise_equal(before["momentum_buffer"], now["momentum_buffer"])


def test_a_tensor_as_learning_rate_is_read_at_each_step():
    a, b = matrices(), matrices()
    lr = torch.tensor(0.02, dtype=FP64)
    ours, plain = warpsmith.optim.Muon(a, lr=lr), warpsmith.optim.Muon(b, lr=0.02)
    for i in range(2):
        for params, optimizer in ((a, ours), (b, plain)):
            set_grads(params, i)
            optimizer.step()
        lr.fill_(0.01)
        plain.param_groups[0]["lr"] = 0.01
    assert all(bitwise_equal(p, q) for p, q in zip(a, b, strict=True))


def test_what_has_no_gradient_stays():
    params = matrices()
    optimizer = warpsmith.optim.Muon(params, lr=0.02)
    optimizer.step()
    assert not optimizer.state
    set_grads(params, 0)
    params[1].grad, before = None, [p.detach().clone() for p in params]
    optimizer.step()
    assert [bitwise_equal(p, q) for p, q in zip(params, before, strict=True)] == [i == 1 for i in range(len(params))]
    assert params[1] not in optimizer.state
    params[0].data = params[0].detach().clone() + 1  # another address
    set_grads(params, 1)
    optimizer.step()
    assert float(params[0].detach().min()) > -3


@pytest.mark.gpu
def test_a_step_captured_in_a_graph():
    a, b = (matrices(device="cuda", shapes=[(64, 128), (128, 64)]) for _ in range(2))
    ours, plain = (warpsmith.optim.Muon(p, lr=0.02) for p in (a, b))
    set_grads(a, 0)
    set_grads(b, 0)
    ours.step()
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(2):
        graph.replay()
        plain.step()
    assert all(bitwise_equal(p, q) for p, q in zip(a, b, strict=True))


BAD = [
    ({"ns_steps": 100}, "ns_steps: expected a whole number in"),
    ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients: expected three numbers"),
    ({"precision": "8bit"}, "precision: expected one of"),
    ({"others_betas": (1.0, 0.5)}, "others_betas: expected two numbers"),
]


@pytest.mark.parametrize("given, text", BAD, ids=str)
def test_bad_arguments(given, text):
    with pytest.raises(ValueError, match=text):
        warpsmith.optim.Muon(matrices(), **given)


def test_other_parameters_are_refused():
    with pytest.raises(
        ValueError, match=r"params'\]\[1\]: expected a matrix .*got shape \(3\)|\[1\].*expected a matrix"
    ):
        warpsmith.optim.Muon([*matrices(shapes=[(4, 4)]), nn.Parameter(torch.ones(3))])
    optimizer = warpsmith.optim.Muon(matrices(shapes=[(4, 4)]))
    with pytest.raises(ValueError, match="expected a matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="others: expected False"):
        optimizer.add_param_group({"params": matrices(shapes=[(2, 2)]), "others": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="expected bfloat16"):
        warpsmith.optim.Muon(matrices(FP64), precision="remainder")


def test_bad_states_and_gradients_change_nothing():
    params = matrices(shapes=[(4, 8), (4, 8)])
    optimizer = warpsmith.optim.Muon(params)
    set_grads(params, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"state_dict: momentum_buffer of .*expected shape \(4, 8\), got \(3,?\)"):
        optimizer.load_state_dict(state)
    fresh = warpsmith.optim.Muon(params)
    params[1].grad = params[1].detach().to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="expected a dense gradient, got sparse_coo"):
        fresh.step()
    assert not fresh.state and all(bitwise_equal(p, q) for p, q in zip(params, before, strict=True))


def test_sharded_optimizer_refuses_it():
    with (
        warpsmith.distributed.init(device="cpu"),
        pytest.raises(ValueError, match=r"optimizer_class: expected SGD.* parts of tensors.*got Muon"),
    ):
        warpsmith.distributed.ShardedOptimizer(matrices(), warpsmith.optim.Muon)


def test_a_scaler_clips_and_skips():
    """By our scaler: a step of scaled gradients, clipped, is one of clipped gradients; an infinite one is skipped."""
    a, b = matrices(), matrices()
    ours, plain = (warpsmith.optim.Muon(p, lr=0.02) for p in (a, b))
    scaler = warpsmith.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.zeros(()))
    for i in range(3):
        set_grads(a, i)
        set_grads(b, i)
        for p in a:
            p.grad *= scaler.get_scale()
        if i == 1:
            a[2].grad[3, 3] = math.inf
        scaler.clip_(ours, 0.5)
        scaler.step(ours)
        scaler.update()
        if i != 1:
            warpsmith.optim.clip_grad_norm_(b, 0.5)
            plain.step()
    for p, q in zip(a, b, strict=True):
        assert float((p - q).abs().max()) <= 2**-8 * 0.02 * 2


@pytest.mark.parametrize(
    ("name", "value"), [("weight_decay", 0.5), ("betas", (0.5, 0.75)), ("precision", "bf16_kahan")]
)
def test_a_group_of_both_kinds_gives_its_values_to_both(name, value):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((4, 3), (5,))]
    optimizer = warpsmith.optim.Muon([{"params": params, name: value}], others="adamw", others_weight_decay=0.25)
    assert [group[name] for group in optimizer.param_groups] == [value, value]
