"""Checkpoints: a program's state in one file, written and read by any number of ranks.

`Checkpoint` saves and restores. `CheckpointManager` numbers the files and keeps the latest ones.
`latest_checkpoint` finds the last one. `Saveable` is the protocol of users' own stateful objects.
"""

from strategies.checkpoint.checkpoint import Checkpoint
from strategies.checkpoint.manager import CheckpointManager, latest_checkpoint
from strategies.checkpoint.states import Saveable
from strategies.checkpoint.tensor_file import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "CheckpointManager", "Saveable", "latest_checkpoint"]
