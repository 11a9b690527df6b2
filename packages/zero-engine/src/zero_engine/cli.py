"""The `zero` command: its arguments, which are read without torch. `commands` carries them out."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch


def dtype_of(text: str) -> torch.dtype:
    """Return a floating-point dtype by its name; raise ArgumentTypeError otherwise."""
    from .commands import DTYPES  # noqa: PLC0415  # needs torch

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


def memory_of(text: str) -> int:
    """Return the bytes of a memory's size: a number without a unit, such as 80, is in GiB."""
    if not re.fullmatch(r"\d+(?:\.\d+)?", text.strip()):
        return num_bytes_of(text)
    if float(text) >= _MOST_GIB:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 80 (GiB) or 80GB, got {text!r}, which would be GiB; for "
            f"bytes, write {text.strip()}B"
        )
    return num_bytes_of(f"{text.strip()}GiB")


# A larger number without a unit is probably meant as bytes, and is refused.
_MOST_GIB: Final = 10**6
_PLACES: Final = ("device", "host", "disk")


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `zero`."""
    parser = commands.add_parser(
        "plan",
        help="say what training a model takes, before it is started",
        description="Print how much memory of device and host, and disk space, training takes on N "
        "ranks, and how much it sends, without allocating any of it. Without --stage: all stages "
        "with every choice of offload, and the one to take.",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "model", nargs="?", metavar="MODEL", help="a config.json of transformers, or its folder"
    )
    model.add_argument("--layers", type=int, help="blocks of a transformer, in place of MODEL")
    model.add_argument("--hidden", type=int, metavar="WIDTH", help="width of the blocks")
    model.add_argument(
        "--params",
        type=_params,
        metavar="NUMBER",
        help="of all parameters, embeddings included, such as 7.5e9 or 7B (K, M, B, T); 12 x "
        "layers x hidden^2 if not given. Without --layers and --hidden: model state by formula",
    )
    model.add_argument(
        "--dtype",
        type=dtype_of,
        help="dtype of parameters, such as bf16, planned with fp32 masters; if not given, "
        "MODEL's own, planned without masters",
    )
    model.add_argument(
        "--no-masters", action="store_true", help="plan no fp32 masters of 16-bit parameters"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    training.add_argument("--ranks-per-node", type=int, metavar="N", help="all if not given")
    training.add_argument("--optimizer", default="adamw", help="adamw, sgd, lion, muon, none, ...")
    training.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cuda, the default, for any device that gives free memory back, or cpu",
    )
    training.add_argument("--stage", type=int, choices=range(4), help="plan this stage in detail")
    training.add_argument("--config", metavar="FILE", help="plan a DeepSpeed file in detail")
    training.add_argument(
        "--optimizer-rests",
        choices=_PLACES,
        default="device",
        help="where optimizer state is kept; Offload(optimizer=)",
    )
    training.add_argument(
        "--params-rest",
        choices=_PLACES,
        default="device",
        help="where parameter shards are kept; Offload(params=)",
    )
    training.add_argument(
        "--secondary", action="store_true", help="stage 3: a node keeps what it has gathered"
    )
    training.add_argument(
        "--replicas", action="store_true", help="shards are those of a node; gradients are averaged"
    )
    training.add_argument("--encode-params", metavar="CODEC", help="int8, bf16, ...")
    training.add_argument("--encode-gradients", metavar="CODEC", help="int4, int8, bf16, ...")
    training.add_argument(
        "--loco", action="store_true", help="add the rounding error to the next gradients"
    )
    room = parser.add_argument_group("memory and disk space")
    for name, what in (
        ("device", "of each device"),
        ("host", "of each machine"),
        ("disk", "of each machine's disk"),
        ("activations", "of each device, for activations and other memory that is not planned"),
    ):
        said = f"{what}; 80 is 80 GiB" if name == "device" else what
        room.add_argument(f"--{name}-memory", type=memory_of, metavar="SIZE", help=said)
    for name, what in (
        ("batch-size", "sequences of a rank in a micro-batch, to estimate activations of MODEL"),
        ("sequence-length", "tokens of each"),
    ):
        room.add_argument(f"--{name}", type=_number, metavar="N", help=what)
    room.add_argument(
        "--reserve",
        type=share_of,
        default=0.2,
        metavar="SHARE",
        help="of each device, left free for activations and other memory that is not planned: 20%%",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, in place of tables")
    parser.add_argument("--picture", metavar="FILE", help="stacked bars of memory, as PNG")


def _number(text: str, such_as: str = "2048 or 2e3") -> int:
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal(0)
    if not value.is_finite() or value < 1 or value % 1:
        raise argparse.ArgumentTypeError(f"expected a whole number such as {such_as}, got {text!r}")
    return int(value)


def _params(text: str) -> int:
    """Return a number of parameters such as 7B; raise ArgumentTypeError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMBT])", text.strip().upper())
    number = text if match is None else f"{match[1]}e{3 + 3 * 'KMBT'.index(match[2])}"
    value = _number(number, such_as="7.5e9 or 7B (K, M, B or T)")
    if value < 1000:
        raise argparse.ArgumentTypeError(
            f"expected 1,000 parameters or more, got {text}; for billions, write {text}B"
        )
    return value


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="train a few steps beside DistributedDataParallel",
        description="Train your model under DistributedDataParallel and under a configuration, "
        "and print the differences. Run it in one process, or on all ranks: torchrun "
        "--nproc-per-node=N -m zero_engine verify MODULE:FUNCTION. Exits with 1 if anything "
        "differs that the configuration does not explain.",
    )
    what = "a dict or tuple of what zero_engine.verify() takes"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=f"returns {what}")


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights as Hugging Face's files",
        description="Write a checkpoint's weights as a folder that from_pretrained() of "
        "transformers loads, once the model's config.json is there. Needs one process, no GPU, "
        "and little memory.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of checkpoints, or one")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--format", choices=["safetensors"], default="safetensors")
    parser.add_argument("--dtype", type=dtype_of, help="of floating-point tensors, such as bf16")
    parser.add_argument(
        "--max-shard-size", type=num_bytes_of, default="5GB", metavar="SIZE", help="such as 5GB"
    )
    parser.add_argument("--tag", help="of the checkpoint; the newest complete one if not given")


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="compare the reports that ranks wrote after an error, and name the one to look at",
        description="Read zero-report-rank0.txt and so on, which ranks write at an error of ours "
        "that ends the program, and at SIGUSR1; print how they differ, and which rank to look at "
        "first.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="where they are: what ZERO_REPORT says")


class _Version(argparse.Action):
    """Prints versions and which compiled code is in use: an installation may lack a compiler."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .commands import versions  # noqa: PLC0415

        print(versions())
        parser.exit()


_COMMANDS: Final = (_add_export, add_plan, _add_report, _add_verify)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `zero` command with these arguments; with those of the process when None.

    Returns the exit status: 0; 1 after an error, which is printed as one line on stderr, or if
    `zero verify` found a difference that was not chosen; 141, as of a program that SIGPIPE ended,
    if the reader of stdout went away. Arguments that cannot be parsed exit with 2 at once.
    """
    parser = argparse.ArgumentParser(
        prog="zero",
        description="Plan the memory of a training, verify its numbers, export its checkpoints, "
        "and compare the reports of its ranks after an error.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="and which compiled code is in use"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    from .commands import run  # noqa: PLC0415  # help needs no torch

    return run(options)
