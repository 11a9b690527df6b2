"""Accelerate's own test scripts, which its wheel ships, with `ZeroAccelerator` in place of its own.

Each function of the scripts runs on two ranks, first with Accelerate's class, which must pass, then
with ours at each stage.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any, Final
from unittest import mock

import pytest
import test_accelerate
import zero_engine
from torch import nn
from zero_comm import Group
from zero_comm.testing import without_default_device
from zero_engine import ZeroConfig
from zero_partition.seams import find_sharded

pytest.importorskip("accelerate")

SCRIPTS: Final = ("test_script", "test_sync", "test_distributed_data_loop", "test_ops")
HELPERS: Final = (
    *("main", "_", "print_", "create_", "generate_", "verify_", "step_", "get_", "mock_"),
    "check_model_parameters",
)
STAGES: Final = (0, 1, 2, 3)

# What is not run, and why.
ALL: Final = "all stages"
SHARDED: Final = "stages 1 to 3"
READS_GRAD: Final = "reads param.grad, which is sharded; full_grad is tested in test_accelerate.py"
ON_CPU: Final = "join_uneven_inputs does nothing on CPUs"
LEFT_OUT: Final[dict[str, tuple[str, str]]] = {
    "test_noop_sync": (ALL, "of one process"),
    "test_data_loader": (ALL, "called by test_stateful_dataloader"),
    "test_split_between_processes_dataset": (ALL, "of the package datasets"),
    "test_can_join_uneven_inputs": (ALL, ON_CPU),
    "test_join_can_override_even_batches": (ALL, ON_CPU),
    "test_join_can_override_for_mixed_type_dataloaders": (ALL, ON_CPU),
    "test_join_raises_warning_for_iterable_when_overriding_even_batches": (ALL, ON_CPU),
    "test_distributed_sync": (SHARDED, READS_GRAD),
    "test_distributed_sync_multiple_fwd": (SHARDED, READS_GRAD),
    "test_gradient_accumulation": (SHARDED, READS_GRAD),
    "test_gradient_accumulation_with_opt_and_scheduler": (SHARDED, READS_GRAD),
}
IN_FP16: Final = ("test_script.training_check",)
FP16: Final = "for fp16, Accelerate knows the kinds of devices by name"


def _load(script: str) -> ModuleType:
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(f"accelerate.test_utils.scripts.{script}")


def _functions() -> list[str]:
    """`script.function` of all that a new version of Accelerate has, too."""
    found = []
    for script in SCRIPTS:
        module = _load(script)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__
            if own and not name.startswith(HELPERS) and LEFT_OUT.get(name, ("",))[0] != ALL:
                found.append(f"{script}.{name}")
    return found


FUNCTIONS: Final = _functions()


class _Whole(nn.Module):
    """A model of the scripts, whose `cpu()`, called when training has ended, makes it whole."""

    def cpu(self) -> Any:
        if find_sharded(self) is not None:
            zero_engine.unshard(self)
        return super().cpu()


def _make(kind: Any, *positional: Any, **options: Any) -> Any:
    """An accelerator of that class, on the ranks' device, of a kind that Accelerate need not know.

    With cpu=True it joins the ranks' group; on a device, it refuses to be told so twice.
    """
    from accelerate.state import AcceleratorState

    if "ACCELERATE_TORCH_DEVICE" not in os.environ or not AcceleratorState._shared_state:
        options["cpu"] = True
    return kind(*positional, **options)


def _run(script: str, name: str, make: Any) -> None:
    from accelerate import PartialState

    module, accelerator = _load(script), make()
    function = getattr(module, name)
    given = {"accelerator": accelerator, "state": PartialState()}
    asked = inspect.signature(function).parameters
    with ExitStack() as stack:
        stack.enter_context(without_default_device())
        if hasattr(module, "Accelerator"):
            stack.enter_context(mock.patch.object(module, "Accelerator", make))
        if hasattr(module, "RegressionModel"):
            kind = type("RegressionModel", (_Whole, module.RegressionModel), {})
            stack.enter_context(mock.patch.object(module, "RegressionModel", kind))
        function(**{key: value for key, value in given.items() if key in asked})


@pytest.mark.filterwarnings("default")
@pytest.mark.ranks(2, timeout_s=120)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(name, marks=[pytest.mark.cpu_only(FP16)] if name in IN_FP16 else [])
        for name in FUNCTIONS
    ],
)
def test_a_script_of_accelerates_passes(group: Group, function: str) -> None:
    from accelerate import Accelerator
    from zero_engine.integrations.accelerate import ZeroAccelerator

    script, name = function.split(".")
    with test_accelerate._environment(group):
        _run(script, name, partial(_make, Accelerator))
    for stage in (0,) if name in LEFT_OUT else STAGES:
        zero = ZeroConfig(stage, min_unit_bytes=0, small_param_numel=0)
        with test_accelerate._environment(group):
            _run(script, name, partial(_make, ZeroAccelerator, zero=zero))
