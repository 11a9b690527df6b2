"""A checkpoint that DeepSpeed's ZeRO saved, as parameters by name, to be read range by range."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_engine import FileError
from zero_engine.checkpoint.file_system import read_regular
from zero_engine.checkpoint.ranges import MemoryRun, Range, read_torch_file
from zero_partition.seams import StateSource

# Files that name the tag to load; the first that exists counts.
_LATEST: Final = ("latest", "latest_universal")
# Folder of a universal checkpoint that has a folder for each parameter.
_PARAMS: Final = "zero"
_OPTIMIZER: Final = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class _Attributes:
    """Placeholder for a pickled object of which only attributes are read."""


# Classes in the files of DeepSpeed's own optimizers, and the classes to unpickle them as.
_STAND_INS: Final[Mapping[str, type]] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Attributes,
    "deepspeed.utils.tensor_fragment.fragment_address": _Attributes,
}


def _read_files(path: Path) -> tuple[dict[int, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return model states by rank (rank 0 alone at stages 1 and 2), and optimizer states of all."""
    optimizer_paths = _numbered(path, _OPTIMIZER, lambda match: int(match[2]))
    model_paths = _numbered(path, _MODEL, lambda match: int(match[1] or 0))
    _refuse_others(path, {*optimizer_paths.values(), *model_paths.values()})
    ranks, optimizer = sorted(optimizer_paths), []
    for rank in ranks:
        content = _mapping(optimizer_paths[rank])
        state = content.get("optimizer_state_dict")
        if not isinstance(state, Mapping):
            raise FileError(
                f"{optimizer_paths[rank]}: expected 'optimizer_state_dict' in it, got "
                f"{sorted(map(str, content))}"
            )
        optimizer.append(state)
    if 0 not in ranks or 0 not in model_paths:
        raise FileError(
            f"{path}: expected a checkpoint of DeepSpeed's ZeRO, with "
            "zero_pp_rank_0_mp_rank_00_optim_states.pt and a file of model states of rank 0; "
            f"got {', '.join(sorted(p.name for p in path.iterdir())[:5]) or 'nothing'}"
        )
    counts = optimizer[0].get("partition_count")
    counts = set(counts) if isinstance(counts, list) else {counts}
    if len(counts) != 1 or ranks != list(range(len(ranks))):
        raise FileError(
            f"{path}: expected one file of optimizer states from each rank, and as many "
            f"partitions in every group; got ranks {ranks}, and {counts}"
        )
    if counts != {len(ranks)}:
        raise FileError(
            f"{path}: expected optimizer states of {min(counts)} ranks, got files of "
            f"{len(ranks)}; a rank did not save, or the copy is incomplete"
        )
    return {rank: _mapping(found) for rank, found in sorted(model_paths.items())}, optimizer


def _mapping(path: Path) -> Mapping[str, Any]:
    content = read_torch_file(path, stand_ins=_STAND_INS)
    if not isinstance(content, Mapping):
        raise FileError(f"{path}: expected a dict, got a {type(content).__name__}")
    return content


def is_deepspeed(folder: Path, tag: str | None) -> bool:
    """Return whether the folder of a tag has files of DeepSpeed's, which are not opened. Local."""
    try:
        names = [path.name for path in _folder_of(folder, tag).iterdir()]
    except OSError:
        # The folder is missing, for example. Opening it raises an error that says so.
        return False
    return any(_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name) for name in names)


def has_deepspeed(folder: Path, tag: str | None) -> bool:
    """Return whether a folder, or one in it, has such files, also without `latest`. Local."""
    if not folder.is_dir():
        return False
    return is_deepspeed(folder, tag) or any(
        is_deepspeed(path, None) for path in folder.iterdir() if path.is_dir()
    )


