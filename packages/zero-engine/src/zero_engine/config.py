"""ZeroConfig: the settings of `shard`, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from attrs import Attribute, field, frozen
from torch import nn
from zero_comm import AnyRanks
from zero_partition import AS_IT_IS, Cut, LayoutError, PartitionError, Precision, Wire
from zero_partition.plan import STAGES, CutChoice, Limits, PartitionConfig, Placements, Stage

from .checks import at_least, is_kind, names_fields
from .errors import ConfigError
from .offload import Offload
from .readers import reader_for


def _check_stage(value: Any) -> Stage:
    if isinstance(value, bool) or not isinstance(value, int) or value not in tuple(Stage):
        raise ConfigError(
            f"ZeroConfig.stage: expected 0, 1, 2 or 3, got {value!r}. 1 shards optimizer state, 2 "
            "also gradients, 3 also parameters; 0 is plain data parallelism."
        )
    return Stage(value)


_HOST = "Offload(optimizer='host')"


def _check_units(_: ZeroConfig, attribute: Attribute, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"ZeroConfig.units: expected module names as in model.named_modules(), got {value!r}"
        )


def _as_names(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _as_cuts(value: Any) -> Any:
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    try:
        if isinstance(value, Mapping):
            cuts = {name: Cut.parse(cut) for name, cut in value.items()}
            return MappingProxyType(cuts)
        one: Any = value
        return Cut.parse(one)
    except LayoutError as error:
        raise ConfigError(
            f"ZeroConfig.cut: {error}; or a mapping from parameter names to these, or a function "
            "of name and parameter"
        ) from error


def _check_precision(_: ZeroConfig, attribute: Attribute, value: Any) -> None:
    if value is not None and not isinstance(value, Precision):
        raise ConfigError(
            "ZeroConfig.precision: expected a Precision, such as zero_engine.Precision(params="
            f"torch.bfloat16), or None, got {value!r}"
        )


def _check_offload(config: ZeroConfig, _: Attribute, offload: Offload | None) -> None:
    for name, lowest in (("optimizer", Stage.ONE), ("params", Stage.THREE)):
        rests = getattr(offload, name, "device")
        if rests != "device" and config.stage < lowest:
            raise ConfigError(
                f"ZeroConfig.offload: expected {name}='device' at stage {int(config.stage)}, which "
                f"replicates them on every rank, got {rests!r}; leave it out, or set stage to "
                f"{int(lowest)}"
            )


def _check_wire(config: ZeroConfig, _: Attribute, wire: Wire) -> None:
    try:
        wire.check(config.placements)
    except PartitionError as error:
        raise ConfigError(f"ZeroConfig.wire: {error}") from error


def _check_groups(_: ZeroConfig, attribute: Attribute, groups: Any) -> None:
    items = groups.items() if isinstance(groups, Mapping) else [("", None)]
    for pattern, ranks in items:
        if not isinstance(pattern, str) or not isinstance(ranks, AnyRanks):
            raise ConfigError(
                "ZeroConfig.groups: expected a mapping from patterns of parameter names, such as "
                "'*.experts.*', to a zero_comm.Group, a ProcessGroup or a DeviceMesh each, got "
                f"{groups!r}"
            )


def _as_state_dict(value: Any) -> Any:
    """Return the kind of `state_dict()`; "placeholders" is what DeepSpeed's users call "names"."""
    kinds = {"names": "names", "placeholders": "names", "gather": "gather"}
    if not isinstance(value, str) or value not in kinds:
        raise ConfigError(f"ZeroConfig.state_dict: expected 'names' or 'gather', got {value!r}")
    return kinds[value]


def _is_asked_to_sanitize() -> bool:
    value = os.environ.get("ZERO_SANITIZE", "0")
    if value not in ("", "0", "1"):
        raise ConfigError(f"expected ZERO_SANITIZE to be 0 or 1, got {value!r}")
    return value == "1"


