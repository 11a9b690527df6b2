"""The ways in which values travel between gloo ranks, for tests whose law holds on each of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from unittest import mock

import pytest
import torch.distributed as dist
from zero_comm import BACKENDS, Group

SOLO, READS, MESSAGES = "solo", "reads", "messages"

SWITCH = "ZERO_COMM_PEER_MEMORY"
BY_READING = "reads of peers' memory: all ranks run on one host and may"


def transports(world_size: int) -> list[str]:
    """Each way there is between so many ranks."""
    return [SOLO] if world_size == 1 else [READS, MESSAGES]


def worlds(*world_sizes: int) -> list[tuple[int, str]]:
    """World sizes with each of their transports, to parametrise a test."""
    return [(size, transport) for size in world_sizes for transport in transports(size)]


def each_world(*world_sizes: int) -> pytest.MarkDecorator:
    """Run a test with a `group` and a `transport` on so many ranks, over each way they have."""
    return pytest.mark.parametrize(("group", "transport"), worlds(*world_sizes), indirect=["group"])


def each_way(splits: Iterable[tuple[int, ...]]) -> pytest.MarkDecorator:
    """Run a test with `group`, `splits` and `transport` for each splits, over each transport."""
    cases = [(len(each), each, way) for each in splits for way in transports(len(each))]
    return pytest.mark.parametrize(
        ("group", "splits", "transport"), cases, indirect=["group"], ids=str
    )


def over(group: Group, transport: str) -> Group:
    """The same ranks, by `transport`: proven, so that no test runs the other one. Collective.

    A backend with collectives of its own has one transport: there, the group is returned as it is.
    """
    if not group.backend.composes_from_peers and group.world_size > 1:
        return group
    if transport == MESSAGES:
        group = by_messages()
        because = f"messages, because rank 0 has {SWITCH}=0 set"
    else:
        because = BY_READING if transport == READS else BACKENDS["solo"].reason

    assert group.transport == because, f"asked for {transport}, got {group.transport}"
    assert group.exchanges.reads_peers == (transport == READS)
    return group


def by_messages() -> Group:
    """A new group of all ranks of the run, made with the switch off. Collective."""
    with mock.patch.dict(os.environ, {SWITCH: "0"}):
        return Group.from_process_group(dist.new_group())
