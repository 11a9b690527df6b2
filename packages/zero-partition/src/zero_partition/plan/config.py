"""PartitionConfig: all that is chosen of how a model is partitioned, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import field, frozen
from zero_comm import AnyRanks

from .cuts import CutChoice
from .precision import AS_IT_IS, Precision
from .slots import Limits
from .stages import STAGES, Placements, Stage, names_fields
from .wire import AS_ONE, Wire

# What `model.state_dict()` does about parameters whose values are elsewhere.
StateDictKind: TypeAlias = Literal["names", "gather"]


@names_fields
@frozen(kw_only=True)
class PartitionConfig:
    """How a model is partitioned. The same on every rank.

    Args:
        placements: What rests sharded; see `STAGES`. On one rank parameters rest whole.
        units: Names of the modules that are unsharded and reduced as one; chosen when None.
        max_unit_bytes: What is larger is split where it can be, when units are chosen.
        min_unit_bytes: Blocks that are smaller stay with what encloses them.
        limits: How much may be whole at a time.
        small_param_numel: Where parameters rest sharded, those of at most this many elements rest
            whole on every rank all the same.
        max_small_numel: Elements of all those together: the first of the model that fit; no bound
            when None.
        precision: Dtypes of parameters, masters and gradients; as they are when left out.
        cut: Where parameters may be cut: a `Cut` or its name, a mapping from names or patterns to
            cuts, or a function of name and parameter. What it leaves open is `cut` in the param
            group, or what the optimizer needs, or anywhere. At stage 0 nothing is cut.
        state_dict: What `state_dict()` gives of what is sharded: "names", stand-ins of the model's
            parameters, of which a use raises, while the optimizer's raises at once; or "gather",
            the values of both, for which every rank must call it.
        wire: Which of the ranks exchange what, and in how many bits; all with all, and exact, when
            left out.
        groups: Ranks of parameters that not all ranks have, as experts that are spread over ranks,
            by pattern of the parameters' names, of which the first that matches counts: each a
            Group, a ProcessGroup or a DeviceMesh of one dimension, of the ranks that have the same
            parameters as this one. They take the values of the first of these ranks, and their
            gradients are summed over them and divided as those of other parameters are.
        timeout_s: How long to wait for ranks that do not call `partition`, in seconds.
        sanitize: Check each use of memory and each collective; see `zero_partition.sanitize`.
    """

    placements: Placements = STAGES[Stage.THREE]
    units: Sequence[str] | None = None
    max_unit_bytes: int = 512 * 2**20
    min_unit_bytes: int = 2**16
    limits: Limits = field(default=Limits())
    small_param_numel: int = 0
    max_small_numel: int | None = None
    precision: Precision = AS_IT_IS
    cut: CutChoice = None
    state_dict: StateDictKind = "names"
    wire: Wire = AS_ONE
    groups: Mapping[str, AnyRanks] = field(factory=dict, hash=False)
    timeout_s: float = 60.0
    sanitize: bool = False
