"""Checkpointer: how calls are checkpointed, and all state that this needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, final

import torch
from attrs import evolve
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from zero_ckpt.inputs.memory import Ledger
from zero_ckpt.inputs.savers import AbstractSaver, KeepSaver, detached

from .call import Call
from .configuration import Configuration, ModelParallel, checked, configuration_of
from .errors import CheckpointError
from .frame import AbstractCompanion, Frame, RecomputeLock, Synchronized
from .keep import Keeping
from .layers import Layers, OnceWritten
from .policies import OperatorPolicy, check_operator_policy
from .profile import Profile, Timed, Timing, table_of
from .rng import (
    MODEL_PARALLEL_RNG,
    RngSnapshot,
    RngTracker,
    devices_of,
    seed_of,
    seeded_state,
    set_state,
)
from .torch_private import is_transformed, uncompiled
from .verify import Checksums, Verification, Witness

# Difference of Megatron between the default seed and the model-parallel one of rank 0.
_OFFSET: Final = 2718


@final
class Checkpointer:
    """Runs functions whose activations are dropped, and computed again in backward.

    Args:
        saver: Saver that keeps a function's inputs until backward; a `KeepSaver`, which keeps them
            as they are, when None.
        tracker: Named rngs, restored for the second run too; a new `RngTracker` when None.
        stops_early: Whether the second run ends as soon as backward has all it needs.
        synchronizes: Whether the host waits for the device before and after each run.
        verifies: How often to verify that the second run did what the first one did; never when
            None.
        profiles: Whether to measure calls, for `timings` and `profile_table`.
        keeps: Decides, for each call of an operator in a function's first run, whether its output
            is kept, so that the operator need not run again: `MATMULS`, or any function of an
            `OperatorCall`. Only new tensors in memory of their own that are not written before
            backward are kept; other calls run again whatever it returns. None keeps nothing.

    Raises:
        CheckpointError: An argument is not of its type.
    """

    def __init__(
        self,
        *,
        saver: AbstractSaver | None = None,
        tracker: RngTracker | None = None,
        stops_early: bool = True,
        synchronizes: bool = False,
        verifies: Verification | None = None,
        profiles: bool = False,
        keeps: OperatorPolicy | None = None,
    ) -> None:
        for name, value, kind in (
            ("saver", saver, AbstractSaver),
            ("tracker", tracker, RngTracker),
            ("verifies", verifies, Verification),
        ):
            if value is not None and not isinstance(value, kind):
                raise CheckpointError(
                    f"Checkpointer({name}=): expected {kind.__name__} or None, got {value!r}"
                )
        for name, value in (
            ("stops_early", stops_early),
            ("synchronizes", synchronizes),
            ("profiles", profiles),
        ):
            checked(name, value, f"Checkpointer({name}=)")
        if keeps is not None:
            check_operator_policy(keeps, "Checkpointer(keeps=)")
        self.saver = KeepSaver() if saver is None else saver
        self.tracker = RngTracker() if tracker is None else tracker
        self._configuration = Configuration(synchronize=synchronizes, profile=profiles)
        self._profile = Profile() if profiles else None
        self._model_parallel = ModelParallel.of(None)
        # Saver for the other value of `partition_activations` than the configuration's. Made at the
        # first `checkpoint_distributed` that asks for it, and dropped by `_configure`.
        self._other_saver: AbstractSaver | None = None
        self._is_configured = False
        self.stops_early = stops_early
        self.keeps = keeps
        self.verifies = verifies
        self._checksums = Checksums()
        self._layers = Layers()
        self._ledger = Ledger()
        self._lock = RecomputeLock()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and drop its activations; backward computes them again.

        Local, unless the saver splits inputs over ranks. Outputs, gradients and random numbers
        are, to the bit, those of `function(*args, **kwargs)`: for the second run every generator
        (the CPU's, those of the devices of tensors in the arguments, every rng of the tracker) and
        autocast are as they were for the first, and after it as they were before it. Buffers that
        a module writes in training (batch norm's statistics) are written once. Where gradients
        are off, nothing is kept at all.

        Inside torch.compile the compiler itself recomputes, as it does for torch's checkpoint. It
        knows nothing of savers, rngs and `keeps`: where this checkpointer has any, the graph breaks
        here, and the function runs as it is.

        Keyword arguments of torch's `checkpoint` are accepted too. `use_reentrant` and
        `preserve_rng_state` may have either value: the behavior above satisfies both. `context_fn`,
        `determinism_check`, `debug` and `early_stop` must have the value for what this checkpointer
        does.

        Args:
            function: Takes and returns anything. It must compute the same when it is called again
                with the same arguments.
            *args: Anything, with tensors anywhere in nested dicts, lists, tuples and dataclasses.
                The first must not be a bool, which Megatron's `checkpoint` takes for
                `distribute_saved_activations`; see `checkpoint_distributed`.
            **kwargs: Likewise, and those of torch's `checkpoint`. Use `functools.partial` to give
                the function a bool as first argument, or a keyword argument of one of torch's
                names.

        Returns:
            What the function returns.

        Raises:
            CheckpointError: The first argument is a bool, or an argument of torch's `checkpoint`
                has a value that is not accepted. The function wrote in place to a tensor that it
                was given, or forked another tracker than this one's; or this is inside a transform
                of torch.func. In backward: an input or weight was written in place meanwhile.
            NondeterminismError: In backward: the second run saved other tensors than the first,
                or, if the call is verified, other values.
        """
        if args and isinstance(args[0], bool):
            raise CheckpointError(
                f"checkpoint(function, {args[0]}, ...): expected no bool as first argument, as it "
                "may be Megatron's distribute_saved_activations or the function's own; call "
                "CheckpointFunction.apply(function, distribute_saved_activations, *args) for the "
                f"former, checkpoint(functools.partial(function, {args[0]}), ...) for the latter"
            )
        return self.call(function, args, self._without_torchs(kwargs))

    def checkpoint_distributed(
        self,
        function: Callable[..., Any],
        distribute_saved_activations: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `checkpoint` with Megatron's argument that decides whether to split inputs.

        Otherwise the configuration applies. Collective over the model-parallel group if inputs are
        split over it.

        Raises:
            CheckpointError: `distribute_saved_activations` is no bool; and as `checkpoint` does.
        """
        where = "checkpoint_distributed(distribute_saved_activations=)"
        checked("partition_activations", distribute_saved_activations, where)
        if distribute_saved_activations is self._configuration.partition_activations:
            return self.call(function, args, kwargs)
        if self._other_saver is None:
            other = self._with("partition_activations", distribute_saved_activations, where)
            self._other_saver = other.saver(self._model_parallel)
        return self.call(function, args, kwargs, saver=self._other_saver)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        saver: AbstractSaver | None = None,
    ) -> Any:
        """Call a function as `checkpoint` does, with any values and names as its arguments."""
        saver = self.saver if saver is None else saver
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            if (
                isinstance(saver, KeepSaver)
                and self.keeps is None
                and self.verifies is None
                and self._profile is None
                and not self.tracker.is_initialized()
                and not self._configuration.synchronize
            ):
                # No option is set that torch's checkpoint lacks, and the compiler knows that one.
                return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
            return self._record_uncompiled(saver, function, args, kwargs)
        if is_transformed():
            raise CheckpointError(
                f"checkpoint(): expected to be outside of torch.func's transforms (vmap, grad, "
                f"jvp, ...), which keep no graph to compute again for, got {function!r:.80} inside "
                "of one; call the function itself there"
            )
        return self._record(saver, function, args, kwargs)

    def _record(
        self, saver: AbstractSaver, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call, inputs = Call.of(function, args, kwargs)
        layer = self._layers.of(function)
        name = f"checkpoint of {layer.name}"
        # A call made while an outer one is computed again is neither measured nor verified: it
        # belongs to that recomputation.
        is_outermost = not self._lock.is_mine
        timed, copying = None, nullcontext
        if self._profile is not None and is_outermost:
            timed = Timed.of(self._profile, layer.name, inputs)
            copying = partial(timed.measure, "copy_s")
        with copying():
            kept = saver.save(detached(inputs), name)
        if timed is not None:
            kept.measures_gathers(partial(timed.measure, "gather_s"))
        rng = RngSnapshot.capture(devices_of((*inputs, *call.params)), self.tracker)
        companions: list[AbstractCompanion | None] = [
            OnceWritten.of(function, (*args, *kwargs.values())),
            Synchronized() if self._configuration.synchronize else None,
            timed,
            None if self.keeps is None else Keeping(name, self.keeps, self._ledger),
        ]
        verifies = self.verifies if is_outermost else None
        is_picked = verifies is not None and verifies.picks(layer.index, next(layer.calls))
        frame = Frame(
            layer=name,
            call=call,
            kept=kept,
            rng=rng,
            lock=self._lock,
            companions=[companion for companion in companions if companion is not None],
            witness=Witness(name, self._checksums) if is_picked else None,
            stops_early=self.stops_early,
            copying=copying,
        )
        outputs = frame.run(args, kwargs)
        call.check_unwritten(inputs, name)
        return outputs

    _record_uncompiled = uncompiled(_record)

    def _without_torchs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the function's own keyword arguments, without those of torch's `checkpoint`.

        Raises:
            CheckpointError: One of torch's has a value that is not accepted.
        """
        own, either = dict(kwargs), (True, False)
        for name, accepted, remedy in (
            ("use_reentrant", (*either, None), "there is one mechanism, which is not reentrant"),
            ("preserve_rng_state", either, "random numbers are always those of the first run"),
            ("determinism_check", ("default",), "the two runs are always compared"),
            ("context_fn", (noop_context_fn,), "Checkpointer(keeps=MATMULS) decides what is kept"),
            ("debug", (False,), "Checkpointer(verifies=Verification()) says what differed"),
            ("early_stop", (self.stops_early,), "Checkpointer(stops_early=) decides that"),
        ):
            value = own.pop(name, accepted[0])
            if value not in accepted:
                expected = " or ".join(map(repr, accepted))
                raise CheckpointError(
                    f"checkpoint({name}=): expected {expected} for this argument of torch's "
                    f"checkpoint, got {value!r:.80}; {remedy}. One of that name for the "
                    f"function itself is given by functools.partial(function, {name}=...)"
                )
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpointer:
        """Return itself: a copy of a model that refers to it is checkpointed as the model is."""
        return self

    def name_layer(self, module: nn.Module, name: str) -> None:
        """Set the name of a module in messages and timings; to be called before its first call.

        The default is the name of its class, with a number from the second module of it on.
        """
        self._layers.names[module] = name

    def timings(self) -> list[Timing]:
        """Return the times that each layer's calls took, in the order of first calls. Local.

        Times are measured on the host, or, where inputs are on an accelerator, by events on its
        current stream. The host waits for these events here, not before.

        Raises:
            CheckpointError: Calls are not measured.
        """
        if self._profile is None:
            raise CheckpointError(
                "Checkpointer.timings(): expected one that measures its calls, which this one does "
                "not; make it with Checkpointer(profiles=True), or configure(profile=True)"
            )
        return self._profile.timings()

    def profile_table(self) -> str:
        """Return the timings as text, one line per layer. Needs tabulate.

        Raises:
            CheckpointError: Calls are not measured, or tabulate is not installed.
        """
        return table_of(self.timings())

    # ---- Configuration, by the names that Megatron and DeepSpeed use ----

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
        """Configure how later calls are checkpointed, by DeepSpeed's argument names.

        An argument takes precedence over the file's section `activation_checkpointing`, and that
        over the default (False). Settings of an earlier call are forgotten, but for `mpu_` and the
        number of layers. The saver that the constructor was given is replaced. Collective over the
        model-parallel group if inputs are split over it, local otherwise.

        Args:
            mpu_: Ranks that split single layers: an object with `get_*_rank`, `get_*_world_size`
                and `get_*_group` for `tensor_model_parallel`, `slice_parallel` or
                `model_parallel`, or a DeviceMesh of one dimension. None keeps that of an earlier
                call; without an earlier one, layers are not split over ranks.
            deepspeed_config: A dict, the path of a JSON file, or an object with
                `activation_checkpointing_config`.
            partition_activations: Whether each rank keeps its shard of each input; ranks gather
                the inputs before they recompute.
            contiguous_checkpointing: Whether inputs are copied to buffers that are allocated once.
            num_checkpoints: Number of checkpointed layers that these buffers are allocated for.
            checkpoint_in_cpu: Whether inputs are copied to host memory.
            synchronize: Whether the host waits for the device before and after each run.
            profile: Whether times are measured, for `timings`.

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
        known = self._configuration.num_checkpoints
        configuration = configuration_of(deepspeed_config, arguments, known)
        self._configure(
            configuration, self._model_parallel if mpu_ is None else ModelParallel.of(mpu_)
        )
        self._is_configured = True

    def _with(self, name: str, value: Any, where: str) -> Configuration:
        """Return the configuration with one argument of `configure` checked and replaced."""
        return evolve(self._configuration, **{name: checked(name, value, where)})

    def _configure(self, configuration: Configuration, model_parallel: ModelParallel) -> None:
        self.saver = configuration.saver(model_parallel)
        if configuration.profile is not (self._profile is not None):
            self._profile = Profile() if configuration.profile else None
        self._other_saver = None
        self._configuration, self._model_parallel = configuration, model_parallel

    def is_configured(self) -> bool:
        """Return whether `configure` has been called."""
        return self._is_configured

    def set_num_layers(self, num_layers: int) -> None:
        """Set the number of checkpointed layers, for contiguous buffers. Local.

        Raises:
            CheckpointError: `num_layers` is no int of 1 or more.
        """
        configuration = self._with("num_checkpoints", num_layers, "set_num_layers()")
        if configuration.contiguous_checkpointing:
            self._configure(configuration, self._model_parallel)
        else:
            self._configuration = configuration

    def partition_activations_in_checkpoint(self, partition_activation: bool) -> None:
        """Split the inputs of later calls over the model-parallel group, or stop doing so.

        Collective over that group.

        Raises:
            CheckpointError: `partition_activation` is no bool.
        """
        where = "partition_activations_in_checkpoint()"
        configuration = self._with("partition_activations", partition_activation, where)
        self._configure(configuration, self._model_parallel)

    def reset(self) -> None:
        """Allocate contiguous buffers anew at the next call, all free and of any size. Local.

        Graphs that exist keep their buffers. Unlike with DeepSpeed, no call is needed after an
        evaluation: a buffer is free when its graph is freed.
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
        where = "model_parallel_cuda_manual_seed()"
        default, own = seed_of(where, seed), self._own_seed(where, seed)
        self.tracker.reset()
        self.tracker.add(MODEL_PARALLEL_RNG, own)
        set_state(self.tracker.device, seeded_state(self.tracker.device, default))

    def model_parallel_reconfigure_tp_seed(self, seed: int) -> None:
        """Reseed "model-parallel-rng" with `seed` + 2718 + this rank's number in its group. Local.

        Raises:
            UnknownRngError: `model_parallel_cuda_manual_seed` has not been called.
            CheckpointError: The seed is no int of 64 bits, this is inside a fork of the tracker, or
                another rng has the seed.
        """
        own = self._own_seed("model_parallel_reconfigure_tp_seed()", seed)
        self.tracker.reseed(MODEL_PARALLEL_RNG, own)

    def _own_seed(self, where: str, seed: int) -> int:
        return seed_of(where, seed_of(where, seed) + _OFFSET + self._model_parallel.rank())

    @property
    def kept_bytes(self) -> int:
        """Bytes of operators' outputs that are kept now by `keeps`, on all devices together."""
        return self._ledger.num_bytes
