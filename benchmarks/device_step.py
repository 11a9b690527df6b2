"""One rank's training steps on a simulated cluster: the process that `bench device` starts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import simulated_device
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import SIZES, Llama
from simulated_device import Rates, Span
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

COLLECTIVES: Final = (
    "all_",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "send",
    "recv",
    "coalesced",
)
STEPS: Final = 4  # the order of units is known after the second


class Cluster(NamedTuple):
    """Ranks of one kind of device."""

    kind: str
    num_ranks: int
    efficiency: float = 1.0

    @property
    def rates(self) -> Rates:
        """Return the rates of its devices, with the efficiency of products of matrices."""
        known = simulated_device.DEVICES
        if self.kind not in known:
            raise SystemExit(f"--cluster: expected one of {', '.join(known)}, got {self.kind}")
        return known[self.kind].with_efficiency(self.efficiency)


class Job(NamedTuple):
    """A model, and what each rank trains it with."""

    size: str
    batch: int  # sequences
    length: int  # tokens of each
    recomputes: str  # "none", "selective" or "full"


def begin(cluster: Cluster) -> None:
    """Make this process the first rank of a cluster that nothing else runs of."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - private

    simulated_device.time_on(cluster.rates)
    dist.init_process_group(
        "cpu:gloo,sim:simccl", store=FakeStore(), rank=0, world_size=cluster.num_ranks
    )


def build(job: Job) -> Llama:
    """Return the model on the device, with its recomputation."""
    with torch.device("sim"):
        model = Llama(SIZES[job.size], job.length)
    if job.recomputes != "none":
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if job.recomputes == "selective":
            options["context_fn"] = _selective
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, **options)
    return model


def _selective() -> Any:
    """Keep attention, and every second product of matrices, as torchtitan's option "op" does."""
    kept = {torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default}
    num_products = {False: 0, True: 0}  # in the forward, and as it is recomputed

    def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operator in kept
        if operator is torch.ops.aten.mm.default:
            num_products[context.is_recompute] += 1
            is_kept = num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


# ---- Systems ----

Step = Callable[[Tensor, Tensor], None]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _fsdp2(model: Llama, cluster: Cluster) -> Step:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    options: dict[str, Any] = {
        "mesh": init_device_mesh("sim", (cluster.num_ranks,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    fully_shard(model.embed, **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    return _step_of(model, _adamw(model), nn.utils.clip_grad_norm_)


def _ddp(model: Llama, cluster: Cluster) -> Step:
    ddp = nn.parallel.DistributedDataParallel(model)
    step = _step_of(ddp, _adamw(model), nn.utils.clip_grad_norm_)

    def under_autocast(tokens: Tensor, targets: Tensor) -> None:
        with torch.autocast("sim", torch.bfloat16):
            step(tokens, targets)

    return under_autocast


def _zero(model: Llama, cluster: Cluster, *, stage: int) -> Step:
    import zero_engine  # noqa: PLC0415

    precision = zero_engine.Precision(
        params=torch.bfloat16, reduce=torch.float32, cast_inputs=False
    )
    config = zero_engine.ZeroConfig(stage, precision=precision)
    model, optimizer = zero_engine.shard(model, _adamw(model), config)

    def clip(_: Any, limit: float) -> None:
        zero_engine.clip_grad_norm_(model, limit)

    return _step_of(model, optimizer, clip)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        del logits
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


SYSTEMS: Final[dict[str, Callable[[Llama, Cluster], Step]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    **{f"zero{stage}": partial(_zero, stage=stage) for stage in (1, 2, 3)},
}


# ---- What a step took ----


def exposed(spans: list[Span], main: str) -> float:
    """Return seconds in which a collective ran, and nothing on the main stream."""
    busy = sorted((s.start, s.end) for s in spans if s.stream == main)
    seconds, reached = 0.0, None
    gaps: list[tuple[float, float]] = []
    for start, end in busy:
        if reached is not None and start > reached:
            gaps.append((reached, start))
        reached = end if reached is None else max(reached, end)
    collectives = sorted((s.start, s.end) for s in spans if s.name.startswith(COLLECTIVES))
    merged: list[list[float]] = []
    for start, end in collectives:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    at = 0
    for begin_gap, end_gap in gaps:
        while at < len(merged) and merged[at][1] <= begin_gap:
            at += 1
        for start, end in merged[at:]:
            if start >= end_gap:
                break
            seconds += min(end, end_gap) - max(start, begin_gap)
    return seconds


def measure(system: str, cluster: Cluster, job: Job) -> dict[str, Any]:
    """Return what the last of a few steps took on this rank."""
    begin(cluster)
    step = SYSTEMS[system](build(job), cluster)
    tokens = torch.zeros(job.batch, job.length, dtype=torch.int64, device="sim")
    for _ in range(STEPS - 1):
        step(tokens, tokens)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    simulated_device.take_spans()
    start = simulated_device.host_seconds()
    step(tokens, tokens)
    torch.accelerator.synchronize()
    seconds, spans = simulated_device.host_seconds() - start, simulated_device.take_spans()
    of_kind: dict[str, float] = {}
    for span in spans:
        of_kind[span.name] = of_kind.get(span.name, 0) + span.end - span.start
    return {
        "system": system,
        "seconds": seconds,
        "tokens_s": job.batch * job.length / seconds,
        "exposed_s": exposed(spans, "default stream"),
        "collectives_s": sum(t for name, t in of_kind.items() if name.startswith(COLLECTIVES)),
        "peak_bytes": (peak := torch.accelerator.max_memory_allocated()),
        "of_memory": peak / cluster.rates.memory_bytes,
        "of_kind": dict(sorted(of_kind.items(), key=lambda item: -item[1])[:12]),
        "num_spans": len(spans),
    }


def main(argv: list[str]) -> None:
    """Print what was measured, as JSON."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("system", choices=SYSTEMS)
    given.add_argument("cluster", type=json.loads)
    given.add_argument("job", type=json.loads)
    args = given.parse_args(argv)
    print(json.dumps(measure(args.system, Cluster(*args.cluster), Job(*args.job))))


if __name__ == "__main__":
    main(sys.argv[1:])
