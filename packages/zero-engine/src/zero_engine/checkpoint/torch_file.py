"""Files of torch.save: read as tensors and plain values, mapped, and never executed."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_engine.errors import FileError

from .ranges import Range

# NOTE(weights_only): torch's unpickler for `weights_only=True` runs no code: it knows the functions
# that make tensors, and refuses the file when it meets any other name. A stand-in is a class of
# ours that it may make in the place of one other name, and of which it sets attributes.


def open_torch_file(path: Path) -> dict[str, Range]:
    """The tensors of a state dict that torch.save wrote, by name. Local; reads no values.

    Raises:
        FileError: The file is missing, damaged, no state dict, or asks for more than tensors.
    """
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise FileError(
            f"{path}: expected a state dict, from names to tensors, got a {type(content).__name__}"
        )
    for name, value in content.items():
        if not isinstance(name, str) or not _is_plain(value):
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"{value.layout} {value.dtype} tensor"
            raise FileError(
                f"{path}: expected a state dict, from names to dense tensors; {name!r} is a {got}. "
                "If the state dict is a part of what was saved, save that part by itself"
            )
    return {name: Range.of(value) for name, value in content.items()}


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def read_torch_file(path: Path, *, stand_ins: Mapping[str, type] | None = None) -> Any:
    """What torch.save wrote; tensors are mapped, so that only what is read of them is. Local.

    Args:
        path: Of the file.
        stand_ins: By full name of a class: what to make in its place. See NOTE(weights_only).

    Raises:
        FileError: The file is missing or damaged, or asks for a name that is not allowed; nothing
            of it was run.
    """
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise FileError(
            f"{path}: expected a whole file as torch.save writes it since version 1.6; if it is "
            "older, write it again with torch.save, else it was cut short"
        )
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    with torch.serialization.safe_globals(allowed):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FileError(
                f"{path}: expected tensors and plain values only, and nothing of it was run: it "
                f"asks for {_unknown_names(path) or error}. Save it again without these objects; "
                "a DeepSpeed checkpoint can be converted by its own zero_to_fp32.py with "
                "--safe_serialization, and the weights loaded with load_pretrained()"
            ) from error
        except Exception as error:  # what a damaged file makes torch say has many types
            raise FileError(
                f"{path}: expected a whole file of torch.save ({error}); it is damaged"
            ) from error


def _unknown_names(path: Path) -> str:
    """What a file asks for beyond what is allowed, found without running it."""
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except Exception:  # it is damaged as well: the first error says enough
        return ""
