"""The `zero` command."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, Final

import attrs
import torch
import zero_comm
from zero_comm import Loco
from zero_offload import StoreError
from zero_partition import PartitionError, Precision, Wire

from zero_engine.checkpoint.export import export
from zero_engine.checkpoint.ranges import CODES
from zero_engine.failure import summary
from zero_engine.observe.verify import verify
from zero_engine.planning.options import Option, Room, offload_at, plan_options, recommend
from zero_engine.planning.plan import plan
from zero_engine.planning.sources import GPTSize
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


def dtype_of(text: str) -> torch.dtype:
    """Return a floating-point dtype by its name; raise ArgumentTypeError otherwise."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(sorted(DTYPES))}, got {text!r}"
        )
    return DTYPES[text]


def share_of(text: str) -> float:
    """Return a share such as 20% or 0.2, below 1; raise ArgumentTypeError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(%?)", text.strip())
    share = 1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if share >= 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 20% or 0.2, got {text!r}")
    return share


def num_bytes_of(text: str) -> int:
    """Return the bytes of a size such as 5GB; raise ArgumentTypeError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?)B|B?)", text.strip().upper())
    size = 0
    if match is not None:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 5GB, 500MB or 2GiB, got {text!r}"
        )
    return size


_PLACES: Final = ("device", "host", "disk")
_SAID: Final = ("name", "fits", "device_bytes", "host_bytes", "disk_bytes")  # of options, as JSON


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `zero`."""
    parser = commands.add_parser(
        "plan",
        help="say what training a model takes, before it is started",
        description="Say how much memory of device, host and disk training takes on so many ranks, "
        "and how much it sends, without allocating any of it. Without --stage: all stages and "
        "residences, and which one to take.",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "model", nargs="?", metavar="MODEL", help="a config.json of transformers, or its folder"
    )
    model.add_argument("--layers", type=int, help="in place of MODEL: blocks of a transformer")
    model.add_argument("--hidden", type=int, metavar="WIDTH", help="their width")
    model.add_argument(
        "--params", type=_number, help="of all, embeddings included: 7.5e9; 12 x layers x hidden^2"
    )
    model.add_argument("--dtype", type=dtype_of, help="of parameters, such as bf16")
    model.add_argument(
        "--no-masters", action="store_true", help="without fp32 masters of 16-bit parameters"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    training.add_argument("--ranks-per-node", type=int, metavar="N", help="all on one if not given")
    training.add_argument("--optimizer", default="adamw", help="adamw, sgd, lion, muon, none, ...")
    training.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    training.add_argument("--stage", type=int, choices=range(4), help="this one, in detail")
    training.add_argument("--config", metavar="FILE", help="written for DeepSpeed, in detail")
    training.add_argument("--optimizer-rests", choices=_PLACES, default="device")
    training.add_argument("--params-rest", choices=_PLACES, default="device")
    training.add_argument(
        "--secondary", action="store_true", help="stage 3: a node keeps what it has gathered"
    )
    training.add_argument(
        "--replicas", action="store_true", help="shards are those of a node; gradients are averaged"
    )
    training.add_argument("--encode-params", metavar="CODEC", help="int8, bf16, ...")
    training.add_argument("--encode-gradients", metavar="CODEC", help="int4, int8, bf16, ...")
    training.add_argument("--loco", action="store_true", help="what that loses is fed back")
    room = parser.add_argument_group("what there is")
    for name, what in (
        ("device", "of each device"),
        ("host", "of each machine"),
        ("disk", "of each machine's disk"),
        ("activations", "of each device, for what a plan does not know"),
    ):
        room.add_argument(f"--{name}-memory", type=num_bytes_of, metavar="SIZE", help=what)
    room.add_argument(
        "--reserve",
        type=share_of,
        default=0.2,
        metavar="SHARE",
        help="of each device, left free for activations and what else a plan does not know: 20%%",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, in place of tables")
    parser.add_argument("--picture", metavar="FILE", help="stacked bars of memory, as PNG")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    arguments: dict[str, Any] = {
        "world_size": options.world_size,
        "ranks_per_node": options.ranks_per_node,
        "optimizer": None if options.optimizer == "none" else options.optimizer,
        "device": options.device,
    }
    room = Room(
        device=options.device_memory,
        host=options.host_memory,
        disk=options.disk_memory,
        activations=options.activations_memory or 0,
        reserve=options.reserve,
    )
    model, detailed = _model(options), _detailed(options)
    if detailed is not None:
        planned = plan(model, detailed, **arguments)
        one = Option.of(planned, room, options.ranks_per_node or options.world_size)
        every, table = (one,), f"{plan_table(planned)}\n\n{recommendation((one,), room)}"
        found: dict[str, Any] = planned.to_dict() | {"fits": one.fits}
    else:
        every = plan_options(model, _config(options), room=room, **arguments)
        chosen, table = recommend(every), options_table(every, room)
        found = {
            "options": [
                {name: getattr(each, name) for name in _SAID} | {"plan": each.plan.to_dict()}
                for each in every
            ],
            "activations_bytes": room.activations,
            "reserve": room.reserve,
            "recommended": None if chosen is None else chosen.name,
        }
    if options.picture is not None:
        save_picture([each.plan for each in every], options.picture)
    print(json.dumps(found, indent=1) if options.json else table)


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
            f"without --params; got {', '.join(given) or 'none of them'}"
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
            raise ConfigError("expected --config, or --stage and what rests where, got both")
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
    if options.dtype is not None:
        precision = Precision(params=options.dtype, masters=masters)
    wire = Wire(
        secondary=options.secondary,
        replicas=options.replicas,
        params=options.encode_params,
        gradients=options.encode_gradients,
        loco=Loco() if options.loco else None,
    )
    return ZeroConfig(precision=precision, wire=wire)


def _number(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"expected a whole number such as 7.5e9, got {text!r}")
    return int(value)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="train a few steps beside DistributedDataParallel",
        description="Train your model under DistributedDataParallel and under a configuration, "
        "and say what differs. Alone, or on all ranks: torchrun --nproc-per-node=N -m zero_engine "
        "verify MODULE:FUNCTION. Ends with 1 where anything differs that was not chosen.",
    )
    what = "a dict or tuple of what zero_engine.verify() takes"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=f"returns {what}")
    parser.set_defaults(run=_run_verify)


def _run_verify(options: argparse.Namespace) -> int:
    group, text = zero_comm.init(), options.function
    sys.path.insert(0, "")  # the working directory, as for `python -m`
    try:
        function = resolve_name(text)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"expected MODULE:FUNCTION to call, got {text!r}: {error}") from error
    given: Any = function() if callable(function) else None
    if not isinstance(given, Mapping | tuple):
        raise ConfigError(
            f"{text}: expected a function that returns a dict or tuple of what "
            f"zero_engine.verify() takes, got {function if given is None else given!r}"
        )
    is_named = isinstance(given, Mapping)
    found = verify(**given, group=group) if is_named else verify(*given, group=group)
    if group.rank == 0:
        print(found)
    return 0 if found.is_equal or found.is_chosen else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `zero` command with these arguments; with those of the process when None.

    Returns the exit status: 0; 1 after an error, which is printed as one line on stderr, or if
    `zero verify` found a difference that was not chosen. Arguments that cannot be parsed exit
    with 2 at once.
    """
    parser = argparse.ArgumentParser(
        prog="zero",
        description="Look ahead to training with zero_engine, and after what it left behind.",
    )
    parser.add_argument("--version", action="version", version=f"zero-engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except (ConfigError, FileError, PartitionError, StoreError) as error:
        print(f"zero: {error}", file=sys.stderr)
        return 1


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights as Hugging Face's files",
        description="Write a checkpoint's weights as a folder that from_pretrained() of "
        "transformers loads. Needs one process, no GPU, and little memory.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of checkpoints, or one")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--format", choices=["safetensors"], default="safetensors")
    parser.add_argument(
        "--dtype", type=dtype_of, help=f"of floating-point tensors: {', '.join(sorted(DTYPES))}"
    )
    parser.add_argument(
        "--max-shard-size", type=num_bytes_of, default="5GB", metavar="SIZE", help="such as 5GB"
    )
    parser.add_argument("--tag", help="of the checkpoint; the newest complete one if not given")
    parser.set_defaults(run=_run_export)


def _run_export(options: argparse.Namespace) -> None:
    with _progress_bar() as progress:
        report = export(
            options.checkpoint,
            options.out,
            tag=options.tag,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_size,
            progress=progress,
        )
    print(
        f"{options.out}: {report.num_tensors} tensors, {report.num_bytes} bytes in "
        f"{len(report.files)} {'file' if len(report.files) == 1 else 'files'}"
    )


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="compare what ranks wrote when it went wrong, and name the one to look at",
        description="Read zero-report-rank0.txt and so on, which ranks write at an error of ours "
        "that ends the program, and at SIGUSR1; say how they differ, and whom to look at first.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="where they are: what ZERO_REPORT says")
    parser.set_defaults(run=lambda options: print(summary(options.folder)))


@contextmanager
def _progress_bar() -> Iterator[Callable[[int], object] | None]:
    """Yield a function to call with the number of bytes written; None if tqdm is missing."""
    try:
        from tqdm import tqdm  # noqa: PLC0415  # no dependency of ours
    except ImportError:
        yield None
        return
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update


_COMMANDS: Final = (_add_export, add_plan, _add_report, _add_verify)
