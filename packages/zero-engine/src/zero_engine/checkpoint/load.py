"""load() and load_deepspeed(): restore all of a checkpoint, or nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from attrs import evolve, frozen
from torch import nn
from zero_comm import AgreementError, AnyRanks, CommError, Group, check_agreement, collective
from zero_comm.logs import warn_user
from zero_partition import LoadError, ShardedAverage, StateError
from zero_partition.plan import nearest, shown_all
from zero_partition.seams import (
    AbstractRangeReader,
    ShardedModel,
    StateLoad,
    StateSource,
    local_of,
    loco_facts,
    plan_load,
    restore_loco,
)

from zero_engine.errors import FileError
from zero_engine.readers import find_reader, reader_for

from .folder import Checkpoint, check_folder, find_complete, has_parts, on_all, run_on_all_ranks
from .pipeline import CheckpointRanks, names_on_other_ranks, without
from .pretrained import has_weights
from .save import restore_rngs, sharded_of

_TIMEOUT_S: Final = 60.0
_NUM_LOOKS: Final = 5
# Folders near a wrong one in which checkpoints are looked for.
_MOST_LOOKED_AT: Final = 1000

T = TypeVar("T")


def open_together(
    open_it: Callable[[], T],
    describe: Callable[[T], str],
    *,
    what: str,
    group: Group,
    **facts: object,
) -> T:
    """Open a checkpoint on every rank, and check that all ranks see the same one. Collective.

    Ranks that see different ones look again, a few times, as one may have been saved meanwhile.

    Raises:
        AgreementError: Ranks see different checkpoints, or pass different `facts`.
    """
    opened: list[T] = []

    def act() -> str:
        opened[:] = [open_it()]
        return describe(opened[0])

    look = partial(run_on_all_ranks, act, what=what, group=group, timeout_s=_TIMEOUT_S)
    said, num_looks = look(), 1
    # A checkpoint may have been saved between the looks of two ranks.
    while len(set(said)) > 1 and num_looks < _NUM_LOOKS:
        said, num_looks = look(), num_looks + 1
    same = {"checkpoint": said[group.rank]} | {name: str(value) for name, value in facts.items()}
    check_agreement(same, group=group, timeout_s=_TIMEOUT_S)
    return opened[0]


def stop_unless_it_fits(
    planned: StateLoad,
    problems: Sequence[str],
    path: Path,
    *,
    verify: Callable[[], None] | None = None,
    what: str,
    group: Group,
) -> None:
    """Raise on all ranks if something does not fit, or is damaged, on any of them. Collective.

    The planned load is given up then.
    """

    def look() -> None:
        if problems:
            said = f"{path}: cannot be loaded, and nothing was written: {shown_all(problems)}"
            names = sum(each.startswith(("missing: ", "unexpected: ")) for each in problems)
            # One more says why.
            if names and len(problems) == names + 1:
                said += "; with is_strict=False the others are loaded"
            raise LoadError(said)

    try:
        run_on_all_ranks(look, what=what, group=group)
        if verify is not None:
            run_on_all_ranks(verify, what=what, group=group)
    except BaseException:
        planned.give_up()
        raise


# ---- Checkpoints that `save` wrote ----


@final
@frozen(kw_only=True)
class LoadReport:
    """Summary of what was restored; `print` it."""

    # The checkpoint's own folder.
    path: Path
    step: int
    extra: Any
    # Whole tensors of parameters, buffers and optimizer state.
    num_tensors: int
    num_tensors_saved: int
    # Bytes of the whole tensors that were restored.
    num_bytes: int
    # Names of parameters and buffers that were not loaded, and of those that the model lacks.
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    # Why random states were not restored; "" if they were.
    why_no_rngs: str
    # State of training that cannot be continued here, each with the reason.
    begins_anew: tuple[str, ...]
    # Arguments of `load` that were not given, though what they load was saved.
    not_loaded: tuple[str, ...]
    # Values that an engine saved.
    engine: Any

    @property
    def restores_rngs(self) -> bool:
        """Return whether random states were restored."""
        return not self.why_no_rngs

    def __str__(self) -> str:
        anew = f"; begins anew: {'; '.join(self.begins_anew)}" if self.begins_anew else ""
        rngs = f"; random states are not restored ({self.why_no_rngs})" if self.why_no_rngs else ""
        rest = "".join(f"; not loaded: {each} (pass {each}=)" for each in self.not_loaded)
        return (
            f"restored {self.num_tensors} of {self.num_tensors_saved} tensors, {self.num_bytes} "
            f"bytes, of step {self.step} from {self.path}{anew}{rngs}{rest}"
        )


@collective
def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    tag: str | None = None,
    is_strict: bool = True,
    restores_rngs: bool = True,
    missing_ok: bool = False,
    average: ShardedAverage | None = None,
    stages: AnyRanks | None = None,
) -> LoadReport | None:
    """Restore what `save` saved, at any world size, stage, offloading and precision. Collective.

    Modules with a `load_state_dict()`, hooks or extra state of their own get their state dict as in
    torch. `load_state_dict()` is called once to find out which entry goes where, with entries that
    are read when they are used, and once more when parameters have their values. Optimizer state
    follows parameters that are renamed by this.

    All files are checked before anything is written; each rank then reads the elements that it
    keeps, 16 MiB at a time. Existing gradients are dropped. Options of param groups, learning rates
    included, become the saved ones, except `fused`, `foreach`, `capturable` and `differentiable`.
    Random number generators are restored at the same world size only. So are the errors of encoding
    gradients that `Wire.loco` feeds back, which belong to one layout and wire. State of a parameter
    with an entry that cannot be put together from its shards is restored only if each rank keeps
    the same elements as the rank that saved them. The report says what begins anew.

    Args:
        folder: The folder of all checkpoints that `save` was given, not that of one of them.
        model: The model that was sharded.
        optimizer: The optimizer that was sharded with it; None leaves its state as it is.
        scheduler: An object with `load_state_dict()`, to restore the one that `save` was given.
        tag: Which checkpoint; the newest complete one when None.
        is_strict: Whether it is an error if names are missing or unexpected, param groups contain
            other parameters, or the state of one of torch's or our optimizers has other entries
            than it keeps, as where another optimizer has saved it. If not, the report says so.
        restores_rngs: Whether random number generators are restored, too.
        missing_ok: Return None where there is nothing yet, at the first start of a job that resumes
            when it can: no such folder, or one without a complete checkpoint.
        average: An average of the model's parameters, to restore the one that `save` was given.
        stages: Where `model` is a stage of a pipeline, the ranks that have the other stages, one of
            each. Each stage loads the entries that it has names for, from a checkpoint of any
            number of stages, or of the whole model.

    Returns:
        A report of what was restored; None only with `missing_ok`.

    Raises:
        ConfigError: `folder` is no path.
        FileError: There is no such folder, no checkpoint in it, or none of that tag; it is a file,
            one checkpoint's own folder, or has what DeepSpeed or Hugging Face saved (whatever
            `missing_ok`): the error says what to call. Or a file of the checkpoint is damaged: the
            error names the tags that can be loaded, and nothing was written. If a file cannot be
            read any more after it was checked, the model is only partly loaded, and the error says
            so.
        zero_partition.LoadError: Names all that is missing, unexpected or does not fit; nothing was
            written.
        zero_partition.StateError: The model is not sharded, or not with this optimizer; or a
            forward is running.
        zero_comm.AgreementError: Ranks pass different arguments, or see different files.
        zero_comm.CommError: A rank did not take part in time.
    """
    check_folder("load()", folder)
    sharded = sharded_of(model, optimizer, "load()", scheduler=scheduler)
    ranks, has_state = CheckpointRanks.of(sharded, stages), optimizer is not None
    group = ranks.group
    checkpoint = open_together(
        lambda: _open(Path(folder), tag, missing_ok=missing_ok),
        lambda found: f"{found.manifest.tag} ({found.manifest.serial})" if found else "none",
        what="load()",
        group=group,
        is_strict=is_strict,
        optimizer=has_state,
        scheduler=scheduler is not None,
        average=average is not None,
    )
    if checkpoint is None:
        return None
    with contextlib.closing(checkpoint.folder):
        named = partial(_under_own_names, checkpoint, sharded, names_on_other_ranks(sharded, ranks))
        checkpoint = on_all(partial(named, is_strict=is_strict), what="load()", group=group)
        source, manifest = checkpoint.source, checkpoint.manifest
        source = source if has_state else evolve(source, states=None, own_said={})
        planned = plan_load(sharded, source, is_strict=is_strict)
        problems, of_average = list(planned.problems), planned.rename(checkpoint.average)
        if scheduler is not None and manifest.scheduler is None and is_strict:
            problems.append("it was saved without a scheduler; leave out scheduler=")
        if average is not None and manifest.num_updates is not None:
            problems += average.find_problems(of_average)
        elif average is not None and is_strict:
            problems.append("it was saved without an average; leave out average=")
        verify = partial(_verify, checkpoint, group)
        stop_unless_it_fits(
            planned, problems, checkpoint.path, verify=verify, what="load()", group=group
        )
        several: Any = optimizer
        for each in several if isinstance(several, list | tuple) else [several]:
            if each is not None:
                each.zero_grad()
        loco_problem = _why_no_loco(checkpoint, sharded) if has_state else None
        other_ranks = _other_ranks(ranks, sharded, checkpoint)
        why_no_rngs = other_ranks or ("" if restores_rngs else "restores_rngs=False")

        def apply() -> None:
            try:
                planned.apply()
                if not other_ranks:
                    own_buffers = planned.rename(checkpoint.read("rank_buffers", ranks.position))
                    _fill_own_buffers(sharded.model, own_buffers)
                if scheduler is not None and manifest.scheduler is not None:
                    scheduler.load_state_dict(manifest.scheduler)
                if average is not None and manifest.num_updates is not None:
                    average.load(of_average, manifest.num_updates)
                if has_state:
                    restore_loco(
                        sharded, {} if loco_problem else checkpoint.read("loco", ranks.position)
                    )
                if not why_no_rngs:
                    restore_rngs(checkpoint.read("rngs", ranks.position), group.device)
            except (CommError, AgreementError, FileError, LoadError, StateError):
                raise
            except Exception as error:
                # An error of a file, or of a scheduler that the state does not fit.
                raise FileError(
                    f"{checkpoint.path}: {type(error).__name__}: {error}; it failed after some "
                    "values were written: load again before training goes on"
                ) from error

        run_on_all_ranks(apply, what="load()", group=group)
        weights, entries = _of_this_rank(source, sharded)
        restored = [reader for name, reader in weights.items() if name not in planned.unexpected]
        return LoadReport(
            path=checkpoint.path,
            step=manifest.step,
            extra=manifest.extra,
            num_tensors=planned.num_tensors,
            num_tensors_saved=len(weights) + len(entries),
            num_bytes=sum(
                e.num_bytes for e in restored + entries if isinstance(e, AbstractRangeReader)
            ),
            missing=planned.missing,
            unexpected=planned.unexpected,
            why_no_rngs=why_no_rngs,
            begins_anew=(*planned.begins_anew, *([loco_problem] if loco_problem else ())),
            not_loaded=(
                *["optimizer"] * (optimizer is None and bool(manifest.param_groups)),
                *["scheduler"] * (scheduler is None and manifest.scheduler is not None),
                *["average"] * (average is None and manifest.num_updates is not None),
            ),
            engine=manifest.engine,
        )


def _under_own_names(
    checkpoint: Checkpoint, sharded: ShardedModel, elsewhere: Collection[str], *, is_strict: bool
) -> Checkpoint:
    """Return a checkpoint with the names that parameters have on this rank. Local.

    Parameters of which each group of ranks has its own (`ZeroConfig.groups`) are saved with a
    suffix, such as `name@1`. Names that only other stages have are left out.

    Raises:
        LoadError: The checkpoint was saved by another number of groups of ranks.
    """
    source, routes = checkpoint.source, sharded.routes
    for param_ref in sharded.param_refs:
        own = routes.of(param_ref.buffer.plan).own
        is_left_out = checkpoint.manifest.excludes_frozen and not param_ref.is_trainable
        if own is None or not own.shares_names or is_left_out or not is_strict:
            continue
        num_groups = routes.whole.world_size // len(own.positions)
        saved = sum(f"{param_ref.name}@{index}" in source.params for index in range(num_groups + 1))
        if saved != num_groups:
            raise LoadError(
                f"{checkpoint.path}: parameter {param_ref.name!r} is another one in each of the "
                f"{num_groups} groups of ranks here, and was not saved by as many; load it on as "
                "many groups, or give each expert a name of its own, such as its number among all"
            )
    if checkpoint.manifest.excludes_frozen:
        frozen = frozenset(
            param_ref.name for param_ref in sharded.param_refs if not param_ref.is_trainable
        )
        source = evolve(source, may_lack=frozen)
    source = evolve(
        source,
        params=_renamed(source.params, sharded),
        ties=_renamed(source.ties, sharded, is_of_names=True),
        states=None if source.states is None else _renamed(source.states, sharded),
        param_groups=[
            {**group, "params": [*_renamed(dict.fromkeys(group["params"]), sharded)]}
            for group in source.param_groups
        ],
    )
    average = _renamed(checkpoint.average, sharded)
    source, average = without(source, average, elsewhere)
    return evolve(checkpoint, source=source, average=average)


def _of_this_rank(source: StateSource, sharded: ShardedModel) -> tuple[dict[str, Any], list[Any]]:
    """Return weights and buffers by name, and entries of state, without other ranks' parameters."""
    others, states = sharded.routes.names_on_other_ranks, (source.states or {}).items()
    weights = {name: r for name, r in source.params.items() if name not in others}
    entries = [e for name, of in states if name not in others for e in of.values()]
    return {**weights, **source.buffers}, entries


