"""The `zero` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from zero_offload import StoreError
from zero_partition import PartitionError

from .__about__ import __version__
from ._cli_plan import add_plan
from ._cli_probe import add_probe
from ._cli_values import DTYPES, dtype_of, num_bytes_of
from ._errors import ConfigError, FileError
from ._export import export


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the command's own name; the process's when None.

    Returns:
        The exit status: 0, or 1 after an error, which is a line on stderr. Arguments that make no
        sense exit with 2 at once.
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
        options.run(options)
    except (ConfigError, FileError, PartitionError, StoreError) as error:
        print(f"zero: {error}", file=sys.stderr)
        return 1
    return 0


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


@contextmanager
def _progress_bar() -> Iterator[Callable[[int], object] | None]:
    """What to call with bytes written; None where tqdm is missing, or nobody looks."""
    try:
        from tqdm import tqdm  # noqa: PLC0415  # no dependency of ours
    except ImportError:
        yield None
        return
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update


_COMMANDS: Final = (_add_export, add_plan, add_probe)
