"""Commands of `zero`, run once `cli` has read the arguments: export, plan, report, verify."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from threading import Event, Thread
from typing import Any, Final

import attrs
import torch
import zero_comm
import zero_offload
from zero_comm import Loco
from zero_offload import StoreError
from zero_partition import PartitionError, Precision, Wire

from zero_engine.checkpoint.export import export
from zero_engine.checkpoint.ranges import CODES
from zero_engine.failure import summary
from zero_engine.observe.verify import verify
from zero_engine.planning.activations import estimate_activations
from zero_engine.planning.options import (
    Option,
    Room,
    name_of,
    offload_at,
    plan_options,
    recommend,
)
from zero_engine.planning.plan import plan
from zero_engine.planning.sources import GPTSize
from zero_engine.planning.states import plan_states
from zero_engine.planning.tables import (
    options_table,
    plan_table,
    recommendation,
    save_picture,
)

from .__about__ import __version__
from .config import ZeroConfig
from .errors import ConfigError, FileError
from .offload import Offload

DTYPES: Final = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in CODES if dtype.is_floating_point},
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


# A command that ends sooner shows no progress.
_SECONDS_UNSAID: Final = 1.0
# Fields of an option in JSON.
_FOR_VERIFY: Final = (
    '{"build_model": ..., "build_optimizer": ..., "batches": ..., "config": ZeroConfig(...)}'
)
_SAID: Final = ("name", "fits", "device_bytes", "host_bytes", "disk_bytes")


def versions() -> str:
    """Return the versions of this package and of torch, and which compiled code is in use."""
    lacks = zero_comm.native_status()
    codecs = f"plain torch, because {lacks}" if lacks else "compiled"
    return (
        f"zero-engine {__version__}, torch {torch.__version__}\n"
        f"{zero_offload.native_status()}\ncodecs on the CPU: {codecs}"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command that `options.command` names, print its text and return its exit status."""
    try:
        text, status = _COMMANDS[options.command](options)
    except (ConfigError, FileError, PartitionError, StoreError) as error:
        print(f"zero: {error}", file=sys.stderr)
        return 1
    try:
        if text:
            print(text, flush=True)
    except BrokenPipeError:
        # The reader of stdout has ended, such as `head`. Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _plan(options: argparse.Namespace) -> tuple[str, int]:
    with _status_line("building the model") as say:
        return _planned(options, say), 0


def _planned(options: argparse.Namespace, say: Callable[[str], object]) -> str:
    arguments: dict[str, Any] = {
        "world_size": options.world_size,
        "ranks_per_node": options.ranks_per_node,
        "optimizer": None if options.optimizer == "none" else options.optimizer,
        "device": options.device,
    }
    sizes = (options.model, options.layers, options.hidden)
    if options.params is not None and all(size is None for size in sizes):
        return _planned_by_number(options)
    model, detailed = _model(options), _detailed(options)
    room = _room(options, model, detailed or _config(options), say)
    if detailed is not None:
        say(f"planning {name_of(detailed)}")
        planned = plan(model, detailed, **arguments)
        one = Option.of(planned, room, options.ranks_per_node or options.world_size)
        every, table = (one,), f"{plan_table(planned)}\n\n{recommendation((one,), room)}"
        found: dict[str, Any] = planned.to_dict() | {"fits": one.fits}
    else:
        every = plan_options(
            model,
            _config(options),
            room=room,
            progress=lambda name: say(f"planning {name}"),
            **arguments,
        )
        chosen, table = recommend(every), options_table(every, room)
        found = {
            "options": [
                {name: getattr(each, name) for name in _SAID} | {"plan": each.plan.to_dict()}
                for each in every
            ],
            "activations_bytes": room.activations,
            "activations_are_estimated": room.activations_are_estimated,
            "reserve": room.reserve,
            "recommended": None if chosen is None else chosen.name,
        }
    if options.picture is not None:
        save_picture([each.plan for each in every], options.picture)
    return json.dumps(found, indent=1) if options.json else table


# Options of `plan` that need more of a model than its number of parameters.
_NEED_UNITS: Final = (
    *("ranks_per_node", "config", "optimizer_rests", "params_rest", "secondary", "replicas"),
    *("encode_params", "encode_gradients", "loco", "host_memory", "disk_memory"),
    *("batch_size", "sequence_length", "picture"),
)


