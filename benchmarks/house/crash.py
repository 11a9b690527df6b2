"""The gate of crashes: after SIGKILLs and flipped bytes nothing is lost, and nothing unnoticed.

    python benchmarks/house/crash.py                   # 50 of each, a minute
    python benchmarks/house/crash.py --kills 200 --flips 200 --seed 7

A process saves, saves in the background, trains from disk, or loads, and is killed. Then the folder
loads, and holds in every value what one save has published: the last that had returned, or the one
that was under way. A byte of a checkpoint or of a swap file is flipped: then loading, or the next
step, ends in an error of ours and leaves the model as it was, or all bits are the same. Runs with
the packages that Python finds; exits with 1 at the first thing that is wrong, and says which.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from names import find
from torch import Tensor, nn

_LONGEST_S: Final = 0.12  # after the first save has returned; a save takes a tenth of it or more
_PLACES: Final = {"optimizer": "disk", "params": "disk"}


class Wrong(Exception):  # noqa: N818 - it says what is
    """The gate is closed."""


# ---- A model whose every value is its step ----


def make(folder: Path | None = None, **disk: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained, and frozen, and with a momentum; on disk where a folder is given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    model[0].bias.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, 0.9)
    offload = None
    if folder is not None:
        settings = find("DiskSettings")(**disk)
        offload = find("Offload")(**_PLACES, path=folder, subgroup_bytes=2048, disk=settings)
    config = find("ZeroConfig")(3, min_unit_bytes=0, offload=offload)
    find("shard")(model, optimizer, config, group=find("Group").solo())
    train_step(model, optimizer, 0)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Of data that follow from the step."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def set_all(model: nn.Module, value: float) -> None:
    """Every value that is trained, and its momentum."""
    for param in model.parameters():
        if param.requires_grad:
            whole = torch.full(param.shape, value)
            find("set_full_param")(param, whole)
            find("set_full_optimizer_state")(param, "momentum_buffer", whole)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """All of them."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = find("full_param")(param)
        if param.requires_grad:
            found[f"{name} momentum"] = find("full_optimizer_state")(param, "momentum_buffer")
    return found


# ---- Kills ----


def _save(folder: Path, tell: Callable[[str, int], object], first: int) -> None:
    model, optimizer = make()
    for step in range(first, 1_000_000):
        set_all(model, float(step))
        tell("b", step)
        tag = "same" if step % 3 == 0 else None
        find("save")(folder, model, optimizer, step=step, tag=tag, keep=2)
        tell("p", step)


def _save_in_background(folder: Path, tell: Callable[[str, int], object], first: int) -> None:
    model, optimizer = make()
    with find("Saver")(folder, model, optimizer, keep=2, overlap=first % 2 == 0) as saver:
        for step in range(first, 1_000_000):
            set_all(model, float(step))
            tell("b", step)
            saver.save(step=step)
            model(torch.ones(1, 40))
            saver.wait()
            tell("p", step)


def _swap(folder: Path, tell: Callable[[str, int], object], first: int) -> None:
    """State and parameters are on disk; they move in each step, and are saved in each third."""
    (folder / "swap").mkdir(exist_ok=True)
    model, optimizer = make(folder / "swap")
    for step in range(first, 1_000_000):
        train_step(model, optimizer, step)
        if step % 3 == 0:
            set_all(model, float(step))
            tell("b", step)
            find("save")(folder, model, optimizer, step=step, keep=2)
            tell("p", step)


def _load(folder: Path, tell: Callable[[str, int], object], first: int) -> None:
    model, optimizer = make()
    if not any(folder.iterdir()):
        set_all(model, float(first))
        find("save")(folder, model, optimizer, step=first)
    while True:
        report = find("load")(folder, model, optimizer)
        tell("p", report.step)


KILLED: Final = {"save": _save, "background": _save_in_background, "swap": _swap, "load": _load}


