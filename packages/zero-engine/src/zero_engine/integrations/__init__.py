"""The library inside the training loops of others, each with an extra of its name.

A module here is written on public names of its host. What saving, resuming and loading a best model
need beyond them is listed below, and a test looks each of them up in the version that is installed.
"""

from typing import Final

# Module and class -> methods that are called or overridden.
PRIVATE_METHODS: Final = {
    "transformers:Trainer": (
        "_load_best_model _load_from_checkpoint _load_optimizer_and_scheduler "
        "_move_model_to_device _save _save_optimizer_and_scheduler _wrap_model"
    ),
    "lightning.fabric.strategies.strategy:_BackwardSyncControl": "no_backward_sync",
}
