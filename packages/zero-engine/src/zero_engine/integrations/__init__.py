"""The library inside the training loops of others, each with its extra: `zero-engine[accelerate]`.

A module here is written on public names of its host. What saving, resuming and loading a best model
need beyond them is listed below, and a test looks each of them up in the version that is installed.
"""

from typing import Final

PRIVATE_METHODS: Final[dict[str, tuple[str, ...]]] = {
    # what is called or overridden, as "module:Class.method"
    "transformers": (
        "transformers:Trainer._load_best_model",
        "transformers:Trainer._load_from_checkpoint",
        "transformers:Trainer._load_optimizer_and_scheduler",
        "transformers:Trainer._move_model_to_device",
        "transformers:Trainer._save",
        "transformers:Trainer._save_optimizer_and_scheduler",
        "transformers:Trainer._wrap_model",
    ),
    "lightning": ("lightning.fabric.strategies.strategy:_BackwardSyncControl.no_backward_sync",),
}
