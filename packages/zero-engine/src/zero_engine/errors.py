"""Errors of configurations, files and the loss scale, and of features that are not built."""


class ConfigError(ValueError):
    """A setting has the wrong type or value."""


class FileError(OSError):
    """A file is missing, damaged, or not of the format expected."""


class NotBuiltError(NotImplementedError):
    """The feature asked for is known by name, but needs a part that is not built yet."""


class LossScaleError(RuntimeError):
    """Gradients overflow at the smallest loss scale allowed."""
