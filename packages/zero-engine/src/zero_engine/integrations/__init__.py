"""Integrations with training loops of other libraries; each has an extra with its name.

A module here uses public names of its library. Saving, resuming and loading a best model also need
the private methods below; a test looks each of them up in the version that is installed.
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
