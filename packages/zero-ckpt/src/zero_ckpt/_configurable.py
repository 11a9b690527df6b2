"""What a checkpointer is told after it was made, by the names that Megatron and DeepSpeed use."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from ._configuration import Configuration, changed, configuration_of
from ._model_parallel import ModelParallel
from ._profile import Profile
from ._savers import AbstractSaver
from ._seeds import reseed_own, seed_both
from ._tracker import RngTracker


class Configurable:
    """The part of `Checkpointer` that decides where inputs rest, and that seeds."""

    def __init__(
        self, saver: AbstractSaver, tracker: RngTracker, configuration: Configuration
    ) -> None:
        self.saver = saver
        self.tracker = tracker
        self._configuration = configuration
        self._profile = Profile() if configuration.profiles else None
        self._model_parallel = ModelParallel.of(None)
        self._other_saver: AbstractSaver | None = None  # see _saver_that_splits_otherwise
        self._is_configured = False

    def configure(
        self,
        mpu_: Any,
        deepspeed_config: Any = None,
        *,
        partition_activations: bool | None = None,
        contiguous_checkpointing: bool | None = None,
        num_checkpoints: int | None = None,
        checkpoint_in_cpu: bool | None = None,
        synchronize: bool | None = None,
        profile: bool | None = None,
    ) -> None:
        """Decide how calls from now on are checkpointed, with DeepSpeed's names for it.

        An argument beats the file's section `activation_checkpointing`, which beats the default
        (False). What an earlier call decided is forgotten, but for `mpu_` and the number of layers.
        The saver that the constructor was given is replaced. Collective over the model-parallel
        group if inputs are split over it, local otherwise.

        Args:
            mpu_: Says which ranks split single layers: an object with `get_*_rank`,
                `get_*_world_size` and `get_*_group` for `tensor_model_parallel`, `slice_parallel`
                or `model_parallel`, or a DeviceMesh of one dimension. None keeps the one before; at
                first there is none, and this rank has its layers for itself.
            deepspeed_config: A dict, the path of a JSON file, or an object with
                `activation_checkpointing_config`.
            partition_activations: Each rank keeps its part of each input, and all gather them
                before they compute again.
            contiguous_checkpointing: Inputs go to buffers that are made once.
            num_checkpoints: For so many calls, that is checkpointed layers.
            checkpoint_in_cpu: Inputs go to host memory.
            synchronize: The device is waited for at the edges of each call.
            profile: Times are measured.

        Raises:
            CheckpointError: `mpu_` is no mpu, an argument or key is of the wrong type, a key is
                unknown, the file cannot be read, contiguous buffers are asked for without a number
                of layers, or inputs cannot be split over `mpu_`'s group. Nothing has changed then.
        """
        arguments = {
            "partition_activations": partition_activations,
            "contiguous_checkpointing": contiguous_checkpointing,
            "num_checkpoints": num_checkpoints,
            "checkpoint_in_cpu": checkpoint_in_cpu,
            "synchronize": synchronize,
            "profile": profile,
        }
        known = self._configuration.num_layers
        configuration = configuration_of(deepspeed_config, arguments, known)
        self._configure(
            configuration, self._model_parallel if mpu_ is None else ModelParallel.of(mpu_)
        )
        self._is_configured = True

    def _configure(self, configuration: Configuration, model_parallel: ModelParallel) -> None:
        self.saver = configuration.saver(model_parallel)
        if configuration.profiles is not (self._profile is not None):
            self._profile = Profile() if configuration.profiles else None
        self._other_saver = None
        self._configuration, self._model_parallel = configuration, model_parallel

    def _saver_that_splits_otherwise(self) -> AbstractSaver:
        """For calls that say themselves whether inputs are split, and not as is configured."""
        if self._other_saver is None:
            other = evolve(self._configuration, partitions=not self._configuration.partitions)
            self._other_saver = other.saver(self._model_parallel)
        return self._other_saver

    def is_configured(self) -> bool:
        """Whether `configure` has been called."""
        return self._is_configured

    def set_num_layers(self, num_layers: int) -> None:
        """Say how many layers are checkpointed, for contiguous buffers. Local.

        Raises:
            CheckpointError: It is no int of 1 or more.
        """
        configuration = changed(
            self._configuration, "num_checkpoints", num_layers, "set_num_layers()"
        )
        if configuration.is_contiguous:
            self._configure(configuration, self._model_parallel)
        else:
            self._configuration = configuration

    def partition_activations_in_checkpoint(self, partition_activation: bool) -> None:
        """Split the inputs of later calls over the model-parallel group, or stop doing so.

        Collective over that group.

        Raises:
            CheckpointError: It is no bool.
        """
        configuration = changed(
            self._configuration,
            "partition_activations",
            partition_activation,
            "partition_activations_in_checkpoint()",
        )
        self._configure(configuration, self._model_parallel)

    def reset(self) -> None:
        """Have contiguous buffers made anew, all of them free and of any size. Local.

        Graphs that exist keep theirs. Nobody needs to call it after an evaluation, as DeepSpeed's
        users do: a buffer is free when its graph is.
        """
        for saver in (self.saver, self._other_saver):
            if saver is not None:
                saver.reset()

    def model_parallel_cuda_manual_seed(self, seed: int) -> None:
        """Seed the default rng and that of the tracker; on the CPU where there is no accelerator.

        The default rng of the tracker's device gets `seed`, on every rank of the model-parallel
        group the same. The tracker forgets its rngs and gets "model-parallel-rng", seeded with
        `seed` + 2718 + this rank's number in that group. Local.

        Raises:
            CheckpointError: The seed is no int of 64 bits, or this is inside a fork of the tracker.
        """
        seed_both(self.tracker, seed, self._model_parallel.rank())

    def model_parallel_reconfigure_tp_seed(self, seed: int) -> None:
        """Begin "model-parallel-rng" again, from `seed` + 2718 + this rank's number. Local.

        Raises:
            UnknownRngError: `model_parallel_cuda_manual_seed` has not been called.
            CheckpointError: As there; or another rng has the seed.
        """
        reseed_own(self.tracker, seed, self._model_parallel.rank())
