"""What can be wrong with a configuration."""


class ConfigError(ValueError):
    """A setting has the wrong type or value."""


class FileError(OSError):
    """A file is missing, damaged, or not of the format expected."""


class NotBuiltError(NotImplementedError):
    """What was asked for is known by name, and comes with a part that is not there yet."""


class LossScaleError(RuntimeError):
    """Gradients overflow at the smallest loss scale allowed."""
