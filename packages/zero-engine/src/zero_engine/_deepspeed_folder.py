"""A checkpoint that DeepSpeed's ZeRO saved, as parameters by name, to be read range by range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_partition import AbstractRangeReader

from ._deepspeed_files import DeepSpeedFiles
from ._deepspeed_layout import Runs, locate_cut_params, locate_whole_groups
from ._errors import FileError
from ._joined_range import JoinedRange
from ._torch_file import TensorRange

Readers = dict[str, AbstractRangeReader]

_OF_ENGINE: Final = ("lr_scheduler", "skipped_steps", "global_steps", "global_samples")
_OF_DEEPSPEED: Final = {  # all that is not the user's; DeepSpeed puts both into one dict
    *_OF_ENGINE,
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    "checkpoint_parallel_dimensions",
}


@final
@frozen
class DeepSpeedFolder:
    """One checkpoint of stage 1, 2 or 3. Opening maps its files; values are read when asked for."""

    path: Path
    step: int
    stage: int
    world_size: int  # that saved it
    params: Mapping[str, AbstractRangeReader]  # fp32 where they train, frozen ones as they are
    ties: Mapping[str, str]  # from further names of tied parameters to those in `params`
    buffers: Mapping[str, AbstractRangeReader]
    states: Mapping[str, Mapping[str, AbstractRangeReader]]  # of the optimizer, by parameter, entry
    engine: Mapping[str, Any]  # what its engine kept besides, by DeepSpeed's names
    client_state: Mapping[str, Any]  # what `save_checkpoint` was given

    @classmethod
    def open(cls, folder: str | Path, tag: str | None = None) -> DeepSpeedFolder:
        """A tag of a folder, what its `latest` names, or the folder itself. Local.

        Raises:
            FileError: A file is missing, damaged, of something else than data parallelism, holds
                other than what its layout says, or asks for a name that is not allowed.
        """
        files = DeepSpeedFiles.open(Path(folder), tag)
        try:
            return _Reading(files).folder()
        except FileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileError(
                f"{files.path}: expected the layout of DeepSpeed's ZeRO ({error!r}); convert it "
                "with DeepSpeed's zero_to_fp32.py, and use load_pretrained()"
            ) from error


@define(eq=False)
class _Reading:
    """Puts together what the files of one checkpoint say."""

    files: DeepSpeedFiles
    stage: int = field(init=False)
    groups: list[dict[str, torch.Size]] = field(init=False)  # shapes, in order
    shapes: dict[str, torch.Size] = field(init=False)  # the same, together
    flats: list[list[Tensor]] = field(init=False)  # partitions of masters, by rank and group
    runs: Runs = field(init=False)

    def __attrs_post_init__(self) -> None:
        # With gradients accumulated in fp32, stage 1 in bf16 leaves its number out.
        self.stage = int(self.files.optimizer[0].get("zero_stage", 1))
        if self.stage not in (1, 2, 3):
            raise FileError(f"{self.files.path}: expected stage 1, 2 or 3, got {self.stage}")
        self.groups = [
            {str(name): torch.Size(shape) for name, shape in group.items()}
            for group in self.model["param_shapes"]
        ]
        self.shapes = {n: shape for group in self.groups for n, shape in group.items()}
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self.flats = [list(of_rank[key]) for of_rank in self.files.optimizer]
        self.runs = self._locate()

    @property
    def model(self) -> Mapping[str, Any]:
        """Model states of rank 0."""
        return self.files.model[0]

    @property
    def world_size(self) -> int:
        """Of the ranks that saved."""
        return len(self.files.optimizer)

    def folder(self) -> DeepSpeedFolder:
        ties = {str(a): str(n) for a, n in (self.model.get("shared_params") or {}).items()}
        params: Readers = {name: self._join(name, self.flats) for name in self.shapes}
        frozen = self._cut_frozen() if self.stage == 3 else self._whole_frozen(ties)
        return DeepSpeedFolder(
            path=self.files.path,
            step=int(self.model["global_steps"]),
            stage=self.stage,
            world_size=self.world_size,
            params=params | frozen,
            ties={a: n for a, n in ties.items() if n in params or n in frozen},
            buffers={name: TensorRange(self.model["module"][name]) for name in self._buffers()},
            states=self._states(),
            engine={key: self.model[key] for key in _OF_ENGINE if key in self.model},
            client_state={k: v for k, v in self.model.items() if k not in _OF_DEEPSPEED},
        )

    def _buffers(self) -> list[str]:
        return [str(name) for name in self.model.get("buffer_names") or ()]

    def _locate(self) -> Runs:
        numels = [{n: shape.numel() for n, shape in group.items()} for group in self.groups]
        lengths = [[flat.numel() for flat in of_rank] for of_rank in self.flats]
        if self.stage == 3:
            runs = locate_cut_params(numels, lengths)
        else:
            said = self.files.optimizer[0].get("param_alignment_paddings")
            gaps = said or [[0] * len(group) for group in numels]
            runs = locate_whole_groups(numels, gaps, lengths)
        for name, shape in self.shapes.items():
            found = sum(run.stop - run.start for run in runs[name])
            if found != shape.numel():
                raise FileError(
                    f"{self.files.path}: expected {shape.numel()} elements of {name!r} in the "
                    f"partitions of {self.world_size} ranks, got {found}; state that DeepSpeed "
                    "kept on NVMe, or shared out over fewer ranks, is not in these files"
                )
        self._check_lengths(runs, lengths)
        return runs

    def _check_lengths(self, runs: Runs, lengths: Sequence[Sequence[int]]) -> None:
        """What is left over is padding: else parameters lie elsewhere than we think."""
        total = sum(map(sum, lengths))
        used = sum(shape.numel() for shape in self.shapes.values())
        gaps = self.files.optimizer[0].get("param_alignment_paddings") or []
        used += 0 if self.stage == 3 else sum(map(sum, gaps))
        padded = self.world_size * (len(runs) if self.stage == 3 else 2 * len(self.groups))
        if total - used > padded:
            raise FileError(
                f"{self.files.path}: expected {used} elements in all partitions, and at most "
                f"{padded} of padding, got {total}"
            )

    def _join(self, name: str, flats: Sequence[Sequence[Any]]) -> JoinedRange:
        runs = self.runs[name]
        parts = tuple((flats[run.rank][run.group], run.start, run.stop) for run in runs)
        dtypes = {tensor.dtype for tensor, _, _ in parts} or {torch.float32}
        if len(dtypes) > 1:
            raise FileError(f"{self.files.path}: {name!r} has parts of {sorted(map(str, dtypes))}")
        return JoinedRange(self.shapes[name], dtypes.pop(), parts)

    def _whole_frozen(self, ties: Mapping[str, str]) -> Readers:
        trained_or_else = {*self.shapes, *self._buffers(), *ties}
        return {
            str(name): TensorRange(value)
            for name, value in self.model["module"].items()
            if name not in trained_or_else
        }

    def _cut_frozen(self) -> Readers:
        readers: Readers = {}
        for name, shape in (self.model.get("frozen_param_shapes") or {}).items():
            lacking = [rank for rank in range(self.world_size) if rank not in self.files.model]
            if lacking:
                raise FileError(
                    f"{self.files.path}: expected model states of {self.world_size} ranks, for the "
                    f"frozen {name!r}; those of rank {lacking[0]} are not there"
                )
            fragments = [
                self.files.model[r]["frozen_param_fragments"][name] for r in range(self.world_size)
            ]
            runs = locate_cut_params(
                [{name: torch.Size(shape).numel()}], [[f.numel()] for f in fragments]
            )[name]
            parts = tuple((fragments[run.rank].view(-1), run.start, run.stop) for run in runs)
            readers[name] = JoinedRange(torch.Size(shape), fragments[0].dtype, parts)
        return readers

    def _states(self) -> dict[str, dict[str, AbstractRangeReader]]:
        by_rank = [list(self._states_of(rank)) for rank in range(self.world_size)]
        return {name: self._state_of(name, by_rank) for name in self.shapes}

    def _states_of(self, rank: int) -> Iterator[Mapping[str, Any]]:
        """The state of each of a rank's partitions, in order."""
        said = self.files.optimizer[rank]
        base = said["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if isinstance(base, list):  # "elastic": without padding, and without param groups
            step = said.get("base_optimizer_state_step")
            shared = {} if step is None else {"step": step}
            yield from ({**shared, **state} for state in base)
            return
        for group in base["param_groups"]:
            shared = {"step": group["step"]} if "step" in group else {}
            for number in group["params"]:
                state = base["state"].get(number, {})
                yield {**shared, **state} if state else {}

    def _state_of(
        self, name: str, by_rank: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, AbstractRangeReader]:
        runs = self.runs[name]
        if not runs:
            return {}
        first = by_rank[runs[0].rank][runs[0].group]
        return {
            str(key): self._entry(name, str(key), value, by_rank) for key, value in first.items()
        }

    def _entry(
        self, name: str, key: str, value: Any, by_rank: Sequence[Sequence[Mapping[str, Any]]]
    ) -> AbstractRangeReader:
        if isinstance(value, int | float):
            value = torch.tensor(float(value))  # as torch's optimizers count
        if not value.dim():
            return TensorRange(value)
        for run in self.runs[name]:
            tensor = by_rank[run.rank][run.group][key]
            length = self.flats[run.rank][run.group].numel()
            if tensor.dim() != 1 or tensor.numel() < length:
                raise FileError(
                    f"{self.files.path}: expected {key!r} of {name!r} to have one value per "
                    f"element, {length} in partition {run.group} of rank {run.rank}; got shape "
                    f"{tuple(tensor.shape)}"
                )
        return self._join(name, [[state.get(key) for state in of] for of in by_rank])
