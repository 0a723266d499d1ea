"""Loss scaling, skipped steps, learning rates of steps that were taken, 8-bit products, without a wait of the host."""

from warpsmith.amp import schedules
from warpsmith.amp._record import Overflow
from warpsmith.amp.device_lr import DeviceLR
from warpsmith.amp.fp8 import Fp8Layers, fp8, fp8_state, load_fp8_state
from warpsmith.amp.fp8_report import Fp8Report, fp8_report
from warpsmith.amp.grad_scaler import GradScaler
from warpsmith.amp.step_guard import StepGuard
from warpsmith.ops._scaled_linear import Fp8Recipe

__all__ = [
    "DeviceLR",
    "Fp8Layers",
    "Fp8Recipe",
    "Fp8Report",
    "GradScaler",
    "Overflow",
    "StepGuard",
    "fp8",
    "fp8_report",
    "fp8_state",
    "load_fp8_state",
    "schedules",
]
