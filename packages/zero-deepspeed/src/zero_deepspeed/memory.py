"""Estimates of model state per rank by DeepSpeed's names, and what memory is in use now."""

from __future__ import annotations

import resource
from typing import Any, Final

import torch
from torch import nn
from zero_engine import ConfigError, Offload, Precision, ZeroConfig, plan

from .comm import get_rank
from .parameters import logger

_GIB: Final = 2**30
_WORDS: Final = {"device": "none", "host": "cpu"}


def see_memory_usage(message: str, force: bool = False, ranks: Any = (0,)) -> None:
    """Log memory in use on the device, its peak, and the peak of this process on the host. Local.

    Args:
        message: Begins the line.
        force: Do nothing when False, as in DeepSpeed.
        ranks: Those that log.
    """
    if not force or get_rank() not in ranks:
        return
    parts = [f"host peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"]
    if torch.accelerator.is_available():
        allocated, peak = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
        parts.insert(0, f"device {allocated() / _GIB:.2f} GiB, peak {peak() / _GIB:.2f} GiB")
    logger.info("%s | %s", message, ", ".join(parts))


# NOTE(estimates): DeepSpeed's functions of these names compute formulas. Here they ask
# `zero_engine.plan`, which knows what is allocated: bf16 with fp32 masters, Adam, buffers included.
# `additional_buffer_factor` and `zero_init` are there for DeepSpeed's signatures only: nothing is
# estimated by a factor, and no model need be whole in one place while it is built.


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of model state at stage 2: on a host, and on a GPU. Local; see NOTE(estimates)."""
    model, where = _model_of(total_params, total_params), "host" if cpu_offload else "device"
    return _estimate(2, model, num_gpus_per_node, num_nodes, where, "device")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 2 for a model, with and without offload. Local.

    See NOTE(estimates).

    Args:
        model: Not sharded; best on the meta device.
        num_gpus_per_node: Ranks on a node.
        num_nodes: Nodes.
        additional_buffer_factor: See NOTE(estimates).

    Raises:
        zero_engine.ConfigError: As for `zero_engine.plan`.
    """
    _print_table(2, model, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 2 for a model of a number of parameters. Local."""
    _print_table(2, _model_of(total_params, total_params), num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs(  # noqa: PLR0917 - the order is DeepSpeed's
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of model state at stage 3: on a host, on a GPU, and of the largest layer. Local."""
    model = _model_of(total_params, largest_layer_params)
    places = ("host" if cpu_offload else "device", "host" if cpu_offload_params else "device")
    found = _estimate(3, model, num_gpus_per_node, num_nodes, *places)
    return (*found, 2 * int(largest_layer_params))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for a model, with and without offload. Local."""
    _print_table(3, model, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for a model whose largest layer is known as well. Local."""
    model = _model_of(total_params, largest_layer_params)
    _print_table(3, model, num_gpus_per_node, num_nodes)


def _model_of(total: float, largest: float) -> nn.Module:
    """Return layers, on meta, of `largest` parameters, or of `total` / 1,000 if that is more."""
    for name, value in (("total_params", total), ("largest_layer_params", largest)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != int(value) or not 1 <= value <= total:
            raise ConfigError(f"expected {name} from 1 to {total}, got {value!r}")
    total, largest = int(total), max(int(largest), int(total) // 1000)
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    return nn.Sequential(*(nn.Linear(size, 1, bias=False, device="meta") for size in sizes))


def _print_table(stage: int, model: nn.Module, per_node: int, num_nodes: int) -> None:
    numel = sum(param.numel() for param in model.parameters())
    print(
        f"Model state at stage {stage}: {num_nodes} nodes of {per_node} GPUs, {numel / 1e6:.0f}M "
        "parameters in bf16, with fp32 masters and Adam. `zero plan` has all figures."
    )
    print(f"{'per host':>12} | {'per GPU':>12} | offload_optimizer, offload_param")
    places = [("device", "device"), ("host", "device"), ("host", "host")]
    for optimizer, params in places if stage == 3 else places[:2]:
        host, device = _estimate(stage, model, per_node, num_nodes, optimizer, params)
        print(
            f"{host / _GIB:>8.2f} GiB | {device / _GIB:>8.2f} GiB | {_WORDS[optimizer]}, "
            f"{_WORDS[params]}"
        )


def _estimate(
    stage: int, model: nn.Module, per_node: int, num_nodes: int, *places: Any
) -> tuple[int, int]:
    """Return bytes on a host and on a GPU, with optimizer state and parameters in `places`."""
    optimizer, params = places
    is_offloaded = (optimizer, params) != ("device", "device")
    config = ZeroConfig(
        stage,
        precision=Precision(params=torch.bfloat16),
        offload=Offload(optimizer=optimizer, params=params) if is_offloaded else None,
    )
    found = plan(model, config, world_size=per_node * num_nodes, ranks_per_node=per_node)
    report = found.memory.before_step
    return (report.host_bytes + found.passing_bytes) * per_node, report.total_bytes
