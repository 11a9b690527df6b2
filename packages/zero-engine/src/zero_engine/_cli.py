"""The `zero` command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from .__about__ import __version__
from ._errors import ConfigError, FileError
from ._export import export
from ._tensor_file import CODES

_UNITS: Final = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_DTYPES: Final = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in CODES if dtype.is_floating_point},
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the command's own name; the process's when None.

    Returns:
        The exit status: 0, or 1 after an error, which is a line on stderr. Arguments that make no
        sense exit with 2 at once.
    """
    parser = argparse.ArgumentParser(
        prog="zero", description="Look after what training with zero_engine left behind."
    )
    parser.add_argument("--version", action="version", version=f"zero-engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ConfigError, FileError) as error:
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
        "--dtype", type=_dtype, help=f"of floating-point tensors: {', '.join(sorted(_DTYPES))}"
    )
    parser.add_argument(
        "--max-shard-size", type=_num_bytes, default="5GB", metavar="SIZE", help="such as 5GB"
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


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(sorted(_DTYPES))}, got {text!r}"
        )
    return _DTYPES[text]


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]I?B|B?)", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2].removeprefix("B")])
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 5GB, 500MB or 2GiB, got {text!r}"
        )
    return size


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


_COMMANDS: Final = (_add_export,)
