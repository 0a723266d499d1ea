"""examples/train_llama.py: a model of transformers learns the same with our ops as without."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_llama.py"


def test_it_learns_the_same_both_ways(capsys):
    spec = importlib.util.spec_from_file_location("train_llama", SCRIPT)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    results = example.main(["--steps", "6", "--length", "32", "--batch", "2", "--hidden", "64"])
    assert "LlamaRMSNorm: warpsmith.rms_norm (5)" in capsys.readouterr().out
    (theirs, _), (ours, _) = results["transformers"], results["warpsmith"]
    assert ours[-1] < ours[0] - 0.3
    assert ours == pytest.approx(theirs, rel=2e-3)