def _renamed(
    by_name: Mapping[str, T], sharded: ShardedModel, *, is_of_names: bool = False
) -> Mapping[str, T]:
    """Return entries by names on this rank, without those of other groups' parameters. Local."""
    here = {
        alias + param_ref.saved_name.removeprefix(param_ref.name): alias
        for param_ref in sharded.param_refs
        if param_ref.saved_name != param_ref.name
        for alias in param_ref.plan.names
    }
    names = {*here.values()}
    return {
        here.get(name, name): here.get(value, value) if is_of_names else value  # type: ignore[call-overload]
        for name, value in by_name.items()
        if name in here or name.rpartition("@")[0] not in names
    }


def _open(folder: Path, tag: str | None, *, missing_ok: bool) -> Checkpoint | None:
    """Open the checkpoint; None if there is none yet and `missing_ok`. Local."""
    aside = ", ".join(map(repr, find_complete(folder)))
    below = None if aside else _find_below(folder)
    mistake = None if aside or below else _find_mistake(folder.absolute(), tag)
    if mistake is not None:
        raise FileError(f"load(): expected the folder of all checkpoints, got {mistake}")
    # In an empty folder nothing was saved, whatever the tag.
    is_new = missing_ok and folder.exists() and not any(folder.iterdir())
    found = Checkpoint.open(folder, tag) if folder.exists() and not is_new else None
    if found is not None:
        return found
    lacks = "contains no complete checkpoint" if folder.exists() else "no such folder"
    lacks += f" but {aside}, to be named by tag=..." if aside else ""
    if below is not None:
        lacks += f", but the folder {str(below)!r} does; pass that one"
        if missing_ok:
            warn_user(f"load(): {folder.absolute()}: {lacks}. Nothing was loaded")
    elif not missing_ok and (near := _find_near(folder)):
        lacks += f"; did you mean {near!r}?"
    elif not aside:
        lacks += "; pass missing_ok=True where the first start of a job has nothing to load"
    if not missing_ok:
        raise FileError(f"load(): {folder.absolute()}: {lacks}")
    return None


