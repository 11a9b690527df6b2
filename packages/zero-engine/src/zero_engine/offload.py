"""Offload: which states are kept on the host or on disk, and the backends that keep them there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, final

import attrs
import torch
from attrs import Attribute, field, frozen
from torch import nn
from zero_offload import (
    AbstractStore,
    DiskSettings,
    DiskStore,
    Footprint,
    HostArena,
    OffloadedState,
)
from zero_offload.residence import DelayedState, HostGradients, OffloadedShards, with_delay
from zero_partition.seams import OffloadBackends, members_of

from .checks import at_least, is_kind, names_fields
from .errors import ConfigError

SUBGROUP_BYTES: Final = 64 * 2**20
# DeepSpeed's words -> ours.
RESIDENCES: Final = {"none": "device", "cpu": "host", "nvme": "disk"}


def our_word(value: Any) -> str:
    """Return the end of an error message: our word for `value`, if that is DeepSpeed's."""
    ours = RESIDENCES.get(value) if isinstance(value, str) else None
    return "" if ours is None else f"; DeepSpeed's {value!r} is {ours!r} here"


def _check_residence(_: Offload, attribute: Attribute, value: Any) -> None:
    if value not in ("device", "host", "disk"):
        raise ConfigError(
            f"Offload.{attribute.name}: expected 'device', 'host' or 'disk', got {value!r}"
            + our_word(value)
        )


