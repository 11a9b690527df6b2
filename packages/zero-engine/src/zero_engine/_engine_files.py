"""What an engine saves and loads; the functions are DeepSpeed's, the files are `save`'s."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import zero_partition
from safetensors.torch import save_file
from torch import Tensor
from zero_comm import collective

from ._checkpoint import find_complete
from ._checks import check_flag, check_folder
from ._deepspeed_files import holds_deepspeed, is_deepspeed
from ._engine_accumulation import EngineAccumulation
from ._errors import ConfigError, FileError
from ._file_system import FILE_SYSTEM, named
from ._load import load
from ._load_deepspeed import DeepSpeedLoadReport, load_deepspeed
from ._save import save_with
from ._together import together
from ._writing import warn_of_gradients

_TIMEOUT_S: Final = 60.0
_COUNTERS: Final = ("global_steps", "micro_steps", "global_samples", "_skipped_steps")


class EngineFiles(EngineAccumulation):
    """Saving and loading of an engine."""

    @collective
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """`zero_engine.save`, with the scheduler, the loss scale and the counters. Collective.

        Gradients of micro-batches since the last boundary are not saved: there is a warning then,
        and `load_checkpoint` begins the global step anew.

        Args:
            save_dir: Of all checkpoints; every rank sees it.
            tag: The name of the checkpoint's folder; "global_step" and their number when None.
            client_state: What `load_checkpoint` returns; see `extra` of `zero_engine.save`.
            save_latest: Whether it is found without its tag.
            exclude_frozen_parameters: Leave out parameters that do not train.

        Returns:
            True.

        Raises:
            ConfigError: `save_dir` is empty or None; or see `zero_engine.save`, as for all else
                that it raises.
        """
        self._check_alive("save_checkpoint()")
        self._settle()
        if self._accumulation.num_pending:
            warn_of_gradients(stacklevel=2)
        scaler = self.loss_scaler
        save_with(
            self.module,
            self.optimizer,
            folder=save_dir,
            tag=f"global_step{self.global_steps}" if tag is None else str(tag),
            step=self.global_steps,
            extra={} if client_state is None else client_state,
            scheduler=self._lr_scheduler if _has_state(self._lr_scheduler) else None,
            keep=None,
            has_frozen=not check_flag("exclude_frozen_parameters", exclude_frozen_parameters),
            is_latest=check_flag("save_latest", save_latest),
            warns=False,
            engine={
                "counters": {name: getattr(self, name) for name in _COUNTERS},
                "loss_scaler": None if scaler is None else scaler.state_dict(),
            },
        )
        return True

    @collective
    def load_checkpoint(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """`zero_engine.load`, with what `save_checkpoint` saved; gradients are dropped. Collective.

        What DeepSpeed's ZeRO saved is read as `zero_engine.load_deepspeed` does, with the counters
        and the scheduler; the loss scale and random numbers begin anew.

        Args:
            load_dir: Of all checkpoints.
            tag: Of one of them; the newest when None.
            load_module_strict: Whether names that are missing or unexpected are an error.
            load_optimizer_states: Whether moments, options of param groups and the loss scale are
                restored. Masters are in any case: they are the weights.
            load_lr_scheduler_states: Whether the scheduler is.
            load_module_only: Restore weights and buffers, and no counters or generators either.
            custom_load_fn: Not supported: None.
            missing_ok: Where there is no checkpoint yet, warn and return None twice, as DeepSpeed
                does, which trains from scratch then.

        Returns:
            The path of the checkpoint and the `client_state`.

        Raises:
            ConfigError: `load_dir` is no path, or `custom_load_fn` is given; or the loss scale does
                not fit.
            FileError: See `zero_engine.load`, as for all else that it raises.
        """
        self._check_alive("load_checkpoint()")
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(): expected custom_load_fn to be None: names and shapes are "
                "matched by zero_engine.load; rename keys with zero_engine.load_pretrained()"
            )
        check_folder("load_checkpoint()", load_dir)
        self._settle()
        has_all, folder = not load_module_only, Path(load_dir)
        optimizer = self.optimizer if has_all and load_optimizer_states else None
        has_scheduler = has_all and load_lr_scheduler_states and _has_state(self._lr_scheduler)
        scheduler = self._lr_scheduler if has_scheduler else None
        tag = None if tag is None else str(tag)
        theirs = together(
            lambda: _is_theirs(folder, tag),
            what="load_checkpoint()",
            group=self.group,
            timeout_s=_TIMEOUT_S,
        )
        if any(theirs):
            found = load_deepspeed(
                folder, self.module, optimizer, tag=tag, is_strict=load_module_strict
            )
            self._begin_anew()
            if has_all:
                self._take_up(found, scheduler)
            return str(found.path), dict(found.client_state)
        report = load(
            folder,
            self.module,
            optimizer,
            scheduler=scheduler,
            tag=tag,
            is_strict=load_module_strict,
            restores_rngs=has_all,
            missing_ok=missing_ok,
        )
        if report is None:
            warnings.warn(f"{load_dir}: holds no complete checkpoint", stacklevel=2)
            return None, None
        for what in report.begins_anew:
            warnings.warn(f"{report.path}: begins anew: {what}", stacklevel=2)
        self._begin_anew()
        if has_all:
            saved = report.engine or {"counters": {"global_steps": report.step}}
            for name, value in saved["counters"].items():
                if name in _COUNTERS:
                    setattr(self, name, value)
            if load_optimizer_states and self._loss_scaler is not None and saved.get("loss_scaler"):
                self._loss_scaler.load_state_dict(saved["loss_scaler"])
        return str(report.path), report.extra

    def _take_up(self, found: DeepSpeedLoadReport, scheduler: Any) -> None:
        """Counters and the scheduler of DeepSpeed's engine. Local."""
        said = found.engine
        self.global_steps = found.step
        self.micro_steps = found.step * self.gradient_accumulation_steps()
        self.global_samples = said.get("global_samples", found.step * self.train_batch_size())
        self._skipped_steps = said.get("skipped_steps", 0)
        anew = ["the loss scale"] if self.loss_scale() == 0.0 else []
        if scheduler is not None and said.get("lr_scheduler") is None:
            anew.append("the scheduler, which was saved without state")
        elif scheduler is not None:
            scheduler.load_state_dict(said["lr_scheduler"])
            rates = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") else ()
            for options, rate in zip(self._groups(), rates, strict=False):
                options["lr"] = rate
        if anew:
            warnings.warn(f"{found.path}: begins anew: {', '.join(anew)}", stacklevel=3)

    @collective
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the dtype that the model computes with. Collective.

        Rank 0 needs host memory for all of them.

        Args:
            save_dir: Made if need be.
            save_filename: With ".safetensors" at its end it is such a file, in which tied
                parameters are under the first of their names; else what `torch.save` writes.
            exclude_frozen_parameters: Leave out parameters that do not train.

        Returns:
            True.

        Raises:
            FileError: It could not be written; a file that was there before is as it was.
        """
        self._check_alive("save_16bit_model()")
        state = zero_partition.full_state_dict(self.module)
        path = Path(save_dir) / save_filename
        left_out = set()
        if exclude_frozen_parameters:
            named_params = self.module.named_parameters(remove_duplicate=False)
            left_out = {name for name, param in named_params if not param.requires_grad}
        chosen = {name: value for name, value in state.items() if name not in left_out}

        def write() -> None:
            if self.group.rank == 0:
                _write_weights(chosen, path)

        together(write, what="save_16bit_model()", group=self.group)
        return True

    save_fp16_model = save_16bit_model


def _is_theirs(folder: Path, tag: str | None) -> bool:
    """Whether it is DeepSpeed's checkpoint that is asked for."""
    complete = find_complete(folder)
    if complete:
        return tag not in complete and is_deepspeed(folder, tag)
    return holds_deepspeed(folder, tag)


def _has_state(scheduler: Any) -> bool:
    return hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")


def _write_weights(state: dict[str, Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            first: dict[int, str] = {}
            for name, value in state.items():
                if isinstance(value, Tensor):
                    first.setdefault(id(value), name)
            tensors = {name: state[name].contiguous() for name in first.values()}
            save_file(tensors, temporary, {"format": "pt"})
        else:
            torch.save(state, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)
        FILE_SYSTEM.sync_folder(path.parent)
    except FileError:
        raise
    except OSError as error:
        raise named(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)
