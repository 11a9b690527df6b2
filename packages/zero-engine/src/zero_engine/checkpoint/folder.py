"""A folder of checkpoints: what their manifests say, which are complete, and one of them opened."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import field, frozen
from torch import Tensor
from zero_comm import Group, all_gather_json
from zero_partition.seams import StateDictLayout, StateSource

from zero_engine.errors import ConfigError, FileError

from .file_system import open_regular, read_regular
from .ranges import FileRun, Range, TensorFile

_KIND: Final = "$"  # the key of what JSON has no word for


def to_json(value: Any, where: str) -> Any:
    """JSON that `from_json` turns into the value again; `where` says in errors what it is.

    Of None, bools, numbers, strings and dtypes, lists, tuples, sets and dicts of these, and small
    dense tensors.
    """
    said: Any = value
    if isinstance(value, Tensor):
        said = _tensor_to_json(value, where)
    elif isinstance(value, torch.dtype):
        said = {_KIND: "dtype", "name": name_of(value)}
    elif isinstance(value, list | tuple | set):
        ordered = sorted(value, key=repr) if isinstance(value, set) else value
        items = [to_json(item, f"{where}[{index}]") for index, item in enumerate(ordered)]
        kind = "set" if isinstance(value, set) else "tuple"
        said = items if type(value) is list else {_KIND: kind, "items": items}
    elif isinstance(value, Mapping):
        said = _mapping_to_json(value, where)
    elif value is not None:  # a number or string, maybe of numpy or an enumeration
        plain = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        if plain is None:
            raise ConfigError(
                f"{where}: expected None, bools, numbers, strings, tensors, and lists, tuples and "
                f"dicts of these, got a {type(value).__name__}, which would have to be pickled"
            )
        said = plain(value)
    return said


def _mapping_to_json(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if all(isinstance(key, str) and key != _KIND for key in value):
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [
        [to_json(key, f"{where}: key {key!r}"), to_json(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {_KIND: "dict", "items": pairs}


def from_json(said: Any) -> Any:
    """The value of which `to_json` made this."""
    if isinstance(said, list):
        return [from_json(item) for item in said]
    if not isinstance(said, dict):
        return said
    kind = said.get(_KIND)
    if kind is None:
        return {key: from_json(item) for key, item in said.items()}
    makers: dict[Any, Callable[[], Any]] = {
        "tuple": lambda: tuple(map(from_json, said["items"])),
        "set": lambda: set(map(from_json, said["items"])),
        "dict": lambda: {from_json(key): from_json(item) for key, item in said["items"]},
        "tensor": lambda: _tensor_from_json(said),
        "dtype": lambda: dtype_of(said["name"]),
    }
    if not isinstance(kind, str) or kind not in makers:
        raise FileError(
            f"expected a tuple, set, dict, dtype or tensor, got a value of kind {kind!r}"
        )
    try:
        return makers[kind]()
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise FileError(f"a value of kind {kind!r} cannot be read ({error!r})") from error


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
        content = read_regular(path)
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


# ---- A folder of them ----

LATEST: Final = "latest"
REPLACED: Final = ".replaced-"  # in the name of a folder that gives way to one of the same tag

# NOTE(complete): a folder TAG is complete: it got its name when everything in it was on disk. While
# it is replaced by another of the same tag there is a moment without TAG, when the one before is
# `.TAG.replaced-XXXX`, and as good. All else that begins with a dot is ignored.


def find_complete(folder: Path) -> dict[str, Path]:
    """Folders of complete checkpoints by tag; see NOTE(complete). Local."""
    if not folder.is_dir():
        return {}
    found, replaced = {}, {}
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or not (path / MANIFEST).exists():
            continue
        if not path.name.startswith("."):
            found[path.name] = path
        elif REPLACED in path.name:
            replaced[path.name[1:].rpartition(REPLACED)[0]] = path
    return replaced | found


def read_latest(folder: Path) -> str | None:
    """The tag that was complete last, as far as `latest` tells."""
    try:
        tag = read_regular(folder / LATEST).decode("utf-8", errors="replace").strip()
    except (OSError, FileError):
        return None
    return tag if tag and Path(tag).name == tag else None


def holds_parts(path: Path) -> bool:
    """Whether a folder has files that ranks write for one checkpoint. Local."""
    return any(path.glob("rank-*.safetensors"))


def read_manifests(
    found: Mapping[str, Path],
) -> tuple[dict[str, dict[str, Any]], dict[str, FileError]]:
    """What the manifests of these checkpoints say, and what is wrong with the others. Local."""
    manifests, damaged = {}, {}
    for tag, path in found.items():
        try:
            manifests[tag] = read_manifest(path / MANIFEST)
        except FileError as error:
            damaged[tag] = error
    return manifests, damaged


def serials_of(found: Mapping[str, Path]) -> dict[str, int]:
    """By tag; 0 of those that are loaded by it only. Damaged ones have none: nobody loads them."""
    return {tag: int(said.get("serial") or 0) for tag, said in read_manifests(found)[0].items()}


def other_tags(folder: Path, tag: str) -> str:
    """What to load in place of a checkpoint that is damaged: the newest first."""
    found, serials = find_complete(folder), {}
    for name, said in read_manifests(found)[0].items():
        with suppress(OSError, KeyError, TypeError, ValueError):  # damaged, too
            facts = facts_of_files(said["files"]).items()
            is_whole = all((found[name] / n).stat().st_size == f.num_bytes for n, f in facts)
            if is_whole and name != tag:
                serials[name] = said.get("serial") or 0
    ranked = sorted(serials, key=serials.__getitem__, reverse=True)
    if not ranked:
        return "there is no other checkpoint here that could be loaded"
    return f"load another checkpoint, with tag={' or '.join(map(repr, ranked))}"


_VERIFIED_BYTES: Final = 4 * 2**20  # read at a time

# What a manifest says, by what is made of it.
_PLAIN: Final = (
    *("tag", "step", "world_size", "serial", "excludes_frozen", "loco_facts", "num_updates"),
)
_VALUES: Final = ("scheduler", "engine", "extra")
_OF_RANKS: Final = ("rank_buffers", "rngs", "loco")
_SINCE: Final[dict[str, Any]] = {  # what the first ones do not say
    "shared_state": [],
    "state_dict_extra": [],
    **{name: {} for name in ("own_said", "own_state", "loco", "loco_facts", "average")},
    "num_updates": None,
    "state_dict": {"keys": {}, "values": {}, "metadata": {}},
}


@final
@frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint. Opening reads its manifest; tensors are read when they are asked for.

    Readers are by the names of `model.state_dict()`. An entry of the optimizer's state that is no
    tensor is its value.
    """

    path: Path
    tag: str = field(converter=str)
    step: int = field(converter=int)
    world_size: int = field(converter=int)  # that saved it
    serial: int | None  # grows with every save to the folder; None: loaded by its tag only
    source: StateSource  # values in the dtype in which they are trained: that of masters
    frozen: frozenset[str]  # names of parameters in it that do not train
    excludes_frozen: bool = field(converter=bool)  # parameters that did not train were left out
    rank_buffers: Mapping[int, Mapping[str, Range]]  # of ranks where they differ from rank 0's
    rngs: Mapping[int, Mapping[str, Range]]  # by rank and stream
    loco: Mapping[int, Mapping[str, Range]]  # by rank: what encoding gradients has lost
    loco_facts: Mapping[str, str]  # what these are of; empty where none were kept
    average: Mapping[str, Range]  # of parameters that train
    num_updates: int | None  # of the average; None: none was saved
    scheduler: Any
    engine: Any
    extra: Any
    files: Mapping[str, FileFacts]

    @classmethod
    def open(cls, folder: str | Path, tag: str | None = None) -> Checkpoint | None:
        """The newest complete checkpoint of a folder, or that of a tag. Local; reads no tensors.

        None if the folder holds no complete checkpoint, or does not exist.
        """
        folder = Path(folder)
        found, hint = find_complete(folder), read_latest(folder)
        if hint is not None and hint not in found and holds_parts(folder / hint):
            found[hint] = folder / hint  # its manifest is gone
        if tag is not None and tag not in found:
            raise FileError(
                f"{folder}: expected a checkpoint {tag!r}, got "
                f"{', '.join(sorted(found)) or 'none at all'}"
            )
        manifests, damaged = read_manifests(found if tag is None else {tag: found[tag]})
        if damaged and (tag is not None or hint is None or hint in damaged):
            bad = hint if hint in damaged else next(iter(damaged))  # it may be the newest
            raise FileError(f"{damaged[bad]}; {other_tags(folder, bad)}") from damaged[bad]
        if tag is None:
            ranked = [name for name, said in manifests.items() if said.get("serial") is not None]
            tag = max(ranked, key=lambda name: manifests[name]["serial"], default=None)
        return None if tag is None else cls._of(found[tag], manifests[tag])

    @classmethod
    def _of(cls, path: Path, said: Mapping[str, Any]) -> Checkpoint:
        said = {**_SINCE, **said}
        try:
            facts = facts_of_files(said["files"])
            files = {name: TensorFile(path / name) for name in facts}

            def tensors(of: Mapping[str, Any]) -> dict[str, Any]:
                return {name: _entry(name, entry, files) for name, entry in of.items()}

            def by_rank(of: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
                return {int(rank): tensors(of_rank) for rank, of_rank in of.items()}

            source = StateSource(
                params=tensors(said["params"]),
                buffers=tensors(said["buffers"]),
                ties=said["ties"],
                may_lack=frozenset(),
                states={name: tensors(of) for name, of in said["optimizer"].items()},
                param_groups=tuple(from_json(group) for group in said["param_groups"]),
                where=str(path),
                extra=tuple(from_json(extra) for extra in said["state_dict_extra"]),
                shared=tuple(from_json(shared) for shared in said["shared_state"]),
                own_said=said["own_said"],
                own=by_rank(said["own_state"]),
                layout=_layout_from(said["state_dict"]),
            )
            fields: dict[str, Any] = {name: said[name] for name in _PLAIN}
            fields |= {name: from_json(said[name]) for name in _VALUES}
            fields |= {name: by_rank(said[name]) for name in _OF_RANKS}
            return cls(
                path=path,
                source=source,
                frozen=frozenset(n for n, s in said["params"].items() if s.get("frozen")),
                average=tensors(said["average"]),
                files=facts,
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError, FileError) as error:
            raise FileError(
                f"{path / MANIFEST}: expected a manifest of a checkpoint ({error!r})"
            ) from error

    def read(self, section: str, rank: int) -> dict[str, Tensor]:
        """A rank's own tensors; none where it saved none."""
        own: Mapping[str, Range] = getattr(self, section).get(rank, {})
        return {name: reader.whole() for name, reader in own.items()}

    def verify(self, files: Iterable[str]) -> None:
        """See that some of its files are what they were when they were saved. Local."""
        for name in files:
            damage = _find_damage(self.path / name, self.files[name])
            if damage is not None:
                raise FileError(f"{damage}; {other_tags(self.path.parent, self.tag)}")


def _layout_from(said: Mapping[str, Any] | None) -> StateDictLayout | None:
    if said is None:
        return None
    values = {key: from_json(value) for key, value in said["values"].items()}
    return StateDictLayout(dict(said["keys"]), values, from_json(said["metadata"]))


def _entry(name: str, said: Mapping[str, Any], files: Mapping[str, TensorFile]) -> Any:
    """A value, or a tensor whose pieces, in any order, are all of its elements once."""
    if "value" in said:
        return from_json(said["value"])
    dtype, shape = dtype_of(said["dtype"]), torch.Size(said["shape"])
    runs, cursor = [], 0
    for piece in sorted(said["pieces"], key=lambda piece: (piece["start"], piece["stop"])):
        start, stop, file = int(piece["start"]), int(piece["stop"]), file_name(piece["file"])
        if file not in files:
            raise FileError(f"{name!r} lies in {file!r}, which is not among the files")
        if start != cursor or stop <= start:
            raise FileError(
                f"expected a piece that starts at element {cursor}, got [{start}, {stop}) in {file}"
            )
        runs.append(FileRun(files[file], str(piece["key"]), dtype, stop - start))
        cursor = stop
    if cursor != shape.numel():
        raise FileError(f"expected pieces of {shape.numel()} elements, got {cursor}")
    return Range(shape, dtype, tuple(runs))


def _find_damage(path: Path, facts: FileFacts) -> str | None:
    try:
        num_bytes, crc32 = 0, 0
        with open_regular(path) as file:
            while chunk := file.read(_VERIFIED_BYTES):
                num_bytes, crc32 = num_bytes + len(chunk), zlib.crc32(chunk, crc32)
    except FileError as error:
        return str(error)
    except OSError as error:
        return f"{path}: expected {facts.num_bytes} bytes, and it cannot be read: {error.strerror}"
    if (num_bytes, crc32) == (facts.num_bytes, facts.crc32):
        return None
    return (
        f"{path}: expected {facts.num_bytes} bytes of crc32 {facts.crc32:08x}, got {num_bytes} of "
        f"{crc32:08x}: it was damaged after it was saved"
    )


def check_folder(where: str, folder: Any) -> None:
    """A path that is not empty: that would be the working directory."""
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise ConfigError(f"{where}: expected the path of a folder, got {folder!r}")


def together(
    act: Callable[[], Any], *, what: str, group: Group, timeout_s: float | None = None
) -> list[Any]:
    """Do it on every rank, and wait until all have; what it returned, by rank. Collective.

    `act` returns what JSON can say. Where it fails on a rank, that rank raises its error, and all
    others a FileError that says `what`. The timeout is the group's own when None.
    """
    problem, result = None, None
    try:
        result = act()
    except Exception as error:
        problem = error
    mine = ["" if problem is None else f"{type(problem).__name__}: {problem}", result]
    said = all_gather_json(mine, group=group, timeout_s=timeout_s)
    if problem is not None:
        raise problem
    for rank, (theirs, _) in enumerate(said):
        if theirs:
            raise FileError(f"{what}: rank {rank} failed (seen on rank {group.rank}): {theirs}")
    return [result for _, result in said]
