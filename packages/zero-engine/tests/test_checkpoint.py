"""What a saved folder says is what is read of it, and what is damaged is named."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import ConfigError, FileError, ZeroConfig
from zero_engine.testing import MANIFEST, damage, edit_manifest
from zero_partition import LoadError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64)


class _Values(nn.Module):
    """Some parameter that trains, and frozen ones of all dtypes and of odd shapes."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.trained = nn.Parameter(torch.randn(7, 5, generator=generator))
        values = ((torch.randn(7, 5, generator=generator) * 9).to(dtype) for dtype in DTYPES)
        self.values = nn.ParameterList(nn.Parameter(v, requires_grad=False) for v in values)
        self.register_buffer("scalar", torch.randn((), generator=generator))
        self.register_buffer("empty", torch.empty(0, 3))


def _shard(*, seed: int = 0, group: Group | None = None) -> tuple[nn.Module, Any]:
    model = _Values(seed=seed)
    optimizer = torch.optim.SGD([model.trained], lr=0.1, momentum=0.9)
    group = Group.solo() if group is None else group
    return zero_engine.shard(model, optimizer, ZeroConfig(3, min_unit_bytes=0), group=group)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in zero_engine.full_state_dict(model).items()}


_assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def test_any_run_of_elements_is_read_whatever_files_it_lies_in(ranks, tmp_path, by_hand) -> None:
    """Another world size asks for other runs than were written."""
    params = {name: param.detach() for name, param in _Values(seed=1).named_parameters()}
    by_hand(tmp_path / "one", params, {}, cuts=(3, 4, 17))

    found, *_ = ranks(3).run(_load_by_hand, folder=tmp_path)

    _assert_same({name: found[name] for name in params}, params)


def _load_by_hand(group: Group, folder: Path) -> dict[str, Tensor]:
    model, _ = _shard(group=group)
    report = zero_engine.load(folder, model, is_strict=False)  # it has no buffers
    assert report is not None
    assert (report.path.name, report.step, report.missing) == ("one", 7, ("scalar", "empty"))
    return _values(model)


def _load(folder: Path, tag: str | None = None) -> tuple[str, int]:
    report = zero_engine.load(folder, *_shard(seed=1), tag=tag)
    assert report is not None
    return report.path.name, report.step


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """Steps begin anew, clocks differ, and `latest` is written after the checkpoint."""
    model, optimizer = _shard()
    for tag, step in (("b", 300), ("c", 200), ("a", 100)):
        zero_engine.save(tmp_path, model, optimizer, step=step, tag=tag)
    zero_engine.save(tmp_path, model, optimizer, step=400, tag="aside", is_latest=False)
    (tmp_path / "latest").write_text("b")

    (tmp_path / "c" / MANIFEST).write_text("{")  # which would not do at the newest

    assert _load(tmp_path) == ("a", 100)
    assert _load(tmp_path, "aside") == ("aside", 400)
    with pytest.raises(FileError, match=r"expected a checkpoint 'd', found 'a', 'aside', 'b', 'c'"):
        _load(tmp_path, "d")
    # Between two renames there is no folder of the tag's name.
    (tmp_path / "a").rename(tmp_path / ".a.replaced-ab12")
    assert _load(tmp_path, "a") == _load(tmp_path) == (".a.replaced-ab12", 100)


def test_every_flipped_byte_is_detected_and_nothing_is_written(tmp_path: Path) -> None:
    """Disks and links flip bits, and a training that goes on from them shows nothing."""
    path = zero_engine.save(tmp_path, *_shard(), step=7).path
    model, optimizer = _shard(seed=1)
    before = _values(model)
    draw = random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(100):
        file = draw.choice(files)
        position, flip = draw.randrange(file.stat().st_size), draw.randrange(1, 256)
        damage(file, position, flip)

        with pytest.raises(FileError, match=file.name):
            zero_engine.load(tmp_path, model, optimizer)

        damage(file, position, flip)
    manifest = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(manifest.replace(b"\n", b" ", 1))  # white space counts, too
    with pytest.raises(FileError, match="damaged"):
        zero_engine.load(tmp_path, model, optimizer)
    (path / MANIFEST).write_bytes(manifest)
    _assert_same(_values(model), before)
    zero_engine.load(tmp_path, model, optimizer)
    _assert_same(_values(model), _values(_shard()[0]))


def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    """A checksum says that it is as it was written, not that it is good."""
    path = zero_engine.save(tmp_path, *_shard(), step=7).path
    was = (path / MANIFEST).read_bytes()
    param = {"dtype": "uint8", "shape": [2], "pieces": []}
    for change, message in (
        ({"files": {"../x": {"bytes": 1, "crc32": 1}}}, "beside the manifest"),
        ({"params": {"w": param | {"dtype": "load"}}}, "torch.dtype"),
        ({"params": {"w": param}}, "of 2 elements, got 0"),
        ({"step": None}, r"manifest.json: step: expected a number"),
        ({"version": 2}, "another version"),
    ):
        edit_manifest(path, lambda content, change=change: content.update(change))
        with pytest.raises(FileError, match=message):
            _load(tmp_path)
        (path / MANIFEST).write_bytes(was)


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Stop what waits for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


