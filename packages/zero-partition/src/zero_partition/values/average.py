"""ShardedAverage: an exponential moving average of a model, of which each rank keeps its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from zero_comm import collective

from zero_partition.dtensors import outer_of
from zero_partition.errors import PartitionError, StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import AbstractRangeReader
from zero_partition.optimizer.shards import SplitEntry
from zero_partition.run.hooks import find_sharded
from zero_partition.run.sharded_model import (
    ModelPhase,
    ShardedModel,
    launch_buffer,
    part_of,
)
from zero_partition.stand_in import StateKind
from zero_partition.torch_private import plain_access

from .load import find_misfits
from .runs import PartBatch, WholeTensor, param_refs_in, read_into, trained_values
from .split_readers import reader_of_part
from .state_dict import gather_state_dict

_SWAP: Final = "ShardedAverage.swap()"


@final
class ShardedAverage:
    """An exponential moving average of the parameters that train, sharded as their optimizer is.

    It equals, bit for bit, what `torch.optim.swa_utils.AveragedModel` computes with
    `get_ema_multi_avg_fn(decay)`: the first update takes the values, each further one makes the
    average `decay * average + (1 - decay) * value`. fp32 masters are averaged where there are some.
    At every stage a rank needs 1/N of their bytes, on the group's device, or on the host where
    optimizer state is offloaded. Frozen parameters and buffers are the model's own.

    Args:
        model: The very module that was sharded. Until the first update the average is as it is now.
        decay: From 0 to 1.

    Attributes:
        decay: May be changed.
        num_updates: How many there were.

    Raises:
        PartitionError: `decay` is no number from 0 to 1.
        StateError: Not sharded, or parameters are parked.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise PartitionError(
                f"ShardedAverage: expected decay to be a number from 0 to 1, got {decay!r}"
            )
        sharded = find_sharded(model)
        if sharded is None:
            raise StateError(
                f"ShardedAverage: expected a model that was sharded, got a {type(model).__name__} "
                "that was not; call zero_engine.shard() first, and pass the very module it "
                "returned (torch.optim.swa_utils.AveragedModel averages plain ones)"
            )
        self.decay, self.num_updates = decay, 0
        self._begin(sharded)

    def _begin(self, sharded: ShardedModel) -> None:
        """Start the averages from the current values, in this layout. Local."""
        self._model, self._sharded = sharded.model, sharded
        self._places = [param_ref for param_ref in sharded.param_refs if param_ref.is_trainable]
        self._is_elsewhere = sharded.residence.offload is not None
        self._device = torch.device("cpu") if self._is_elsewhere else sharded.group.device
        self._usable("ShardedAverage()")
        self._averages = {
            buffer: trained_values(sharded, buffer).to(self._device, copy=True)
            for buffer in sharded.buffers
            if buffer.plan.trainable
        }
        sharded.averages[self] = None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that it takes, padding included."""
        return 0 if self._is_elsewhere else sum(each.nbytes for each in self._averages.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes, where optimizer state is offloaded."""
        return sum(each.nbytes for each in self._averages.values()) - self.device_bytes

    @torch.no_grad()
    def update(self) -> None:
        """Take the values of now into the average; after `optimizer.step()`. Local.

        An update of the optimizer's that is delayed counts as made.

        Raises:
            StateError: The model was unsharded since, its parameters are parked, or this is inside
                `swap`.
        """
        sharded = self._usable("ShardedAverage.update()")
        for buffer, average in self._averages.items():
            values = trained_values(sharded, buffer).to(self._device)
            average.lerp_(values, 1 - self.decay) if self.num_updates else average.copy_(values)
        self.num_updates += 1

    @collective
    def full_state_dict(self) -> dict[str, Any]:
        """The model's whole `state_dict` with the averages in it, on rank 0. Collective.

        As `zero_engine.full_state_dict(model)`, but of the dtype in which they are averaged.

        Returns:
            The state dict on rank 0, in host memory; an empty dict on other ranks.

        Raises:
            StateError: As for `update`, or a forward is running.
        """
        sharded = self._usable("ShardedAverage.full_state_dict()")
        return gather_state_dict(sharded, self._averages)

    @contextmanager
    @collective
    def swap(self) -> Iterator[nn.Module]:
        """A context in which the model computes with the averages. Every rank; collective.

        For evaluation: steps, loading and saving are refused inside. At its end every value that
        trains is as it was, to the bit. Takes the bytes of the average once more.

        Yields:
            The model.

        Raises:
            StateError: As for `update`, or a forward, or a context that gathers, is running.
        """
        sharded = self._usable(_SWAP)
        sharded.require(_SWAP, no=(ModelPhase.FORWARD, ModelPhase.GATHERED))
        sharded.finish_update()
        for buffer in self._averages:
            buffer.follow_writes()
        trained = {b: b.trained.to(self._device, copy=True) for b in self._averages}
        sharded.open_contexts.append(_SWAP)
        try:
            self._write(self._averages)
            yield self._model
        finally:
            sharded.open_contexts.remove(_SWAP)
            self._write(trained)

    def batches(self) -> list[PartBatch]:
        """This rank's parts of the average, for a checkpoint. Local."""
        self._usable("ShardedAverage.batches()")
        batches = []
        for buffer, average in self._averages.items():
            given = {}
            for param_ref in param_refs_in(buffer):
                tensor = WholeTensor.of(param_ref, None, param_ref.plan.shape, average.dtype)
                part = tensor.given_part(param_ref, param_ref.kept)
                if part.span.numel:
                    given[part] = part_of(param_ref, average)
            read = partial(list, given.values())
            batches.append(PartBatch(tuple(given), False, read, False))
        return batches

    def find_problems(self, readers: Mapping[str, AbstractRangeReader]) -> list[str]:
        """Return what prevents loading an average from `readers`, by parameters' names. Local."""
        self._usable("ShardedAverage.load()")
        problems = []
        for param_ref in self._places:
            if param_ref.name in readers:
                shape = outer_of(param_ref.param).shape
                dtype = self._averages[param_ref.buffer].dtype
                problems += find_misfits(param_ref.name, shape, dtype, readers[param_ref.name])
            elif param_ref.plan.shape.numel():
                problems.append(f"the average lacks {param_ref.name!r}")
        return problems

    def load(self, readers: Mapping[str, AbstractRangeReader], num_updates: int) -> None:
        """Read this rank's parts of an average in which there are no problems. Local."""
        for param_ref in self._places:
            if param_ref.kept.numel:
                part = part_of(param_ref, self._averages[param_ref.buffer])
                reader = reader_of_part(param_ref.param, readers[param_ref.name])
                read_into(part, reader, param_ref.kept)
        self.num_updates = num_updates

    def split(self) -> dict[str, SplitEntry]:
        """Return the averages by name, split evenly, before their layout ends. Collective."""
        device, found = self._sharded.group.device, dict[str, SplitEntry]()
        for buffer, average in self._averages.items():
            values = launch_buffer(buffer, average.to(device))()
            for plan, value in zip(buffer.plan.params, values, strict=True):
                found[plan.name] = SplitEntry.of(value.to(self._device), buffer.group)
        return found

    @torch.no_grad()
    def follow(self, sharded: ShardedModel, averages: Mapping[str, SplitEntry]) -> None:
        """Continue in another layout of the model. Collective.

        The averages of newly trainable parameters start from their current values.
        """
        self._begin(sharded)
        for param_ref in self._places:
            if param_ref.name in averages:
                whole = averages[param_ref.name].whole().view(-1)
                part_of(param_ref, self._averages[param_ref.buffer]).copy_(
                    whole[param_ref.kept.as_slice()]
                )

    def _usable(self, what: str) -> ShardedModel:
        sharded = self._sharded
        if find_sharded(self._model) is not sharded:
            raise StateError(
                f"{what}: the model was unsharded since this was made; make a ShardedAverage of "
                "the model as it is sharded now"
            )
        if _SWAP in sharded.open_contexts:
            raise StateError(f"{what} inside {_SWAP}: leave the context first")
        sharded.require(what, StateKind.PARAMS, StateKind.MASTERS)
        return sharded

    @torch.no_grad()
    def _write(self, values: Mapping[FlatBuffer, Tensor]) -> None:
        """Make these the values that train, and that the model computes with. Collective."""
        self._sharded.begin_write()
        with plain_access():
            for buffer, value in values.items():
                for storage in dict.fromkeys((buffer.main_shard, buffer.model_shard)):
                    storage.write(value)
        self._sharded.publish_params(is_sharded=True)
