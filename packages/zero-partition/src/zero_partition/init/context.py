"""Init: a model is built while each rank keeps its part of it only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final
from weakref import ReferenceType, ref

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from zero_comm import CommError, Group, check_agreement

from zero_partition.errors import PartitionError, StateError
from zero_partition.plan.layout import in_batches
from zero_partition.plan.wire import whole_of
from zero_partition.stand_in import VALUES, NameOnly, end_export, export, names_of, tensors_among
from zero_partition.torch_private import (
    forward_pre_hooks,
    num_viewers,
    own_parameters,
    plainly,
    state_dict_hooks,
    state_dict_pre_hooks,
)

from .early_shard import (
    CURRENT,
    EarlyShard,
    allow_uses,
    find_aliased,
    find_early,
    forbid_uses,
    forget_early,
    shard_early,
)
from .units import check_parameter


def module_under_construction() -> nn.Module | None:
    """The module whose `__init__` is the innermost on this thread's stack. Local.

    Seen from the stack, no class has to be patched: neither those that exist nor those that are
    defined meanwhile. A wrong answer costs time and no correctness: what is sharded too early is
    gathered when it is touched.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None


def refuse_forward(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: before shard() there is a forward inside Init only."""
    name = next(iter(_stand_ins_of(module)), None)
    if name is not None and CURRENT.get() is None:
        raise StateError(
            f"forward of a {type(module).__name__} whose parameter {name!r} was sharded by "
            "Init: call zero_engine.shard(model, optimizer, config) first"
        )


def before_export(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """state_dict pre-hook: outside Init there are names, and no values."""
    if CURRENT.get() is None and not keep_vars:
        remedy = (
            "parameter %r was sharded by Init: call zero_engine.shard(model, ...) first, and then "
            "zero_engine.full_state_dict(model) on every rank"
        )
        names = {
            name: partial(NameOnly.of, early.parameter, remedy % (prefix + name))
            for name, early in _stand_ins_of(module).items()
        }
        export(module, names)


def _stand_ins_of(module: nn.Module) -> dict[str, EarlyShard]:
    """Return early shards, by name, of the module's own parameters that are not gathered now."""
    own = {name: find_early(p) for name, p in own_parameters(module).items() if p is not None}
    return {name: early for name, early in own.items() if early and not early.is_gathered}


def guard_module(module: nn.Module) -> None:
    """Let the module refuse what would read stand-ins. Plain functions: copies share them."""
    if refuse_forward not in forward_pre_hooks(module).values():
        module.register_forward_pre_hook(refuse_forward, prepend=True)
        module.register_state_dict_pre_hook(before_export)
        module.register_state_dict_post_hook(end_export)


def unguard_module(module: nn.Module) -> None:
    """Undo `guard_module`, if it was done."""
    for hooks, ours in (
        (forward_pre_hooks(module), refuse_forward),
        (state_dict_pre_hooks(module), before_export),
        (state_dict_hooks(module), end_export),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]


class Interception(TorchFunctionMode):
    """Calls something with the arguments of every torch function that may read or write them."""

    def __init__(self, before_call: Callable[[object], None]) -> None:
        super().__init__()
        self._before_call = before_call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _asks_no_values(func):
            self._before_call((args, kwargs))
        return func(*args, **(kwargs or {}))


_ASKS_NO_VALUES: Final = {
    *("dim", "size", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("__len__", "__hash__", "__repr__"),  # one rank may print
}


def _asks_no_values(func: Callable[..., Any]) -> bool:
    name, attribute = names_of(func)
    return attribute not in VALUES if attribute else name in _ASKS_NO_VALUES


def can_be_sharded(param: nn.Parameter) -> bool:
    """Return whether a parameter has values (is not on meta, not lazy) and no early shard yet."""
    return not param.is_meta and not is_lazy(param) and find_early(param) is None


def _is_ready(param: nn.Parameter, keep: Sequence[Tensor] | None) -> bool:
    if not can_be_sharded(param):
        return False
    return keep is None or not (num_viewers(param) > 1 or any(param is kept for kept in keep))


def _whole_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: param
        for name, param in own_parameters(module).items()
        if param is not None and find_early(param) is None
    }


def _bytes_of(param: nn.Parameter) -> int:
    return 0 if param.is_meta or is_lazy(param) else param.nbytes


# NOTE(touch): nothing is patched. torch tells us of every parameter and module that is registered
# (its own global hooks), and of every torch function that is called (a mode of this thread). A
# function that is given a sharded parameter finds it whole; what is whole and no longer in use is
# sharded before the next function runs. So `apply`, `nn.init`, `.data`, `.to()`, a forward and
# whatever else a constructor does to its children work, because all of them are torch functions.
# "In use" is asked of the storage: while a view of a parameter lives, a write through it may come.

# NOTE(order): sharding and gathering are collective, and happen where the program is, so all ranks
# must build the same model by the same calls. Each round is agreed on first: ranks that differ get
# an error that names the parameter, not a hang.


@define(eq=False)
class Init:
    """Shard parameters while a model is built, so that no rank has all of them. Collective.

        with Init(group=group):
            model = Model()
        partition(model, optimizer, group=group)

    Inside, what is created without a device is on the group's device; if another default device
    than the CPU is set, as by `with torch.device("meta")`, it is there. A module's own parameters
    are sharded soon after its constructor has ended. Code that uses one later (a parent's
    constructor, `module.apply(fn)`, `nn.init`, `.data`, a forward) gets it whole, and what it
    writes stays. Values are those of plain construction on rank 0, bit for bit, whatever the other
    ranks' seeds. Buffers stay whole; partition() gives all ranks those of rank 0. Parameters on the
    meta device stay there.

    After it, until `partition` adopts the parameters, a use of their values, forward and
    `state_dict()` raise; `copy.deepcopy` works. To change values, enter another `Init`. What is to
    partition the model inside the block does so in `with Init.suspended():`.

    Memory of parameters on a rank: its part of all, and the whole of those that the innermost
    running constructor owns or that are touched at the moment, and `batch_bytes`.

    Args:
        module: A module that exists already: its parameters are sharded at once.
        group: The ranks to distribute over, as for `partition`.
        batch_bytes: Small parameters stay whole until there are so many bytes of them, and travel
            as one.
        timeout_s: How long to wait for ranks that do not build the same, in seconds.

    Raises:
        PartitionError: A parameter is not dense and contiguous, or not on the group's device.
        zero_comm.AgreementError: Ranks build different models, or touch different parameters.
        zero_comm.CommError: A rank did not take part in time.
    """

    module: nn.Module | None = None
    group: Group = field(kw_only=True, converter=whole_of)
    batch_bytes: int = field(default=2**20, kw_only=True)
    timeout_s: float = field(default=60.0, kw_only=True)
    _outer: Init | None = field(default=None, init=False)
    # What is to be sharded as soon as it can be: all that these modules own, and sharded parameters
    # that were touched; and their bytes, at most. Modules are kept alive: when garbage is collected
    # must not decide what ranks agree on.
    _modules: dict[int, nn.Module] = field(factory=dict, init=False)
    _touched: list[tuple[str, nn.Parameter]] = field(factory=list, init=False)
    _whole_bytes: int = field(default=0, init=False)
    _sharded: list[ReferenceType[nn.Parameter]] = field(factory=list, init=False)
    _num_rounds: int = field(default=0, init=False)
    _undo: ExitStack | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.module is not None:
            with plainly():
                named = self.module.named_parameters()
                whole = [(name, param) for name, param in named if can_be_sharded(param)]
                batches = in_batches(whole, lambda item: item[1].nbytes, max_bytes=self.batch_bytes)
                for batch in batches:
                    self._shard(batch)
                for child in self.module.modules():
                    guard_module(child)

    def __enter__(self) -> Init:
        if self._undo is not None:
            raise StateError("this Init is entered already; make another one to nest them")
        with ExitStack() as undo:
            self._outer = CURRENT.get()
            if self._outer is None:
                allow_uses()
                undo.callback(forbid_uses)
            undo.callback(CURRENT.reset, CURRENT.set(self))
            if self.group.device.type != "cpu" and torch.get_default_device().type == "cpu":
                undo.enter_context(self.group.device)
            for register, hook in (
                (register_module_parameter_registration_hook, self._on_parameter),
                (register_module_module_registration_hook, self._on_module),
            ):
                undo.callback(register(hook).remove)
            undo.enter_context(Interception(self._before_call))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        assert self._undo is not None, "it was entered"
        try:
            # After an exception, peers may not be here.
            if kind is None:
                self._finish()
        finally:
            self._forget_whole()
            self._sharded.clear()
            undo, self._undo, self._outer = self._undo, None, None
            undo.close()

    @staticmethod
    @contextmanager
    def suspended() -> Iterator[None]:
        """Inside, no Init of this thread watches: what was built is as after its block. Collective.

        Yields:
            Nothing. Outside every Init this does nothing.
        """
        running: Init | None = CURRENT.get()
        while running is not None:
            running._finish()
            running = running._outer
        token = CURRENT.set(None)
        forbid_uses()
        try:
            yield
        finally:
            CURRENT.reset(token)
            if CURRENT.get() is not None:
                allow_uses()

    def _finish(self) -> None:
        """Shard all that is whole. Collective."""
        with plainly():
            self._find_replaced()
            self._reshard_unused(None)

    def _before_call(self, args: object) -> None:
        """A torch function is about to run with these arguments: make sharded parameters whole."""
        if CURRENT.get() is None:  # see `suspended`
            return
        with plainly():
            tensors = tensors_among(args)
            self._reshard_unused(tensors)
            for tensor in tensors:
                early = find_early(tensor)
                if early is not None:
                    self._unshard(tensor, early)

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if CURRENT.get() is not self or param is None:
            return
        with plainly():
            aliased = find_aliased(param)
            if aliased is not None:
                aliased.install_copy(param)
            elif find_early(param) is None:
                self._expect(module, [param])
            else:
                guard_module(module)

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if CURRENT.get() is self and child is not None:
            # The child may be a copy, or was built outside of this context.
            for found in child.modules():
                if id(found) not in self._modules and (whole := _whole_of(found)):
                    self._expect(found, whole.values())

    def _expect(self, module: nn.Module, params: Iterable[nn.Parameter]) -> None:
        self._modules[id(module)] = module
        self._whole_bytes += sum(map(_bytes_of, params))

    def _touch(self, label: str, param: nn.Parameter) -> None:
        self._touched.append((label, param))
        self._whole_bytes += _bytes_of(param)

    def _forget_whole(self) -> None:
        self._modules, self._touched, self._whole_bytes = {}, [], 0

    def _reshard_unused(self, keep: Sequence[Tensor] | None) -> None:
        """Shard what is whole and no longer in use, if it is worth a round.

        Args:
            keep: What is about to be used. None: nothing is in use any more.
        """
        if keep is not None and self._whole_bytes < max(self.batch_bytes, 1):
            return
        ready: dict[int, tuple[str, nn.Parameter]] = {}
        building = None if keep is None else module_under_construction()
        modules, touched = self._modules.values(), self._touched
        self._forget_whole()
        for module in modules:
            for name, param in _whole_of(module).items():
                if module is not building and _is_ready(param, keep):
                    ready.setdefault(id(param), (f"{type(module).__name__}.{name}", param))
                    guard_module(module)
                else:
                    self._expect(module, [param])
        for label, param in touched:
            if _is_ready(param, keep):
                ready.setdefault(id(param), (label, param))
            elif can_be_sharded(param):
                self._touch(label, param)
        if ready:
            self._shard(list(ready.values()))

    def _shard(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        for label, param in params:
            check_parameter(param, label)
            if param.device != self.group.device:
                raise PartitionError(
                    f"parameter {label!r} is on {param.device}, but the group communicates on "
                    f"{self.group.device} (rank {self.group.rank}); build the model inside `with "
                    f"torch.device({str(self.group.device)!r}):`"
                )
        self._agree("shard", params)
        shard_early(params, group=self.group)
        self._sharded += [ref(param) for _, param in params]

    def _unshard(self, param: Tensor, early: EarlyShard) -> None:
        assert isinstance(param, nn.Parameter), "only parameters are sharded"
        if not early.is_replaced(param):
            early.check_untouched(param, early.label)
            self._agree("gather", [(early.label, param)])
            try:
                param.data = early.whole(timeout_s=self.timeout_s)
            except CommError as error:
                raise CommError(
                    f"gathering {early.label} inside Init: {error}"
                ) from error.__cause__
        forget_early(param)
        self._touch(early.label, param)

    def _find_replaced(self) -> None:
        """Drop shards of parameters with other memory now, and check that others are as they were.

        Functions such as `Tensor.set_`, which are hidden from modes, replace memory unnoticed.
        """
        for known in self._sharded:
            param = known()
            if param is None or (early := find_early(param)) is None:
                continue
            if early.is_replaced(param):
                self._unshard(param, early)
            else:
                early.check_untouched(param, early.label)

    def _agree(self, verb: str, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Check that all ranks shard or gather the same parameters; see NOTE(order). Collective."""
        self._num_rounds += 1
        what = ", ".join(f"{label} {tuple(param.shape)} {param.dtype}" for label, param in params)
        facts = {f"what to do in round {self._num_rounds} of Init": f"{verb} {what}"}
        check_agreement(facts, group=self.group, timeout_s=self.timeout_s)