def _with_checkpoints(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield those that have complete checkpoints, of a number of folders. Local."""
    for folder in islice(folders, _MOST_LOOKED_AT):
        # Others' folders, as "lost+found", cannot be read.
        with contextlib.suppress(OSError):
            if find_complete(folder):
                yield folder


def _find_below(folder: Path) -> Path | None:
    """Return a folder in this one that has checkpoints; those of Trainer are two levels down."""
    return min(_with_checkpoints(chain(folder.glob("*/"), folder.glob("*/*/"))), default=None)


def _find_near(folder: Path) -> str | None:
    """Return the name of a folder of checkpoints that is nearest to a mistyped one. Local."""
    beside = () if folder.exists() else folder.absolute().parent.glob("*/")
    return nearest(folder.name, [each.name for each in _with_checkpoints(beside)])


def _find_mistake(path: Path, tag: str | None) -> str | None:
    """Describe a path that is no folder of our checkpoints, with the call that reads it. Local.

    Returns None if it is such a folder, or of no known kind.
    """
    if path.is_file():
        return f"the file {path}; load_pretrained(model, path) reads files of weights"
    if has_parts(path):
        own = "" if path.name.startswith(".") else f" and tag={path.name!r}"
        return f"the folder of one of them, {path}; pass {str(path.parent)!r}{own}"
    if (reader := find_reader()) is not None and reader.has_checkpoint(path, tag):
        return (
            f"{path}, which DeepSpeed saved; call load_deepspeed(folder, model, optimizer), or "
            "engine.load_checkpoint(folder)"
        )
    if has_weights(path):
        return f"{path}, which contains only weights; call load_pretrained(model, folder)"
    if (path / "adapter_config.json").is_file():
        return (
            f"{path}, in which peft saved adapters; read its file on every rank, and call "
            "peft.set_peft_model_state_dict(model, values) on every rank"
        )
    return None


def _verify(checkpoint: Checkpoint, group: Group) -> None:
    """Verify this rank's share of the files; all ranks' shares have about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(group.world_size)]
    sizes = [0] * group.world_size
    largest_first = sorted(checkpoint.manifest.files.items(), key=lambda item: -item[1].num_bytes)
    for name, facts in largest_first:
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += facts.num_bytes
    checkpoint.verify(shares[group.rank])