def _planned_by_number(options: argparse.Namespace) -> str:
    """Plan model state by formula; refuse options that need a model's units."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in _NEED_UNITS
        if getattr(options, name) not in (None, False, "device")
    ]
    if given:
        raise ConfigError(
            f"--params alone: expected none of the options that need a model's units, got "
            f"{', '.join(given)}; pass MODEL (a config.json of transformers), or --layers and "
            "--hidden"
        )
    planned = plan_states(
        options.params,
        _config(options),
        dtype=options.dtype or torch.float32,
        world_size=options.world_size,
        stages=range(4) if options.stage is None else (options.stage,),
        room=Room(
            device=options.device_memory,
            activations=options.activations_memory or 0,
            reserve=options.reserve,
        ),
        optimizer=None if options.optimizer == "none" else options.optimizer,
        device=options.device,
    )
    return json.dumps(planned.to_dict(), indent=1) if options.json else planned.table()


def _room(
    options: argparse.Namespace, model: Any, config: ZeroConfig, say: Callable[[str], object]
) -> Room:
    """Return the machines' memory, with the bytes of activations as given or estimated."""
    given, tokens = options.activations_memory, (options.batch_size, options.sequence_length)
    if any(tokens) and (given is not None or not all(tokens)):
        raise ConfigError(
            "expected --batch-size with --sequence-length, or --activations-memory, got "
            + ", ".join(
                f"--{name.replace('_', '-')}"
                for name in ("activations_memory", "batch_size", "sequence_length")
                if getattr(options, name) is not None
            )
        )
    if all(tokens):
        if isinstance(model, GPTSize):
            raise ConfigError(
                "expected a config.json with --batch-size and --sequence-length, which estimate "
                "activations of its model, got --layers and --hidden. transformers writes one: "
                "LlamaConfig(...).save_pretrained('.'); or pass --activations-memory"
            )
        say("estimating activations")
        dtype = None if config.precision is None else config.precision.params
        given = estimate_activations(
            model, batch_size=tokens[0], sequence_length=tokens[1], dtype=dtype
        )
    return Room(
        device=options.device_memory,
        host=options.host_memory,
        disk=options.disk_memory,
        activations=given or 0,
        activations_are_estimated=all(tokens),
        reserve=options.reserve,
    )


def _model(options: argparse.Namespace) -> Any:
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "params")}
    given = [f"--{name}" for name, value in sizes.items() if value is not None]
    if options.model is not None:
        if given:
            raise ConfigError(
                f"expected MODEL or --layers and --hidden, got both: {options.model!r} and "
                + ", ".join(given)
            )
        return options.model
    if options.layers is None or options.hidden is None:
        raise ConfigError(
            "expected MODEL (a config.json of transformers), or --layers and --hidden, with or "
            f"without --params, or --params alone; got {', '.join(given) or 'none of them'}"
        )
    return GPTSize(
        options.layers, options.hidden, options.params, dtype=options.dtype or torch.float32
    )


def _detailed(options: argparse.Namespace) -> ZeroConfig | None:
    """Return the one configuration to plan in detail; None to plan all of them."""
    rests = (options.optimizer_rests, options.params_rest)
    if options.config is not None:
        asked = options.stage is not None or _config(options).wire != Wire()
        if asked or rests != ("device", "device"):
            raise ConfigError(
                "expected --config, or --stage, --optimizer-rests and --params-rest, got both"
            )
        return ZeroConfig.from_deepspeed(options.config)
    if options.stage is None:
        if rests != ("device", "device"):
            raise ConfigError("expected --stage with --optimizer-rests and --params-rest")
        return None
    return attrs.evolve(
        _config(options), stage=options.stage, offload=offload_at(*rests, like=Offload())
    )


def _config(options: argparse.Namespace) -> ZeroConfig:
    """Return the configuration of precision and wire, which applies to every stage planned."""
    precision, masters = None, None if options.no_masters else torch.float32
    if options.dtype is not None or options.no_masters:
        precision = Precision(params=options.dtype, masters=masters)
    wire = Wire(
        secondary=options.secondary,
        replicas=options.replicas,
        params=options.encode_params,
        gradients=options.encode_gradients,
        loco=Loco() if options.loco else None,
    )
    return ZeroConfig(precision=precision, wire=wire)


