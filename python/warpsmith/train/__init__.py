"""What a training loop needs around its step: checkpoints."""

from warpsmith.train.checkpoint_folder import CheckpointError
from warpsmith.train.checkpointer import Checkpointer

__all__ = ["CheckpointError", "Checkpointer"]
