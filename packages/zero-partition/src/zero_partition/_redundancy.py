"""Any torch optimizer under DistributedDataParallel, with its state sharded by whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from zero_comm import AgreementError, Group, check_agreement

from ._balance import Balance
from ._chained import options_of
from ._consolidated import Consolidated
from ._consolidation import consolidate
from ._errors import StateError
from ._given_state import check_state, names_of, own_state
from ._independence import check_independence, check_params
from ._overlap import StepInBackward, only
from ._ownership import Ownership, copy_options
from ._publication import AGREE_TAG, PURPOSES, Facts, Publication

_TIMEOUT_S: Final = 60.0


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Stage 1 in one line, for a loop with DistributedDataParallel.

    Each parameter belongs to one rank, whose optimizer updates it and has its state; after each
    step its owner sends it to the others. Parameters are dealt whole, the largest first, to the
    rank that has least, so any optimizer works that treats them one by one, matrix-wise ones too.
    No rank keeps more state than the N-th part and that of one parameter, where state is as large
    as its parameter or a multiple of it.

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Every rank makes it, steps, adds param groups and freezes or unfreezes parameters alike. The
    weights are those of plain DDP with the same optimizer.

    Attributes:
        optim: This rank's optimizer, over its own parameters.
        group: The ranks.
        state: This rank's, by its own parameters. `param_groups` have those of all ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        group: Group | Any = None,
        parameters_as_bucket_view: bool = False,
        *,
        process_group: Any = None,
        **defaults: Any,
    ) -> None:
        """Deal the parameters and make this rank's optimizer. Collective.

        Args:
            params: Parameters, (name, parameter) pairs, or dicts of them and options, as any
                optimizer takes them; generators too. Dicts given are not changed. Names are used in
                messages.
            optimizer_class: What to make, of any optimizer that treats parameters one by one.
            group: A zero_comm.Group or torch's ProcessGroup; the default process group when None.
            parameters_as_bucket_view: Whether trainable parameters become views of one buffer, from
                which they are sent and into which they are received without a copy. `param.data`
                then changes its address; if it is given another later, its values are copied back.
            process_group: Torch's name for `group`.
            **defaults: Options of `optimizer_class`.

        Raises:
            PartitionError: The optimizer updates parameters together, not one by one (LBFGS), or a
                parameter is sparse or on the meta device.
            TypeError: Both `group` and `process_group`, or torch's `overlap_with_ddp`.
            zero_comm.AgreementError: Ranks have different parameters, or one cannot make its
                optimizer; that one raises what its optimizer raised.
            zero_comm.CommError: torch.distributed is not initialised and `group` is None, or a rank
                did not take part within 60 s.
        """
        if "overlap_with_ddp" in defaults:
            raise TypeError(
                "expected options of the optimizer, got overlap_with_ddp: call "
                "optimizer.overlap_with_ddp(ddp_model, allreduce_hook) instead, once"
            )
        if group is not None and process_group is not None:
            raise TypeError("expected group or process_group, which are one, got both")
        group = process_group if group is None else group
        self.group = group if isinstance(group, Group) else Group.from_process_group(group)
        self._optimizer_class, self._options = optimizer_class, defaults
        self._kind = getattr(optimizer_class, "__name__", repr(optimizer_class))
        self._in_place = parameters_as_bucket_view
        self._ownership = Ownership(self.group.rank, Balance.of(self.group.world_size))
        self._whole: Consolidated | None = None
        self._in_backward: StepInBackward | None = None
        self._is_made = False
        self.group.explain(PURPOSES)
        super().__init__(params, dict(defaults))
        self._ownership.deal(self._all_params())
        self._together(self._make)
        copy_options(self.optim.param_groups, self.param_groups)
        self.defaults = dict(self.optim.defaults)
        self.state = self.optim.state
        self._publication = self._plan()
        self._is_made = True

    # ---- Parameters ----

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of the parameters that each rank updates, in rank order: how even they are."""
        return tuple(self._ownership.balance.bytes_per_rank)

    def owner_of(self, param: Tensor) -> int:
        """The rank that updates a parameter and has its state. Local.

        Raises:
            PartitionError: It is in no param group.
        """
        return self._ownership.owner_of(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Deal the parameters of one more group. Collective; the dict is not changed.

        Those that were dealt before stay with their rank.

        Raises:
            zero_comm.AgreementError: Ranks add different parameters, or the optimizer of one cannot
                take them; that one raises what its optimizer raised. Nothing was added.
        """
        is_dict = isinstance(param_group, dict)
        super().add_param_group(dict(param_group) if is_dict else param_group)
        if not self._is_made:
            return  # called by torch's constructor
        group = self.param_groups[-1]
        self._ownership.deal(group["params"])
        try:
            self._together(self._extend)
        except BaseException:
            self._ownership.forget(group["params"])
            del self.param_groups[-1]
            del self.optim.param_groups[len(self.param_groups) :]  # where it took them
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self._plan_again()

    # ---- The step ----

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's parameters and give every rank all of them. Collective; blocks.

        Changes of `param_groups` (a scheduler's) reach the optimizer, and its changes of them come
        back. A parameter may have been frozen or unfrozen since the last step, on all ranks.

        Args:
            closure: Computes the loss again, with gradients; called as often as the optimizer calls
                it, on each rank.
            **options: For the optimizer's own `step`.

        Returns:
            What the optimizer's `step` returns.
        """
        if self._in_backward is not None:  # backward has stepped
            with torch.enable_grad():
                return None if closure is None else closure()
        loss = self._update(closure, **options)
        self._follow()
        self._publication.publish()
        return loss

    def overlap_with_ddp(
        self,
        model: Any,
        reduce: Callable[[Any, Any], torch.futures.Future],
        state: Any = None,
    ) -> None:
        """Step within backward from now on: bucket by bucket, while DDP reduces the next. Local.

        It registers a communication hook. Every backward that synchronises gradients then updates
        all parameters, from the first one on, by the options they have in `param_groups` by then;
        `step()` has nothing left to do and may stay in the loop, and accumulation needs
        `model.no_sync()`. Gradients cannot be clipped or unscaled before they are used. The
        optimizer steps once per bucket, on the parameters of that bucket: one that counts its steps
        elsewhere than in the state of each parameter counts too many. Under
        `find_unused_parameters` an unused parameter steps with a gradient of zeros.

            optimizer.overlap_with_ddp(model, default_hooks.allreduce_hook)

        Args:
            model: The DistributedDataParallel, on every rank.
            reduce: The communication hook that reduces a bucket, such as those of
                `torch.distributed.algorithms.ddp_comm_hooks`.
            state: What that hook gets as its first argument.

        Raises:
            StateError: Called twice.
        """
        if self._in_backward is not None:
            raise StateError("overlap_with_ddp() was called before; make another optimizer")
        self._in_backward = StepInBackward(self._publication, self._update_some, reduce)
        take = self._in_backward.take

        def hook(state, bucket):  # no annotations: DDP compares them with types, and they are text
            return take(state, bucket)

        model.register_comm_hook(state, hook)

    def _update_some(self, grads: Mapping[Tensor, Tensor]) -> None:
        with only(self.optim, grads):
            self._update()

    def _update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step this rank's optimizer. Local, but for a closure."""
        if self._whole is not None:
            self._whole.detach()
        copy_options(self.param_groups, self.optim.param_groups)
        given = () if closure is None else (closure,)
        loss = self.optim.step(*given, **options)
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _follow(self) -> None:
        """Plan again if parameters were frozen, unfrozen, moved or converted. Collective then."""
        if self._publication.facts != tuple(map(Facts.of, self._publication.params)):
            self._agree()
            self._plan_again()

    # ---- State ----

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Put the whole state together in host memory, for `state_dict()`. Collective; blocks.

        Tensors travel one at a time and without pickling. The receiver needs memory for what it
        lacks and one tensor more; what it has itself is copied only if it steps again.

        Args:
            to: The rank that receives it, a position in the group; None for all ranks.

        Raises:
            StateError: The state of some parameter holds what is no tensor, number, string, or
                list, tuple or dict of these; or `to` is no rank. On every rank.
        """
        if to is not None and not 0 <= to < self.group.world_size:
            raise StateError(
                f"consolidate_state_dict(): expected a rank below {self.group.world_size}, or None "
                f"for all, got {to}"
            )
        self._whole = None
        params = self._all_params()
        mine = {
            number: self.optim.state[param]
            for number, param in enumerate(params)
            if param in self.optim.state
        }
        whole = consolidate(mine, to=to, group=self.group)
        if whole is not None:
            self._whole = Consolidated.of(params, whole, mine)

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters as of the last consolidation, and the options as of now.

        It is that of the plain optimizer, which loads it, as does a ZeroRedundancyOptimizer of any
        number of ranks. Local.

        Raises:
            StateError: It was not consolidated on this rank.
        """
        mine = self.state
        self.state = self._consolidated().state  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def local_state_dict(self) -> dict[str, Any]:
        """The state of this rank's own parameters, numbered among themselves. Local."""
        copy_options(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    def rank_local_state_dict(self, rank: int) -> dict[str, Any]:
        """What `local_state_dict()` of a rank was when the state was consolidated here. Local.

        Raises:
            StateError: It was not consolidated on this rank, or there is no such rank.
        """
        whole = self._consolidated().state
        if not 0 <= rank < self.group.world_size:
            raise StateError(f"expected a rank below {self.group.world_size}, got {rank}")
        state: dict[int, Any] = {}
        groups, count = [], 0
        for group in self.param_groups:
            own = self._ownership.own(group["params"], rank)
            numbers = range(count, count + len(own))
            count += len(own)
            state.update({n: whole[p] for n, p in zip(numbers, own, strict=True) if p in whole})
            groups.append({**options_of(group), "params": list(numbers)})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a whole state, each rank that of its own parameters. Local; call it on all.

        The state may come from the plain optimizer, or from any number of ranks. It is copied: the
        dict and its tensors are neither changed now nor by later steps. A parameter without state
        begins anew, as in the plain optimizer.

        Raises:
            LoadError: Names each parameter with entries that are missing, unexpected or of another
                shape, or param groups of other sizes; the same on every rank. Nothing was written.
        """
        check_state(state_dict, self, self._optimizer_class, self._options)
        params = self._all_params()
        is_own = [self.owner_of(param) == self.group.rank for param in params]
        state, groups = own_state(state_dict, is_own)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        own = [param for group in self.optim.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(own)}
        state = {numbers[param]: of_param for param, of_param in self.state.items()}
        groups = self.optim.state_dict()["param_groups"]
        copy_options(self.param_groups, groups)
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self.state = self.optim.state

    # ---- Inside ----

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _make(self) -> None:
        """Make this rank's optimizer. Local."""
        check_params(self)
        groups = [self._ownership.own_part(group) for group in self.param_groups]
        self.optim = self._optimizer_class(groups, **self._options)  # type: ignore[arg-type]
        check_independence(self.optim, self)

    def _extend(self) -> None:
        """Give this rank's optimizer its part of the last param group. Local."""
        check_params(self)
        self.optim.add_param_group(self._ownership.own_part(self.param_groups[-1]))

    def _together(self, attempt: Callable[[], None]) -> None:
        """Do what may fail on some ranks alone; if it does, all raise. Collective."""
        problem: Exception | None = None
        try:
            attempt()
        except Exception as error:
            problem = error
        said = "" if problem is None else f"{type(problem).__name__}: {problem}"
        try:
            self._agree({f"what speaks against {self._kind}": said})
        except AgreementError:
            if problem is None:
                raise
        if problem is not None:
            raise problem

    def _agree(self, facts: Mapping[str, str] | None = None) -> None:
        """Raise unless all ranks have the same parameters in the same groups. Collective."""
        facts = dict(facts or {})
        facts["optimizer"] = self._kind
        sizes = [len(group["params"]) for group in self.param_groups]
        facts["parameters in param groups"] = str(sizes)
        for name, param in zip(names_of(self), self._all_params(), strict=True):
            of = Facts.of(param)
            how = "trains" if of.travels else "is frozen"
            facts[name] = f"{how}, {tuple(of.shape)} with strides {of.stride}, {of.dtype}"
        check_agreement(facts, group=self.group, tag=AGREE_TAG, timeout_s=_TIMEOUT_S)

    def _plan(self) -> Publication:
        params = self._all_params()
        owners = [self._ownership.owners[param] for param in params]
        return Publication.plan(self.group, params, owners, in_place=self._in_place)

    def _plan_again(self) -> None:
        before, self._publication = self._publication, self._plan()
        before.release()
        if self._in_backward is not None:
            self._in_backward.follow(self._publication)

    def _consolidated(self) -> Consolidated:
        if self._whole is None:
            rank = self.group.rank
            raise StateError(
                "Optimizer state has not been consolidated on this rank. Call "
                f"`consolidate_state_dict(to={rank})` on all ranks beforehand, or "
                "`local_state_dict()` for what this rank has"
            )
        return self._whole