def _verify(options: argparse.Namespace) -> tuple[str, int]:
    # Only one of the ranks that share a terminal writes to it.
    is_first = os.environ.get("RANK", "0") == "0"
    with _status_line("waiting for ranks", is_shown=is_first) as say:
        return _verified(options.function, say)


def _verified(text: str, say: Callable[[str], object]) -> tuple[str, int]:
    group = zero_comm.init()
    # The working directory, as for `python -m`.
    sys.path.insert(0, "")
    try:
        function = resolve_name(text)
    except (ValueError, ImportError, AttributeError) as error:
        name = text.replace(".py:", ":").replace("/", ".")
        meant = f"; did you mean {name}?" if name != text else ""
        raise ConfigError(
            f"expected MODULE:FUNCTION to call, got {text!r}: {error}{meant}"
        ) from error
    given: Any = function() if callable(function) else None
    if not isinstance(given, Mapping | tuple):
        raise ConfigError(
            f"{text}: expected a function that returns a dict or tuple of what "
            f"zero_engine.verify() takes, such as {_FOR_VERIFY}, got "
            f"{function if given is None else type(given).__name__}"
        )
    ours = {"group": group, "progress": say}
    by_name, by_place = (given, ()) if isinstance(given, Mapping) else ({}, given)
    takes = inspect.signature(verify)
    required = [name for name, each in takes.parameters.items() if each.default is each.empty]
    try:
        called = takes.bind_partial(*by_place, **by_name, **ours)
        if lacks := [repr(name) for name in required if name not in called.arguments]:
            raise TypeError(f"missing {', '.join(lacks)}")
    except TypeError as error:
        raise ConfigError(
            f"{text}: expected a dict or tuple of what zero_engine.verify() takes, such as "
            f"{_FOR_VERIFY}: {error}; got "
            f"{', '.join(map(repr, by_name)) if by_name else f'{len(by_place)} values'}"
        ) from error
    found = verify(*called.args, **called.kwargs)
    return str(found) if group.rank == 0 else "", int(not (found.is_equal or found.is_chosen))


def _export(options: argparse.Namespace) -> tuple[str, int]:
    with _progress_bar() as progress:
        report = export(
            options.checkpoint,
            options.out,
            tag=options.tag,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_size,
            progress=progress,
        )
    files = f"{len(report.files)} {'file' if len(report.files) == 1 else 'files'}"
    said = f"{options.out}: {report.num_tensors} tensors, {report.num_bytes} bytes in {files}"
    return f"{said}; for from_pretrained() of transformers, add the model's config.json", 0


def _report(options: argparse.Namespace) -> tuple[str, int]:
    return summary(options.folder), 0


@contextmanager
def _progress_bar() -> Iterator[Callable[[int], object] | None]:
    """Yield a function to call with the number of bytes written; None if tqdm is missing."""
    try:
        from tqdm import tqdm  # noqa: PLC0415 (optional)
    except ImportError:
        yield None
        return
    with tqdm(unit="B", unit_scale=True, disable=None, delay=_SECONDS_UNSAID) as bar:
        yield bar.update


@contextmanager
def _status_line(text: str, *, is_shown: bool = True) -> Iterator[Callable[[str], object]]:
    """Show `text` on stderr, if that is a terminal, once a second has passed.

    Yields a function to call with the next text. The line is erased at the end.
    """
    said, is_done = [text], Event()
    if not (is_shown and sys.stderr.isatty()):
        yield said.append
        return

    def write(text: str) -> None:
        fitting = text[: shutil.get_terminal_size().columns - 1]
        # \x1b[K erases the remainder of the line before it.
        print(f"\r{fitting}\x1b[K", end="", file=sys.stderr, flush=True)

    def show() -> None:
        shown, pause = "", _SECONDS_UNSAID
        while not is_done.wait(pause):
            if said[-1] != shown:
                write(f"zero: {(shown := said[-1])}")
            pause = 0.1
        if shown:
            write("")

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield said.append
    finally:
        is_done.set()
        thread.join()


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace], tuple[str, int]]]] = {
    "export": _export,
    "plan": _plan,
    "report": _report,
    "verify": _verify,
}
