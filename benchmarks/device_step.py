"""One rank's training steps on a simulated cluster: the process that `bench device` starts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    """Make this process the first rank of a cluster without other processes."""
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

Step = Callable[[Tensor, Tensor, Callable[[str], None]], None]  # tokens, targets, enter a part


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _fsdp2(model: Llama, cluster: Cluster, *, on_node: bool = False, host: bool = False) -> Step:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import (  # noqa: PLC0415
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    options: dict[str, Any] = {
        "mesh": init_device_mesh("sim", (cluster.num_ranks,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy() if host else OffloadPolicy(),
    }
    reshards = cluster.rates.ranks_per_node if on_node else True
    fully_shard(model.embed, **options, reshard_after_forward=reshards)
    for layer in model.layers:
        fully_shard(layer, **options, reshard_after_forward=reshards)
    fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    return _step_of(model, _adamw(model), nn.utils.clip_grad_norm_)


def _ddp(model: Llama, cluster: Cluster) -> Step:
    ddp = nn.parallel.DistributedDataParallel(model)
    step = _step_of(ddp, _adamw(model), nn.utils.clip_grad_norm_)

    def under_autocast(*args: Any) -> None:
        with torch.autocast("sim", torch.bfloat16):
            step(*args)

    return under_autocast


def _zero(
    model: Llama, cluster: Cluster, *, stage: int, on_node: bool = False, host: bool = False
) -> Step:
    import zero_engine  # noqa: PLC0415

    precision = zero_engine.Precision(
        params=torch.bfloat16, reduce=torch.float32, cast_inputs=False
    )
    per_node = cluster.rates.ranks_per_node
    config = zero_engine.ZeroConfig(
        stage,
        precision=precision,
        wire=zero_engine.Wire(levels=per_node, secondary=True) if on_node else zero_engine.Wire(),
        offload=zero_engine.Offload(optimizer="host") if host else None,
    )
    model, optimizer = zero_engine.shard(model, _adamw(model), config)

    def clip(_: Any, limit: float) -> None:
        zero_engine.clip_grad_norm_(model, limit)

    return _step_of(model, optimizer, clip)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor, enter: Callable[[str], None]) -> None:
        logits = model(tokens)
        enter("loss")
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        del logits
        enter("optimizer")
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


SYSTEMS: Final[dict[str, Callable[[Llama, Cluster], Step]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp2_hpz": partial(_fsdp2, on_node=True),
    "fsdp2_host": partial(_fsdp2, host=True),
    **{f"zero{stage}": partial(_zero, stage=stage) for stage in (1, 2, 3)},
    "zero3_hpz": partial(_zero, stage=3, on_node=True),
    **{f"zero{stage}_host": partial(_zero, stage=stage, host=True) for stage in (1, 2, 3)},
}


# ---- What a step took ----


@dataclass
class Timeline:
    """Spans of kernels and collectives, each with the part of the step that launched it."""

    part: str = "start"
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def enter(self, part: str) -> None:
        """Begin another part."""
        self.spans += [(self.part, span) for span in simulated_device.take_spans()]
        self.part = part

    def watch(self, name: str, module: nn.Module) -> None:
        """Enter a part before this module's forward, and one before its backward.

        The wait for its gather is launched before, but the part's first kernel is what it delays.
        """

        def leave(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self.enter(f"backward {name}"))

        module.register_forward_pre_hook(lambda *_: self.enter(f"forward {name}"), prepend=True)
        module.register_forward_hook(leave, prepend=True)

    def exposed(self, start: float, end: float, main: str) -> dict[str, float]:
        """Return by part the seconds in which a collective ran, and nothing on the main stream.

        Seconds count for the part of the next kernel; those after all kernels count for "end".
        """
        running = _union(span for _, span in self.spans if span.name.startswith(COLLECTIVES))
        seconds: dict[str, float] = {}
        busy = [(part, span) for part, span in self.spans if span.stream == main]
        for part, span in [*busy, ("end", Span("", main, end, end))]:
            waits = (min(b, span.start) - max(a, start) for a, b in running)
            if span.start > start and (waited := sum(each for each in waits if each > 0)):
                seconds[part] = seconds.get(part, 0) + waited
            start = max(start, span.end)
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the times in which any of the spans runs, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(merged.pop()[1], end)  # noqa: PLW2901
        merged.append((start, end))
    return merged


def measure(system: str, cluster: Cluster, job: Job) -> dict[str, Any]:
    """Return time and memory of the last of a few steps on this rank."""
    begin(cluster)
    model = build(job)
    step = SYSTEMS[system](model, cluster)
    timeline = Timeline()
    for name, module in model.named_modules():
        if name in ("embed", "norm", "head") or re.fullmatch(r"layers\.\d+", name):
            timeline.watch(name, module)
    tokens = torch.zeros(job.batch, job.length, dtype=torch.int64, device="sim")
    for _ in range(STEPS - 1):
        step(tokens, tokens, timeline.enter)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    timeline.enter("start")
    timeline.spans.clear()
    start = simulated_device.host_seconds()
    step(tokens, tokens, timeline.enter)
    torch.accelerator.synchronize()
    end = simulated_device.host_seconds()
    timeline.enter("end")
    of_kind: dict[str, float] = {}
    for _, span in timeline.spans:
        of_kind[span.name] = of_kind.get(span.name, 0) + span.end - span.start
    exposed = timeline.exposed(start, end, "default stream")
    largest = [f"{part} {1e3 * seconds:.1f}" for part, seconds in exposed.items()][:3]
    return {
        "system": system,
        "seconds": end - start,
        "tokens_s": job.batch * job.length / (end - start),
        "exposed_s": sum(exposed.values()),
        "exposed_most": ", ".join(largest),
        "exposed_by_part": exposed,
        "collectives_s": sum(t for name, t in of_kind.items() if name.startswith(COLLECTIVES)),
        "peak_bytes": (peak := torch.accelerator.max_memory_allocated()),
        "of_memory": peak / cluster.rates.memory_bytes,
        "of_kind": dict(sorted(of_kind.items(), key=lambda item: -item[1])[:12]),
        "num_spans": len(timeline.spans),
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
