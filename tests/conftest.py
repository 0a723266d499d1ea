"""Markers: ``gpu`` tests are skipped without a CUDA device, ``slow`` ones unless ``--slow`` asks for them; both say
so."""

import os

import pytest

# Two ranks or threads on a small machine must not fight for cores with OpenMP's spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    import torch

    no_cuda = pytest.mark.skip(reason="no CUDA device")
    not_asked = pytest.mark.skip(reason="slow; run with --slow")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_cuda)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(not_asked)
