"""What can be wrong with a configuration."""


class ConfigError(ValueError):
    """A setting has the wrong type or value."""
