"""Private names of torch that the engine relies on do what they are used for."""
# Names a private module: what it holds are private names of torch, each looked up in one place.

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from zero_engine import torch_private
from zero_engine.torch_private import current_backward


def test_each_backward_has_a_number_of_its_own() -> None:
    """`_current_graph_task_id`: a loss that was scaled counts in its own backward only."""
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    for _ in range(2):
        inner, outer = leaf * 2, leaf * 3
        for tensor in (inner, outer):
            tensor.register_hook(lambda _: seen.append(current_backward()))
        (inner + outer).backward()

    assert current_backward() == -1
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert -1 not in seen


@pytest.mark.parametrize("uses", [False, True])
def test_a_device_that_is_not_used_is_not_begun_with(
    monkeypatch: pytest.MonkeyPatch, uses: bool
) -> None:
    """`zero export` on a machine whose GPUs are full must not ask for memory there."""
    module = SimpleNamespace(is_initialized=lambda: uses)
    monkeypatch.setattr(torch_private, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    assert torch_private.accelerator_in_use() == (torch.device("cuda") if uses else None)
