"""verify(): a model under DistributedDataParallel and under a configuration, side by side."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, final

import attrs
import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zero_comm import AnyRanks, Group, all_gather_json, collective, ddp_hook
from zero_partition import full_grad, full_param
from zero_partition.plan import ranks_of
from zero_partition.seams import is_dtensor, require_sharded

from zero_engine.checkpoint.save import capture_rngs, restore_rngs
from zero_engine.checks import default_group
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.sharding import shard, unshard

# Kinds of differences in the order of a step -> a likely cause, if two runs of DDP are equal.
_KINDS: Final = {
    "initial weight": "build_model() gives other values than under DistributedDataParallel",
    "random numbers": "forward draws others: it asks for a parameter's class, shape or grad",
    "loss": "forward asks for more than values: a parameter's class, shape or grad, or the wrapper",
    "gradient": "DistributedDataParallel does not reduce it, or it is changed during backward",
    "weight": "the optimizer's step, or a weight that is changed outside of it",
}
_OURS: Final = "the configuration"
_DDP: Final = (
    "DistributedDataParallel, where nothing is sharded: if that itself cannot run this model, "
    "verify in one process, beside the plain model"
)
_ORDER: Final = tuple(_KINDS)
# Settings that are reset one after the other until both runs are equal -> the cause to print.
# "sums" is none of ZeroConfig: DistributedDataParallel then adds gradients in our order.
_CHOICES: Final = {
    "wire": "codecs, or sums by node (ZeroConfig.wire)",
    "precision": "dtypes (ZeroConfig.precision)",
    "offload": "the host's kernels, or a delay (ZeroConfig.offload)",
    "sums": "order of sums: here ranks are added in turn, then divided",
}
# Causes of a difference that begins at a stage, by stage.
_SHARDED: Final = (
    "",
    "the optimizer steps shards, which have the gradients: its step looks beyond single elements "
    "(see ZeroConfig.cut), or p.grad is read before it",
    "gradients are shards in backward already: something keeps or changes them there",
    "parameters are gathered during their module's calls only: code outside reads or keeps one",
)


@frozen
class Difference:
    """A value that is not equal in every bit in two runs, and the size of its error."""

    step: int  # from 0
    # One of `_KINDS`.
    kind: str
    # Unit of the parameter; "" is the model itself.
    unit: str
    # Name of the parameter; "" for the loss and random numbers, which belong to none.
    name: str
    # All differences of a result are on one rank: the first of those where values differ earliest.
    rank: int
    # Largest difference of an element; infinite if one run has no such value.
    absolute: float
    # Norm of the difference, divided by the norm of DistributedDataParallel's value.
    relative: float

    def __str__(self) -> str:
        of = f" of {self.name!r} in unit {self.unit!r}" if self.name else ""
        error = f"by {self.absolute:.2g}, relative {self.relative:.2g}"
        how = "in one run only" if self.absolute == torch.inf else error
        return f"step {self.step}, {self.kind}{of}: {how}, on rank {self.rank}"


@final
@frozen
class VerificationResult:
    """Result of `verify`, to be printed. The same on every rank."""

    num_steps: int
    # By step, then in the order of `_KINDS`, then in the order of the model's parameters.
    differences: tuple[Difference, ...]
    # The likely cause; empty if nothing differs.
    cause: str = ""
    # Whether the runs are equal once settings that round, delay or reorder sums are reset.
    is_chosen: bool = False

    @property
    def is_equal(self) -> bool:
        """Return whether losses, gradients and weights equal DDP's in every bit and step."""
        return not self.differences

    def __str__(self) -> str:
        said = f"{self.num_steps} steps beside DistributedDataParallel: "
        if self.is_equal:
            return f"{said}losses, gradients and weights are equal in every bit"
        said += "different, as chosen" if self.is_chosen else "DIFFERENT"
        said += f"\nfirst    {self.differences[0]}\ncause    {self.cause}"
        for kind in _KINDS:
            last = [d for d in self.differences if (d.step, d.kind) == (self.num_steps - 1, kind)]
            if last:
                said += f"\nlargest  {max(last, key=lambda each: each.relative)}"
        return said


@define(eq=False)
class _Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    # The model, or the DistributedDataParallel around it.
    called: nn.Module
    is_sharded: bool

    def values(self, kind: str, names: Collection[str]) -> Iterator[Tensor | None]:
        params = dict(self.model.named_parameters())
        for param in (params[name] for name in names):
            if kind == "gradient":
                yield full_grad(param) if self.is_sharded else param.grad
            else:
                yield full_param(param) if self.is_sharded else param.detach()


