"""The only place that names private functions and attributes of torch, or ones newer than 2.11.

Each exists in every version that `docs/versions.md` lists, unless a comment says which have it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final

import torch
import torch._subclasses

# Getters in C: they cost a call of a Python function less than one of our own.
# Buffers of a module without its children's, name -> tensor; and names of non-persistent ones.
own_buffers: Final = attrgetter("_buffers")
non_persistent_buffers: Final = attrgetter("_non_persistent_buffers_set")
# Identity of an UntypedStorage; unique while it lives.
storage_id: Final = attrgetter("_cdata")
# Number of in-place writes to a tensor's memory.
version_of: Final = attrgetter("_version")

# Operations on a list of tensors in one call, as in torch's own optimizers.
foreach_add_: Final = torch._foreach_add_
foreach_mul: Final = torch._foreach_mul
foreach_mul_: Final = torch._foreach_mul_
foreach_sign_: Final = torch._foreach_sign_
foreach_sub_: Final = torch._foreach_sub_

# Whether a transform of torch.func (grad, vmap, jvp, ...) is being taken right now: None if not.
is_in_functional_transform: Final = torch._C._functorch.peek_interpreter_stack


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which tensors of any device have no memory, and operators no values.

    Unlike the meta device, each operator is the one that torch takes on the tensors' device. Those
    made outside may be used inside.
    """
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def current_backward() -> int:
    """Return the number of the backward that runs on this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def accelerator() -> torch.device | None:
    """Return the type of accelerator this process can use, without an index; None: only a CPU.

    A torch that is built for CUDA names that accelerator on a machine without a GPU too, unless it
    is asked to look. `torch.accelerator.current_device_index()` has the index, and initializes the
    device.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def accelerator_in_use() -> torch.device | None:
    """Return the type of accelerator, if this process has used it; `accelerator` initializes none.

    Torch's modules of devices say so by `is_initialized`; a device without it counts as used.
    """
    found = accelerator()
    if found is None:
        return None
    is_initialized = getattr(torch.get_device_module(found), "is_initialized", lambda: True)
    return found if is_initialized() else None
