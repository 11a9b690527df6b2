"""For the sanitizer: calls of single objects that are checked, and launches that are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from threading import Thread, get_ident
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from .agreement import all_gather_json
from .calls import (
    CAUSES,
    advice,
    collective_call,
    in_call_of,
    in_lines,
    is_collective,
    main_stack,
    of_user,
)
from .errors import AgreementError
from .group import Group
from .shared_host.peer_memory import any_peers
from .watch import Purpose

_LOG: Final = logging.getLogger("zero_comm")
# No other collective has this tag, or one of the next below it. A report shows so many launches.
_TAG: Final = -1
_NUM_TAGS: Final = 16
# Object -> the checks around its methods.
_CHECKS: Final[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def check_calls(each: Any, verbs: str, checks: Any) -> None:
    """Let `checks.verb(call, each, ...)` stand for these methods of one object. Local.

    They are wrapped in its class, for good; other objects then pay one look-up for each call.
    """
    _CHECKS[each] = checks
    for verb in verbs.split():
        method = getattr(type(each), verb)
        if not hasattr(method, "zero_checked"):
            setattr(type(each), verb, _checked(method, verb.strip("_")))


def _checked(method: Callable[..., Any], verb: str) -> Callable[..., Any]:
    # Attributes are not copied: the mark of `ranged` stays with the method alone.
    @wraps(method, updated=())
    def run(self: Any, *args: Any, **named: Any) -> Any:
        if (checks := _CHECKS.get(self)) is None:
            return method(self, *args, **named)
        return getattr(checks, verb)(partial(method, self), self, *args, **named)

    run.zero_checked = True  # type: ignore[attr-defined]
    return run


class CompareLaunches:
    """Ranks tell each other what they launch on a group, before they do; see `check_calls`.

    Operation, numels, bytes of an element, codec and purpose are compared; dtypes are not, nor are
    control traffic and what other `Group` objects launch. Where ranks launch different things, the
    launch raises AgreementError on all of them.
    """

    number = 0  # of comparisons; equal on ranks that have passed them
    # Where ranks have first come to the same launch from different lines.
    parted = ""

    def count(self, call: Callable[..., None], group: Group, *args: Any, **named: Any) -> None:
        """Traffic is counted right before each launch."""
        name, _, numels, *rest = args
        if named.get("calls", 1) and name != "agree":
            purpose = group.purposes.get(named.get("tag", 0), Purpose("no known purpose"))
            # Sizes are not compared in a gather to one rank, where each counts what it sends.
            size = "" if name == "gather" else f" of {numels} elements of {rest[-2]} bytes"
            codec = f", encoded as {rest[-1]}" if rest[-1] else ""
            self.compare(f"{purpose.what} ({name}{size}{codec})", group, purpose.remedy)
        call(*args, **named)

    def compare(self, what: str, group: Group, remedy: str) -> None:
        """Compare what ranks are about to do. Collective.

        Raises:
            AgreementError: They are about to do different things; ends with the remedy.
        """
        self.number += 1
        tag = _TAG - self.number % _NUM_TAGS
        group.purposes[tag] = Purpose(what, remedy)
        call = what if is_collective(what) else collective_call()
        lines = [str(place) for place in of_user(main_stack())]
        said = _exchange((what, call, remedy, lines), group, tag)
        for rank, theirs in enumerate(said):
            if theirs[0] != said[0][0]:
                self._refuse({0: said[0], rank: theirs}, group.rank)
        for rank, (*_, its_lines) in enumerate(said):
            if its_lines != said[0][3] and not self.parted:
                one, its = _lines_apart(said[0][3], its_lines)
                self.parted = (
                    f"ranks came to {what.partition(' (')[0]} from different lines: rank 0 from "
                    f"{one}, rank {rank} from {its}; one of them may be what not all ranks run"
                )
                if group.watch is not None:
                    group.watch.remark(f"before, {self.parted}")
                if group.rank in (0, rank):
                    _LOG.warning("zero_comm: %s, if an error follows", self.parted)

    def _refuse(self, sides: Mapping[int, Any], rank: int) -> NoReturn:
        what, calls, remedies, lines = (
            {each: said[at] for each, said in sides.items()} for at in range(4)
        )
        (first, other), (one, its) = sides, _lines_apart(*lines.values())
        for each, call in calls.items():
            if call and call not in what[each]:
                what[each] = f"{call}: {what[each]}"
        raise AgreementError(
            in_lines(
                f"ranks disagree on the next collective (seen on rank {rank}):",
                f"rank {first} has {what[first]} at {one}",
                f"rank {other} has {what[other]} at {its}",
                *(advice(calls, remedies) or [CAUSES]),
                f"before, {self.parted}" if self.parted else "",
            )
        )


def _lines_apart(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return the innermost line of each stack, and the outermost ones in which they differ.

    If none differs, the lines that call the innermost ones.
    """
    last = [lines[-1] if lines else "no line of yours" for lines in (one, other)]
    pairs = zip((one, other), last, strict=True)
    callers = [lines[-2] if len(lines) > 1 else line for lines, line in pairs]
    apart = next((pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), callers)
    first, second = (
        line if line == caller else f"{line} (called from {caller})"
        for line, caller in zip(last, apart, strict=True)
    )
    return first, second


def _exchange(value: Any, group: Group, tag: int) -> list[Any]:
    """Collective. Meanwhile peers may wait for this rank to read what they have launched before."""
    exchange = partial(all_gather_json, value, group=group, tag=tag)
    if (peers := any_peers()) is None:
        return exchange()
    future: Future[list[Any]] = Future()
    caller = get_ident()

    def run() -> None:
        try:
            with in_call_of(caller):
                future.set_result(exchange())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    peers.progress_until(future.done, lambda: None)
    return future.result()
