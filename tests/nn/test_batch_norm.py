"""BatchNorm2d in place of torch's, alone and with the residual and ReLU behind it."""

import pytest
import torch
import warpsmith
from torch import nn

CONSTRUCTED = [{}, {"momentum": None}, {"momentum": 0.0}, {"momentum": 1.0}, {"affine": False}, {"eps": 1e-2},
               {"track_running_stats": False}]  # fmt: skip


def pixels(seed=0):
    return torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(seed)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", CONSTRUCTED, ids=str)
def test_is_torchs_module(options):
    """Over steps of training and an evaluation: outputs, gradients and the state."""
    ours, theirs = warpsmith.nn.BatchNorm2d(6, **options), nn.BatchNorm2d(6, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    for step in range(5):
        results = []
        for module in (ours, theirs):
            module.train(step < 3)
            module.track_running_stats &= step != 2  # changed behind the constructor: statistics stay
            x = pixels(step).requires_grad_()
            y = module(x)
            results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], pixels(9))])
        torch.testing.assert_close(*results)
    assert isinstance(ours, nn.BatchNorm2d) and list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize("training", [True, False])
def test_residual_and_relu_are_those_behind_it(training):
    ours, theirs = warpsmith.nn.BatchNorm2d(6, activation="relu").train(training), nn.BatchNorm2d(6).train(training)
    leaves = [[pixels(s).requires_grad_() for s in (1, 2)] for _ in range(2)]
    y = ours(leaves[0][0], residual=leaves[0][1]), torch.relu(theirs(leaves[1][0]) + leaves[1][1])
    torch.testing.assert_close(*y)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), t) for out, t in zip(y, leaves, strict=True)))
    assert "activation=relu" in repr(ours)


def test_a_weight_without_a_bias():
    module = warpsmith.nn.BatchNorm2d(6, bias=False)
    assert set(module.state_dict()) == {"weight", "running_mean", "running_var", "num_batches_tracked"}
    torch.testing.assert_close(module(pixels()), nn.BatchNorm2d(6)(pixels()))


def test_autocast_and_float32_parameters():
    module, x = warpsmith.nn.BatchNorm2d(6), pixels().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    assert module.running_mean.dtype == torch.float32 and module.running_mean.abs().sum() > 0


def test_symbolic_trace_counts_steps():
    module = warpsmith.nn.BatchNorm2d(6, momentum=None)
    graph = torch.fx.symbolic_trace(nn.Sequential(module))
    assert int(module.num_batches_tracked) == 0
    for step in range(3):
        graph(pixels(step))
    assert int(graph.get_submodule("0").num_batches_tracked if hasattr(graph, "0") else module.num_batches_tracked) == 3


def test_one_value_a_channel_is_refused():
    module = warpsmith.nn.BatchNorm2d(6)
    with pytest.raises(ValueError, match="expected more than 1 value per channel when training, got input size"):
        module(torch.randn(1, 6, 1, 1))
    assert module.eval()(torch.randn(1, 6, 1, 1)).shape == (1, 6, 1, 1)
    with pytest.raises(ValueError, match="expected 4D input"):
        module(torch.randn(2, 6))


def test_torchs_conversion_to_synchronized_modules_takes_it():
    found = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(warpsmith.nn.BatchNorm2d(6)))[0]
    assert isinstance(found, nn.SyncBatchNorm)


def test_compiled_training_updates_the_statistics():
    modules = [warpsmith.nn.BatchNorm2d(6, activation="relu") for _ in range(2)]
    compiled = torch.compile(modules[0], fullgraph=True, backend="aot_eager")
    for step in range(3):
        y, expected = compiled(pixels(step)), modules[1](pixels(step))
        assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in modules), strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kernel_size": (3, 1), "stride": (1, 2), "dilation": 2, "groups": 3}], ids=str
)
def test_a_convolution_before_it(options, training):
    module = warpsmith.nn.ConvBNReLU(6, 9, **options).train(training)
    conv = nn.Conv2d(6, 9, **{"kernel_size": 3, "padding": (2, 0) if options else 1, "bias": False} | options)
    theirs = nn.Sequential(conv, nn.BatchNorm2d(9))
    theirs.train(training).load_state_dict(module.state_dict())
    x = pixels().requires_grad_()
    y, expected = module(x), torch.relu(theirs(x))
    torch.testing.assert_close(y, expected)
    leaves = [[x, *m.parameters()] for m in (module, theirs)]
    found = [torch.autograd.grad(out.square().sum(), t) for out, t in zip((y, expected), leaves, strict=True)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    residual = torch.randn_like(y)
    torch.testing.assert_close(module(x, residual), torch.relu(theirs(x) + residual))
    torch.testing.assert_close(dict(module.state_dict()), dict(theirs.state_dict()))


def test_channels_that_groups_do_not_divide():
    with pytest.raises(ValueError, match="ConvBNReLU: groups: expected a divisor of both numbers of channels, got 4"):
        warpsmith.nn.ConvBNReLU(6, 8, groups=4)
