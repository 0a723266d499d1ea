"""What a training loop needs around its step: batches, one CUDA graph of it, a list of its waits, checkpoints."""

from warpsmith.train.captured_step import CapturedStep, CaptureError
from warpsmith.train.checkpoint_folder import CheckpointError
from warpsmith.train.checkpointer import Checkpointer
from warpsmith.train.prefetcher import Prefetcher, PrefetchStats
from warpsmith.train.syncs import Sync, SyncAudit, sync_audit

__all__ = [
    "CaptureError",
    "CapturedStep",
    "CheckpointError",
    "Checkpointer",
    "PrefetchStats",
    "Prefetcher",
    "Sync",
    "SyncAudit",
    "sync_audit",
]
