"""Kernels, bindings and csrc/sim as one op library, which a Python process loads in place of the package's own."""

from __future__ import annotations

import os
from pathlib import Path


def load():
    import torch
    path = os.environ.setdefault("WARPSMITH_SIM_LIBRARY", str(Path(__file__).resolve().parents[2]/"build/try/libwarpsmith_sim.so"))
    torch.ops.load_library(path)