def _folder_of(folder: Path, tag: str | None, *, is_universal: bool = False) -> Path:
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder")
    for latest in _LATEST[1:] if is_universal else _LATEST:
        if tag is None and (folder / latest).is_file():
            tag = read_regular(folder / latest).decode("utf-8", errors="replace").strip()
    if tag is None and is_universal:
        raise FileError(
            f"{folder}: expected a file {_LATEST[1]!r} in it, which names a universal checkpoint, "
            "as checkpoint.load_universal says, got none; make one with DeepSpeed's "
            "ds_to_universal.py, or leave the key out: no checkpoint needs to be converted here"
        )
    if tag is None:
        return folder
    if Path(tag).name != tag or not (folder / tag).is_dir():
        known = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise FileError(f"{folder}: expected a folder {tag!r} in it, got {known}")
    return folder / tag


def _numbered(
    folder: Path, pattern: re.Pattern[str], rank_of: Callable[[re.Match[str]], int]
) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or int(match[match.re.groups]):
            # The last group is the model-parallel rank. Only files of rank 0 count.
            continue
        if (other := found.setdefault(rank_of(match), path)) != path:
            raise FileError(
                f"{folder}: expected one such file of rank {rank_of(match)}, got {other.name} and "
                f"{path.name}; remove the one that an older run left"
            )
    return found


def _refuse_others(folder: Path, known: set[Path]) -> None:
    others = [path.name for path in sorted(folder.glob("*_states.pt")) if path not in known]
    if others:
        raise FileError(
            f"{folder}: expected a checkpoint of data parallelism alone, got {others[0]}, as of "
            "tensor, pipeline or expert parallelism; convert it with DeepSpeed's own tools to a "
            "state dict or safetensors, and use load_pretrained()"
        )


_OF_ENGINE: Final = ("lr_scheduler", "skipped_steps", "global_steps", "global_samples")
# DeepSpeed puts its own keys and the user's into one dict. All other keys are the user's.
_OF_DEEPSPEED: Final = {
    *_OF_ENGINE,
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    "checkpoint_parallel_dimensions",
}


@final
@frozen
class DeepSpeedFolder:
    """One checkpoint of stage 1, 2 or 3, as it was saved or as ds_to_universal.py converts it.

    Opening maps its files; values are read when asked for.
    """

    path: Path
    step: int
    stage: int
    # Number of ranks that saved it.
    world_size: int
    # Values of trained parameters in fp32, of frozen ones in their dtype; without param groups.
    source: StateSource
    # Names of the frozen parameters in `source`.
    frozen: frozenset[str]
    # Other values of the engine, by DeepSpeed's names.
    engine: Mapping[str, Any]
    # The argument of `save_checkpoint`.
    client_state: Mapping[str, Any]

    @classmethod
    def open(
        cls, folder: str | Path, tag: str | None = None, *, is_universal: bool = False
    ) -> DeepSpeedFolder:
        """Open the checkpoint of a tag, the one that `latest` names, or the folder itself. Local.

        Where there is no `latest`, or with `is_universal`, `latest_universal` names it.
        """
        path = _folder_of(Path(folder), tag, is_universal=is_universal)
        try:
            if (path / _PARAMS).is_dir():
                return _open_universal(path)
            return _Reading(path, *_read_files(path)).folder()
        except FileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileError(
                f"{path}: expected the layout of DeepSpeed's ZeRO ({error!r}); convert it "
                "with DeepSpeed's zero_to_fp32.py, and use load_pretrained()"
            ) from error


# NOTE(partitions): a checkpoint has flat groups of parameters, in order, and every rank has a
# partition of each group.
# Stages 1 and 2: a group is its parameters end to end, with gaps that align them, cut into one
# partition per rank; those of the last ranks are shorter by what would be padding.
# Stage 3: each parameter is cut into equal parts, one per rank, the last ones padded; a rank's
# partition is its parts end to end. Groups are runs of parameters, and a rank's partitions end to
# end are one flat sequence, whose cuts into groups need not be known.


def _cut(flats: Sequence[Tensor], start: int, stop: int) -> Iterator[MemoryRun]:
    """Elements [start, stop) of tensors that follow each other, as far as there are any."""
    begin = 0
    for flat in flats:
        first, last = max(start, begin), min(stop, begin + flat.numel())
        if first < last:
            yield MemoryRun(flat, first - begin, last - first)
        begin += flat.numel()


