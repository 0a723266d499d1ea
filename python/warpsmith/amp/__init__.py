"""Loss scaling, skipped steps and learning rates of steps that were taken, without a wait of the host."""

from warpsmith.amp import schedules
from warpsmith.amp._record import Overflow
from warpsmith.amp.device_lr import DeviceLR
from warpsmith.amp.grad_scaler import GradScaler
from warpsmith.amp.step_guard import StepGuard

__all__ = ["DeviceLR", "GradScaler", "Overflow", "StepGuard", "schedules"]
