import pytest
from replayed import Replayed
from warpsmith.train import captured_step


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were made, one an instance of CapturedStep."""
    monkeypatch.setattr(captured_step, "CudaGraphs", Replayed)
    monkeypatch.setattr(Replayed, "made", [], raising=False)
    return Replayed.made