def _other_ranks(ranks: CheckpointRanks, sharded: ShardedModel, checkpoint: Checkpoint) -> str:
    """Say how the ranks, parts and stages that saved a checkpoint differ from these; "" if not.

    If not, each rank finds its own buffers, generators and encoding errors in it.
    """
    saved = checkpoint.manifest
    numbers = {
        "ranks": (saved.world_size, ranks.group.world_size),
        "parts": (saved.num_parts, sharded.routes.num_parts),
        "stages": (saved.num_stages, ranks.num_stages),
    }
    differ = (
        f"{one} {what}, loaded by {two}" for what, (one, two) in numbers.items() if one != two
    )
    found = next(differ, "")
    return f"saved by {found}" if found else ""


def _fill_own_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy saved values of buffers in which this rank differed from its stage's first rank."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if name in buffers:
            local_of(buffers[name]).copy_(value)


def _why_no_loco(checkpoint: Checkpoint, sharded: ShardedModel) -> str | None:
    """Return why saved encoding errors do not fit; None if they do, or if none are needed here."""
    here, saved = loco_facts(sharded), checkpoint.manifest.loco_facts
    if not here:
        return None
    what = "errors of encoding gradients (LoCo)"
    if not saved:
        return f"{what}, of which none were saved"
    for name in here | dict(saved):
        if here.get(name) != saved.get(name):
            return f"{what}: {name} was {saved.get(name)} when they were saved, is {here.get(name)}"
    return None