STRANGE: Final[dict[str, Callable[[Path], object]]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_regular_file_is_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe waits for ever for a writer, and a device has no end."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path = zero_engine.save(tmp_path / "run", *_shard(), step=7).path
    for file in sorted(path.iterdir()):
        aside = file.rename(tmp_path / "aside")
        STRANGE[kind](Path(os.path.relpath(file)))
        with _within(20), pytest.raises(FileError, match=f"{file.name}|no checkpoint"):
            _load(tmp_path / "run")
        with _within(20), pytest.raises(FileError, match=f"{file.name}|no checkpoint"):
            zero_engine.export(tmp_path / "run", tmp_path / "out.safetensors")
        file.rmdir() if kind == "a folder" else file.unlink()
        aside.rename(file)
    assert _load(tmp_path / "run") == ("step-7", 7)


@pytest.mark.parametrize("kind", STRANGE)
def test_what_lies_in_another_tag_stops_no_save(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One damaged folder among many must not end a run that goes on."""
    monkeypatch.chdir(tmp_path)
    model, optimizer = _shard()
    for step in (1, 2, 3):
        zero_engine.save(tmp_path, model, optimizer, step=step)
    for file in [*(tmp_path / "step-1").iterdir(), tmp_path / "step-2" / MANIFEST]:
        file.unlink()
        STRANGE[kind](Path(os.path.relpath(file)))
    with _within(60):
        for step in (4, 5):
            zero_engine.save(tmp_path, model, optimizer, step=step, keep=2)
        assert _load(tmp_path) == ("step-5", 5)


@pytest.mark.parametrize("said", ["../other/step-9", "/etc", "..", "", "step-9\0"])
def test_latest_names_a_tag_of_its_own_folder(tmp_path: Path, said: str) -> None:
    """A path in it would lead out of the folder that was asked for."""
    zero_engine.save(tmp_path / "other", *_shard(), step=9)
    zero_engine.save(tmp_path / "run", *_shard(), step=1)
    (tmp_path / "run" / "latest").write_text(said)
    assert _load(tmp_path / "run") == ("step-1", 1)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Betas are a tuple, and a learning rate may be a tensor; what would run code is refused."""
    value = {
        "betas": (0.9, 0.95),
        "lr": torch.tensor(1e-3, dtype=torch.float64),
        "milestones": {3: 1, 6: 2},
        "marked": {"$": "dict"},
        "$": [None, True, "é", float("inf"), 0.1 + 0.2],
        "flags": torch.tensor([[True], [False]]),
        "nothing": torch.empty(0, 2, dtype=torch.bfloat16),
    }
    model, optimizer = _shard()
    zero_engine.save(tmp_path, model, optimizer, step=1, extra=value)

    again = zero_engine.load(tmp_path, model, optimizer).extra

    tensors = ("lr", "flags", "nothing")
    assert list(again) == list(value)
    _assert_same([again.pop(key) for key in tensors], [value.pop(key) for key in tensors])
    assert again == value
    with pytest.raises(ConfigError, match=r"extra\['a'\]\[1\]: expected .* got a PosixPath"):
        zero_engine.save(tmp_path, model, optimizer, step=1, extra={"a": [1, Path("x")]})


def test_a_scheduler_that_is_none_is_refused(tmp_path: Path) -> None:
    """An optimizer has a state too, and was saved as that of a scheduler; a lambda has none."""
    model, optimizer = _shard()
    zero_engine.save(tmp_path, model, optimizer, step=1)
    before = sorted(tmp_path.rglob("*"))
    for wrong in (optimizer, model, lambda step: 1.0):
        says = rf"scheduler to be .*, got one of type {type(wrong).__name__}"
        with pytest.raises(ConfigError, match=rf"save\(\): expected {says}"):
            zero_engine.save(tmp_path, model, optimizer, step=2, scheduler=wrong)
        with pytest.raises(ConfigError, match=rf"load\(\): expected {says}"):
            zero_engine.load(tmp_path, model, optimizer, scheduler=wrong)
    assert sorted(tmp_path.rglob("*")) == before


class _Grown(_Values):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(3))


class _Wider(_Grown):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(7, 6))


def test_is_strict_false_is_advised_where_it_helps(tmp_path: Path) -> None:
    """Other names are left out then; another shape is an error all the same."""
    zero_engine.save(tmp_path, *_shard(), step=1)
    for make, helps in ((_Grown, True), (_Wider, False)):
        model = make()
        zero_engine.shard(model, None, ZeroConfig(3), group=Group.solo())
        with pytest.raises(LoadError, match=r"missing: 'more'") as caught:
            zero_engine.load(tmp_path, model)
        assert ("with is_strict=False the others are loaded" in str(caught.value)) == helps
        with nullcontext() if helps else pytest.raises(LoadError, match="expected shape"):
            assert zero_engine.load(tmp_path, model, is_strict=False).missing == ("more",)
