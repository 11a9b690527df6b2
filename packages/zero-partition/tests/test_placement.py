"""The ZeRO table."""

from zero_partition.plan import STAGES, Placement, Stage


def test_each_stage_shards_one_kind_more() -> None:
    """Section 5 of arXiv 1910.02054: optimizer state, then gradients, then parameters."""
    counts = [
        sum(
            kind is Placement.SHARDED
            for kind in (STAGES[stage].optim, STAGES[stage].grads, STAGES[stage].params)
        )
        for stage in Stage
    ]

    assert counts == [0, 1, 2, 3]
    assert STAGES[Stage.ONE].optim is Placement.SHARDED
    assert STAGES[Stage.TWO].grads is Placement.SHARDED
