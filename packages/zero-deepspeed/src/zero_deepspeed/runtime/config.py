"""deepspeed.runtime.config: what is raised for a wrong configuration."""

from zero_engine import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
