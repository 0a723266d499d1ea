"""Loss scaling, skipped steps and learning rates of steps that were taken, without a wait of the host."""

from warpsmith.amp import schedules
from warpsmith.amp._record import Overflow
from warpsmith.amp.device_lr import DeviceLR
from warpsmith.amp.grad_scaler import GradScaler
from warpsmith.amp.step_guard import StepGuard
from warpsmith.ops._scaled_linear import Fp8Recipe

__all__ = ["DeviceLR", "Fp8Recipe", "GradScaler", "Overflow", "StepGuard", "schedules"]