@names_fields
@frozen
class ZeroConfig:
    """Settings of how a model is sharded. The same on every rank.

    Args:
        stage: 0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also
            parameters (arXiv 1910.02054).
        units: Names of the modules whose parameters are gathered and reduced as one, as in
            `model.named_modules()`. Chosen when None: children of containers of modules, and
            children of modules that are too large.
        max_unit_bytes: Where units are chosen, a larger one is split if it can be.
        min_unit_bytes: Where units are chosen, smaller modules belong to the unit that encloses
            them: they are not worth a gather and hooks of their own.
        precision: Dtypes of parameters, masters and gradients; as they are when None.
        window: Stage 3: units that may be gathered at a time, the one in use included; those that
            enclose others do not count. More hides more communication and costs their bytes.
            None: three on the CPU, two on other devices.
        max_live_numel: Stage 3, in place of `window`: parameter elements that may be gathered at a
            time, those of units that enclose others included.
        prefetch_numel: Stage 3: parameter elements whose gathers may be launched ahead of their
            use; 0 turns prefetching off. As many as may be gathered when None.
        max_reuse_numel: Stage 3: a unit stays gathered until its next use if the units used in
            between have at most this many parameter elements, and if as many may be gathered at a
            time. When None, only the latter counts.
        small_param_numel: Stage 3: parameters of at most this many elements are replicated on every
            rank, as at stage 2: no gather for biases and norms, at the price of their bytes.
        max_small_numel: Most elements of all those parameters together: the first ones of the model
            that fit are replicated. No bound when None.
        cut: Where parameters may be cut into shards: "flat" (anywhere), "row" (between rows),
            "tensor" (nowhere: one rank keeps it) or "block(k)" (on multiples of k elements); a
            mapping from parameter names, or patterns such as "blocks.*.weight", to these; or a
            function of name and parameter. What is left open (None) is `cut` in the param group, or
            what the optimizer needs: whole tensors for torch's Muon and Adafactor, else what it
            says as its attribute `needs_cut`, else the smallest that will do, as a trial shows.
        state_dict: What `state_dict()` gives where values are sharded over several ranks, which are
            the optimizer's state at stages 1 to 3, and the model's exact parameters at stage 3, and
            at 1 and 2 with `Wire(params=...)`. With "names", the model's gives placeholders that
            have shape, dtype and device; a use of their values raises and names `full_state_dict`.
            The optimizer's raises and names `full_optimizer_state_dict`. "gather" makes both
            collective and gives every rank everything, and the optimizer's `load_state_dict()`
            takes that. "placeholders" means "names".
        offload: States to offload to the host or disk: the optimizer's at stages 1 to 3, the
            parameters' shards at stage 3. Nothing when None.
        wire: Which ranks communicate: `Wire(secondary=True)` keeps gathers of backward inside a
            node, `Wire(replicas=True)` shards over a node and averages over the nodes. And how
            values are encoded when they are sent: `Wire(params="int8", gradients="int4")`.
        groups: Ranks of parameters that not all ranks have, as experts that are spread over ranks,
            by pattern of the parameters' names: `{"*.experts.*": group}`, where the group (a
            `zero_comm.Group`, a ProcessGroup or a DeviceMesh of one dimension) has the ranks with
            the same experts as this one. Their gradients are summed over these, and divided as
            those of other parameters are, by the number of all ranks.
        timeout_s: How long `shard` waits for ranks that do not call it, in seconds.
        sanitize: Check each use of memory and each collective; a step takes two to three times as
            long: see `zero_partition.sanitize`. When left out, ZERO_SANITIZE=1 turns it on.

    Raises:
        ConfigError: Names the setting, what was expected and what came.
    """

    stage: Stage = field(default=Stage.THREE, converter=_check_stage)
    units: tuple[str, ...] | None = field(
        default=None, converter=_as_names, validator=_check_units, kw_only=True
    )
    max_unit_bytes: int = field(default=512 * 2**20, validator=at_least(1, int), kw_only=True)
    min_unit_bytes: int = field(default=2**16, validator=at_least(0, int), kw_only=True)
    cut: CutChoice = field(default=None, converter=_as_cuts, kw_only=True)
    precision: Precision | None = field(default=None, validator=_check_precision, kw_only=True)
    window: int | None = field(default=None, validator=at_least(1, int), kw_only=True)
    max_live_numel: int | None = field(default=None, validator=at_least(1, int), kw_only=True)
    prefetch_numel: int | None = field(default=None, validator=at_least(0, int), kw_only=True)
    max_reuse_numel: int | None = field(default=None, validator=at_least(0, int), kw_only=True)
    small_param_numel: int = field(default=0, validator=at_least(0, int), kw_only=True)
    max_small_numel: int | None = field(default=None, validator=at_least(0, int), kw_only=True)
    state_dict: Literal["names", "gather"] = field(
        default="names", converter=_as_state_dict, kw_only=True
    )
    offload: Offload | None = field(
        default=None,
        validator=[is_kind(Offload, None, such_as=_HOST), _check_offload],
        kw_only=True,
    )
    wire: Wire = field(default=Wire(), validator=[is_kind(Wire), _check_wire], kw_only=True)
    groups: Mapping[str, AnyRanks] = field(
        factory=dict, validator=_check_groups, hash=False, kw_only=True
    )
    timeout_s: float = field(default=60.0, validator=at_least(0.001, (int, float)), kw_only=True)
    sanitize: bool = field(factory=_is_asked_to_sanitize, validator=is_kind(bool), kw_only=True)

    @classmethod
    def from_deepspeed(
        cls,
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        auto: Mapping[str, Any] | None = None,
    ) -> ZeroConfig:
        """Read what a configuration written for DeepSpeed says of ZeRO and of dtypes. Local.

        For a plain loop: batch sizes, optimizer, scheduler and clipping stay with the caller, and
        so do leaf modules, with a warning. The whole file is checked all the same;
        `EngineConfig.from_deepspeed` says how.

        Args:
            source: A dict, the path of a JSON file, or its base64.
            model: Resolves "auto" where it depends on `model.config.hidden_size` or, which 16-bit
                section is on, on the dtype of its parameters.
            auto: Values for further keys that are "auto" in the file, by path.

        Raises:
            ConfigError: Starts with the path of the key that is wrong.
            FileError: There is no such file, or it is not JSON.
        """
        reader = reader_for("ZeroConfig.from_deepspeed()")
        return cls(**reader.zero_arguments(source, model=model, auto=auto))

    @property
    def placements(self) -> Placements:
        """Placements of parameters, gradients and optimizer state: the stage's row of `STAGES`."""
        return STAGES[self.stage]

    @property
    def for_partition(self) -> PartitionConfig:
        """Settings for `zero_partition.partition`: all, but of `offload` only `read_ahead`."""
        return PartitionConfig(
            placements=self.placements,
            units=self.units,
            max_unit_bytes=self.max_unit_bytes,
            min_unit_bytes=self.min_unit_bytes,
            limits=Limits(
                self.window,
                max_live_numel=self.max_live_numel,
                prefetch_numel=self.prefetch_numel,
                max_reuse_numel=self.max_reuse_numel,
                read_ahead=0 if self.offload is None else self.offload.read_ahead,
            ),
            small_param_numel=self.small_param_numel,
            max_small_numel=self.max_small_numel,
            precision=self.precision or AS_IT_IS,
            cut=self.cut,
            state_dict=self.state_dict,
            wire=self.wire,
            groups=self.groups,
            timeout_s=self.timeout_s,
            sanitize=self.sanitize,
        )