def _cut_parts(flats: Sequence[Sequence[Tensor]], cursor: int, numel: int) -> Iterator[MemoryRun]:
    """Yield the runs of a stage-3 parameter, whose parts begin at `cursor` on each rank."""
    part = -(-numel // len(flats))
    for rank, of_rank in enumerate(flats):
        yield from _cut(of_rank, cursor, cursor + min(part, max(0, numel - part * rank)))


def _joined(path: Path, name: str, shape: torch.Size, runs: Sequence[MemoryRun]) -> Range:
    dtypes = {run.tensor.dtype for run in runs} or {torch.float32}
    if len(dtypes) > 1:
        raise FileError(f"{path}: {name!r} has parts of {sorted(map(str, dtypes))}")
    return Range(shape, dtypes.pop(), tuple(runs))


def _cut_frozen(
    path: Path, models: Mapping[int, Mapping[str, Any]], world_size: int
) -> dict[str, Range]:
    """Join frozen parameters at stage 3, of which each rank's model states have a part."""
    ranges = {}
    for name, said in (models[0].get("frozen_param_shapes") or {}).items():
        lacking = [rank for rank in range(world_size) if rank not in models]
        if lacking:
            raise FileError(
                f"{path}: expected model states of {world_size} ranks, for the frozen {name!r}; "
                f"those of rank {lacking[0]} are not there"
            )
        shape = torch.Size(said)
        flats = [[models[rank]["frozen_param_fragments"][name]] for rank in range(world_size)]
        ranges[name] = _joined(path, name, shape, list(_cut_parts(flats, 0, shape.numel())))
    return ranges


@define(eq=False)
class _Reading:
    """Content of the files of one checkpoint, from which `folder` makes a DeepSpeedFolder."""

    path: Path
    # Both as `_read_files` returns them.
    models: Mapping[int, Mapping[str, Any]]
    optimizer: Sequence[Mapping[str, Any]]
    stage: int = field(init=False)
    # Name -> shape of each trained parameter, in order.
    shapes: dict[str, torch.Size] = field(init=False)
    # Partitions of masters, by rank and group; see NOTE(partitions).
    flats: list[list[Tensor]] = field(init=False)
    # Name -> runs of a parameter in `flats`.
    runs: dict[str, list[MemoryRun]] = field(factory=dict, init=False)

    def folder(self) -> DeepSpeedFolder:
        model = self.models[0]
        # With gradients accumulated in fp32, stage 1 in bf16 leaves its number out.
        self.stage = int(self.optimizer[0].get("zero_stage", 1))
        if self.stage not in (1, 2, 3):
            raise FileError(f"{self.path}: expected stage 1, 2 or 3, got {self.stage}")
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self.flats = [list(of_rank[key]) for of_rank in self.optimizer]
        self._locate()
        params = {
            name: _joined(self.path, name, shape, self.runs[name])
            for name, shape in self.shapes.items()
        }
        if self.stage == 3:
            params |= _cut_frozen(self.path, self.models, len(self.optimizer))
        else:
            params |= _frozen_in(model, {*self.shapes})
        return _folder_from(
            self.path,
            model,
            stage=self.stage,
            world_size=len(self.optimizer),
            params=params,
            trained={*self.shapes},
            states=self._states(),
        )

    def _locate(self) -> None:
        """Find the runs of every parameter; see NOTE(partitions).

        Elements that belong to no parameter must be padding: if there are more of them than that,
        the parameters are at other places, and FileError is raised.
        """
        groups = [
            {str(name): torch.Size(shape) for name, shape in group.items()}
            for group in self.models[0]["param_shapes"]
        ]
        self.shapes = {name: shape for group in groups for name, shape in group.items()}
        if self.stage == 3:
            gaps: Sequence[Sequence[int]] = []
            padded, cursor = len(self.flats) * len(self.shapes), 0
            for name, shape in self.shapes.items():
                self.runs[name] = list(_cut_parts(self.flats, cursor, shape.numel()))
                cursor += -(-shape.numel() // len(self.flats))
        else:
            none = [[0] * len(group) for group in groups]
            gaps = self.optimizer[0].get("param_alignment_paddings") or none
            padded = len(self.flats) * 2 * len(groups)
            for index, group in enumerate(groups):
                flats, cursor = [of_rank[index] for of_rank in self.flats], 0
                for (name, shape), gap in zip(group.items(), gaps[index], strict=True):
                    self.runs[name] = list(_cut(flats, cursor, cursor + shape.numel()))
                    cursor += shape.numel() + gap
        for name, shape in self.shapes.items():
            found = sum(run.numel for run in self.runs[name])
            if found != shape.numel():
                raise FileError(
                    f"{self.path}: expected {shape.numel()} elements of {name!r} in the "
                    f"partitions of {len(self.flats)} ranks, got {found}; state that DeepSpeed "
                    "kept on NVMe, or shared out over fewer ranks, is not in these files"
                )
        used = sum(shape.numel() for shape in self.shapes.values()) + sum(map(sum, gaps))
        total = sum(flat.numel() for of_rank in self.flats for flat in of_rank)
        if total - used > padded:
            raise FileError(
                f"{self.path}: expected {used} elements in all partitions, and at most "
                f"{padded} of padding, got {total}"
            )

    def _states(self) -> dict[str, dict[str, Range]]:
        # id of a partition -> its rank and group, and its optimizer state.
        found = {
            id(flat): (rank, group, state)
            for rank, (flats, said) in enumerate(zip(self.flats, self.optimizer, strict=True))
            for group, (flat, state) in enumerate(zip(flats, self._states_of(said), strict=False))
        }
        return {
            name: {
                str(key): self._entry(name, key, value, found)
                for run in self.runs[name][:1]
                for key, value in found[id(run.tensor)][2].items()
            }
            for name in self.shapes
        }

    def _states_of(self, said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The state of each of a rank's partitions, in order."""
        base = said["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if isinstance(base, list):
            # "Elastic" state has no padding and no param groups.
            step = said.get("base_optimizer_state_step")
            shared = {} if step is None else {"step": step}
            yield from ({**shared, **state} for state in base)
            return
        for group in base["param_groups"]:
            shared = {"step": group["step"]} if "step" in group else {}
            for number in group["params"]:
                state = base["state"].get(number, {})
                yield {**shared, **state} if state else {}

    def _entry(
        self, name: str, key: Any, value: Any, found: Mapping[int, tuple[int, int, Mapping]]
    ) -> Range:
        if not isinstance(value, Tensor) or not value.dim():
            return _as_range(value)
        runs = []
        for run in self.runs[name]:
            rank, group, state = found[id(run.tensor)]
            tensor, length = state[key], run.tensor.numel()
            if tensor.dim() != 1 or tensor.numel() < length:
                raise FileError(
                    f"{self.path}: expected {key!r} of {name!r} to have one value per "
                    f"element, {length} in partition {group} of rank {rank}; got shape "
                    f"{tuple(tensor.shape)}"
                )
            runs.append(MemoryRun(tensor, run.first, run.numel))
        return _joined(self.path, name, self.shapes[name], runs)


def _ties_of(model: Mapping[str, Any]) -> dict[str, str]:
    return {str(a): str(name) for a, name in (model.get("shared_params") or {}).items()}


def _buffers_of(model: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in model.get("buffer_names") or ()]


def _frozen_in(model: Mapping[str, Any], trained: set[str]) -> dict[str, Range]:
    """Find parameters among a module's values that do not train."""
    known = {*trained, *_buffers_of(model), *_ties_of(model)}
    found = {str(name): value for name, value in model["module"].items() if name not in known}
    return {name: Range.of(value) for name, value in found.items()}


def _folder_from(
    path: Path,
    model: Mapping[str, Any],
    *,
    stage: int,
    world_size: int,
    params: Mapping[str, Range],
    trained: set[str],
    states: Mapping[str, Mapping[str, Range]],
) -> DeepSpeedFolder:
    """Make a folder from parameters, states, and the model states of rank 0."""
    buffers, ties = _buffers_of(model), _ties_of(model)
    return DeepSpeedFolder(
        path=path,
        step=int(model["global_steps"]),
        stage=stage,
        world_size=world_size,
        source=StateSource(
            params=params,
            buffers={name: Range.of(model["module"][name]) for name in buffers},
            ties={alias: name for alias, name in ties.items() if name in params},
            may_lack=frozenset(),
            states={name: state for name, state in states.items() if state},
            param_groups=(),
            where=str(path),
        ),
        frozen=frozenset(params.keys() - trained),
        engine={key: model[key] for key in _OF_ENGINE if key in model},
        client_state={k: v for k, v in model.items() if k not in _OF_DEEPSPEED},
    )


# ---- Universal checkpoints, as ds_to_universal.py makes them ----

# NOTE(universal): zero/NAME/fp32.pt has the master of a parameter, and zero/NAME/exp_avg.pt and the
# like its state: a tensor, flat if stage 3 saved it, or a dict with that as "param". Where there is
# no zero/NAME/step.pt, the step is in zero/optimizer_state.pt. Frozen parameters and buffers are in
# the model states of rank 0, and those of stage 3 in the parts that each rank saved.


def _open_universal(path: Path) -> DeepSpeedFolder:
    models = {n: _mapping(p) for n, p in _numbered(path, _MODEL, lambda m: int(m[1] or 0)).items()}
    if 0 not in models:
        raise FileError(
            f"{path}: expected a file of model states of rank 0 beside {_PARAMS}, got "
            f"{', '.join(sorted(p.name for p in path.iterdir())[:5])}"
        )
    model, common = models[0], _mapping(path / _PARAMS / "optimizer_state.pt")
    stage = int(common.get("zero_stage", 1))
    shapes = {
        str(name): torch.Size(shape)
        for group in model["param_shapes"]
        for name, shape in group.items()
    }
    params, states = {}, {}
    for name, shape in shapes.items():
        if name == ".." or (path / _PARAMS / name).parent != path / _PARAMS:
            raise FileError(f"{path}: expected the name of a parameter, got {name!r:.80}")
        found = {
            file.stem: _universal_entry(file, shape)
            for file in sorted((path / _PARAMS / name).glob("*.pt"))
        }
        if "fp32" not in found:
            raise FileError(f"{path}: expected {_PARAMS}/{name}/fp32.pt in it, got none")
        params[name] = found.pop("fp32")
        if found and "step" not in found:
            found["step"] = _as_range(_common_step(common))
        states[name] = found
    is_cut = stage == 3
    frozen = _cut_frozen(path, models, len(models)) if is_cut else _frozen_in(model, {*shapes})
    counts = common.get("partition_count") or len(models)
    return _folder_from(
        path,
        model,
        stage=stage,
        world_size=max(counts) if isinstance(counts, list) else int(counts),
        params=params | frozen,
        trained={*shapes},
        states=states,
    )


def _universal_entry(file: Path, shape: torch.Size) -> Range:
    content = read_torch_file(file, stand_ins=_STAND_INS)
    value = content["param"] if isinstance(content, Mapping) else content
    if not isinstance(value, Tensor) or not value.dim():
        return _as_range(value)
    if value.numel() != shape.numel():
        raise FileError(
            f"{file}: expected {shape.numel()} elements, of shape {tuple(shape)}, got "
            f"{value.numel()}"
        )
    return Range.of(value.reshape(shape))


def _common_step(common: Mapping[str, Any]) -> Any:
    """Return the step of the first parameter that has one."""
    base = common.get("optimizer_state_dict") or common
    for said in (*(base.get("state") or {}).values(), *base["param_groups"]):
        if "step" in said:
            return said["step"]
    raise KeyError("step")


def _as_range(value: Any) -> Range:
    """Return the range of a value; numbers become tensors, as torch's optimizers count."""
    return Range.of(
        value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
    )
