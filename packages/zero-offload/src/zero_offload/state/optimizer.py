"""Any optimizer of torch, with its state on the host or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, final

import torch
from attrs import field, frozen
from torch import Tensor
from torch.optim import Optimizer

from zero_offload.adam.cpu_optimizers import load_by_torch
from zero_offload.adam.parallel import Team, total_norm
from zero_offload.disk.disk_store import DiskStore
from zero_offload.disk.store import AbstractStore
from zero_offload.errors import OffloadError

from .footprint import Footprint
from .offloaded_state import OffloadedState
from .subgroups import Shares
from .template import OptimizerTemplate


@final
@frozen(eq=False)
class StateView(Mapping[Tensor, dict[str, Any]]):
    """`optimizer.state`: copies on the CPU, made at each access. To write: `write_state`."""

    _reference: weakref.ref[OffloadedOptimizer] = field(converter=weakref.ref)

    @property
    def optimizer(self) -> OffloadedOptimizer:
        """Optimizer that the state belongs to.

        The reference is weak, since with a cycle only the garbage collector would free its memory.
        """
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("the optimizer of this state is gone; keep the optimizer")
        return optimizer

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        """Return a copy of a parameter's state."""
        if not any(param is each for each in self.optimizer.started()):
            raise KeyError(f"a parameter of shape {tuple(param.shape)} without state")
        return self.optimizer.read_state([param])[param]

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the parameters that have state."""
        return iter(self.optimizer.started())

    def __len__(self) -> int:
        """Return the number of parameters that have state."""
        return len(self.optimizer.started())

    def items(self) -> ItemsView[Tensor, dict[str, Any]]:
        """Return copies of the state of all parameters that have one; reads each sub-group once."""
        return self.optimizer.read_state(self.optimizer.started()).items()


@final
class OffloadedOptimizer(Optimizer):
    """An optimizer whose state is kept on the host or on disk, and whose steps run on the host.

        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4,
                                       state="disk", path="/local/nvme")

    Everything else of the training loop stays as it is. Parameters stay where they are, on the
    host or on a device; sub-groups of them are stepped one after the other while the state of the
    next is read and that of the last is written. Adam, AdamW and Adagrad of torch are stepped by
    `CPUAdam` and `CPUAdagrad`. Other optimizers step on the host themselves, with one instance for
    each sub-group, so the step of a parameter must not depend on other parameters. 16-bit
    parameters have fp32 masters in the state. State that `fraction` leaves on the device is stepped
    there. Results do not depend on where the state is kept.

    `step()`, `zero_grad()`, param groups, schedulers, hooks and `torch.amp.GradScaler` are as for
    any optimizer of torch. State dicts are torch's of that class, in both directions; `state` is a
    view that reads. Local; not thread-safe.

    Gradients of parameters on a device go to the host during backward. `param.grad` is then a
    tensor that raises when its values are used: clip with `clip_grad_norm_` below. With
    `grads="device"` gradients stay in `param.grad` until the step, as GradScaler needs.

    Args:
        params: Parameters or groups, as torch takes them.
        optimizer: A class of torch.optim, or like one, that steps each parameter by itself.
        state: Where state is kept: "host" or "disk".
        grads: Where gradients of parameters on a device wait for the step: "host" or "device".
        fraction: Shares of the state's bytes that are kept on the device and on the host instead:
            {"device": 0.2, "host": 0.3} leaves half for `state`. Parameters are assigned in their
            order.
        path: With state="disk", a folder on the disk to use.
        store: In place of `path`: any store, which stays the caller's to close.
        subgroup_bytes: Most state that is read, stepped and written together. With the disk, three
            times this is allocated in memory.
        small_bytes: A sub-group with less state stays in memory.
        budget_bytes: Most host memory to allocate; None: what the process's budget allows.
        arguments: Arguments of the optimizer: lr and so on.

    Raises:
        UnsupportedOptimizerError: The class needs all parameters at once.
        BudgetError: The host or the budget does not have the memory; with its users' bytes.
        StoreError: The disk has too little space, or there is no such folder.
        ValueError: An argument makes no sense.
    """

    def __init__(
        self,
        params: Any,
        optimizer: type[Optimizer],
        *,
        state: Literal["host", "disk"] = "host",
        grads: Literal["host", "device"] = "host",
        fraction: Mapping[str, float] | None = None,
        path: str | Path | None = None,
        store: AbstractStore | None = None,
        subgroup_bytes: int = 64 * 2**20,
        small_bytes: int = 2**20,
        budget_bytes: int | None = None,
        **arguments: Any,
    ) -> None:
        shares = Shares.of(state, fraction, subgroup_bytes, small_bytes)
        if grads not in ("host", "device"):
            raise ValueError(f"grads={grads!r}: expected 'host' or 'device'")
        if (state == "disk") != ((path is None) != (store is None)):
            raise ValueError(
                f"state={state!r}, path={path!r}, store={store!r}: state='disk' takes one of path "
                f"and store, state='host' none"
            )
        template = OptimizerTemplate.choose(optimizer, arguments)
        self._offloaded: OffloadedState | None = None
        self._clip = 1.0
        self._team = Team()
        super().__init__(params, dict(template.template.defaults))
        self.state = StateView(self)  # type: ignore[assignment]
        self._step_supports_amp_scaling = True
        self._own_store = DiskStore(Path(path)) if path is not None else None
        self._offloaded = OffloadedState(
            [template],
            shares,
            self._own_store or store,
            grads_leave=grads == "host",
            budget_bytes=budget_bytes,
        )
        try:
            groups = self.param_groups
            self._plan(p for group in groups for p in group["params"] if p.requires_grad)
        except BaseException:
            self.close()
            raise

    @property
    def footprint(self) -> Footprint:
        """Bytes of memory and disk in use, by purpose."""
        return self._parts.footprint

    # ---- Stepping ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Local, blocking.

        Args:
            closure: Computes the loss again, as for any optimizer of torch; called once.

        Returns:
            The closure's loss, or None.

        Raises:
            StoreError: The first read failed; nothing was stepped, and the step can be tried again.
            TornStepError: A later read or write failed, or a sub-group's step did. Parameters and
                state are of two different steps: load a state dict, and the model's.
            UnsupportedTensorError: A gradient is sparse; nothing was stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = self._usable("step()")
        clip, self._clip = self._clip, 1.0
        # GradScaler sets `found_inf` and `grad_scale` for the time of a step.
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0:
            return loss
        scale = getattr(self, "grad_scale", None)
        factor = clip if scale is None else clip / float(scale)
        grads = parts.gradients.collect(self.param_groups)
        self._plan(grads)
        parts.step(self.param_groups, grads, factor=factor)
        parts.write_numbers(self.param_groups)
        parts.flush()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` of all parameters; the next step scales.

        Local. Gradients are read once, and not written. With a GradScaler, `unscale_` comes before.

        Returns:
            The norm before clipping: an fp32 tensor of no dimension on the CPU.

        Raises:
            RuntimeError: The norm is not finite, and `error_if_nonfinite`.
        """
        parts = self._usable("clip_grad_norm_()")
        grads = parts.gradients.collect(self.param_groups)
        norm = total_norm([*grads.values()], float(norm_type), self._team)
        if error_if_nonfinite and not -float("inf") < norm < float("inf"):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm}, so they cannot "
                f"be clipped; pass error_if_nonfinite=False to go on all the same"
            )
        coefficient = max_norm / (norm + 1e-6)
        # A coefficient of nan scales gradients too, as it does in torch.
        self._clip = coefficient if not coefficient >= 1 else 1.0
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does; those that have left their device are dropped always."""
        self._clip = 1.0
        if self._offloaded is not None:
            self._offloaded.gradients.clear()
        super().zero_grad(set_to_none)

    # ---- State ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as torch does, at any time, and allocate its state.

        On an error the group is not added.
        """
        super().add_param_group(param_group)
        if self._offloaded is not None:
            try:
                self._plan(p for p in self.param_groups[-1]["params"] if p.requires_grad)
            except BaseException:
                self.param_groups.pop()
                raise

    def started(self) -> list[Tensor]:
        """Return parameters that have state, in order."""
        return self._parts.started()

    @torch.no_grad()
    def read_state(self, params: Iterable[Tensor]) -> dict[Tensor, dict[str, Any]]:
        """Return copies, on the CPU, of the state of some parameters. Local, blocking.

        Raises:
            StoreError: A read failed; nothing was changed.
        """
        return self._parts.read(params)

    @torch.no_grad()
    def write_state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Replace the state of some parameters. Local, blocking.

        Args:
            states: By parameter; entries as `state` gives them, of any dtype. {} removes.

        Raises:
            TornStepError: A read or write failed, and some states are replaced.
        """
        parts = self._usable("writing state")
        self._plan(states)
        parts.write(states)
        parts.flush()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Set masters from parameters that something else has written, such as loading. Local."""
        parts = self._parts
        parts.refresh()
        parts.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like the plain optimizer's.

        Its tensors are copies on the CPU, all in memory at once.
        """
        self._usable("state_dict()")
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or the plain optimizer saved. Local, blocking.

        Entries take the dtypes in which they are kept here. Masters that were not saved are made
        from the parameters: load those first. After a torn step this makes the optimizer usable
        again.
        """
        self._parts  # noqa: B018 - raises if closed
        load = partial(super().load_state_dict, state_dict)
        # torch would copy the state to the parameters' devices, so it loads param groups only.
        saved = load_by_torch(self, load, with_state=False)
        known = {p: entries for p, entries in saved.items() if entries or p.requires_grad}
        self._parts.mend()
        self.write_state(known)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.param_groups = state["param_groups"]
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> NoReturn:
        raise OffloadError(
            "an OffloadedOptimizer cannot be pickled or copied: its state may be on disk. Save "
            "state_dict(), and load it into another one"
        )

    def close(self) -> None:
        """Remove the hooks, and release the memory and the disk. Again: nothing happens."""
        parts, self._offloaded = self._offloaded, None
        if parts is not None:
            parts.close(keeps_store=self._own_store is None)
        if self._own_store is not None:
            self._own_store.close()

    # ---- Internals ----

    @property
    def _parts(self) -> OffloadedState:
        if self._offloaded is None:
            raise OffloadError("this OffloadedOptimizer is closed; make another one")
        return self._offloaded

    def _usable(self, what: str) -> OffloadedState:
        parts = self._parts
        parts.check(what)
        return parts

    def _plan(self, params: Iterable[Tensor]) -> None:
        """Allocate state for the parameters that have not been added yet."""
        if wanted := self._parts.unplanned(params):
            positions = {
                param: position
                for position, group in enumerate(self.param_groups)
                for param in group["params"]
            }
            self._parts.add({p: positions[p] for p in wanted}, self.param_groups)
