"""Errors between ranks, one type per remedy."""


class CommError(RuntimeError):
    """A collective was misused, failed, or did not finish in time."""


def named(what: str, error: CommError) -> CommError:
    """Return an error whose first line says what failed: this one, if it does already."""
    return error if what in str(error).partition("\n")[0] else CommError(f"{what}: {error}")


class DivergenceError(CommError):
    """Ranks wait for each other in different collectives, which would never end."""


class GroupMismatchError(ValueError):
    """Tensors do not fit the group they were handed to: device, shape or split."""


class CodecError(ValueError):
    """Values, or bytes on the wire, do not fit a codec; or there is no codec of that name."""


class AgreementError(RuntimeError):
    """Ranks that must have equal values have different ones."""


class RankFailedError(RuntimeError):
    """A worker of a rank pool raised, died or did not answer in time."""
