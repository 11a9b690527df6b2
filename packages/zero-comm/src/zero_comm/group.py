"""The ranks that communicate, as one value that is passed around."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from attrs import Factory, evolve, field, frozen

from .errors import CommError
from .logs import follow_environment
from .messages import Messages
from .order import OrderWatch, abort
from .planning import Sent
from .shared_host import meet
from .torch_private import accelerator, backend_of, let_gloo_finish_at_exit, timeout_of
from .traffic import Traffic
from .watch import Purpose, Watch

follow_environment()
_LOG: Final = logging.getLogger("zero_comm")
# Process group -> recorders of its traffic, which all Groups that wrap it share.
_RECORDERS: Final[WeakKeyDictionary[Any, list[Traffic]]] = WeakKeyDictionary()
# Process group of a call of `spanning` -> ranks of the job -> the process group made of them.
_SPANNING: Final[WeakKeyDictionary[Any, dict[tuple[int, ...], Any]]] = WeakKeyDictionary()


@frozen
class Backend:
    """Backend of a process group, and whether we compose collectives in place of its own."""

    name: str
    # Whether exchanges between every two ranks are faster than its own collectives.
    composes_from_peers: bool
    # Why that is so, in one line for users.
    reason: str


BACKENDS: Final = {
    "solo": Backend(
        name="solo",
        composes_from_peers=False,
        reason="one rank: nothing travels",
    ),
    "gloo": Backend(
        name="gloo",
        composes_from_peers=True,
        reason=(
            "gloo's reduce-scatter moves as much as two all-reduces and its all-gather copies "
            "twice; exchanges between every two ranks were 3 to 12 times faster at 100 MB"
        ),
    ),
    "nccl": Backend(
        name="nccl",
        composes_from_peers=False,
        reason="NCCL's own collectives are the fastest on its links",
    ),
}


def _known_backends() -> dict[str, str]:
    """Return the backends that `init` can start, each with the kind of device it is for.

    These are torch's defaults for kinds of devices; packages of other devices add theirs when they
    are imported. Of gloo, which several kinds have, the kind is the CPU.
    """
    by_kind = dist.Backend.default_device_backend_map
    return {backend: kind for kind, backend in reversed([*by_kind.items()])}


def _choose_backend(process_group: Any, device: torch.device | None) -> tuple[str, torch.device]:
    """Return the backend with which a process group serves a device, and the device.

    Args:
        process_group: Of torch; it has a backend for each of some kinds of device.
        device: Where tensors are to live; None: on the accelerator if its backend is its own.
    """
    config = dist.get_backend_config(process_group).lower()  # such as "cpu:gloo,cuda:nccl"
    by_kind = dict(part.split(":") for part in config.split(","))
    if device is None:
        found = accelerator()
        has_own = found is not None and by_kind.get(found.type, "gloo") != "gloo"
        device = found if found is not None and has_own else torch.device("cpu")
    if device.type not in by_kind:
        raise CommError(
            f"expected a process group with a backend for tensors on {device.type}, got one with "
            f"{config}; init() picks one"
        )
    return by_kind[device.type], _with_index(device)


@frozen(eq=False)
class Group:
    """Ranks that communicate. Made by `init()`, `from_process_group()`, `from_mesh()`, `solo()`."""

    process_group: Any  # torch's ProcessGroup; None for a solo group
    rank: int  # position in this group, not in the job
    world_size: int
    device: torch.device  # device of the tensors of its collectives
    backend: Backend
    # Exchanges between every two ranks: `Messages`, or `Reads` where all ranks run on one host.
    exchanges: Messages = field(repr=False)
    # None for a group of one rank.
    watch: Watch | None = field(default=None, repr=False)
    # How values travel and why, in one line.
    transport: str = ""
    recorders: list[Traffic] = field(default=Factory(list), repr=False)
    # Tag -> purpose of the collectives with it; shared by all Groups of one process group.
    purposes: dict[int, Purpose] = field(default=Factory(dict), repr=False)
    # Node of each rank; empty where nodes are not known.
    nodes: tuple[int, ...] = field(default=(), repr=False)
    # Counts of steps, oldest first; `count` adds to the last one. The list's owner begins others.
    log: list[Traffic] = field(default=Factory(list), repr=False)

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> Group:
        """A group of one: every collective is the identity and nothing needs to be started."""
        where, backend = _with_index(torch.device(device)), BACKENDS["solo"]
        messages = Messages(None, 0, 1)
        return cls(None, 0, 1, where, backend, messages, transport=backend.reason)

    @classmethod
    def from_process_group(
        cls,
        process_group: Any = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        patience_s: float | None = None,
    ) -> Group:
        """Wrap a ProcessGroup of torch; None means the default one.

        Collective the first time that a gloo group of several ranks is wrapped: its ranks find out
        whether they may read each other's memory. Local otherwise.

        Args:
            process_group: From `torch.distributed.new_group` and friends.
            device: Where its tensors live; the current accelerator if the group has a backend for
                it, as nccl is for CUDA, else the CPU.
            timeout_s: Longest wait for the other ranks the first time; the group's own when None.
            patience_s: How long a rank waits for a peer, or for its device, before it finds out
                whether that one can still come, in seconds; as it is (3 at first) when None. Peers
                that are slow are waited for; one that waits for this rank in another collective, or
                has launched another one, ends with it in a DivergenceError.

        Raises:
            CommError: torch.distributed is not initialised, this rank is not a member, the backend
                is not one we know, or another rank did not wrap its group in time.
        """
        if not dist.is_initialized():
            raise CommError(
                "expected torch.distributed to be initialised, but it is not; call "
                "zero_comm.init(), or use Group.solo() for a single process"
            )
        if process_group is None:
            process_group = dist.group.WORLD
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise CommError(
                f"rank {dist.get_rank()} of the job is not a member of the process group given"
            )
        name, where = _choose_backend(
            process_group, None if device is None else torch.device(device)
        )
        world_size = dist.get_world_size(process_group)
        backend = BACKENDS.get(name) or Backend(
            name, composes_from_peers=False, reason=f"{name} has collectives of its own"
        )
        exchanges = Messages(process_group, rank, world_size)
        watch: Watch | None = None
        transport, nodes = backend.reason, ()
        if backend.composes_from_peers and world_size > 1:
            let_gloo_finish_at_exit()
            met = meet(process_group, rank=rank, world_size=world_size, timeout_s=timeout_s)
            exchanges = met.exchanges_of(process_group, rank, world_size)
            watch, transport, nodes = met.watch, met.reason, met.hosts
        elif world_size > 1:
            watch = _order_watch(process_group, where)
        if watch is not None and patience_s is not None:
            watch.wait_longer(patience_s)
        ranks = (process_group, rank, world_size)
        group = cls(*ranks, where, backend, exchanges, watch, transport)
        _LOG.debug("a %s group of %d ranks, this is %d: %s", name, world_size, rank, transport)
        # All Groups that wrap one process group share their purposes and recorders.
        purposes = group.purposes if watch is None else watch.purposes
        recorders = _RECORDERS.setdefault(process_group, [])
        return evolve(group, purposes=purposes, nodes=nodes, recorders=recorders)

    @classmethod
    def from_mesh(cls, mesh: dist.DeviceMesh, axis: str | int | None = None) -> Group:
        """Return the group along one dimension of a DeviceMesh, for tensors on its kind of device.

        Collective as `from_process_group` is.

        Args:
            mesh: That this rank is in.
            axis: Name or number of the dimension; may be left out of a mesh of one.

        Raises:
            CommError: This rank is not in the mesh, or it has several dimensions and `axis` is
                None.
        """
        if mesh.get_coordinate() is None:
            raise CommError(
                f"expected a mesh that this rank is in, got {mesh} on rank {dist.get_rank()} of "
                "the job; only its own ranks may use it"
            )
        if axis is None and mesh.ndim != 1:
            names = mesh.mesh_dim_names
            remedy = f"mesh[{names[-1]!r}]" if names else "mesh_dim_names, and one of these"
            raise CommError(
                f"expected a mesh of one dimension, got {mesh} (rank {dist.get_rank()}); choose "
                f"the dimension by {remedy}"
            )
        return cls.from_process_group(mesh.get_group(axis), device=mesh.device_type)

    @classmethod
    def of(cls, ranks: AnyRanks) -> Group:
        """Return the group of these ranks. Collective as `from_process_group` is.

        Args:
            ranks: A Group, which is returned as it is; a ProcessGroup of torch, such as
                `dist.group.WORLD`; or a DeviceMesh of one dimension.

        Raises:
            CommError: It is none of these; or as `from_process_group` and `from_mesh` do.
        """
        if isinstance(ranks, Group):
            return ranks
        if isinstance(ranks, dist.DeviceMesh):
            return cls.from_mesh(ranks)
        if isinstance(ranks, dist.ProcessGroup):
            return cls.from_process_group(ranks)
        if ranks is dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError(
                "expected ranks that this one is among: dist.new_group() made a group without it"
            )
        raise CommError(
            "expected the ranks to be a zero_comm.Group, a ProcessGroup of torch.distributed or a "
            f"DeviceMesh, got {ranks!r} of type {type(ranks).__name__}; zero_comm.init() is the "
            "group of the whole job"
        )

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of position `rank` in this group."""
        return dist.get_global_rank(self.process_group, rank)

    def positions_in(self, whole: Group) -> list[int]:
        """Return where these ranks are in another group; -1 for those that are not. Local."""
        if self.process_group is None:
            return [whole.rank]
        if whole.process_group is None:
            return [-1] * self.world_size
        position = {whole.global_rank(rank): rank for rank in range(whole.world_size)}
        return [position.get(self.global_rank(rank), -1) for rank in range(self.world_size)]

    def spanning(self, ranks: Iterable[int]) -> Group:
        """Return the group of these ranks of the job, this one among them, for the same device.

        Collective among these the first time, when a process group is made; local afterwards.
        """
        chosen = tuple(sorted(ranks))
        if len(chosen) == dist.get_world_size():
            return Group.from_process_group(device=self.device)
        made = _SPANNING.setdefault(self.process_group, {})
        if chosen not in made:
            made[chosen] = dist.new_group(
                chosen,
                timeout=timeout_of(self.process_group, self.device),
                backend=self.backend.name,
                # Other ranks of the job do not take part.
                use_local_synchronization=True,
            )
        return Group.from_process_group(made[chosen], device=self.device)

    def by_messages(self, why: str) -> Group:
        """Return the same group, whose ranks do not read each other's memory. Local.

        Args:
            why: Reason, as `transport` says it: "its ranks are of several nodes".
        """
        if not self.exchanges.reads_peers:
            return self
        messages = Messages(self.process_group, self.rank, self.world_size)
        return evolve(self, exchanges=messages, transport=f"messages, because {why}")

    def explain(self, purposes: Mapping[int, Purpose]) -> None:
        """Say what the collectives with these tags are for: to errors, and in counts. Local."""
        self.purposes.update(purposes)

    def compare_launches(
        self, what: str, *, at_once: bool = False, timeout_s: float | None = None
    ) -> None:
        """Raise unless all ranks have launched the same on this group. Collective.

        Backends such as NCCL match collectives by the order of their launches, and the host does
        not wait for them: a collective may have been matched with a different one. On other
        backends, such as gloo, messages are matched by their keys, and this does nothing. The host
        waits for no device.

        Args:
            what: The call that is about to rely on it: "optimizer.step()".
            at_once: Wait until all ranks have made this call. Otherwise what is looked at are the
                launches before the call before, which all ranks have made by now or are about to.
            timeout_s: Longest wait for another rank, in seconds; the group's own when None.

        Raises:
            DivergenceError: Ranks launched different collectives; says where, and on which ranks.
            CommError: A rank did not come in time.
        """
        if self.watch is not None:
            self.watch.compare(what, at_once=at_once, timeout_s=timeout_s)

    def count(
        self,
        name: str,
        sent: Callable[..., tuple[Sent, Sent]],
        *args: Hashable,
        calls: int = 1,
        tag: int | None = None,
    ) -> None:
        """Count one call in the active traffic records. Local.

        `sent(*args)` returns the traffic inside the node and across nodes. It is called when the
        record is read, not here.
        """
        purpose = None if tag is None else self.purposes.get(tag)
        call = (name, "" if purpose is None else purpose.subject, calls, sent, args)
        for traffic in (*self.recorders, *self.log[-1:]):
            traffic.counted[call] += 1


