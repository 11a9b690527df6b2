"""What users and torch keep beside tensors, as JSON and back: exact, and never pickled."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ._errors import ConfigError, FileError

_KIND: Final = "$"  # the key of what JSON has no word for


def to_json(value: Any, where: str) -> Any:
    """JSON that `from_json` turns into the value again, tuples and small tensors included.

    Args:
        value: None, bools, numbers, strings; lists, tuples and dicts of these; dense tensors, whose
            values go into the text.
        where: What it is, for the error.

    Raises:
        ConfigError: It holds something else, which would have to be pickled.
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
    """The value of which `to_json` made this.

    Raises:
        FileError: It is of no kind that `to_json` makes.
    """
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
    """The dtype that torch calls so, "float32" say.

    Raises:
        FileError: There is none.
    """
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
