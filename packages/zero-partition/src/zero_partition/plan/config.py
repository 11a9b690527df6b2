"""PartitionConfig: every choice of how a model is partitioned, as one value."""

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

# What `model.state_dict()` does with parameters that are sharded.
StateDictKind: TypeAlias = Literal["names", "gather"]


@names_fields
@frozen(kw_only=True)
class PartitionConfig:
    """Choices of how a model is partitioned. The same on every rank.

    Args:
        placements: Which states are sharded; see `STAGES`. On one rank parameters are replicated.
        units: Names of the modules that are unsharded and reduced as one; chosen when None.
        max_unit_bytes: When units are chosen, larger ones are split where possible.
        min_unit_bytes: When units are chosen, smaller blocks join the unit that encloses them.
        limits: How much may be unsharded at a time.
        small_param_numel: Where parameters are sharded, those of at most this many elements are
            replicated on every rank nevertheless.
        max_small_numel: Bound on the elements of all those together. Parameters are taken in the
            model's order while they fit; no bound when None.
        precision: Dtypes of parameters, masters and gradients; as they are when left out.
        cut: Where parameters may be cut: a `Cut` or its name, a mapping from names or patterns to
            cuts, or a function of name and parameter. Where it says nothing, `cut` of the param
            group counts, then what the optimizer needs; else any cut is allowed. At stage 0
            nothing is cut.
        state_dict: What `state_dict()` gives for sharded values. "names": stand-ins of the model's
            parameters, which raise when used, while the optimizer's `state_dict()` raises at once.
            "gather": the values of both, for which every rank must call it.
        wire: Which of the ranks exchange what, and in how many bits; all with all, and exact, when
            left out.
        groups: Ranks of parameters that not all ranks have, such as experts that are spread over
            ranks, by pattern of the parameters' names; the first pattern that matches counts. Each
            is a Group, a ProcessGroup or a DeviceMesh of one dimension, of the ranks that have the
            same parameters as this one. The parameters take the values of the first of these
            ranks. Their gradients are summed over these ranks and divided as those of other
            parameters are.
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