# ---- What DeepSpeed saved ----


@collective
def load_deepspeed(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tag: str | None = None,
    is_strict: bool = True,
    group: AnyRanks | None = None,
) -> Any:
    """Load a checkpoint that DeepSpeed's ZeRO saved at stage 1, 2 or 3. Collective.

    Parameters and optimizer state are matched by name and element, so that any world size, stage
    and offloading will do. Trained parameters come from DeepSpeed's fp32 partitions, which masters
    take as they are. Each rank maps the files and reads the elements it keeps. Options of param
    groups, learning rates included, stay those of `optimizer`; loss scales and random numbers are
    not read, and other state of DeepSpeed's engine is in the report only.

    Files are read as tensors and plain values (`weights_only=True`), and nothing of them is run.
    DeepSpeed need not be installed.

    Args:
        folder: The folder that `save_checkpoint` was given, or that of a tag in it.
        model: A model that was sharded; without `optimizer` also one inside `Init`, on the meta
            device, or plain, as for `load_pretrained`.
        optimizer: The optimizer that was sharded with it; None leaves its state as it is.
        tag: Which checkpoint; what the folder's file `latest` says when None.
        is_strict: Whether missing and unexpected names, and trained parameters without state in the
            files, are errors.
        group: As for `load_pretrained`, where the model is not sharded yet.

    Returns:
        A report of what was loaded; training goes on at its `step`.

    Raises:
        ConfigError: No package that reads DeepSpeed's files is installed.
        FileError: A file is missing, damaged, of tensor, pipeline or expert parallelism, or asks
            for more than tensors and plain values: it is named with what it asks for.
        zero_partition.LoadError: Names all that is missing, unexpected or does not fit; nothing was
            written.
        zero_partition.StateError: `optimizer` was given and not sharded with the model; or a
            forward is running.
        zero_comm.AgreementError: Ranks see different files or pass different arguments.
        zero_comm.CommError: A rank did not take part in time.
    """
    return reader_for("load_deepspeed()").load_checkpoint(
        folder, model, optimizer, tag=tag, is_strict=is_strict, group=group
    )