@define(eq=False)
class _Trainer:
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Any]
    group: Group
    # States of random number generators, set before a model is built and before the first step.
    rngs: Mapping[str, Tensor]
    progress: Callable[[str], object] | None = None
    doing: str = ""

    def compare(
        self, config: ZeroConfig | None, like_us: Sequence[str] = ()
    ) -> tuple[Difference, ...]:
        """Train under DDP, then under `config` (None: DDP); return differences. Collective."""
        first, second = self._run(None, like_us), self._run(config, like_us)
        if not {*map(id, first.model.parameters())}.isdisjoint(map(id, second.model.parameters())):
            raise ConfigError(
                "verify(): expected build_model() to build a new model at each call, got one that "
                "shares parameters with the one before"
            )
        units = {name: "" for name, _ in first.model.named_parameters()}
        if second.is_sharded:
            param_refs = require_sharded(second.model).param_refs
            units = {param_ref.name: param_ref.unit.plan.name for param_ref in param_refs}
        found = [
            (step, kind, units.get(name, ""), name, self.group.rank, *error)
            for step, kind, name, *values in self._values((first, second), units)
            if (error := _error(*values)) is not None
        ]
        if second.is_sharded:
            unshard(second.model, second.optimizer)
        by_rank = all_gather_json(found, group=self.group)
        rows = min(
            filter(None, by_rank), key=lambda r: (r[0][0], _ORDER.index(r[0][1])), default=[]
        )
        return tuple(Difference(*row) for row in rows)

    def _run(self, config: ZeroConfig | None, like_us: Sequence[str]) -> _Run:
        self._begin("building models")
        restore_rngs(self.rngs, self.group.device)
        model = self.build_model()
        if any(map(is_dtensor, model.parameters())):
            raise ConfigError(
                "verify(): expected a model of plain parameters, got one that parallelize_module() "
                "has split, which it cannot compare; verify the model as it is before that"
            )
        if config is not None and config.groups:
            raise ConfigError(
                "verify(): expected a configuration without groups, got "
                f"{', '.join(config.groups)}: DistributedDataParallel takes parameters for the "
                "same on all ranks; compare with one process that has all of them"
            )
        optimizer, called = self.build_optimizer(model), model
        if config is not None:
            shard(model, optimizer, config, group=self.group)
        elif self.group.world_size > 1:
            options = {"process_group": self.group.process_group, "find_unused_parameters": True}
            called = DistributedDataParallel(model, **options)
            called.broadcast_buffers = "buffers" not in like_us
            if "sums" in like_us:
                called.register_comm_hook(None, ddp_hook(self.group))
        return _Run(model, optimizer, called, config is not None)

    def _values(self, runs: tuple[_Run, _Run], names: Collection[str]) -> Iterator[tuple[Any, ...]]:
        """Train both runs; yield step, kind, name, and the value of either run."""

        def of_params(step: int, kind: str) -> Iterator[tuple[Any, ...]]:
            values = zip(names, *(run.values(kind, names) for run in runs), strict=True)
            return ((step, kind, name, *both) for name, *both in values)

        yield from of_params(0, "initial weight")
        before: Mapping[str, Tensor] = self.rngs
        for step, batch in enumerate(self.batches):
            losses, after = [], []
            for run in runs:
                restore_rngs(before, self.group.device)
                plain = "the plain model" if run.called is run.model else _DDP
                self._begin(f"in step {step} under {_OURS if run.is_sharded else plain}")
                losses.append(self._backward(run, batch))
                after.append(capture_rngs(self.group.device))
            before, others = after
            is_same = all(torch.equal(state, others[name]) for name, state in before.items())
            yield step, "random numbers", "", None, None if is_same else losses[0]
            yield step, "loss", "", *losses
            yield from of_params(step, "gradient")
            self._begin(f"in step {step}, where optimizers step")
            for run in runs:
                run.optimizer.step()
                run.optimizer.zero_grad()
            yield from of_params(step, "weight")

    def _begin(self, doing: str) -> None:
        self.doing = doing
        if self.progress is not None:
            self.progress(f"verify(): {doing}")

    def _backward(self, run: _Run, batch: Any) -> Tensor:
        # A copy, since the loss function may change the batch in place.
        loss = self.loss(run.called, copy.deepcopy(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise ConfigError(
                "verify(): expected a loss, which is a tensor with one element, got a "
                f"{type(loss).__name__}{shape}; pass loss=, a function of model and batch"
            )
        loss.backward()
        return loss.detach()


def _error(expected: Tensor | None, got: Tensor | None) -> tuple[float, float] | None:
    """Return the largest error and the relative norm of all errors; None if both are equal."""
    if expected is None or got is None:
        return None if expected is got else (torch.inf, torch.inf)
    wide = torch.promote_types(expected.dtype, torch.float64)
    expected, got = expected.detach().to(wide), got.detach().to(wide)
    if torch.allclose(expected, got, rtol=0, atol=0, equal_nan=True):
        return None
    norm, error = torch.linalg.vector_norm, got - expected
    both = torch.stack([error.abs().max(), norm(error) / norm(expected)])
    absolute, relative = both.nan_to_num(torch.inf, torch.inf).tolist()
    return absolute, relative


def _own_loss(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)


@collective
def verify(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Iterable[Any],
    config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    num_steps: int = 3,
    group: AnyRanks | None = None,
    progress: Callable[[str], object] | None = None,
) -> VerificationResult:
    """Train a model under DistributedDataParallel and under `config`, and compare. Collective.

    In each step both have the same batch and the same random numbers. Where they differ, further
    runs look for the cause: DistributedDataParallel again; the configuration without settings that
    round, delay or add in another order; lower stages. States of random number generators are
    restored at the end.

    Args:
        build_model: Builds a new model at each call, on the device of the group.
        build_optimizer: Builds an optimizer of the model.
        batches: Batches of this rank; the first `num_steps` are used. The elements of a tuple or a
            list, and the items of a mapping by keyword, are the model's arguments; any other batch
            is the only argument.
        config: `ZeroConfig()` when None. A dict, or a path, is a configuration for DeepSpeed.
        loss: Called with model and batch. When None, the model returns its loss, or an output with
            it as `loss`.
        num_steps: Most steps, of one batch each.
        group: As for `shard`; this process alone is on torch's default device when None.
        progress: Called with a description of each part of a step before it begins.

    Raises:
        ConfigError: There is no loss, ranks do not have as many batches, or two models share
            parameters.
        Exception: As raised by training, with a note that names the step and the run.
    """
    if not isinstance(config, ZeroConfig):
        config = ZeroConfig() if config is None else ZeroConfig.from_deepspeed(config)
    if group is None:
        group = default_group(timeout_s=config.timeout_s)
    group, wire = ranks_of(group, config.wire, config.placements)
    config = attrs.evolve(config, wire=wire)
    rngs = capture_rngs(group.device)
    try:
        given = list(islice(batches, num_steps))
        numbers = all_gather_json(len(given), group=group)
        if len(set(numbers)) > 1 or not given:
            raise ConfigError(f"verify(): expected as many batches on every rank, got {numbers}")
        trainer = _Trainer(
            build_model, build_optimizer, given, loss or _own_loss, group, rngs, progress
        )
        with warnings.catch_warnings():
            # DDP warns of strides of gradients that autograd has allocated.
            warnings.filterwarnings("ignore", "Grad strides do not match")
            # DDP has no masters either, and a run is no training.
            warnings.filterwarnings("ignore", ".* without fp32 masters")
            try:
                return _explained(trainer, config)
            except Exception as error:
                error.add_note(f"verify(): {trainer.doing}")
                raise
    finally:
        restore_rngs(rngs, group.device)


def _explained(trainer: _Trainer, config: ZeroConfig) -> VerificationResult:
    """Return the differences and their likely cause. Collective.

    Choices of the configuration are undone one after the other until no difference is left.
    """
    num_steps, found = len(trainer.batches), trainer.compare(config)
    if not found:
        return VerificationResult(num_steps, found)
    if again := trainer.compare(None):
        cause = (
            f"another run of DistributedDataParallel has another {again[0].kind}: build_model() or "
            "forward has state or random numbers of its own, or a kernel is not deterministic"
        )
        return VerificationResult(num_steps, found, cause)
    causes, remaining, like_us = list[str](), found, ()
    for name, cause in _CHOICES.items():
        if name == "sums":
            like_us = (name,)
        elif getattr(config, name) == getattr(ZeroConfig(), name):
            continue
        else:
            config = attrs.evolve(config, **{name: getattr(ZeroConfig(), name)})
        causes.append(cause)
        remaining = trainer.compare(config, like_us)
        if not remaining:
            return VerificationResult(num_steps, found, "; ".join(causes), is_chosen=True)
    cause = _KINDS[remaining[0].kind]
    if not trainer.compare(config, ("sums", "buffers")):
        cause = "each rank has its own buffers; DistributedDataParallel takes rank 0's at each step"
    for stage in range(config.stage - 1, -1, -1):
        if not trainer.compare(attrs.evolve(config, stage=stage), like_us):
            cause = f"{cause}. Equal at stage {stage}; at {stage + 1} {_SHARDED[stage + 1]}"
            break
    return VerificationResult(num_steps, remaining, cause)
