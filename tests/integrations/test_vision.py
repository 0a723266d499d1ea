"""Models of images with our ops in them and without: outputs, gradients and running statistics within the law."""

import copy
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
import warpsmith
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from warpsmith.integrations import vision
from warpsmith.integrations.vision import patch
from warpsmith.testing import run_ranks

from .laws import assert_close, assert_law_of_the_mean, assert_law_of_the_model

transformers = pytest.importorskip("transformers")
JOINED = "its norms with what is behind them"


class Block(nn.Module):
    """As torchvision's and timm's: ReLU shared and in place, the sum in place, a shortcut of its own or none."""

    def __init__(self, channels, stride=1, relu=None):
        super().__init__()
        self.stride, self.scale = stride, 1.0
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = relu or nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(channels, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out) * self.scale


class Functional(nn.Module):
    """Functions for modules, keywords, a norm before its convolution, and one whose result two layers read."""

    def __init__(self, channels):
        super().__init__()
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(channels) for _ in range(3))
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, scale=1.0):
        y = self.bn2(self.conv(F.relu(self.bn1(x), inplace=True)))
        z = torch.add(x, y).relu_()
        twice = self.bn3(z)
        return (torch.relu(twice) + twice) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.layers = nn.Sequential(Block(8), Block(8, stride=2), Functional(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.layers(self.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def resnet(layer_type):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1], num_labels=5, layer_type=layer_type
    )
    return Logits(transformers.ResNetForImageClassification(config))


MAKERS = {
    "own": Net,
    "bottleneck": lambda: resnet("bottleneck"),
    "basic": lambda: resnet("basic"),
    "sequential": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
}
NORMS = {"own": 9, "bottleneck": 12, "basic": 9, "sequential": 1}


def make(name):
    torch.manual_seed(0)
    model = MAKERS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def images(seed=0, count=16):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


COPIES = ("::_local_scalar_dense", "::_to_copy", "::cat", "::clone", "::copy_")


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func.name())
        return func(*args, **(kwargs or {}))

    def count(self, *names):
        return sum(any(name in called for name in names) for called in self.called)