def _kill_once(kind: str, folder: Path, draw: random.Random, last: int) -> tuple[int, int]:
    """Returns the last step that a save has returned from, and the last that was begun."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _be_killed(kind, folder, writing, last + 1)
    os.close(writing)
    said = b""
    while b"p" not in said:  # it has come round once
        more = os.read(reading, 4096)
        if not more:
            raise Wrong(f"{kind}: the process ended before it was killed")
        said += more
    time.sleep(draw.uniform(0, _LONGEST_S))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise Wrong(f"{kind}: the process ended with {status} before it was killed")
    while more := os.read(reading, 65536):
        said += more
    os.close(reading)
    words = said.decode().split("\n")[:-1]
    published = [int(word[1:]) for word in words if word[0] == "p"]
    begun = [int(word[1:]) for word in words]
    return max(published), max(begun)


def _be_killed(kind: str, folder: Path, writing: int, first: int) -> NoReturn:
    try:
        KILLED[kind](
            folder, lambda word, step: os.write(writing, f"{word}{step}\n".encode()), first
        )
    except BaseException as error:
        print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def kill_many(num_kills: int, draw: random.Random, scratch: Path) -> Counter[str]:
    """Kill, look, and again in the same folder. Returns how often what came out."""
    outcomes: Counter[str] = Counter()
    last = dict.fromkeys(KILLED, 0)
    content: dict[str, str] = {}
    model, optimizer = make()
    for number in range(num_kills):
        kind = list(KILLED)[number % len(KILLED)]
        folder = scratch / kind
        folder.mkdir(exist_ok=True)
        published, begun = _kill_once(kind, folder, draw, last[kind])
        set_all(model, -1.0)
        report = find("load")(folder, model, optimizer)
        if report is None or not published <= report.step <= begun:
            raise Wrong(f"{kind}: {published} had returned, {begun} was begun, found {report}")
        for name, value in values_of(model).items():
            if name != "0.bias" and not torch.equal(value, torch.full_like(value, report.step)):
                raise Wrong(f"{kind}: {name} is not that of step {report.step}")
        if kind == "load":  # which changes nothing
            now = _digest(folder)
            if content.setdefault(kind, now) != now:
                raise Wrong("load: the files have changed")
        else:
            last[kind] = begun
        if kind == "swap":
            _check_leftovers(folder / "swap")
        outcomes[f"{kind}: {'the one begun' if report.step > published else 'the last'}"] += 1
    return outcomes


def _check_leftovers(folder: Path) -> None:
    """The next job here removes what the dead one has left, and trains from disk as in memory."""
    left = set(folder.iterdir())
    if not left:
        raise Wrong("swap: a killed process left nothing, so nothing was tried")
    offloaded, plain = make(folder), make()
    if left & set(folder.iterdir()):
        raise Wrong(f"swap: {left & set(folder.iterdir())} was not removed")
    for step in range(2):
        if train_step(*offloaded, step) != train_step(*plain, step):
            raise Wrong("swap: a run in the same folder trains otherwise")
    find("unshard")(*offloaded)


def _digest(folder: Path) -> str:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    content = b"".join(str(path).encode() + path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()


# ---- Flips ----


def _flip(path: Path, draw: random.Random, *, hides: bool = False) -> int:
    """One bit of one byte; with the file's old dates where nobody is to see that it changed."""
    before, content = path.stat(), bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    content[at] ^= 1 << draw.randrange(8)
    with path.open("r+b") as file:
        file.write(content)
    if hides:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return at


def _errors() -> tuple[type[Exception], ...]:
    names = ("FileError", "LoadError", "StoreError", "TornStepError", "ConfigError")
    return tuple(find(name) for name in names)


def flip_checkpoints(num_flips: int, draw: random.Random, scratch: Path) -> Counter[str]:
    """Of files that `save` and `Saver` wrote."""
    outcomes: Counter[str] = Counter()
    model, optimizer = make()
    for kind in ("save", "background"):
        set_all(model, 5.0)
        if kind == "save":
            find("save")(scratch / kind, model, optimizer, step=5, extra={"position": 3})
        else:
            with find("Saver")(scratch / kind, model, optimizer) as saver:
                saver.save(step=5, extra={"position": 3})
    expected = values_of(model)
    for number in range(num_flips):
        folder = scratch / ("save", "background")[number % 2]
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        # A byte of any file alike, and each file as often.
        path = paths[number // 2 % len(paths)]
        whole = path.read_bytes()
        at = _flip(path, draw)
        set_all(model, -1.0)
        before = values_of(model)
        what = f"{path.name}, byte {at}"
        try:
            report = find("load")(folder, model, optimizer)
        except _errors() as error:
            outcomes[f"{path.name}: {type(error).__name__}"] += 1
            _check_same(before, values_of(model), f"{what}: load() raised and has written")
        else:
            if (report.step, report.extra) != (5, {"position": 3}):
                raise Wrong(f"{what}: loaded {report}")
            _check_same(expected, values_of(model), f"{what}: load() did not notice")
            outcomes[f"{path.name}: the same"] += 1
        path.write_bytes(whole)
    return outcomes


def flip_swap_files(num_flips: int, draw: random.Random, scratch: Path) -> Counter[str]:
    """Between two steps; seen by its date, or, with that put back, by its checksum."""
    outcomes: Counter[str] = Counter()
    for number in range(num_flips):
        hides = number % 2 == 1
        folder = scratch / f"swap-{number}"
        folder.mkdir()
        model, optimizer = make(folder, has_checksums=hides)
        plain = make()
        find("full_state_dict")(model)  # what is written behind is on disk then
        find("full_optimizer_state_dict")(model)
        paths = sorted(path for path in folder.glob("*/*") if path.stat().st_size)
        path = draw.choice(paths)
        what = f"{path.name}, byte {_flip(path, draw, hides=hides)}, {hides=}"
        try:
            losses = [train_step(model, optimizer, step) for step in (1, 2)]
            found = values_of(model)
        except _errors() as error:
            outcomes[f"swap file: {type(error).__name__}"] += 1
            continue
        if losses != [train_step(*plain, step) for step in (1, 2)]:
            raise Wrong(f"{what}: training did not notice")
        _check_same(values_of(plain[0]), found, f"{what}: training did not notice")
        outcomes["swap file: the same"] += 1
    return outcomes


def _check_same(expected: dict[str, Tensor], found: dict[str, Tensor], what: str) -> None:
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    if different:
        raise Wrong(f"{what} {different}")


def main() -> int:
    """Kill and flip. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of instants and bytes")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    print(f"seed {seed}, {Path(str(sys.modules[find('shard').__module__].__file__)).parent}")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        scratch = Path(folder)
        try:
            outcomes = kill_many(options.kills, draw, scratch)
            (scratch / "flips").mkdir()
            in_swap = options.flips * 2 // 5
            outcomes += flip_checkpoints(options.flips - in_swap, draw, scratch / "flips")
            outcomes += flip_swap_files(in_swap, draw, scratch / "flips")
        except (Wrong, *_errors()) as error:
            print(f"wrong: {error}")
            return 1
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:4} {outcome}")
    print(f"{options.kills} kills, {options.flips} flipped bytes: nothing lost, nothing unnoticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
