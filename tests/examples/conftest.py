"""What every test of the training example has: small data, and the process as it was."""

import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # the example is a script, not a package


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    torch.use_deterministic_algorithms(False)  # which a run on a GPU asks for
    torch.utils.deterministic.fill_uninitialized_memory = True
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty small files."""
    folder = tmp_path_factory.mktemp("data")
    words = ["def", "return", "for", "in", "if", "else", "while", "not", "import", "class", "self", "value", "index"]
    source = random.Random(0)
    for i in range(20):
        text = "\n".join(" ".join(source.choices(words, k=8)) for _ in range(40))
        (folder / f"file_{i:02}.txt").write_text(text)
    return folder
