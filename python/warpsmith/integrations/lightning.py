"""Lightning: loss scaling and clipping that do not wait for the device, whole steps as CUDA graphs, a list of waits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from warpsmith._core import checks
from warpsmith.amp import GradScaler
from warpsmith.optim import clip_grad_norm_
from warpsmith.train import CapturedStep, SyncAudit, sync_audit


class MixedPrecision(LightningMixedPrecision):
    """Lightning's mixed precision with :class:`warpsmith.amp.GradScaler`, for :mod:`warpsmith.optim`.

    Lightning refuses to clip with optimizers that divide the gradients by the loss scale in their step, ours and
    torch's fused ones, also in bfloat16, where nothing is divided. With this plugin it clips: by norm with
    :meth:`GradScaler.clip_`, or :func:`warpsmith.optim.clip_grad_norm_` in bfloat16, without a wait of the host; by
    value after ``unscale_``.

    Args:
        precision: "bf16-mixed", or "16-mixed", which scales the loss.
        device: of ``torch.autocast`` and the scaler: "cuda" or "cpu".
        scaler: of "16-mixed"; default: a GradScaler. Checkpoints hold its state.

    ``on_before_optimizer_step`` sees gradients that are still multiplied by the scale. Optimizers that do not divide,
    torch's unfused ones, are unscaled before, as by Lightning.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from warpsmith.integrations.lightning import MixedPrecision
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = Trainer(plugins=[MixedPrecision("bf16-mixed", "cpu")], gradient_clip_val=1.0, **options)
        >>> trainer.precision
        'bf16-mixed'
    """

    def __init__(
        self,
        precision: Literal["bf16-mixed", "16-mixed"] = "bf16-mixed",
        device: str = "cuda",
        scaler: GradScaler | None = None,
    ) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            checks.refuse_type("MixedPrecision", "scaler", "a warpsmith.amp.GradScaler or None", scaler)
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips by norm or by value; nothing for 0."""
        if not clip_val or clip_val <= 0:
            return
        scaler = self.scaler
        divides = getattr(optimizer, "_step_supports_amp_scaling", False)
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            if scaler is not None and divides:
                scaler.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
        elif isinstance(scaler, GradScaler) and divides:
            scaler.clip_(optimizer, clip_val)
        else:
            clip_grad_norm_(self.main_params(optimizer), clip_val)


def captured_step(
    module: LightningModule, step_fn: Callable[..., Any], state: list[Any], **options: Any
) -> CapturedStep:
    """A :class:`warpsmith.train.CapturedStep` for a LightningModule that optimizes by hand: each call counts as a step
    of the trainer, so that ``max_steps``, checkpoints and loggers go on.

    Args:
        module: with ``automatic_optimization = False``.
        step_fn, state, options: of CapturedStep. Take optimizers by ``module.optimizers(use_pl_optimizer=False)``.

    Raises:
        ValueError: the module optimizes automatically, so Lightning would step a second time.

    Example: ``examples/train_lightning.py``.
    """
    if module.automatic_optimization:
        checks.refuse("captured_step", "module.automatic_optimization", "False", "True")
    return _CountedStep(module, step_fn, state=state, **options)


class _CountedStep(CapturedStep):
    def __init__(self, module: LightningModule, step_fn: Callable[..., Any], **options: Any) -> None:
        super().__init__(step_fn, **options)
        self._lightning = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        # What Lightning's own optimizers do at a step: Trainer.global_step reads this count.
        progress = self._lightning.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        return result


class SyncAuditCallback(Callback):
    """Lists the lines on which the host waits for the device in some training batches, by
    :func:`warpsmith.train.sync_audit`.

    Args:
        first: the batch that is audited first, from 0. Earlier ones compile kernels and make states.
        batches: how many are audited.

    Attributes:
        audit: what was found, after these batches; None before. ``str(audit)`` is a table, which is printed.

    Example:
        >>> from warpsmith.integrations.lightning import SyncAuditCallback
        >>> SyncAuditCallback(first=2, batches=3).audit is None
        True
    """

    def __init__(self, first: int = 3, batches: int = 2) -> None:
        checks.sizes("SyncAuditCallback", first=first)
        checks.sizes("SyncAuditCallback", 1, batches=batches)
        self.first, self.batches = first, batches
        self.audit: SyncAudit | None = None
        self._seen = 0
        self._open: contextlib.ExitStack | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins the audit at its first batch."""
        if self._seen == self.first:
            self._open = contextlib.ExitStack()
            kind = "cuda" if pl_module.device.type == "cuda" else "cpu"
            self._found = self._open.enter_context(sync_audit(kind))
        self._seen += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends it behind its last batch."""
        if self._open is not None and self._seen == self.first + self.batches:
            self._end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends an audit that had fewer batches than it wanted."""
        if self._open is not None:
            self._end()
        elif self.audit is None:
            warnings.warn(f"SyncAuditCallback: the training had {self._seen} batches, none was audited", stacklevel=2)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends it where the training breaks off."""
        if self._open is not None:
            self._end()

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open, self.audit = None, self._found
        print(self.audit)
