"""Megatron's model-parallel unit, an object that knows this rank's groups; or a device mesh."""

from __future__ import annotations

from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh
from zero_comm import Group

from zero_engine.errors import ConfigError

_DATA_AXES: Final = ("dp", "data", "data_parallel")


def _axes_of(mesh: DeviceMesh, *, what: str) -> tuple[int, int | None]:
    """Along which the data is split, and along which the model is, if any."""
    if mesh.ndim == 1:
        return 0, None
    names = mesh.mesh_dim_names or ()
    data = [axis for axis, name in enumerate(names) if name in _DATA_AXES]
    if len(data) != 1 or mesh.ndim != 2:
        raise ConfigError(
            f"{what}: expected mpu to be a device mesh of one axis, or of two with one named "
            f"{' or '.join(map(repr, _DATA_AXES))}, got the axes {names or mesh.ndim}; flatten "
            "those over which the model is split into one"
        )
    return data[0], 1 - data[0]


def check_mpu(mpu: Any, *, what: str) -> None:
    """Raise ConfigError unless it is None or has the getters that are called."""
    if mpu is None:
        return
    if isinstance(mpu, DeviceMesh):
        _axes_of(mpu, what=what)
        return
    names = ["get_data_parallel_group"]
    if hasattr(mpu, "get_model_parallel_world_size"):  # else the model is not split
        names += ["get_model_parallel_world_size", "get_model_parallel_group"]
    missing = [f"{name}()" for name in names if not callable(getattr(mpu, name, None))]
    if missing:
        raise ConfigError(
            f"{what}: expected mpu to have {' and '.join(missing)}, got {mpu!r}; it is a device "
            "mesh, or an object or a module as Megatron's, with get_data_parallel_group() and, "
            "where the model is split, get_model_parallel_world_size() and "
            "get_model_parallel_group()"
        )


def data_group_of(mpu: Any, *, what: str) -> Group:
    """The ranks that hold the same part of the model. Collective among them."""
    if isinstance(mpu, DeviceMesh):
        return Group.from_mesh(mpu, _axes_of(mpu, what=what)[0])
    return _wrap(mpu.get_data_parallel_group(), f"{what}: mpu.get_data_parallel_group()")


def model_group_of(mpu: Any, *, what: str) -> Group | None:
    """The ranks that hold the parts of one model; None where it has one. Collective among them."""
    if isinstance(mpu, DeviceMesh):
        _, axis = _axes_of(mpu, what=what)
        return None if axis is None or mpu.size(axis) == 1 else Group.from_mesh(mpu, axis)
    if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1:
        return None
    return _wrap(mpu.get_model_parallel_group(), f"{what}: mpu.get_model_parallel_group()")


def model_part_of(mpu: Any, *, what: str) -> Any:
    """What says so to `zero_ckpt.configure`; None where the model is not split. Local."""
    if isinstance(mpu, DeviceMesh):
        _, axis = _axes_of(mpu, what=what)
        return None if axis is None else mpu[(mpu.mesh_dim_names or ())[axis]]
    return None if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1 else mpu


def _wrap(process_group: Any, where: str) -> Group:
    try:
        return Group.from_process_group(process_group)
    except (TypeError, ValueError) as error:  # what torch says of a group it does not know
        raise ConfigError(
            f"{where}: expected a process group of torch.distributed, got {process_group!r}"
        ) from error