def results(model, x, call=None):
    x = x.to(memory_format=torch.channels_last).requires_grad_()  # torch's convolutions add in another order in NCHW
    model.to(memory_format=torch.channels_last)
    out = (model if call is None else call)(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    leaves = {"x": x, **dict(model.named_parameters())}
    grads = torch.autograd.grad((out * weights).sum(), [*leaves.values()])
    found = {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}
    return found | {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_results_obey_the_law(name, dtype, training):
    model, x = make(name).to(dtype).train(training), images().to(dtype)
    wide = copy.deepcopy(model).double()
    patched, norms = copy.deepcopy(model), NORMS[name]
    done = patch(patched)
    assert done.replaced["BatchNorm2d"] == f"warpsmith.batch_norm ({norms})" and not done.kept, done
    with Ops() as ops:
        found = results(patched, x)
    assert ops.count("warpsmith::batch_norm_forward") == norms
    relus = sum(call in ("aten::relu", "aten::relu_") for call in ops.called)
    assert relus == (name == "own")  # Functional's, whose norm is read twice
    exact = results(wide, x.double())
    with Ops() as of_torch:
        expected = results(model, x)
    assert ops.count(*COPIES) <= of_torch.count(*COPIES), "copies, or waits of the host"
    if dtype == torch.float64:
        assert_close(found, expected, rtol=1e-9, atol=1e-10)
    elif dtype == torch.bfloat16:
        assert_law_of_the_model(found, expected, exact)
    else:
        assert_law_of_the_mean(found, expected, exact)
    states = zip(patched.state_dict().items(), model.state_dict().items(), strict=True)
    assert all(a == b and t.dtype == u.dtype and t.shape == u.shape for (a, t), (b, u) in states)


@pytest.mark.parametrize("name", MAKERS)
def test_undo_leaves_nothing(name):
    model = make(name)
    untouched, x = copy.deepcopy(model), images()
    untouched(x), model(x)
    types, strides = [type(m) for m in model.modules()], [p.stride() for p in model.parameters()]
    with patch(model):
        assert [type(m) for m in model.modules()] != types and [p.stride() for p in model.parameters()] != strides
        assert patch(model).replaced == {} and all(why == "it is patched already" for why in patch(model).kept.values())
    assert [type(m) for m in model.modules()] == types and [p.stride() for p in model.parameters()] == strides
    assert torch.equal(model(x), untouched(x))
    found, expected = results(model, x), results(untouched, x)
    assert all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.parametrize("name", ["own", "bottleneck"])
def test_every_hook_is_called_as_before(name):
    def called(model):
        calls = []

        def keep(name, out):
            calls.append((name, out.detach().clone() if isinstance(out, torch.Tensor) else None))

        for name, module in model.named_modules():
            module.register_forward_hook(lambda m, i, o, name=name: keep(name, o))
        model(images())
        return calls

    plain, patched = make(name), make(name)
    patch(patched)
    ours, theirs = called(patched), called(plain)
    assert [n for n, _ in ours] == [n for n, _ in theirs] and len(ours) > 20
    for (_, t), (_, u) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(t, u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["relu", "bn2", "downsample", "downsample.1"])
def test_one_hook_parts_what_it_hangs_on(name):
    model, plain = make("own").layers[1], make("own").layers[1]
    done, seen = patch(model), []
    x = torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last)
    handle = model.get_submodule(name).register_forward_hook(lambda m, i, o: seen.append(o))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert len(seen) == (2 if name == "relu" else 1)
    handle.remove()
    with Ops() as ops:
        model(x)
    assert ops.count("aten::relu") == 0 and done.replaced["Block"] == f"{JOINED} (1)"


def test_what_changes_after_the_patch_is_obeyed():
    model, plain = make("own").layers, make("own").layers
    patch(model)

    def same(*changes):
        for block in (model, plain):
            for change in changes:
                change(block)
        x = torch.randn(2, 8, 8, 8)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)

    same()
    same(lambda b: setattr(b[0], "relu", nn.GELU()))
    same(lambda b: setattr(b[0], "scale", 2.0))
    same(lambda b: setattr(b[0], "bn1", nn.Identity()))
    torch.manual_seed(0)
    shortcut = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh())
    same(lambda b: setattr(b[0], "downsample", shortcut))
    same(lambda b: b[1].downsample.append(nn.Tanh()))
    same(lambda b: b[1].bn2.eval())
    same(lambda b: setattr(b[1], "downsample", nn.AvgPool2d(2)))
    same(lambda b: [m.eval() for m in b.modules()])
    x = torch.randn(2, 8, 8, 8)
    torch.testing.assert_close(model[2](x, scale=3.0), plain[2](x, 3.0), rtol=1e-4, atol=1e-5)


class Reads(nn.Module):
    """Its forward cannot be joined. ``kind`` says why."""

    def __init__(self, kind):
        super().__init__()
        self.bn, self.conv, self.kind = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), kind

    def forward(self, x):
        if self.kind == "by value" and x.mean() > 0:
            x = -x
        if self.kind == "at random" and random.random() < 0.5:
            return x
        if self.kind == "by type" and not isinstance(x, torch.Tensor):
            x = x * 2
        return F.relu(self.bn(self.conv(x)))


@pytest.mark.parametrize(
    "kind, why",
    [
        ("by value", "torch.fx cannot follow its forward: symbolically traced variables cannot be used as inputs"),
        ("at random", "its forward draws random numbers"),
        ("by type", "on random values it computes something else"),
    ],
)
def test_a_forward_that_cannot_be_joined_stays(kind, why):
    model = Reads(kind)
    done = patch(model)
    assert done.kept["Reads"].startswith(why) and done.replaced["BatchNorm2d"] == "warpsmith.batch_norm (1)"
    assert type(model) is Reads


