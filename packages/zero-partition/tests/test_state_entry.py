"""What is divided with a parameter, whatever its shape, is found whole again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zero_partition import StateError
from zero_partition.plan import Cut, FlatLayout, ParameterPlan, Span
from zero_partition.planning import EntryInfo, PlainEntry, TensorEntry, part_of_entry, plan_entry

SHAPES = [(7, 3), (12,), (1,), (), (0, 4), (33,), (2, 3, 4), (1, 5)]


def _keeps(shape: tuple[int, ...], cut: Cut, world_size: int) -> list[Span | None]:
    """By rank, as a flat buffer of this one parameter would be cut."""
    numels, options = [torch.Size(shape).numel()], {"world_size": world_size, "align": 1}
    if cut == Cut.TENSOR:
        layout = FlatLayout.plan_whole(numels, [world_size - 1], **options)
    elif cut == Cut.FLAT:
        layout = FlatLayout.plan(numels, **options)
    else:
        layout = FlatLayout.plan_cut(numels, [cut.grain(shape)], **options)
    pieces = [layout.pieces(rank) for rank in range(world_size)]
    return [of_rank[0].in_tensor if of_rank else None for of_rank in pieces]


def _entries(shape: tuple[int, ...], cut: Cut) -> dict[str, Tensor | float]:
    numel = torch.Size(shape).numel()
    whole: dict[str, Tensor | float] = {
        "step": torch.tensor(3.0),
        "count": 4,
        "mean": torch.arange(float(numel)).view(shape),
    }
    if cut.kind in {"row", "block"}:
        count = -(-numel // cut.grain(shape))
        whole["scale"] = torch.arange(count)
        whole["wide"] = torch.arange(count * 2.0).view(count, 2)
    if cut == Cut.TENSOR:
        whole["anything"] = torch.arange(35).view(5, 7)
    return whole


@pytest.mark.parametrize(
    "cut", [Cut.FLAT, Cut.ROW, Cut.TENSOR, Cut.block(4), Cut.block(32)], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_parts_of_an_entry_are_found_to_be_its_whole(cut: Cut, world_size: int) -> None:
    """Shard, ask, and lay end to end: a moment in the wrong place trains, and to nonsense."""
    for shape in SHAPES:
        _check_entries(shape, cut, world_size)


def _check_entries(shape: tuple[int, ...], cut: Cut, world_size: int) -> None:
    plan = ParameterPlan(("weight",), torch.Size(shape), torch.float32, True, cut)
    kept = _keeps(shape, cut, world_size)
    numel = plan.shape.numel()
    has = [cut == Cut.FLAT or not numel or span is not None for span in kept]

    for key, whole in _entries(shape, cut).items():
        if (key == "wide" and not numel) or (key == "scale" and numel <= 1 and shape != (1,)):
            continue  # no slice to look at; and one block of one element looks like the element
        parts = [
            part_of_entry(plan, key, whole, span or Span(0, 0)) if is_there else None
            for span, is_there in zip(kept, has, strict=True)
        ]
        if key == "mean":  # next to the shard, an optimizer looks for it in the shard's shape
            for part, span in zip(parts, kept, strict=True):
                if part is not None and span is not None:
                    assert part.shape == cut.shard_shape(shape, span.numel)
        infos = [None if part is None else EntryInfo.of(part) for part in parts]
        entry = plan_entry(plan, key, kept, infos)
        if not isinstance(whole, Tensor):
            assert entry == PlainEntry(whole)
            continue
        assert isinstance(entry, TensorEntry)
        assert (entry.shape, entry.dtype) == (whole.shape, whole.dtype), key
        assert sum(entry.splits) == whole.numel(), key
        laid = torch.full((whole.numel(),), -1, dtype=whole.dtype)
        for part, span, sent in zip(parts, entry.spans, entry.splits, strict=True):
            if sent:
                laid[span.as_slice()] = part.reshape(-1)
        assert torch.equal(laid.view(whole.shape), whole), key


def _infos(*shapes: tuple[int, ...] | None) -> list[EntryInfo | None]:
    return [None if shape is None else EntryInfo("torch.float32", shape) for shape in shapes]


LIST = EntryInfo.of([torch.ones(12)])
HALVES = [Span(0, 12), Span(12, 24)]
UNEXPLAINED: list[tuple[Cut, list[Span | None], list[EntryInfo | None], str]] = [
    (Cut.ROW, HALVES, _infos((1, 3), (1, 3)), "neither one value"),
    (Cut.ROW, HALVES, _infos((4, 3), None), "rank 1 should have"),
    (Cut.ROW, HALVES, _infos((4, 2), (4, 5)), "neither one value"),
    (Cut.FLAT, HALVES, _infos((4, 3), (4, 3)), "neither one value"),
    (Cut.block(16), [Span(0, 16), Span(16, 24)], _infos((1,), (2,)), "neither one value"),
    (Cut.FLAT, HALVES, _infos((12,), None), "rank 1 should have"),
    (Cut.TENSOR, [None, Span(0, 24)], [None, EntryInfo("list")], "a list cannot be sent"),
    (Cut.FLAT, HALVES, [LIST, LIST], "the cut of tensors in a list is unknown"),
    (
        Cut.ROW,
        HALVES,
        [EntryInfo("torch.float32", (4, 3)), EntryInfo("torch.int8", (4, 3))],
        "rank 1 should have what the others have",
    ),
]


def test_what_no_cut_explains_is_refused_with_what_each_rank_has() -> None:
    """A guess would be a wrong checkpoint."""
    for cut, kept, infos, reason in UNEXPLAINED:
        plan = ParameterPlan(("weight",), torch.Size((8, 3)), torch.float32, True, cut)
        says = rf"'weight'.*'mean' has no whole.*rank 0 has.*{reason}"
        with pytest.raises(StateError, match=says):
            plan_entry(plan, "mean", kept, infos)


def test_a_rank_without_elements_may_have_no_state() -> None:
    """Some optimizers pass over empty parameters, and others give them empty state."""
    plan = ParameterPlan(("weight",), torch.Size((8, 3)), torch.float32, True, Cut.FLAT)
    for second in (None, EntryInfo("torch.float32", (0,))):
        infos = [EntryInfo("torch.float32", (24,)), second]
        entry = plan_entry(plan, "mean", [Span(0, 24), None], infos)
        assert isinstance(entry, TensorEntry)
        assert (entry.shape, entry.splits) == ((8, 3), (24, 0))


def test_blocks_that_look_like_elements_are_told_apart_by_the_others() -> None:
    """The last rank has one element, and so one block: its shape alone does not say which."""
    plan = ParameterPlan(("weight",), torch.Size((17,)), torch.float32, True, Cut.block(16))
    kept = [Span(0, 16), Span(16, 17)]

    assert plan_entry(plan, "scale", kept, _infos((1,), (1,))).shape == (2,)
    assert plan_entry(plan, "mean", kept, _infos((16,), (1,))).shape == (17,)
