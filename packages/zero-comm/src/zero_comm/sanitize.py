"""For the sanitizer: calls of single objects that are checked, and launches that are compared."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from threading import Thread, get_ident
from typing import Any, Final
from weakref import WeakKeyDictionary

from .agreement import check_agreement
from .calls import in_call_of
from .errors import AgreementError
from .group import Group
from .shared_host.peer_memory import any_peers
from .watch import Purpose

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
            AgreementError: They are about to do different things; ends with this rank's remedy.
        """
        self.number += 1
        tag = _TAG - self.number % _NUM_TAGS
        group.purposes[tag] = Purpose(what, remedy)
        try:
            _compare({"the next collective": what}, group, tag)
        except AgreementError as error:
            raise AgreementError(f"{error}; {remedy}" if remedy else str(error)) from None


def _compare(said: dict[str, str], group: Group, tag: int) -> None:
    """Collective. Meanwhile peers may wait for this rank to read what they have launched before."""
    check = partial(check_agreement, said, group=group, tag=tag, timeout_s=None)
    if (peers := any_peers()) is None:
        check()
        return
    future: Future[None] = Future()
    caller = get_ident()

    def run() -> None:
        try:
            with in_call_of(caller):
                future.set_result(check())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    peers.progress_until(future.done, lambda: None)
    future.result()
