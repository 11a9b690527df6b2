"""A file written for DeepSpeed that names hpZ or MiCS trains as the same choice made here."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import zero_engine
from parity import ZeroConfig
from zero_comm import Group
from zero_engine import Engine, Wire
from zero_engine.compat import deepspeed
from zero_partition import find_sharded

FILES: dict[str, tuple[dict[str, Any], Wire]] = {
    "hpZ": ({"zero_hpz_partition_size": 2}, Wire(levels=2, secondary=True)),
    "MiCS": ({"mics_shard_size": 2}, Wire(levels=2, replicas=True)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_makes_the_groups_that_it_asks_for(ranks, name: str) -> None:
    """Whoever moves a job here measures the network first, and must find what was there."""
    ranks(4).run(_train_from_a_file, name=name)


def _train_from_a_file(group: Group, name: str) -> None:
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
