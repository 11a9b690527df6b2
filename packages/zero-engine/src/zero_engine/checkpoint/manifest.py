"""The manifest of a checkpoint: what it holds, where that lies, and what makes sure of it."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from zero_engine.errors import ConfigError, FileError

_KIND: Final = "$"  # the key of what JSON has no word for


def to_json(value: Any, where: str) -> Any:
    """JSON that `from_json` turns into the value again; `where` says in errors what it is.

    Of None, bools, numbers and strings, lists, tuples and dicts of these, and small dense tensors.
    """
    if isinstance(value, Tensor):
        return _tensor_to_json(value, where)
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if type(value) is list else {_KIND: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _KIND for key in value):
            return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [to_json(key, f"{where}: key {key!r}"), to_json(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {_KIND: "dict", "items": pairs}
    for kind in (bool, int, float, str):  # of numpy and enums, say
        if isinstance(value, kind):
            return kind(value)
    raise ConfigError(
        f"{where}: expected None, bools, numbers, strings, tensors, and lists, tuples and dicts of "
        f"these, got a {type(value).__name__}, which would have to be pickled"
    )


def from_json(said: Any) -> Any:
    """The value of which `to_json` made this."""
    if isinstance(said, list):
        return [from_json(item) for item in said]
    if not isinstance(said, dict):
        return said
    kind = said.get(_KIND)
    if kind is None:
        return {key: from_json(item) for key, item in said.items()}
    try:
        if kind == "tuple":
            return tuple(from_json(item) for item in said["items"])
        if kind == "dict":
            return {from_json(key): from_json(item) for key, item in said["items"]}
        if kind == "tensor":
            return _tensor_from_json(said)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise FileError(f"a value of kind {kind!r} cannot be read ({error!r})") from error
    raise FileError(f"expected a tuple, dict or tensor, got a value of kind {kind!r}")


def dtype_of(name: Any) -> torch.dtype:
    """The dtype that torch calls so, "float32" say."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"expected the name of a torch.dtype, got {name!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """What torch calls a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def _tensor_to_json(value: Tensor, where: str) -> dict[str, Any]:
    if value.layout is not torch.strided:
        raise ConfigError(f"{where}: expected a dense tensor, got layout {value.layout}")
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return {
        _KIND: "tensor",
        "dtype": name_of(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(flat.numpy().tobytes()).decode(),
    }


def _tensor_from_json(said: Mapping[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(said["data"], validate=True))
    dtype, shape = dtype_of(said["dtype"]), torch.Size(said["shape"])
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape).clone()


FORMAT: Final = "zero-checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"


@frozen
class FileFacts:
    """What a file has to be."""

    num_bytes: int
    crc32: int  # zlib's, over all of it


def seal(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest: JSON, with a checksum over all else that it says."""
    content = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**content, "crc32": _crc32_of(content)}, indent=1).encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says. Local; raises if it is damaged, or of another format or version."""
    try:
        content = path.read_bytes()
        said = json.loads(content)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected a manifest in JSON: it is damaged ({error})") from error
    if not isinstance(said, dict):
        raise FileError(f"{path}: expected a manifest in JSON, got a {type(said).__name__}")
    crc32 = said.pop("crc32", None)
    if crc32 != _crc32_of(said) or content != seal(said):  # white space, too
        raise FileError(
            f"{path}: expected content of crc32 {crc32}, got {_crc32_of(said)}: it is damaged"
        )
    if said.get("format") != FORMAT or said.get("version") != VERSION:
        raise FileError(
            f"{path}: expected {FORMAT!r} of version {VERSION}, got {said.get('format')!r} of "
            f"version {said.get('version')!r}; another version of zero_engine has written it"
        )
    return said


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def file_name(name: Any) -> str:
    """Of a file beside the manifest: nothing that a manifest says leads out of its folder."""
    if not isinstance(name, str) or name in {"", ".", ".."} or Path(name).name != name:
        raise FileError(f"expected the name of a file beside the manifest, got {name!r}")
    return name


def facts_of_files(said: Mapping[str, Any]) -> dict[str, FileFacts]:
    """By name."""
    return {
        file_name(name): FileFacts(int(facts["bytes"]), int(facts["crc32"]))
        for name, facts in said.items()
    }
