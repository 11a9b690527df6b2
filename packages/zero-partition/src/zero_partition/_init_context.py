"""Init: a model is built while each rank keeps its part of it only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final
from weakref import ReferenceType, ref

from attrs import define, field
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from zero_comm import CommError, Group, check_agreement

from ._construction import CURRENT, module_under_construction
from ._early_guards import guard_module
from ._early_shard import (
    EarlyShard,
    find_aliased,
    find_early,
    forget_early,
    in_batches,
    shard_early,
)
from ._errors import PartitionError, StateError
from ._grouping import check_parameter
from ._torch_compat import is_viewed, plainly

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
    """Shard parameters while a model is built, so that no rank ever holds the whole. Collective.

        with Init(group=group):
            model = Model()
        partition(model, optimizer, group=group)

    Inside, a module's own parameters are sharded soon after its constructor has ended. Whoever
    touches one later (a parent's constructor, `module.apply(fn)`, `nn.init`, `.data`, a forward)
    finds it whole, and what is written stays. Values are those of plain construction on rank 0,
    bit for bit, whatever the other ranks' seeds. Buffers stay whole; partition() gives all ranks
    those of rank 0. Parameters on the meta device stay there.

    After it, parameters read as NaN until `partition` adopts them; forward and `state_dict()`
    raise, `copy.deepcopy` works. To change values before that, enter another `Init`.

    Memory of parameters on a rank: its part of all, and the whole of those that the innermost
    running constructor owns or that are touched at the moment, and `batch_bytes`.

    Args:
        module: A module that exists already: its parameters are sharded at once.
        group: The ranks to distribute over.
        batch_bytes: Small parameters stay whole until there are so many bytes of them, and travel
            as one.
        timeout_s: How long to wait for ranks that do not build the same, in seconds.

    Raises:
        PartitionError: A parameter is not dense and contiguous, or not on the group's device.
        zero_comm.AgreementError: Ranks build different models, or touch different parameters.
        zero_comm.CommError: A rank did not take part in time.
    """

    module: nn.Module | None = None
    group: Group = field(kw_only=True)
    batch_bytes: int = field(default=2**20, kw_only=True)
    timeout_s: float = field(default=60.0, kw_only=True)
    # Held alive until they are sharded: when garbage goes must not decide what ranks agree on.
    _modules: dict[int, nn.Module] = field(factory=dict, init=False)
    _touched: list[tuple[str, nn.Parameter]] = field(factory=list, init=False)  # whole again
    _sharded: list[ReferenceType[nn.Parameter]] = field(factory=list, init=False)
    _whole_bytes: int = field(default=0, init=False)  # at most, of what could be sharded
    _num_rounds: int = field(default=0, init=False)
    _undo: ExitStack | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.module is not None:
            with plainly():
                whole = [
                    (name, param)
                    for name, param in self.module.named_parameters()
                    if _can_be_sharded(param)
                ]
                for batch in in_batches(whole, max_bytes=self.batch_bytes):
                    self._shard(batch)
                for child in self.module.modules():
                    guard_module(child)

    def __enter__(self) -> Init:
        if self._undo is not None:
            raise StateError("this Init is entered already; make another one to nest them")
        with ExitStack() as undo:
            undo.callback(CURRENT.reset, CURRENT.set(self))
            for register, hook in (
                (register_module_parameter_registration_hook, self._on_parameter),
                (register_module_module_registration_hook, self._on_module),
            ):
                undo.callback(register(hook).remove)
            undo.enter_context(_Interception(self))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        assert self._undo is not None, "it was entered"
        try:
            if kind is None:  # else peers may not be here
                with plainly():
                    self._find_replaced()
                    self._settle(keep=(), at_end=True)
        finally:
            self._modules.clear()
            self._touched.clear()
            self._sharded.clear()
            undo, self._undo = self._undo, None
            undo.close()

    def before_call(self, args: object) -> None:
        """A torch function is about to run with these arguments: make sharded parameters whole."""
        with plainly():
            tensors = list(_tensors_in(args))
            self._settle(keep=tensors)
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
            for found in child.modules():  # copies, and what was built elsewhere
                if id(found) not in self._modules:
                    whole = [p for p in _own_parameters(found).values() if find_early(p) is None]
                    if whole:
                        self._expect(found, whole)

    def _expect(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self._modules[id(module)] = module
        self._whole_bytes += sum(_bytes_of(param) for param in params)

    def _settle(self, *, keep: Sequence[Tensor], at_end: bool = False) -> None:
        """Shard what is whole and no longer in use, if it is worth a round."""
        if not at_end and (self._whole_bytes < self.batch_bytes or not self._whole_bytes):
            return
        ready: dict[int, tuple[str, nn.Parameter]] = {}

        def is_ready(param: nn.Parameter) -> bool:
            if at_end:
                return True
            return not any(param is kept for kept in keep) and not is_viewed(param)

        building = None if at_end else module_under_construction()
        modules, self._modules = self._modules, {}
        self._whole_bytes = 0
        for module in modules.values():
            rest = {
                name: param
                for name, param in _own_parameters(module).items()
                if find_early(param) is None
            }
            chosen = {
                name: param
                for name, param in rest.items()
                if module is not building and _can_be_sharded(param) and is_ready(param)
            }
            for name, param in chosen.items():
                ready.setdefault(id(param), (f"{type(module).__name__}.{name}", param))
            if chosen:
                guard_module(module)
            if len(chosen) < len(rest):
                self._expect(module, [param for name, param in rest.items() if name not in chosen])
        touched, self._touched = self._touched, []
        for label, param in touched:
            if find_early(param) is not None or not _can_be_sharded(param):
                continue
            if is_ready(param):
                ready.setdefault(id(param), (label, param))
            else:
                self._touched.append((label, param))
                self._whole_bytes += _bytes_of(param)
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
        if early.is_replaced(param):
            self._take_back(param, early)
            return
        early.check_untouched(param, early.label)
        self._agree("gather", [(early.label, param)])
        try:
            whole = early.whole(timeout_s=self.timeout_s)
        except CommError as error:
            raise CommError(f"gathering {early.label} inside Init: {error}") from error
        param.data = whole
        self._take_back(param, early)

    def _take_back(self, param: nn.Parameter, early: EarlyShard) -> None:
        forget_early(param)
        self._touched.append((early.label, param))
        self._whole_bytes += _bytes_of(param)

    def _find_replaced(self) -> None:
        """Few functions, such as `Tensor.set_`, are hidden from modes; their effect is not."""
        for known in self._sharded:
            param = known()
            early = None if param is None else find_early(param)
            if param is None or early is None:
                continue
            if early.is_replaced(param):
                self._take_back(param, early)
            else:
                early.check_untouched(param, early.label)

    def _agree(self, verb: str, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """See NOTE(order)."""
        self._num_rounds += 1
        what = ", ".join(f"{label} {tuple(param.shape)} {param.dtype}" for label, param in params)
        facts = {f"what to do in round {self._num_rounds} of Init": f"{verb} {what}"}
        check_agreement(facts, group=self.group, timeout_s=self.timeout_s)


class _Interception(TorchFunctionMode):
    """Tells an Init of every torch function before it runs."""

    def __init__(self, init: Init) -> None:
        super().__init__()
        self._init = init

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _asks_no_values(func):
            self._init.before_call((args, kwargs))
        return func(*args, **kwargs)


_GIVES_VALUES: Final = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes
_ASKS_NO_VALUES: Final = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.__len__,
    Tensor.__hash__,
    Tensor.__repr__,  # one rank may print
}


def _asks_no_values(func: Callable[..., Any]) -> bool:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _GIVES_VALUES
    return func in _ASKS_NO_VALUES


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors among arguments; long lists of numbers are not read through."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(tuple(value.values()))
    elif isinstance(value, tuple) or (isinstance(value, list) and _may_hold_tensors(value)):
        for item in value:
            yield from _tensors_in(item)


def _may_hold_tensors(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], Tensor | list | tuple | Mapping)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def _bytes_of(param: nn.Parameter) -> int:
    return 0 if param.is_meta or is_lazy(param) else param.nbytes


def _can_be_sharded(param: nn.Parameter) -> bool:
    """On the meta device, and in lazy modules, there is nothing yet."""
    return not param.is_meta and not is_lazy(param) and find_early(param) is None
