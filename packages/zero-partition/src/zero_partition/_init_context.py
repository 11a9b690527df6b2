"""Init: a model is built while each rank keeps its part of it only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from weakref import ReferenceType, ref

from attrs import define, field
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from zero_comm import CommError, Group, check_agreement

from ._construction import CURRENT
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
from ._guards import StateDictKind
from ._interception import Interception, tensors_among
from ._torch_compat import plainly
from ._whole_so_far import WholeSoFar, can_be_sharded

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
    raise, `copy.deepcopy` works. To change values before that, enter another `Init`. What is to
    partition the model inside the block does so in `with Init.suspended():`.

    Memory of parameters on a rank: its part of all, and the whole of those that the innermost
    running constructor owns or that are touched at the moment, and `batch_bytes`.

    Args:
        module: A module that exists already: its parameters are sharded at once.
        group: The ranks to distribute over.
        batch_bytes: Small parameters stay whole until there are so many bytes of them, and travel
            as one.
        timeout_s: How long to wait for ranks that do not build the same, in seconds.
        state_dict: With "placeholders", `state_dict()` has an empty tensor of every parameter that
            was sharded, inside the block and after it. Otherwise there are whole ones inside.

    Raises:
        PartitionError: A parameter is not dense and contiguous, or not on the group's device.
        zero_comm.AgreementError: Ranks build different models, or touch different parameters.
        zero_comm.CommError: A rank did not take part in time.
    """

    module: nn.Module | None = None
    group: Group = field(kw_only=True)
    batch_bytes: int = field(default=2**20, kw_only=True)
    timeout_s: float = field(default=60.0, kw_only=True)
    state_dict: StateDictKind = field(default="raise", kw_only=True)
    _outer: Init | None = field(default=None, init=False)
    _whole: WholeSoFar = field(factory=WholeSoFar, init=False)
    _sharded: list[ReferenceType[nn.Parameter]] = field(factory=list, init=False)
    _num_rounds: int = field(default=0, init=False)
    _undo: ExitStack | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.module is not None:
            with plainly():
                whole = [
                    (name, param)
                    for name, param in self.module.named_parameters()
                    if can_be_sharded(param)
                ]
                for batch in in_batches(whole, max_bytes=self.batch_bytes):
                    self._shard(batch)
                for child in self.module.modules():
                    guard_module(child)

    def __enter__(self) -> Init:
        if self._undo is not None:
            raise StateError("this Init is entered already; make another one to nest them")
        with ExitStack() as undo:
            self._outer = CURRENT.get()
            undo.callback(CURRENT.reset, CURRENT.set(self))
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
            if kind is None:  # else peers may not be here
                self._finish()
        finally:
            self._whole.clear()
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
        try:
            yield
        finally:
            CURRENT.reset(token)

    def _finish(self) -> None:
        """Shard all that is whole. Collective."""
        with plainly():
            self._find_replaced()
            self._settle(keep=(), at_end=True)

    def _before_call(self, args: object) -> None:
        """A torch function is about to run with these arguments: make sharded parameters whole."""
        if CURRENT.get() is None:  # see `suspended`
            return
        with plainly():
            tensors = list(tensors_among(args))
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
                self._whole.expect(module, [param])
            else:
                guard_module(module)

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if CURRENT.get() is self and child is not None:
            for found in child.modules():  # copies, and what was built elsewhere
                self._whole.expect_own(found)

    def _settle(self, *, keep: Sequence[Tensor], at_end: bool = False) -> None:
        """Shard what is whole and no longer in use, if it is worth a round."""
        if not at_end and (self._whole.num_bytes < self.batch_bytes or not self._whole.num_bytes):
            return
        ready = self._whole.take_ready(keep=keep, at_end=at_end)
        if ready:
            self._shard(ready)

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
        exports_empty = self.state_dict == "placeholders"
        shard_early(params, group=self.group, exports_empty=exports_empty)
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
        self._whole.touch(early.label, param)

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