AnyRanks: TypeAlias = Group | dist.ProcessGroup | dist.DeviceMesh

# Process group -> its watch.
_ORDER: Final[WeakKeyDictionary[Any, OrderWatch]] = WeakKeyDictionary()
# Default process group -> how many groups of each name there were, as torch uses a name again.
_NAMED: Final[WeakKeyDictionary[Any, Counter[str]]] = WeakKeyDictionary()


def _order_watch(process_group: Any, device: torch.device) -> OrderWatch:
    """Return the watch of a process group whose collectives meet in the order of their launches."""
    found = _ORDER.get(process_group)
    if found is None:
        names = _NAMED.setdefault(dist.group.WORLD, Counter())
        name = process_group.group_name
        names[name] += 1
        found = _ORDER[process_group] = OrderWatch(
            f"{name}/{names[name]}",
            dist.get_rank(process_group),
            partial(abort, ref(process_group), device),
            world_size=dist.get_world_size(process_group),
            device=device,
            backend=backend_of(process_group, device),
            timeout_s=timeout_of(process_group, device).total_seconds(),
        )
    return found


def _with_index(device: torch.device) -> torch.device:
    """Return the device with an index, as tensors have it: `cuda` does not equal `cuda:0`."""
    if device.type not in ("cpu", "meta") and device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def init(*, backend: str | None = None, timeout_s: float = 600.0) -> Group:
    """Join the job that torchrun describes, or be a job of one. Collective when there are others.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets; without
    WORLD_SIZE this process is alone and nothing is started. Where there is an accelerator for each
    local rank, picks what torch takes by default for its kind (nccl for CUDA, xccl for XPU), else
    gloo. If torch.distributed is already initialised, wraps its default group instead, and keeps
    that group's backend and timeout.

    Args:
        backend: "gloo", or that of the accelerator, to overrule the choice.
        timeout_s: Longest wait of a collective before it fails, in seconds.

    Raises:
        CommError: `backend` is neither, or there is no such accelerator for each local rank; or
            WORLD_SIZE is set but one of the other variables is not.
    """
    known = _known_backends()
    if backend not in (None, *known):
        raise CommError(f"expected one of the backends {', '.join(known)}, got {backend!r}")
    if dist.is_initialized():
        return Group.from_process_group()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = accelerator()
    own = "gloo" if found is None else dist.Backend.default_device_backend_map.get(found.type)
    has_devices = own != "gloo" and torch.accelerator.device_count() >= local_world_size
    if backend not in (None, "gloo") and not (has_devices and backend == own):
        raise CommError(
            f"backend {backend!r}: expected a device of {known[backend]} for each of "
            f"{local_world_size} local ranks, and torch {torch.__version__} finds "
            f"{0 if found is None else f'{torch.accelerator.device_count()} of {found.type}'} "
            f"(rank {os.environ.get('RANK', '0')}); leave backend out, or take 'gloo'"
        )
    chosen = backend or (own if has_devices else None) or "gloo"
    if "WORLD_SIZE" not in os.environ:
        return Group.solo("cpu" if found is None or backend == "gloo" else found)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CommError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not; "
            "start with torchrun, or unset WORLD_SIZE to run alone"
        )
    device_id = None
    if found is not None and chosen != "gloo":
        device_id = torch.device(found.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s), device_id=device_id)
    return Group.from_process_group()


@contextmanager
def record_traffic(group: Group) -> Iterator[Traffic]:
    """Count every collective of `group` launched inside the context. Local.

    Calls of all Groups that wrap the same ProcessGroup count: a model that was sharded without
    `group=` communicates over the job's, which is `init()`.

    What counts is what an algorithm that sends each element once to each rank that needs it sends
    from this rank: (N-1) shards for an all-gather, all but the own shard for a reduce-scatter, the
    sum of both for an all-reduce. So a buffer of M elements costs M(N-1)/N, averaged over ranks.

    Of a group that is the whole of some `Levels`, what their other two groups send counts too.
    """
    traffic = Traffic()
    group.recorders.append(traffic)
    try:
        yield traffic
    finally:
        group.recorders.remove(traffic)
