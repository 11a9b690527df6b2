"""A file written for DeepSpeed that names hpZ or MiCS trains as the same choice made here."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_deepspeed as deepspeed
import zero_engine
from one_dtype import OneDtype
from parity import ZeroConfig
from zero_comm import Group
from zero_engine import ConfigError, Engine, Precision, Wire
from zero_partition.seams import find_sharded

FILES: dict[str, tuple[dict[str, Any], Wire]] = {
    "hpZ": ({"zero_hpz_partition_size": 2}, Wire(levels=2, secondary=True)),
    "MiCS": ({"mics_shard_size": 2}, Wire(levels=2, replicas=True)),
}
QUANTIZED: dict[str, Any] = {
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_nontrainable_weights": True,
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_encodes_weights_at_every_stage_with_shards(group: Group, stage: int) -> None:
    """The engine's own step gathers what it has updated, as the plain loop's does."""
    model, optimizer = parity.build_with_optimizer(make=OneDtype)
    precision = Precision(params=torch.bfloat16)
    config = zero_engine.ZeroConfig(stage, wire=Wire(params="int8"), precision=precision)
    zero_engine.shard(model, optimizer, config, group=group)
    expected = parity.run_steps(model, optimizer, range(3), rank=group.rank)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "zero_quantized_weights": True,
        },
    }
    built, stepper = parity.build_with_optimizer(make=OneDtype)
    engine, *_ = deepspeed.initialize(model=built, optimizer=stepper, config=settings)

    assert [_step(engine, step) for step in range(3)] == expected


@pytest.mark.parametrize("name", FILES)
@pytest.mark.ranks(4)
def test_a_file_makes_the_groups_that_it_asks_for(group: Group, name: str) -> None:
    """Whoever moves a job here measures the network first, and must find what was there."""
    keys, wire = FILES[name]
    model, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    zero_engine.shard(model, optimizer, ZeroConfig(3, wire=wire), group=group)
    expected = parity.run_steps(model, optimizer, range(3), rank=group.rank)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **keys},
    }
    with deepspeed.zero.MiCS_Init(config_dict_or_path=settings):
        built, stepper = parity.build_with_optimizer(make=parity.tiny_float32)
    engine, *_ = deepspeed.initialize(model=built, optimizer=stepper, config=settings)

    assert [_step(engine, step) for step in range(3)] == expected
    ours, theirs = (find_sharded(each).routes for each in (model, built))
    for part in ("whole", "shards", "replicas", "node"):
        of_ours, of_theirs = getattr(ours, part), getattr(theirs, part)
        assert (of_ours is None) == (of_theirs is None)
        assert of_ours is None or of_ours.process_group is of_theirs.process_group


def _step(engine: Engine, step: int) -> float:
    loss = parity.loss_of(engine, parity.batch(step, 0, engine.group.rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


# ---- What `Init` is told as well ----


@pytest.mark.ranks(4)
def test_init_takes_what_its_configuration_says_too(group: Group) -> None:
    """Scripts of ZeRO++ say it in both places; trained is by the configuration, and so it is."""
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    settings = {"zero_optimization": {"stage": 3, **QUANTIZED}}
    for config in (
        settings,
        ZeroConfig(3, wire=Wire(secondary=True, params="int8", frozen="int8", levels=2)),
    ):
        with deepspeed.zero.Init(
            config_dict_or_path=config,
            zero_param_parallel_group=nodes[group.rank // 2],
            zero_quantized_weights=True,
            zero_quantized_nontrainable_weights=True,
        ):
            parity.build(parity.Block)
    with pytest.raises(
        ConfigError, match=rf"expected the ranks of this rank's node.*rank {group.rank}"
    ):
        deepspeed.zero.Init(
            config_dict_or_path=settings, zero_param_parallel_group=group.process_group
        )


ALONE: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    (
        {"zero_quantized_weights": True},
        None,
        "got no configuration; write .*zero_quantized_weights: true",
    ),
    ({"zero_quantized_weights": True}, {}, "got a configuration that does not"),
    (
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_weights": True},
        "zero_quantized_nontrainable_weights: true there",
    ),
]


@pytest.mark.parametrize(("arguments", "keys", "text"), ALONE)
def test_init_refuses_what_only_it_is_told(
    group: Group, arguments: dict[str, Any], keys: dict[str, Any] | None, text: str
) -> None:
    """`initialize` would train without, and nobody would know."""
    config = None if keys is None else {"zero_optimization": {"stage": 3, **keys}}
    with pytest.raises(ConfigError, match=text):
        deepspeed.zero.Init(config_dict_or_path=config, **arguments)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=False, **arguments):
        pass
    with pytest.raises(ConfigError, match="zero_hpz_partition_size: 2 there"):
        deepspeed.zero.Init(
            config_dict_or_path=config, zero_param_parallel_group=group.process_group
        )