def test_other_norms_and_forwards_stay():
    class Own(nn.BatchNorm2d):
        def forward(self, input):
            return super().forward(input) * 2

    parametrized = nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(4), dim=None)
    replaced = nn.BatchNorm2d(4)
    replaced.forward = lambda input: input
    done = patch(nn.Sequential(Own(4), nn.SyncBatchNorm(4), parametrized, replaced))
    assert done.kept == {
        "Own": "no op of ours does what it does",
        "SyncBatchNorm": "no op of ours does what it does",
        "ParametrizedBatchNorm2d": "no op of ours does what it does",
        "BatchNorm2d": "somebody else has replaced its forward",
    }
    assert done.replaced == {}


def test_copies_are_patched_and_pickles_are_not():
    model = make("own")
    done = patch(model)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(loaded.layers[0]) is Block and type(copied.layers[0]) is not Block
    x = images()
    torch.testing.assert_close(copied(x), loaded(x), rtol=1e-4, atol=1e-5)
    done.undo()
    with Ops() as ops:
        copied(x)
    assert ops.count("warpsmith::") == 0


def test_max_pools_of_what_the_op_takes():
    pools = nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, dilation=2)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *pools).to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    expected, done = results(copy.deepcopy(model), x), patch(model)
    assert done.replaced["MaxPool2d"] == "warpsmith.max_pool2d (3)"
    with Ops() as ops:
        found = results(model, x)
    assert ops.count("warpsmith::max_pool2d_forward") == ops.count("warpsmith::max_pool2d_backward") == 2
    assert all(torch.equal(t, expected[name]) for name, t in found.items())
    patch(indices := nn.MaxPool2d(2, return_indices=True))
    assert torch.equal(indices(x)[1], nn.MaxPool2d(2, return_indices=True)(x)[1])


def test_nchw_is_left_to_torch():
    model, x = make("own"), images()
    done = patch(model, channels_last=False)
    assert "weights of convolutions" not in done.replaced
    with Ops() as ops:
        expected = model(x)
    assert ops.count("warpsmith::") == 0 and torch.equal(expected, make("own")(x))
    with Ops() as ops:
        model(x.to(memory_format=torch.channels_last))
    assert ops.count("warpsmith::batch_norm") == NORMS["own"]


@pytest.mark.parametrize("training", [True, False])
def test_autocast_gives_the_dtypes_of_torch(training):
    model, x = make("bottleneck").train(training), images()
    patched = copy.deepcopy(model)
    wide = copy.deepcopy(model).double()
    patch(patched)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = results(model, x), results(patched, x)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert_law_of_the_model(found, expected, results(wide, x.double()))


def test_float32_norms_beside_bfloat16_activations():
    model = make("own").bfloat16()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    patched = copy.deepcopy(model)
    patch(patched)
    found, expected = results(patched, images().bfloat16()), results(model, images().bfloat16())
    assert_law_of_the_model(found, expected, results(copy.deepcopy(model).double(), images().double()))


