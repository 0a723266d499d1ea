"""The C++ function of images gives Python's results."""

import pytest
import torch
import warpsmith


def test_equal_to_python(cpp, undefined):
    x, numbers = torch.randint(256, (2, 4, 8, 3), dtype=torch.uint8), ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    for flip in (None, torch.tensor([True, False])):
        assert torch.equal(cpp.normalize_image(x, *numbers, flip), warpsmith.normalize_image(x, *numbers, flip=flip))
    with pytest.raises(ValueError, match="^normalize_image: x: expected uint8, got float32"):
        cpp.normalize_image(x.float(), *numbers, None)
