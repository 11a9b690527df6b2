"""Ranks that save or load one checkpoint together: all of a model, or of all stages of a pipeline.

A stage of a pipeline is a model of its own, sharded over the ranks that have the same stage. With
`save(stages=)` the ranks of all stages write one checkpoint with the names of the whole model.
`load(stages=)` gives each stage the part of a checkpoint that it has names for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, Final, TypeVar

import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from zero_comm import AnyRanks, Group, all_gather_json
from zero_partition import StateError
from zero_partition.seams import ShardedModel, StateSource

T = TypeVar("T")
U = TypeVar("U")

_TIMEOUT_S: Final = 60.0


@frozen
class CheckpointRanks:
    """Ranks that save or load one checkpoint, and the position of this rank among them."""

    # All ranks that save or load.
    group: Group
    # Number of this rank among them; ranks of the first stage come first.
    position: int
    # Ranks that have the other stages, one of each, in the order of stages.
    stages: Group | None = None

    @classmethod
    def of(cls, sharded: ShardedModel, stages: AnyRanks | None) -> CheckpointRanks:
        """Return the ranks that save or load together.

        Local without stages, else collective over all ranks of all stages.

        Args:
            sharded: This rank's model, or its stage of one.
            stages: Ranks that have the other stages, one of each.

        Raises:
            zero_comm.CommError: `stages` is no group, ProcessGroup or DeviceMesh of one dimension.
            StateError: Stages are sharded over different numbers of ranks, or share ranks.
        """
        routes = sharded.routes
        of_stages = None if stages is None else Group.of(stages)
        if of_stages is None or of_stages.world_size == 1:
            return cls(routes.all_ranks, routes.position)
        of_stage = routes.all_ranks
        mine = [dist.get_rank()]
        if of_stage.process_group is not None:
            mine = [of_stage.global_rank(rank) for rank in range(of_stage.world_size)]
        by_stage = all_gather_json(mine, group=of_stages, timeout_s=_TIMEOUT_S)
        every = set(chain.from_iterable(by_stage))
        if of_stages.device.type != of_stage.device.type:
            raise StateError(
                f"stages: expected a group for tensors on {of_stage.device.type}, as that of the "
                f"model's own ranks, got one for {of_stages.device.type} (rank {dist.get_rank()})"
            )
        if len({*map(len, by_stage)}) > 1 or len(every) != sum(map(len, by_stage)):
            raise StateError(
                "stages: expected ranks that have different stages, each sharded over as many "
                f"ranks, got ranks {by_stage} of the job by stage (rank {dist.get_rank()}); pass "
                "the dimension of the mesh along which stages differ, as in stages=mesh['stage']"
            )
        position = of_stages.rank * of_stage.world_size + routes.position
        return cls(of_stages.spanning(every), position, of_stages)

    @property
    def num_stages(self) -> int:
        """Return the number of stages; 1 without a pipeline."""
        return 1 if self.stages is None else self.stages.world_size

    @property
    def stage(self) -> int:
        """Return the number of the stage that this rank has."""
        return 0 if self.stages is None else self.stages.rank


# ---- Saving ----

# Sections of a manifest that are joined from those of all stages.
_BY_NAME: Final = ("params", "optimizer", "ties")


def join_stages(
    content: dict[str, Any],
    buffers: Mapping[str, Tensor],
    sharded: ShardedModel,
    ranks: CheckpointRanks,
) -> tuple[frozenset[str], int]:
    """Add to a manifest what the ranks of other stages say. Collective if there are stages.

    Args:
        content: Content of the manifest, complete for this rank's stage.
        buffers: This rank's persistent buffers.
        sharded: This rank's stage.
        ranks: The ranks that save.

    Returns:
        Names of the buffers that this stage saves, which are those that no earlier stage has; and
        the number of buffers that all stages save.

    Raises:
        StateError: A rank has something that cannot be saved of several stages.
    """
    if ranks.stages is None:
        return frozenset(buffers), len(buffers)
    is_first = sharded.routes.all_ranks.rank == 0
    sections = ("param_groups", "shared_state", "state_dict_extra", *_BY_NAME)
    mine = {
        "stage": ranks.stage,
        "problem": _find_problem(content),
        "content": {name: content[name] for name in sections} if is_first else None,
        "buffers": {name: [*tensor.shape] for name, tensor in buffers.items()},
    }
    by_rank = all_gather_json(mine, group=ranks.group, timeout_s=_TIMEOUT_S)
    firsts = sorted((said for said in by_rank if said["content"]), key=lambda said: said["stage"])
    by_stage = [said["content"] for said in firsts]
    problems = [
        f"{said['problem']} (on rank {rank})"
        for rank, said in enumerate(by_rank)
        if said["problem"]
    ]
    problems += _find_differences(by_stage)
    shapes: dict[str, Any] = {}
    for said in firsts:
        for name, shape in said["buffers"].items():
            if shapes.setdefault(name, shape) != shape:
                problems.append(
                    f"buffer {name!r} has shape {shapes[name]} on one stage and {shape} on stage "
                    f"{said['stage']}; give it another name there, or persistent=False"
                )
    if problems:
        raise StateError(f"save(stages=): {problems[0]}")
    for said in by_stage:
        for name in _BY_NAME:
            content[name] = {**content[name], **said[name]}
    for number, group in enumerate(content["param_groups"]):
        names = (said["param_groups"][number]["params"] for said in by_stage)
        group["params"] = [*chain.from_iterable(names)]
    earlier = chain.from_iterable(said["buffers"] for said in firsts[: ranks.stage])
    return frozenset(buffers).difference(earlier), len(shapes)


def _find_problem(content: Mapping[str, Any]) -> str:
    """Return what a checkpoint of several stages has no place for; "" if there is nothing."""
    # None means that the layout is not known.
    layout = content["state_dict"]
    if layout is None or layout["keys"] or layout["values"]:
        return (
            "modules change what state_dict() gives, by hooks or methods of their own, which is "
            "saved of one stage alone; leave out stages=, and save each stage to a folder"
        )
    if content["own_said"]:
        return (
            f"optimizer state of {min(content['own_said'])!r} cannot be put together from its "
            "shards; leave out stages=, and save each stage to a folder"
        )
    if content["loco_facts"]:
        return "Wire(loco=) is not saved of several stages; save each stage to a folder"
    return ""


def _find_differences(by_stage: list[dict[str, Any]]) -> list[str]:
    """Return what keeps the manifests of stages from being joined. Local, equal on all ranks."""
    counted = Counter(chain.from_iterable(said["params"] for said in by_stage))
    several = [name for name, times in counted.items() if times > 1]
    if several:
        at = [number for number, said in enumerate(by_stage) if several[0] in said["params"]]
        return [
            f"parameter {several[0]!r} is on stages {at}; give the modules of a stage the names "
            "that they have in the whole model, as in nn.ModuleDict({str(number): block})"
        ]
    for key in ("shared_state", "state_dict_extra"):
        if any(said[key] != by_stage[0][key] for said in by_stage):
            return [f"optimizers keep different entries by stage: {[s[key] for s in by_stage]}"]
    options = [[{**group, "params": None} for group in said["param_groups"]] for said in by_stage]
    for number, of_stage in enumerate(options):
        if of_stage != options[0]:
            return [
                f"expected the same param groups on all stages, got {options[0]} on stage 0 and "
                f"{of_stage} on stage {number}; a group without parameters of a stage is passed "
                "there with an empty list"
            ]
    return []


# ---- Loading ----


def names_on_other_ranks(sharded: ShardedModel, ranks: CheckpointRanks) -> frozenset[str]:
    """Return names that only other stages have. Collective if there are stages."""
    if ranks.stages is None:
        return frozenset()
    aliases = chain.from_iterable(param_ref.plan.names for param_ref in sharded.param_refs)
    buffers = (name for name, _ in sharded.model.named_buffers(remove_duplicate=False))
    mine = {*aliases, *buffers, *(param_ref.saved_name for param_ref in sharded.param_refs)}
    # All ranks tell their names, since those of one stage may have different parameters.
    by_rank = all_gather_json([ranks.stage, sorted(mine)], group=ranks.group, timeout_s=_TIMEOUT_S)
    here, other = set[str](), set[str]()
    for stage, names in by_rank:
        (here if stage == ranks.stage else other).update(names)
    return frozenset(other - here)


def without(
    source: StateSource, average: Mapping[str, T], names: Collection[str]
) -> tuple[StateSource, Mapping[str, T]]:
    """Return a checkpoint's values, and an average's, without those of `names`. Local."""
    if not names:
        return source, average
    # First name -> name here, of tied parameters whose first name is on another stage.
    here = {first: name for name, first in source.ties.items() if name not in names}
    here = {first: name for first, name in here.items() if first in names}

    def rest(by_name: Mapping[str, U]) -> dict[str, U]:
        chosen = (name for name in by_name if name in here or name not in names)
        return {here.get(name, name): by_name[name] for name in chosen}

    kept = evolve(
        source,
        params=rest(source.params),
        buffers=rest(source.buffers),
        ties={
            name: here.get(first, first)
            for name, first in source.ties.items()
            if name not in names and here.get(first) != name
        },
        states=None if source.states is None else rest(source.states),
        param_groups=[
            {**group, "params": [*rest(dict.fromkeys(group["params"]))]}
            for group in source.param_groups
        ],
    )
    return kept, rest(average)