def test_weights_of_16_bits_take_the_steps_of_autocast():
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1)
    models = [copy.deepcopy(nn.Sequential(*layers)) for _ in range(2)]
    begun = [p.detach().clone() for p in models[0].bfloat16().float().parameters()]  # alike in both
    models[1].bfloat16()[1].float()
    optimizers = []
    for model, precision in zip(models, (None, "remainder"), strict=True):
        patch(model)
        optimizers.append(warpsmith.optim.SGD(model.parameters(), lr=1e-3, precision=precision))
    for _ in range(5):  # each less than a unit of bfloat16's last place
        x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = models[0](x)
        for y, optimizer in zip((under_autocast, models[1](x.bfloat16())), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(y.float(), x.roll(1, 2)).backward()
            optimizer.step()
    for before, wide, half in zip(begun, *(m.parameters() for m in models), strict=True):
        rest = optimizers[1].state[half].get("remainder")  # of a norm there is none
        found = half if rest is None else ((half.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)
        step = (wide - before).abs().max()
        assert step > 0 and (found - wide).abs().max() < 0.02 * step


@pytest.mark.parametrize("name", ["own", "basic"])
def test_fold_in_evaluation(name):
    model, x = make(name).eval(), images()
    patched, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    done = patch(patched, fold=True)
    for _ in range(2):
        with torch.no_grad(), Ops() as ops:
            found = {"out": patched(x)}
            expected, exact = {"out": model(x)}, {"out": wide(x.double())}
        assert_law_of_the_mean(found, expected, exact)
        # Functional's first and third norm have no convolution before them.
        assert ops.count("warpsmith::batch_norm") == (2 if name == "own" else 0)
        assert not ops.count("::_local_scalar_dense"), "the host waits"
        with torch.no_grad():  # what is folded is made anew
            for of_ours, of_theirs, of_wide in zip(*(m.parameters() for m in (patched, model, wide)), strict=True):
                of_ours.mul_(1.25)
                of_theirs.mul_(1.25)
                of_wide.mul_(1.25)
    for m in (patched, model):
        m.train()
    assert_close(results(patched, x), results(model, x), rtol=1e-3, atol=1e-4)
    done.undo()
    assert all(torch.equal(a, b) for a, b in zip(patched.parameters(), model.parameters(), strict=True))


def test_a_penalty_on_gradients():
    def penalty(model):
        x = images().double().requires_grad_()
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return dict(enumerate(torch.autograd.grad(g.square().sum(), [*model.parameters()])))

    model, plain = make("own").double(), make("own").double()
    patch(model)
    assert_close(penalty(model), penalty(plain), rtol=1e-7, atol=1e-7)


def test_compiled_in_one_graph():
    for training in (True, False):
        model, plain = make("own").train(training), make("own").train(training)
        patch(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(results(model, images(), compiled), results(plain, images()), rtol=1e-3, atol=1e-4)


def train_in_ddp(rank, world_size, ours):
    model = make("own")
    if ours:
        patch(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        ddp(images(2 * step + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: t.detach() for n, t in model.state_dict().items()}


def test_in_ddp():
    found, expected = (run_ranks(train_in_ddp, 2, ours) for ours in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0] if "running" not in n)


def test_a_converted_norm_is_called():
    model = make("own")
    patch(model)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model).eval()
    assert isinstance(converted.layers[0].bn1, nn.SyncBatchNorm)
    torch.testing.assert_close(converted(images()), make("own").eval()(images()), rtol=1e-4, atol=1e-5)


def test_the_same_bits_at_every_call():
    first, second = (results(model, images()) for model in (make("bottleneck"), make("bottleneck")) if patch(model))
    assert all(torch.equal(first[n], t) for n, t in second.items())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
        self.model = diffusers.UNet2DModel(
            sample_size=16,
            layers_per_block=1,
            block_out_channels=(16, 32),
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )

    def forward(self, x):
        return self.model(x, torch.arange(len(x))).sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_unet_of_diffusers(dtype):
    """In float32 of three batches together: of one the error of a small tensor is a draw (2.2 times torch's on one CPU,
    0.5 to 1.7 for other batches)."""
    torch.manual_seed(0)
    model = UNet().to(dtype)
    patched, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    done = patch(patched)
    batches = [images(i, count=4).to(dtype) for i in range(3 if dtype == torch.float32 else 1)]

    def of_all(model, kind=dtype):
        found = [results(model, x.to(kind)) for x in batches]
        return {name: torch.stack([f[name] for f in found]) for name in found[0]}

    with Ops() as ops:
        results(patched, batches[0])
    assert done.replaced["ResnetBlock2D"] == "warpsmith.group_norm with silu (8)"
    assert ops.count("warpsmith::group_norm_forward") == 21 and ops.called.count("aten::silu") == 9  # those of times
    law = assert_law_of_the_mean if dtype == torch.float32 else assert_law_of_the_model
    law(of_all(patched), of_all(model), of_all(wide, torch.float64))
    done.undo()
    assert type(patched.model) is type(model.model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["own", "bottleneck"])
def test_on_a_gpu(name, dtype):
    model, x = make(name).to(dtype), images().to(dtype)
    exact = results(copy.deepcopy(model).double(), x.double())
    patched = copy.deepcopy(model).cuda()
    done = patch(patched)
    assert not done.kept
    with torch.backends.cudnn.flags(allow_tf32=False):
        found, expected = results(patched, x.cuda()), results(model.cuda(), x.cuda())
    found, expected = ({n: t.cpu() for n, t in values.items()} for values in (found, expected))
    if dtype == torch.float32:
        assert_close(found, expected, rtol=1e-3, atol=1e-4)
    else:
        assert_law_of_the_model(found, expected, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # to which torch rounds some convolutions
def test_fold_on_a_gpu(dtype, autocast):
    """Where ReLU is behind it, one kernel of cuDNN in 16 bits."""
    model, x = make("basic").eval(), images()
    patched, wide = copy.deepcopy(model).cuda(), copy.deepcopy(model).double()
    patch(patched, fold=True)
    model, x = model.cuda(), x.cuda()
    if not autocast:
        model, patched, x = model.to(dtype), patched.to(dtype), x.to(dtype)
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=autocast and dtype != torch.float32), Ops() as ops:
        found = {"out": patched(x).cpu()}
        expected = {"out": model(x).cpu()}
    assert ops.count("aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu") == (dtype != torch.float32) * 7
    with torch.no_grad():
        assert_law_of_the_mean(found, expected, {"out": wide(images().double())})


@pytest.mark.gpu
def test_captured_steps_are_the_eager_ones():
    def train(captured):
        model = make("bottleneck").cuda()
        patch(model)
        optimizer = warpsmith.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(x):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = warpsmith.train.CapturedStep(step, state=[model, optimizer]) if captured else step
        losses = [call(images(i).cuda().to(memory_format=torch.channels_last)).clone() for i in range(8)]
        assert not captured or call.fallback_reason is None
        return torch.stack(losses), dict(model.named_buffers())

    (found, ours), (expected, theirs) = train(True), train(False)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
    assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert all(int(t) == 8 for n, t in ours.items() if n.endswith("num_batches_tracked"))


def test_bad_input():
    with pytest.raises(ValueError, match="patch: model: expected a torch.nn.Module, got"):
        patch(3)
    with pytest.raises((TypeError, ValueError), match="patch: fold: expected"):
        patch(make("own"), fold="yes")
    patched = make("sequential")
    patch(patched)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        patched(torch.randn(1, 3, 3, 3))
    assert vision.Patched().replaced == {}


def once(self, y):
    with torch.no_grad():
        return self.relu(y)


def keep(self, y):
    self.last = y
    return self.relu(y)


UNREAD = {
    "gradients turned off": (once, "gradients or autocast"),
    "an attribute written": (keep, "changes an attribute"),
    "a list written": (lambda self, y: self.log.append(y) or self.relu(y), "changes an attribute"),
    "a layer read": (
        lambda self, y: torch.nn.functional.dropout(self.relu(y), self.drop.p, self.drop.training),
        "drop",
    ),
    "gradients asked for": (lambda self, y: self.relu(y) if torch.is_grad_enabled() else y, "gradients are on"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_a_graph_would_not_hold_is_left(case):
    """Such a forward stays, but for its norm alone; its results and what it writes are those of before."""
    behind, why = UNREAD[case]

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
            self.log = []
            if "drop" in why:
                self.drop = nn.Dropout(0.0)

        def forward(self, x):
            return behind(self, self.norm(self.conv(x)))

    torch.manual_seed(0)
    model, x = Odd(), torch.randn(2, 3, 8, 8)
    patched = copy.deepcopy(model)
    done = patch(patched)
    assert why in done.kept["Odd"], done
    y, expected = (torch.manual_seed(1) and m(x) for m in (patched, model))
    torch.testing.assert_close(y, expected)
    assert y.requires_grad == expected.requires_grad and len(patched.log) == len(model.log)
    assert hasattr(patched, "last") == hasattr(model, "last")


def test_a_fold_follows_steps_that_leave_no_trace():
    model, x = make("basic"), images()
    patch(model, fold=True)
    plain = copy.deepcopy(model)
    model.train()(x).square().mean().backward()
    for p in model.parameters():
        p.data.add_(0.01)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.eval()(x))
