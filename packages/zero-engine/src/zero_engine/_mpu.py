"""Megatron's model-parallel unit: an object that knows this rank's groups."""

from __future__ import annotations

from typing import Any

from zero_comm import Group

from ._errors import ConfigError


def check_mpu(mpu: Any, *, what: str) -> None:
    """Raise ConfigError unless it is None or has the getters that are called."""
    if mpu is None:
        return
    names = ["get_data_parallel_group"]
    if hasattr(mpu, "get_model_parallel_world_size"):  # else the model is not split
        names += ["get_model_parallel_world_size", "get_model_parallel_group"]
    missing = [f"{name}()" for name in names if not callable(getattr(mpu, name, None))]
    if missing:
        raise ConfigError(
            f"{what}: expected mpu to have {' and '.join(missing)}, got {mpu!r}; it is an object "
            "or a module as Megatron's, with get_data_parallel_group() and, where the model is "
            "split, get_model_parallel_world_size() and get_model_parallel_group()"
        )


def data_group_of(mpu: Any, *, what: str) -> Group:
    """The ranks that hold the same part of the model. Collective among them."""
    return _wrap(mpu.get_data_parallel_group(), f"{what}: mpu.get_data_parallel_group()")


def model_group_of(mpu: Any, *, what: str) -> Group | None:
    """The ranks that hold the parts of one model; None where it has one. Collective among them."""
    if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1:
        return None
    return _wrap(mpu.get_model_parallel_group(), f"{what}: mpu.get_model_parallel_group()")


def _wrap(process_group: Any, where: str) -> Group:
    try:
        return Group.from_process_group(process_group)
    except (TypeError, ValueError) as error:  # what torch says of a group it does not know
        raise ConfigError(
            f"{where}: expected a process group of torch.distributed, got {process_group!r}"
        ) from error
