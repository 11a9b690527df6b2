"""The functions that Megatron-style and DeepSpeed-style code calls, over one default Checkpointer.

They are functions, not its bound methods: a model with a reference to one can be copied and
pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from .checkpointer import Checkpointer
from .errors import CheckpointError
from .rng import RngTracker

_DEFAULT: Final = Checkpointer()


def default_checkpointer() -> Checkpointer:
    """Return the Checkpointer that these functions call.

    It also has the timings of `configure(profile=True)`.
    """
    return _DEFAULT


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and drop its activations; see `Checkpointer.checkpoint`."""
    return _DEFAULT.checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as `checkpoint` does; its only mechanism is not reentrant."""
    return _DEFAULT.checkpoint(function, *args, **kwargs)


@final
class CheckpointFunction:
    """Class whose `apply` some code calls instead of `checkpoint`; no `torch.autograd.Function`."""

    @staticmethod
    def apply(
        function: Callable[..., Any], choice: bool | list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function and drop its activations; see `Checkpointer.checkpoint`.

        Args:
            function: Function to call.
            choice: As Megatron gives it, whether inputs are split over the model-parallel group for
                this call; see `Checkpointer.checkpoint_distributed`. Or, as DeepSpeed gives it, a
                list that is extended by all outputs.
            *args: For the function.
            **kwargs: Likewise.

        Returns:
            What the function returns.

        Raises:
            CheckpointError: `choice` is neither a bool nor a list; and as `checkpoint` does.
        """
        if isinstance(choice, bool):
            return _DEFAULT.checkpoint_distributed(function, choice, *args, **kwargs)
        if not isinstance(choice, list):
            raise CheckpointError(
                "CheckpointFunction.apply(function, choice, *args): expected a bool (Megatron's "
                "distribute_saved_activations) or a list (DeepSpeed's all_outputs) as second "
                f"argument, got a {type(choice).__name__}; to give none, call checkpoint()"
            )
        outputs = _DEFAULT.call(function, args, kwargs)
        choice.extend(outputs if isinstance(outputs, tuple | list) else (outputs,))
        return outputs


def configure(  # noqa: PLR0917  (as code that exists calls it)
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Decide how `checkpoint` keeps inputs; see `Checkpointer.configure`."""
    _DEFAULT.configure(
        mpu_,
        deepspeed_config=deepspeed_config,
        partition_activations=partition_activations,
        contiguous_checkpointing=contiguous_checkpointing,
        num_checkpoints=num_checkpoints,
        checkpoint_in_cpu=checkpoint_in_cpu,
        synchronize=synchronize,
        profile=profile,
    )


def is_configured() -> bool:
    """Return whether `configure` has been called."""
    return _DEFAULT.is_configured()


def set_num_layers(num_layers: int) -> None:
    """Set the number of checkpointed layers; see `Checkpointer.set_num_layers`."""
    _DEFAULT.set_num_layers(num_layers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Split later inputs or not; see `Checkpointer.partition_activations_in_checkpoint`."""
    _DEFAULT.partition_activations_in_checkpoint(partition_activation)


def reset() -> None:
    """Allocate contiguous buffers anew at the next call; see `Checkpointer.reset`."""
    _DEFAULT.reset()


def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker whose rngs `checkpoint` restores; for the CPU without an accelerator."""
    return _DEFAULT.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default and the model-parallel rng; see the method of `Checkpointer`."""
    _DEFAULT.model_parallel_cuda_manual_seed(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed the model-parallel rng; see the method of `Checkpointer`."""
    _DEFAULT.model_parallel_reconfigure_tp_seed(seed)
