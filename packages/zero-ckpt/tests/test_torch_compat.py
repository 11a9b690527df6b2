"""Private names of torch that savers rely on do what they are used for."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks
from zero_ckpt._torch_compat import hooks_save_tensors, set_version, version_of


def test_hooks_around_are_seen() -> None:
    """`_top_saved_tensors_default_hooks`: a slot under hooks would be read after its time."""
    assert not hooks_save_tensors()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert hooks_save_tensors()
    assert not hooks_save_tensors()


def test_a_version_can_be_set_for_all_views() -> None:
    """`_unsafe_set_version_counter`: new memory stands for a tensor that was written so often."""
    tensor = torch.zeros(4)
    view = tensor.view(2, 2).detach()
    set_version(tensor, 7)

    assert version_of(view) == version_of(tensor) == 7
    set_version(tensor, -1)
    assert version_of(tensor) == 7
