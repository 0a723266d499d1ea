"""normalize_image under the law: bytes of images become numbers in channels_last."""

import pytest
import torch
import warpsmith
from warpsmith.reference.image import normalize_image as reference
from warpsmith.testing import Case, op_tests

from tests.ops.public_calls import op_spec

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


def inputs(case, rng):
    x, flip = rng.integers(case.shape, 0, 256).to(torch.uint8), case.options.get("flip", True)
    flips = rng.integers(case.shape[:1], 0, 2).bool() if flip else None
    return {"x": x, "mean": MEAN, "std": STD, "flip": flips, "dtype": case.options.get("to", FP16)}


PLAIN = [Case((3, 8, 16, 3), options={"to": to, "flip": False}) for to in (FP16, FP32)]
CASES = [
    *(
        Case(shape, options={"to": to})
        for shape in ((1, 1, 1, 3), (2, 1, 7, 3), (5, 3, 8, 3), (3, 7, 5, 3), (2, 32, 40, 3), (9, 16, 16, 3))
        for to in (FP16, BF16, FP32)
    ),
    *PLAIN,
    Case((3, 7, 5, 3), options={"flip": False}),
    *(Case((7, 24, 40, 3), options={"flip": flip}) for flip in (False, True)),  # of two blocks
]
TestNormalizeImage = op_tests(
    op_spec(
        name="normalize_image",
        oracle=lambda case, **given: reference(**{**given, "dtype": torch.float64}),
        inputs=inputs,
        cases=CASES,
        laid_out=("x",),
        batched=("x", "flip"),
        edge_inputs=(),
        float64_devices=(),
        sim_elements=2**15,
        one_element=False,  # of three channels
        zero_sizes=False,  # likewise: test_nothing
        floor_bytes=lambda case: {
            "forward": torch.Size(case.shape).numel() * (1 + case.options.get("to", FP16).itemsize)
        },
        bytes_cases=PLAIN,
        redraw=lambda draw, st, case: case.but(shape=(*case.shape[:3], 3)),
    )
)  # fmt: skip


def test_the_layout_is_channels_last_and_torchvisions_arithmetic():
    x = torch.randint(256, (2, 6, 8, 3), dtype=torch.uint8)
    y = warpsmith.normalize_image(x, MEAN, STD, dtype=FP32)
    assert y.shape == (2, 3, 6, 8) and y.is_contiguous(memory_format=torch.channels_last)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    torch.testing.assert_close(y, (x.permute(0, 3, 1, 2).float() / 255 - mean) / std, rtol=1e-6, atol=1e-6)
    mirrored = warpsmith.normalize_image(x, MEAN, STD, dtype=FP32, flip=torch.tensor([False, True]))
    assert torch.equal(mirrored[0], y[0]) and torch.equal(mirrored[1], y[1].flip(-1))


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 3), (2, 4, 0, 3)])
def test_nothing(shape):
    y = warpsmith.normalize_image(torch.empty(shape, dtype=torch.uint8), MEAN, STD)
    assert y.shape == (shape[0], 3, *shape[1:3]) and y.dtype == FP16


def test_numbers_of_numpy_and_lists():
    np = pytest.importorskip("numpy")
    x = torch.randint(256, (1, 4, 4, 3), dtype=torch.uint8)
    expected = warpsmith.normalize_image(x, MEAN, STD)
    assert torch.equal(warpsmith.normalize_image(x, [*map(np.float64, MEAN)], list(STD)), expected)
