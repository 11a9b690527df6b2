"""EngineConfig: the configuration of an engine."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import torch
from attrs import Attribute, field, frozen
from torch import Tensor, nn

from zero_engine.checks import at_least, check_number, is_kind, names_fields
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.readers import AbstractReader, reader_for
from zero_engine.reports import as_table

from .loss_scale import DynamicLossScale, StaticLossScale


class AbstractMonitor(ABC):
    """Display of an engine's steps, on the rank that has it. Its methods are local."""

    @abstractmethod
    def note_loss(self, num_samples: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch; `num_samples` are those before its global step."""

    @abstractmethod
    def step(self, num_steps: int, num_samples: int, values: Mapping[str, float]) -> None:
        """End a global step: its number, samples so far, learning rate and loss scale."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the losses since the last global step, which belong to no step."""

    @abstractmethod
    def close(self) -> None:
        """Close the display, as the engine ends."""


def _is_function(owner: Any, attribute: Attribute, value: Any) -> None:
    if value is not None and not callable(value):
        raise ConfigError(
            f"{type(owner).__name__}.{attribute.name}: expected a function, or None, got {value!r}"
        )


@final
@frozen
class SourceRow:
    """One line of `EngineConfig.table`."""

    # Path of the key in the file.
    key: str
    # The value that is used; `str` does not fail for it.
    value: Any
    # "file", "auto" (the file leaves it open), "inferred" or "default".
    origin: str
    # The field of EngineConfig that it becomes part of, or why it changes nothing.
    meaning: str


@final
@names_fields
@frozen(kw_only=True)
class EngineConfig:
    """Settings of how an engine trains. The same on every rank.

    Args:
        zero: How the model is distributed, and in which dtypes.
        loss_scale: Scale by which the loss is multiplied before its backward; none when None.
        max_norm: Gradients are clipped to this global L2 norm; 0 turns it off.
        train_batch_size: Samples of all ranks for one step of the optimizer.
        micro_batch_size: Samples of one rank in one forward.
        accumulation_steps: Micro-batches for one step of the optimizer.
        manages_accumulation: Whether the engine counts them. When False every `Engine.step` is a
            boundary, and you call it once per `accumulation_steps` backwards: their number divides
            losses as ever. Each backward reduces; inside `Engine.no_sync` those before the last
            one need not.
        optimizer: Called with the parameters to train where `initialize` is given no optimizer;
            returns one.
        scheduler: Called with the optimizer where `initialize` is given no scheduler; returns one.
        steps_per_print: Steps between two lines of progress; none when None.
        needs_scaled_loss: Whether a backward that no engine runs is an error unless its loss went
            through `Engine.scale`. By default as in DeepSpeed: with a DynamicLossScale, and at
            stage 0 with a static one too; in other cases this is not checked.
        checks_overflow: Whether a step whose gradients have inf or nan on any rank is skipped.
        autocast_dtype: What torch.autocast computes in during forward; off when None.
        drop_last: Whether the data loader drops a last, incomplete batch.
        activation_checkpointing: How `zero_ckpt.checkpoint` keeps inputs, as in the section of this
            name in a file. Ignored if `zero_ckpt.configure` was called before `initialize`.
        prepare: Called with the model before `initialize` shards it, for settings that must be made
            by then: which modules are leaves (`zero_partition.set_leaf_modules`).
        state_dtype: Dtype of the optimizer's moments beside `Precision(params=torch.bfloat16,
            masters=None)`: torch.bfloat16, or torch.float32, which Adam supports. `initialize`
            makes such an optimizer, or refuses one that is passed and has others. The optimizer's
            own when None.
        monitor: Called with the model by rank 0's engine; returns what shows its steps.
        reader: Reader of another library's checkpoints, for `Engine.load_checkpoint`; the installed
            one when None.
        sources: Where every value came from, if it came from a file; not compared by `==`.

    Raises:
        ConfigError: Names the field, what was expected and what came.
    """

    zero: ZeroConfig = field(factory=ZeroConfig, validator=is_kind(ZeroConfig))
    loss_scale: StaticLossScale | DynamicLossScale | None = field(
        default=None, validator=is_kind(StaticLossScale, DynamicLossScale, None)
    )
    max_norm: float = field(default=0.0, validator=at_least(0, (int, float)))
    train_batch_size: int = field(validator=at_least(1, int))
    micro_batch_size: int = field(validator=at_least(1, int))
    accumulation_steps: int = field(default=1, validator=at_least(1, int))
    manages_accumulation: bool = field(default=True, validator=is_kind(bool))
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = field(
        default=None, validator=_is_function
    )
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = field(
        default=None, validator=_is_function
    )
    steps_per_print: int | None = field(default=None, validator=at_least(1, int))
    needs_scaled_loss: bool = field(validator=is_kind(bool))
    checks_overflow: bool = field(default=False, validator=is_kind(bool))
    autocast_dtype: torch.dtype | None = field(default=None, validator=is_kind(torch.dtype, None))
    drop_last: bool = field(default=False, validator=is_kind(bool))
    activation_checkpointing: dict[str, Any] = field(factory=dict, converter=dict, hash=False)
    prepare: Callable[[nn.Module], object] | None = field(default=None, validator=_is_function)
    state_dtype: torch.dtype | None = field(default=None, validator=is_kind(torch.dtype, None))
    monitor: Callable[[nn.Module], AbstractMonitor] | None = field(
        default=None, validator=_is_function
    )
    reader: AbstractReader | None = field(default=None, validator=is_kind(AbstractReader, None))
    sources: tuple[SourceRow, ...] = field(default=(), repr=False, eq=False)

    @needs_scaled_loss.default
    def _needs_scaled_loss(self) -> bool:
        is_static = isinstance(self.loss_scale, StaticLossScale)
        return self.loss_scale is not None and (not is_static or self.zero.stage == 0)

    @classmethod
    def from_deepspeed(
        cls,
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        world_size: int = 1,
        model: nn.Module | None = None,
        auto: Mapping[str, Any] | None = None,
        implied: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """Read a configuration written for DeepSpeed (deepspeed.ai/docs/config-json). Local.

        Every key is used or reported. A key is an error if its type is wrong, its feature is not
        built, it is a known one misspelt, or it is unknown and could change results or memory. Keys
        that change nothing are named in one warning, by rank 0 where there is a job. Of keys that
        are absent, those of the schedule of stage 3 keep the defaults of ZeroConfig, and
        `gradient_clipping` is 1.0, as it is in DeepSpeed. Needs the package zero-deepspeed.

        Args:
            source: A dict, the path of a JSON file, or its base64, as launchers hand it on.
            world_size: Ranks over which the batch is divided.
            model: Resolves "auto" where it depends on `model.config.hidden_size` or, which 16-bit
                section is on, on the dtype of its parameters.
            auto: Values for further keys that are "auto" in the file, by path, as in
                `{"optimizer.params.lr": 1e-4}`; of the three batch sizes, two are enough.
            implied: Like `auto`, but not compared with what the file says: `initialize` passes what
                follows from its arguments.

        Raises:
            ConfigError: Starts with the path of the key that is wrong; of what is still "auto" it
                names every key.
            FileError: There is no such file, or it is not JSON.
        """
        return reader_for("EngineConfig.from_deepspeed()").engine_config(
            source,
            world_size=check_number(
                "EngineConfig.from_deepspeed(): world_size", world_size, 1, int
            ),
            model=model,
            auto=auto,
            implied=implied,
        )

    def table(self) -> str:
        """Return a table of all keys, given or not, at most 100 columns wide.

        A section has a line of its own, and its keys follow without its name: ".stage".
        """
        rows, before = list[tuple[str, Any, str | None, str]](), ""
        for each in self.sources:
            section, dot, key = each.key.partition(".")
            if dot and section != before:
                rows.append((section, "", "", ""))
            before = section
            rows.append((dot + key or section, _shortened(each), each.origin, each.meaning))
        return as_table(
            rows,
            headers=["key", "value", "from", "meaning"],
            missingval="-",
            disable_numparse=True,
            maxcolwidths=[42, 17, 8, 27],
        )


_MOST_NAMES: Final = 2  # of a default list that is printed


def _shortened(row: SourceRow) -> Any:
    """Return the value of a row; of a longer list that nobody gave, only its length."""
    is_long = isinstance(row.value, list | tuple) and len(row.value) > _MOST_NAMES
    is_cut = is_long and row.origin == "default"
    return f"{len(row.value)} names" if is_cut else row.value
