"""The files of a DeepSpeed checkpoint: found by their names, read, and complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from ._errors import FileError
from ._torch_file import read_torch_file

_LATEST: Final = "latest"
_OPTIMIZER: Final = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class _Attributes:
    """Stands for an object of which only attributes are looked at."""


# What DeepSpeed's own optimizer files hold beside tensors and plain values.
_STAND_INS: Final[Mapping[str, type]] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Attributes,
    "deepspeed.utils.tensor_fragment.fragment_address": _Attributes,
}


@frozen
class DeepSpeedFiles:
    """What the files of one checkpoint say, as it is."""

    path: Path  # of the folder they lie in
    model: Mapping[int, Mapping[str, Any]]  # by rank; at stages 1 and 2 of rank 0 alone
    optimizer: tuple[Mapping[str, Any], ...]  # by rank: what is under "optimizer_state_dict"

    @classmethod
    def open(cls, folder: Path, tag: str | None) -> DeepSpeedFiles:
        """Read the files of a tag, of `latest`, or of the folder itself. Local; maps tensors.

        Raises:
            FileError: A file is missing, damaged, of something else than data parallelism, or asks
                for a name that is not known.
        """
        path = _folder_of(folder, tag)
        optimizer_paths = _numbered(path, _OPTIMIZER, lambda match: int(match[2]))
        model_paths = _numbered(path, _MODEL, lambda match: int(match[1] or 0))
        _refuse_others(path, {*optimizer_paths.values(), *model_paths.values()})
        optimizer = {
            rank: _part(found, "optimizer_state_dict")
            for rank, found in sorted(optimizer_paths.items())
        }
        if 0 not in optimizer or 0 not in model_paths:
            raise FileError(
                f"{path}: expected a checkpoint of DeepSpeed's ZeRO, with "
                "zero_pp_rank_0_mp_rank_00_optim_states.pt and a file of model states of rank 0; "
                f"got {', '.join(sorted(p.name for p in path.iterdir())[:5]) or 'nothing'}"
            )
        counts = optimizer[0].get("partition_count")
        counts = set(counts) if isinstance(counts, list) else {counts}
        if len(counts) != 1 or sorted(optimizer) != list(range(len(optimizer))):
            raise FileError(
                f"{path}: expected one file of optimizer states from each rank, and as many "
                f"partitions in every group; got ranks {sorted(optimizer)}, and {counts}"
            )
        if counts != {len(optimizer)}:
            raise FileError(
                f"{path}: expected optimizer states of {min(counts)} ranks, got files of "
                f"{len(optimizer)}; a rank did not save, or the copy is incomplete"
            )
        model = {rank: _mapping(found) for rank, found in sorted(model_paths.items())}
        return cls(path, model, tuple(optimizer.values()))


def is_deepspeed(folder: Path, tag: str | None) -> bool:
    """Whether there are files of DeepSpeed's, to look at before it is opened. Local."""
    try:
        names = [path.name for path in _folder_of(folder, tag).iterdir()]
    except OSError:  # as with a folder that is missing: whoever opens it says so
        return False
    return any(_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name) for name in names)


def holds_deepspeed(folder: Path, tag: str | None) -> bool:
    """Whether a folder, or one in it, has such files: also without `latest`. Local."""
    if not folder.is_dir():
        return False
    return is_deepspeed(folder, tag) or any(
        is_deepspeed(path, None) for path in folder.iterdir() if path.is_dir()
    )


def _folder_of(folder: Path, tag: str | None) -> Path:
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder")
    if tag is None and (folder / _LATEST).is_file():
        tag = (folder / _LATEST).read_text("utf-8", errors="replace").strip()
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
        if match is None or int(match[match.re.groups]):  # of another model-parallel rank
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


def _mapping(path: Path) -> Mapping[str, Any]:
    content = read_torch_file(path, stand_ins=_STAND_INS)
    if not isinstance(content, Mapping):
        raise FileError(f"{path}: expected a dict, got a {type(content).__name__}")
    return content


def _part(path: Path, key: str) -> Mapping[str, Any]:
    content = _mapping(path)
    if not isinstance(content.get(key), Mapping):
        raise FileError(f"{path}: expected {key!r} in it, got {sorted(map(str, content))}")
    return content[key]
