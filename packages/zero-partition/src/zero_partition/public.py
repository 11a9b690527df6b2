"""Functions that users call on a partitioned model between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from zero_comm import collective

from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import ModelPhase
from zero_partition.run.source import CodecErrors

from .errors import StateError
from .stand_in import StateKind
from .torch_private import plain_access


@collective
def finish_update(model: nn.Module) -> None:
    """Apply delayed updates to the model. Collective, blocking; between steps.

    After an optimizer's step that is delayed, the model lacks the update of that step until the
    next one. Call this after the last step, before the model is evaluated or exported. Training may
    go on afterwards: its next step has no delay. Where no update is delayed nothing happens.

    Raises:
        StateError: Not sharded, a forward is running, or a context has gathered parameters.
        Exception: The error with which the update has ended, such as a StoreError or a
            TornStepError.
    """
    require_sharded(model).finish_update()


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients without reducing them. Local; all ranks must do the same.

    Inside, each rank keeps its own whole gradients, as with DistributedDataParallel's `no_sync`.
    The first backward after it, or the optimizer's step, reduces the sum once. Without it, each
    backward reduces and adds to the gradient shard, which needs less memory.

    Raises:
        StateError: Not sharded.
    """
    return require_sharded(model).reducer.no_sync()


@contextmanager
def coalesce_reduction(model: nn.Module) -> Iterator[None]:
    """Reduce the sum of all gradients of the backwards inside, once, on leaving. Collective there.

    For several backwards that make one step: each rank may run as many as it likes. Between them
    each rank keeps whole gradients, as under `no_sync`. After an exception nothing is reduced;
    `zero_grad()` drops what was collected.

    Raises:
        StateError: Not sharded, inside `no_sync` or itself, or an exception ended a backward.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    if not sharded.reducer.sync:
        raise StateError(
            "coalesce_reduction() inside no_sync() or another coalesce_reduction(): the outer one "
            "says when gradients are reduced; leave it first"
        )
    sharded.require("coalesce_reduction()", StateKind.GRADS)
    with no_sync(model):
        yield
    sharded.require("leaving coalesce_reduction()", no=(ModelPhase.FAILED,))
    with plain_access():
        sharded.reducer.reduce_local()


def backward_without_batch(model: nn.Module) -> None:
    """Take part in a backward of the other ranks, with gradients of zero. Collective.

    For a rank that has no batch left while others have: it calls this in place of forward and
    backward, and then steps as they do. Inside `no_sync` it does nothing. At stage 3 the others
    must be able to read this rank's memory; where they cannot, their gathers need it, so it has to
    run a batch of any kind with its loss times zero.

    Raises:
        StateError: Not sharded, or a backward of this rank is running or ended in an exception.
        zero_comm.DivergenceError: At stage 3, others gather by messages meanwhile.
    """
    require_sharded(model).backward_without_batch()


def release_buffers(model: nn.Module) -> None:
    """Free slots and reduction buffers until the next step needs them. Local.

    Their memory is then free for another use between phases. A graph that was made before can no
    longer run backward.

    Raises:
        StateError: Not sharded, or a unit is in use.
    """
    require_sharded(model).release_buffers()


@contextmanager
def record_codec_errors(model: nn.Module) -> Iterator[CodecErrors]:
    """Measure what codecs lose of what this rank sends within the context. Local.

    This covers its shards in gathers that are launched inside, and its own gradients in the first
    hop of their reduction, without what `Loco` adds to them. To measure, what it sends is encoded
    and decoded once more; nothing else changes.

    Yields:
        `params.relative()` and `gradients.relative()`: by unit, the norm of what was lost divided
        by the norm of what was to be sent; only units of which something was sent encoded.

    Raises:
        StateError: Not sharded.
    """
    units, errors = require_sharded(model).units, CodecErrors()
    before = [unit.errors for unit in units]
    for unit in units:
        unit.record_errors(errors)
    try:
        yield errors
    finally:
        for unit, outer in zip(units, before, strict=True):
            unit.record_errors(outer)
