"""`zero plan`: what training will take, from the shell."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from zero_comm import Loco
from zero_partition import Precision, Wire

from ._cli_values import dtype_of, num_bytes_of, share_of
from ._config import ZeroConfig
from ._errors import ConfigError
from ._estimate import estimate_step
from ._offload import Offload
from ._plan import plan
from ._plan_options import Room, plan_options, recommend
from ._plan_picture import save_picture
from ._plan_source import GPTSize
from ._plan_table import options_table, plan_table, times_table
from ._rates import Rates

_DISK: Final = Path("/")  # a plan opens no file
_PLACES: Final = ("device", "host", "disk")


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `zero`."""
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
    training.add_argument("--rates", metavar="FILE", help="from zero probe --json: step time")
    training.add_argument("--tokens", type=_number, help="that a rank computes with in a step")
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
    if (options.rates is None) is not (options.tokens is None):
        raise ConfigError("expected --rates and --tokens, or neither: a step takes both to time")
    rates = None if options.rates is None else Rates.load(options.rates)
    model, detailed = _model(options), _detailed(options)
    if detailed is not None:
        one = plan(model, detailed, **arguments)
        plans, table = [one], plan_table(one)
        found: dict[str, Any] = one.to_dict()
    else:
        every = plan_options(
            model,
            ZeroConfig(precision=_precision(options), wire=_wire(options)),
            room=room,
            **arguments,
        )
        chosen = recommend(every)
        plans, table = [each.plan for each in every], options_table(every, room)
        found = {
            "options": [
                {
                    "name": each.name,
                    "fits": each.fits,
                    "device_bytes": each.device_bytes,
                    "host_bytes": each.host_bytes,
                    "disk_bytes": each.disk_bytes,
                    "plan": each.plan.to_dict(),
                }
                for each in every
            ],
            "activations_bytes": room.activations,
            "reserve": room.reserve,
            "recommended": None if chosen is None else chosen.name,
        }
    if rates is not None:
        times = [estimate_step(each, rates, tokens=options.tokens) for each in plans]
        table += "\n\n" + times_table(plans, times)
        found["step_seconds"] = [dict(each.seconds) for each in times]
    if options.picture is not None:
        save_picture(plans, options.picture)
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
    """The one configuration that was asked for; None: all of them."""
    rests = (options.optimizer_rests, options.params_rest)
    if options.config is not None:
        asked = options.stage is not None or _wire(options) != Wire()
        if asked or rests != ("device", "device"):
            raise ConfigError("expected --config, or --stage and what rests where, got both")
        return ZeroConfig.from_deepspeed(options.config)
    if options.stage is None:
        if rests != ("device", "device"):
            raise ConfigError("expected --stage with --optimizer-rests and --params-rest")
        return None
    offload = None
    if rests != ("device", "device"):
        path = _DISK if "disk" in rests else None
        offload = Offload(optimizer=rests[0], params=rests[1], path=path)
    return ZeroConfig(
        options.stage, offload=offload, precision=_precision(options), wire=_wire(options)
    )


def _precision(options: argparse.Namespace) -> Precision | None:
    if options.dtype is None:
        return None
    return Precision(params=options.dtype, masters=None if options.no_masters else torch.float32)


def _wire(options: argparse.Namespace) -> Wire:
    return Wire(
        secondary=options.secondary,
        replicas=options.replicas,
        params=options.encode_params,
        gradients=options.encode_gradients,
        loco=Loco() if options.loco else None,
    )


def _number(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"expected a whole number such as 7.5e9, got {text!r}")
    return int(value)
