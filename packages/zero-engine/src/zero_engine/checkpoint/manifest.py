"""Manifests of checkpoints: JSON with a checksum, every field of which is checked."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from attrs import NOTHING, Attribute, Converter, field, fields, fields_dict, frozen
from torch import Tensor
from zero_partition.plan import Split
from zero_partition.seams import StateDictLayout

from zero_engine.errors import ConfigError, FileError
from zero_engine.torch_private import accelerator_in_use

from .file_system import OpenFolder, read_regular
from .limits import LARGEST_NUMBER, MOST_DIMENSIONS, MOST_NESTED, MOST_RANK_DIGITS

T = TypeVar("T")
# Takes a value of JSON and the place where it is; returns the checked value or raises FileError.
Check = Callable[[Any, str], T]

# ---- Values ----

# Key of an object that stands for a value that JSON does not have.
_KIND: Final = "$"


def to_json(value: Any, where: str, *, depth: int = 0) -> Any:
    """Return JSON that `from_json` turns into the value again; `where` names it in errors.

    Values are None, bools, numbers, strings and dtypes, lists, tuples, sets and dicts of these, and
    small dense tensors.
    """
    if depth > MOST_NESTED:
        raise ConfigError(f"{where[:80]}...: expected at most {MOST_NESTED} values in values")
    said: Any = value
    if isinstance(value, Tensor):
        said = _tensor_to_json(value, where)
    elif isinstance(value, torch.dtype):
        said = {_KIND: "dtype", "name": name_of(value)}
    elif isinstance(value, list | tuple | set):
        ordered = sorted(value, key=repr) if isinstance(value, set) else value
        items = [
            to_json(item, f"{where}[{index}]", depth=depth + 1)
            for index, item in enumerate(ordered)
        ]
        kind = "set" if isinstance(value, set) else "tuple"
        said = items if type(value) is list else {_KIND: kind, "items": items}
    elif isinstance(value, Mapping):
        said = _mapping_to_json(value, where, depth + 1)
    elif value is not None:
        # A number or string, maybe of numpy or an enumeration.
        plain = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        if plain is None:
            raise ConfigError(
                f"{where}: expected None, bools, numbers, strings, tensors, and lists, tuples and "
                f"dicts of these, got a {type(value).__name__}, which would have to be pickled"
            )
        said = plain(value)
    return said


def _mapping_to_json(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    items = [(k, to_json(item, f"{where}[{k!r}]", depth=depth)) for k, item in value.items()]
    if all(isinstance(key, str) and key != _KIND for key in value):
        return dict(items)
    pairs = [[to_json(k, f"{where}: key {k!r}", depth=depth), item] for k, item in items]
    return {_KIND: "dict", "items": pairs}


def from_json(said: Any, where: str = "", *, depth: int = 0) -> Any:
    """Return the value of which `to_json` made `said`.

    Raises:
        FileError: `said` is nothing that `to_json` makes, or is nested too deep; it names `where`.
    """
    # A param group adds one level around its options.
    if depth > MOST_NESTED + 1:
        raise FileError(f"{where}: expected at most {MOST_NESTED} values in values")

    def inner(item: Any) -> Any:
        return from_json(item, where, depth=depth + 1)

    if isinstance(said, list):
        return [*map(inner, said)]
    if not isinstance(said, dict):
        return said
    kind = said.get(_KIND)
    if kind is None:
        return {key: inner(item) for key, item in said.items()}
    makers: dict[Any, Callable[[], Any]] = {
        "tuple": lambda: tuple(map(inner, said["items"])),
        "set": lambda: set(map(inner, said["items"])),
        "dict": lambda: {inner(key): inner(item) for key, item in said["items"]},
        "tensor": lambda: _tensor_from_json(said),
        "dtype": lambda: dtype_of(said["name"]),
    }
    if not isinstance(kind, str) or kind not in makers:
        raise FileError(
            f"{where}: expected a tuple, set, dict, dtype or tensor, got a value of kind {kind!r}"
        )
    try:
        return makers[kind]()
    except (LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise FileError(f"{where}: a value of kind {kind!r} cannot be read ({error!r})") from error


def dtype_of(name: Any, where: str = "dtype") -> torch.dtype:
    """Return the dtype of a name such as "float32"; raise FileError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"{where}: expected the name of a torch.dtype, got {name!r:.60}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _tensor_to_json(value: Tensor, where: str) -> dict[str, Any]:
    if value.layout is not torch.strided:
        raise ConfigError(f"{where}: expected a dense tensor, got layout {value.layout}")
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    said = {
        _KIND: "tensor",
        "dtype": name_of(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(flat.numpy().tobytes()).decode(),
    }
    return said if value.is_cpu else {**said, "on_device": True}


def _tensor_from_json(said: Mapping[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(said["data"], validate=True))
    dtype, shape = dtype_of(said["dtype"]), _shape(said["shape"], "shape")
    if not data:
        found = torch.empty(0, dtype=dtype, device="cpu").view(shape)
    else:
        found = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape).clone()
    # A tensor that was on a device is put on this process's device, of whatever kind, as by
    # torch.load. A process that has not used its device, such as `zero export`, does not begin to.
    return found.to(accelerator_in_use() or "cpu") if said.get("on_device") is True else found


# ---- Checks ----


def _refuse(where: str, expected: str, said: Any) -> FileError:
    got = repr(said)
    return FileError(f"{where}: expected {expected}, got {got[:60]}{'...' * (len(got) > 60)}")


def _count(said: Any, where: str) -> int:
    if type(said) is not int or not 0 <= said <= LARGEST_NUMBER:
        raise _refuse(where, "a number from 0 to 2**62", said)
    return said


def _text(said: Any, where: str) -> str:
    if type(said) is not str:
        raise _refuse(where, "a string", said)
    return said


def _flag(said: Any, where: str) -> bool:
    if type(said) is not bool:
        raise _refuse(where, "true or false", said)
    return said


def _truth(said: Any, where: str) -> bool:
    """Return a flag as a bool; earlier versions of `save` also wrote numbers and None."""
    if type(said) not in {bool, int, type(None)}:
        raise _refuse(where, "true or false", said)
    return bool(said)


def _value(said: Any, where: str) -> Any:
    return from_json(said, where)


def _mapping(said: Any, where: str) -> dict[Any, Any]:
    found = from_json(said, where)
    if type(found) is not dict:
        raise _refuse(where, "a dict", said)
    return found


def _maybe(check: Check[T]) -> Check[T | None]:
    return lambda said, where: None if said is None else check(said, where)


def _list_of(check: Check[T]) -> Check[tuple[T, ...]]:
    def look(said: Any, where: str) -> tuple[T, ...]:
        if type(said) is not list:
            raise _refuse(where, "a list", said)
        return tuple(check(item, f"{where}[{index}]") for index, item in enumerate(said))

    return look


def _dict_of(check: Check[T]) -> Check[dict[str, T]]:
    def look(said: Any, where: str) -> dict[str, T]:
        if type(said) is not dict:
            raise _refuse(where, "an object", said)
        return {key: check(item, f"{where}[{key!r}]") for key, item in said.items()}

    return look


def _by_rank(check: Check[T]) -> Check[dict[int, T]]:
    def look(said: Any, where: str) -> dict[int, T]:
        found = _dict_of(check)(said, where)
        if wrong := [
            key for key in found if not (key.isdecimal() and len(key) <= MOST_RANK_DIGITS)
        ]:
            raise _refuse(where, "the numbers of ranks", wrong[0])
        return {int(key): value for key, value in found.items()}

    return look


def _shape(said: Any, where: str) -> torch.Size:
    sides = _list_of(_count)(said, where)
    numel = 1
    for side in sides:
        numel *= side
    if numel > LARGEST_NUMBER or len(sides) > MOST_DIMENSIONS:
        raise _refuse(where, "the shape of a tensor", said)
    return torch.Size(sides)


def file_name(said: Any, where: str) -> str:
    """Check the name of a file beside the manifest: it must not lead out of the folder."""
    name = _text(said, where)
    if name in {"", ".", ".."} or "\0" in name or Path(name).name != name:
        raise _refuse(where, "the name of a file beside the manifest", said)
    return name


def _object(kind: Callable[..., T], **checks: Check[Any]) -> Check[T]:
    """Return a check that makes a `kind` of these keys, in order; others are ignored."""

    def look(said: Any, where: str) -> T:
        if type(said) is not dict:
            raise _refuse(where, "an object", said)
        if lacking := checks.keys() - said.keys():
            raise _refuse(where, f"an object with {min(lacking)!r}", said)
        return kind(*(check(said[key], f"{where}.{key}") for key, check in checks.items()))

    return look


# ---- Content of a manifest ----


@frozen
class FileFacts:
    """Size and checksum that a file must have."""

    num_bytes: int
    crc32: int  # zlib's, of the whole file


@frozen
class StoredRange:
    """Location of elements [start, stop) of a flattened tensor: a file, and a key in it."""

    file: str
    key: str
    start: int
    stop: int


@frozen
class TensorFacts:
    """Tensor in files, in pieces that contain each of its elements once, in order."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[StoredRange, ...]
    # Whether it is a parameter that does not train.
    is_frozen: bool = False
    # With a split, `pieces` are in the order of its parts.
    split: Split | None = None


def no_pieces(dtype: torch.dtype, shape: torch.Size, split: Split | None) -> dict[str, Any]:
    """Return a manifest's entry of a tensor of which no piece is written yet.

    The pieces of a split tensor have another key. Older versions, which would take them for
    elements of the whole tensor in order, therefore find none.
    """
    said = {"dtype": name_of(dtype), "shape": list(shape)}
    if split is None:
        return said | {"pieces": []}
    return said | {"parts": {"dim": split.dim, "sizes": [*split.sizes], "pieces": []}}


def _files(said: Any, where: str) -> dict[str, FileFacts]:
    found = _dict_of(_object(FileFacts, bytes=_count, crc32=_count))(said, where)
    return {file_name(name, where): facts for name, facts in found.items()}


_piece = _object(StoredRange, file=file_name, key=_text, start=_count, stop=_count)
_pieces = _object(TensorFacts, dtype=dtype_of, shape=_shape, pieces=_list_of(_piece))
_parts = _object(lambda *of: of, dim=_count, sizes=_list_of(_count), pieces=_value)


def _tensor(said: Any, where: str) -> TensorFacts:
    split, cursor = None, 0
    if type(said) is dict and "parts" in said:
        dim, sizes, pieces = _parts(said["parts"], f"{where}.parts")
        found = _pieces(said | {"pieces": pieces}, where)
        if found.shape[dim : dim + 1] != (sum(sizes),):
            raise _refuse(f"{where}.parts", f"a dimension of {tuple(found.shape)}, in parts", said)
        split = Split(found.shape, dim, sizes)
    else:
        found = _pieces(said, where)
    pieces = sorted(found.pieces, key=lambda piece: (piece.start, piece.stop))
    for piece in pieces:
        if piece.start != cursor or piece.stop <= piece.start:
            raise FileError(
                f"{where}: expected a piece that starts at element {cursor}, got [{piece.start}, "
                f"{piece.stop}) in {piece.file}"
            )
        cursor = piece.stop
    numel = found.shape.numel()
    if cursor != numel:
        raise FileError(f"{where}: expected pieces of {numel} elements, got {cursor}")
    is_frozen = _flag(said.get("frozen", False), f"{where}.frozen")
    return TensorFacts(found.dtype, found.shape, tuple(pieces), is_frozen, split)


def _entry(said: Any, where: str) -> Any:
    """Check an entry of an optimizer's state: a tensor, or a value."""
    if type(said) is dict and "value" in said:
        return from_json(said["value"], where)
    return _tensor(said, where)


def _own_entries(said: Any, where: str) -> dict[str, Any]:
    """Check lists with an item for each rank; see `StateParts.own_said`."""
    lists = _list_of(_value)
    keeps, entries = _object(lambda *of: of, keeps=lists, entries=_dict_of(lists))(said, where)
    if any(len(of_ranks) != len(keeps) for of_ranks in entries.values()):
        raise _refuse(where, f"entries of {len(keeps)} ranks", said)
    return {"keeps": said["keeps"], "entries": said["entries"]}


def _options(said: Any, where: str) -> dict[str, Any]:
    """Check the options of a param group, and the names of its parameters."""
    found = _mapping(said, where)
    return {**found, "params": [*_list_of(_text)(found.get("params"), f"{where}.params")]}


_tensors = _dict_of(_tensor)
_of_ranks = _by_rank(_tensors)
_layout = _object(StateDictLayout, keys=_dict_of(_text), values=_dict_of(_value), metadata=_value)

_NO_LAYOUT: Final = partial(dict, keys={}, values={}, metadata={})


def _by(check: Check[Any]) -> Any:
    """Return an attrs converter that applies `check`, with the field's name in errors."""

    def convert(said: Any, own: Attribute[Any]) -> Any:
        return check(said, own.name)

    return Converter(convert, takes_field=True)  # type: ignore[misc]


@frozen(kw_only=True)
class Manifest:
    """Content of a manifest. Fields that earlier versions did not write have a default."""

    tag: str = field(converter=_by(_text))
    step: int = field(converter=_by(_count))
    # Ranks that saved it, and over how many parts of DTensors and stages of a pipeline they were.
    world_size: int = field(converter=_by(_count))
    num_parts: int = field(converter=_by(_count), default=1)
    num_stages: int = field(converter=_by(_count), default=1)
    # Larger for newer checkpoints. None: loaded by its tag only.
    serial: int | None = field(converter=_by(_maybe(_count)), default=None)
    # Whether parameters that did not train were left out.
    excludes_frozen: bool = field(converter=_by(_truth))
    files: Mapping[str, FileFacts] = field(converter=_by(_files))
    params: Mapping[str, TensorFacts] = field(converter=_by(_tensors))
    buffers: Mapping[str, TensorFacts] = field(converter=_by(_tensors))
    ties: Mapping[str, str] = field(converter=_by(_dict_of(_text)))
    optimizer: Mapping[str, Mapping[str, Any]] = field(converter=_by(_dict_of(_dict_of(_entry))))
    param_groups: tuple[dict[str, Any], ...] = field(converter=_by(_list_of(_options)))
    shared_state: tuple[Any, ...] = field(converter=_by(_list_of(_mapping)), factory=list)
    state_dict_extra: tuple[Any, ...] = field(converter=_by(_list_of(_mapping)), factory=list)
    own_said: Mapping[str, dict[str, Any]] = field(
        converter=_by(_dict_of(_own_entries)), factory=dict
    )
    own_state: Mapping[int, Mapping[str, TensorFacts]] = field(
        converter=_by(_of_ranks), factory=dict
    )
    # What modules save by their own code. None: not known.
    state_dict: StateDictLayout | None = field(converter=_by(_maybe(_layout)), factory=_NO_LAYOUT)
    rank_buffers: Mapping[int, Mapping[str, TensorFacts]] = field(converter=_by(_of_ranks))
    rngs: Mapping[int, Mapping[str, TensorFacts]] = field(converter=_by(_of_ranks))
    loco: Mapping[int, Mapping[str, TensorFacts]] = field(converter=_by(_of_ranks), factory=dict)
    loco_facts: Mapping[str, str] = field(converter=_by(_dict_of(_text)), factory=dict)
    average: Mapping[str, TensorFacts] = field(converter=_by(_tensors), factory=dict)
    # Updates of the average. None: no average was saved.
    num_updates: int | None = field(converter=_by(_maybe(_count)), default=None)
    scheduler: Any = field(converter=_by(_value))
    engine: Any = field(converter=_by(_value))
    extra: Any = field(converter=_by(_value))

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Manifest:
        """Check all fields of a manifest; unknown ones are ignored.

        Raises:
            FileError: A field is missing or wrong; the error names it.
        """
        known = {own.name: own.default is NOTHING for own in fields(cls)}
        for name, is_needed in known.items():
            if is_needed and name not in said:
                raise FileError(f"expected a field {name!r}, got none")
        return cls(**{name: said[name] for name in known if name in said})


# ---- In a file ----

FORMAT: Final = "zero-checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"


def seal(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest: JSON, with a checksum over all its other content."""
    content = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**content, "crc32": _crc32_of(content)}, indent=1).encode()


def read_manifest(path: Path, folder: OpenFolder) -> Manifest:
    """Read and check a manifest. Local; FileError names the field that is wrong."""
    said = unsealed(path, folder)
    try:
        return Manifest.of(said)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error


def read_fields(path: Path, *names: str) -> list[Any]:
    """Read some fields of a manifest, and check only those. Local; as `read_manifest`."""
    said, known = unsealed(path), fields_dict(Manifest)
    checks: list[Any] = [(known[name].converter, known[name]) for name in names]
    try:
        return [by.converter(said.get(own.name), own) for by, own in checks]
    except FileError as error:
        raise FileError(f"{path}: {error}") from error


def unsealed(path: Path, folder: OpenFolder | None = None) -> dict[str, Any]:
    """Read a manifest's JSON. Local; FileError if damaged, or of another format or version."""
    try:
        content = read_regular(path, folder)
        said = json.loads(content)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected a manifest in JSON: it is damaged ({error})") from error
    if not isinstance(said, dict):
        raise FileError(f"{path}: expected a manifest in JSON, got a {type(said).__name__}")
    crc32 = said.pop("crc32", None)
    try:
        # White space must be equal, too.
        found, is_same = _crc32_of(said), content == seal({**said})
    except (RecursionError, ValueError) as error:
        raise FileError(f"{path}: expected a manifest, and it is nested too deep") from error
    if crc32 != found or not is_same:
        raise FileError(f"{path}: expected content of crc32 {crc32}, got {found}: it is damaged")
    if said.get("format") != FORMAT or said.get("version") != VERSION:
        raise FileError(
            f"{path}: expected {FORMAT!r} of version {VERSION}, got {said.get('format')!r} of "
            f"version {said.get('version')!r}; another version of zero_engine has written it"
        )
    return said


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