def _check_share(_: Offload, attribute: Attribute, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ConfigError(
            f"Offload.{attribute.name}: expected a share of the optimizer's state, from 0 to 1, "
            f"got {value!r}"
        )


def _as_folder(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ConfigError(f"Offload.path: expected the path of a folder, or None, got {value!r}")
    return Path(value)


@final
@names_fields
@frozen(kw_only=True)
class Offload:
    """Choice of the states that are offloaded to the host or disk. The same on every rank.

    Offloading does not change results, with two exceptions: `delayed_update`, and the last bits of
    torch's Adam, AdamW and Adagrad, whose offloaded state is stepped by zero-offload's kernels.

    Args:
        optimizer: Where optimizer state and masters are stored and stepped: "device", "host" or
            "disk". Not at stage 0.
        params: Where shards of parameters are stored. At stage 3 only.
        fraction: Share of the optimizer state, by bytes, that is stored at `optimizer`. The
            remainder is stored and stepped on the device, or on the host if shards of parameters
            are offloaded. 0 offloads nothing.
        path: A folder on the disk to use; needed where something is offloaded to disk.
        pin: Page-lock host memory, where there is an accelerator: transfers then overlap with
            computing.
        subgroup_bytes: Most optimizer state that is read, stepped and written together. With the
            disk, three times this is in memory at once. Below 1 MiB the step takes many times as
            long.
        read_ahead: With params="disk": units whose shards are read ahead of their gather.
        max_host_numel: With params="disk": elements of this rank's shards that are stored on the
            host instead, beginning with the model's first units.
        budget_bytes: Most host memory of a rank; what the process may have when None.
        disk: How the disk is used, such as `zero_offload.tune(path)` returns.
        delayed_update: `optimizer.step()` starts the update and returns. The update runs during the
            next forward and backward, and the model gets its values in the step after these.
            Gradients are therefore of parameters without the last update: results differ, and
            learning may be slower; compare. Needs memory for the new values, and for a second copy
            of the gradients. Call `finish_update` after the last step.

    Raises:
        ConfigError: Names the setting, what was expected and what came.
    """

    optimizer: Literal["device", "host", "disk"] = field(
        default="device", validator=_check_residence
    )
    params: Literal["device", "host", "disk"] = field(default="device", validator=_check_residence)
    fraction: float = field(default=1.0, validator=_check_share)
    path: Path | None = field(default=None, converter=_as_folder)
    pin: bool = field(default=True, validator=is_kind(bool))
    subgroup_bytes: int = field(default=SUBGROUP_BYTES, validator=at_least(1, int))
    read_ahead: int = field(default=2, validator=at_least(0, int))
    max_host_numel: int = field(default=0, validator=at_least(0, int))
    budget_bytes: int | None = field(default=None, validator=at_least(1, int))
    disk: DiskSettings | None = field(default=None, validator=is_kind(DiskSettings, None))
    delayed_update: bool = field(default=False, validator=is_kind(bool))

    def __attrs_post_init__(self) -> None:
        uses_disk = "disk" in (self.optimizer, self.params)
        if uses_disk and self.path is None:
            where = "optimizer" if self.optimizer == "disk" else "params"
            raise ConfigError(
                f"Offload.path: expected a folder on the disk to use with {where}='disk', got "
                "None; pass path=..."
            )
        # A setting without effect must not be ignored. Upper bounds such as `budget_bytes` are
        # fulfilled where nothing is offloaded, so they are not checked.
        for name, is_read, needed in (
            ("fraction", self.optimizer != "device", "optimizer='host' or 'disk'"),
            ("path", uses_disk, "optimizer='disk' or params='disk'"),
            ("max_host_numel", self.params == "disk", "params='disk'"),
            ("disk", uses_disk, "optimizer='disk' or params='disk'"),
            ("delayed_update", self.optimizer != "device", "optimizer='host' or 'disk'"),
            ("delayed_update", self.fraction > 0, "fraction above 0"),
        ):
            value, default = getattr(self, name), getattr(attrs.fields(Offload), name).default
            if not is_read and value != default:
                raise ConfigError(
                    f"Offload.{name}: expected {default!r} without {needed}, got {value!r}; leave "
                    f"it out, or set {needed}"
                )


# Sub-groups with less state stay in host memory.
_SMALL_BYTES: Final = 2**20


def shares_of(offload: Offload, *, offloads_params: bool) -> dict[str, Any]:
    """Return how much of the state is stored where, as arguments of `OffloadedState.like`.

    With `offloads_params`, shards of parameters are offloaded. Then no state stays on the device:
    an optimizer on the device cannot update offloaded shards.
    """
    return {
        "state": "host" if offload.optimizer == "host" else "disk",
        "fraction": {"host" if offloads_params else "device": 1 - offload.fraction},
        "subgroup_bytes": offload.subgroup_bytes,
        "small_bytes": min(_SMALL_BYTES, offload.subgroup_bytes // 2),
    }


def _open_disk(offload: Offload) -> AbstractStore:
    assert offload.path is not None, "checked when it was made"
    return DiskStore(offload.path, offload.disk or DiskSettings())


def backends_of(
    offload: Offload | None,
    device: torch.device,
    *,
    open_disk: Callable[[Offload], AbstractStore] = _open_disk,
) -> OffloadBackends:
    """Return the offload backends of a configuration; none allocates or opens anything yet. Local.

    On the CPU, host and device are the same memory, so params="host" has no effect. On other
    devices, reduced gradients are kept on the host if all optimizer state is stepped there.
    """
    if offload is None:
        return OffloadBackends()
    is_cpu = device.type == "cpu"
    resources = ExitStack()
    # Entered first, so that the store is closed after its users.
    disk = resources.enter_context(ExitStack())
    # Opened when it is first used, where ranks report errors to each other: a folder that is
    # missing on one rank then raises on all.
    store = cache(lambda: disk.enter_context(open_disk(offload)))

    def arena(name: str) -> HostArena:
        return HostArena(name, is_pinned=offload.pin)

    params = None
    if offload.params == "disk":
        params = OffloadedShards(
            arena("parameters"),
            store,
            max_host_numel=offload.max_host_numel,
            budget_bytes=offload.budget_bytes,
        )
    elif offload.params == "host" and not is_cpu:
        params = OffloadedShards(arena("parameters"))
    if params is not None:
        resources.callback(params.end)
    has_state = offload.optimizer != "device" and offload.fraction > 0
    is_all_on_host = offload.fraction == 1 or params is not None
    grads_on_host = has_state and not is_cpu and is_all_on_host

    def open_state(
        optimizer: torch.optim.Optimizer,
        positions: Mapping[nn.Parameter, int],
        own_masters: Mapping[torch.dtype, torch.dtype],
    ) -> OffloadedState | DelayedState:
        budget = offload.budget_bytes
        if budget is not None:
            taken = 0 if params is None else params.host_bytes
            if offload.delayed_update:
                delayed = with_delay(Footprint(), positions, grads_on_host=grads_on_host)
                taken += delayed.host_bytes
            budget = max(0, budget - taken)
        state: OffloadedState | DelayedState
        state = inner = OffloadedState.like(
            members_of(optimizer),
            store=store() if offload.optimizer == "disk" else None,
            own_masters=own_masters,
            budget_bytes=budget,
            is_pinned=offload.pin,
            **shares_of(offload, offloads_params=params is not None),
        )
        if offload.delayed_update:
            state = DelayedState(inner, arena("delayed update"), grads_on_host=grads_on_host)
        resources.callback(state.close, keeps_store=False)
        state.add(positions, optimizer.param_groups)
        return state

    return OffloadBackends(
        params=params,
        open_state=open_state if has_state else None,
        is_delayed=has_state and offload.delayed_update,
        gradients=HostGradients(arena("gradients")) if grads_on_host else None,
        place="here" if params is None else offload.params,
        close=resources.close,
    )
