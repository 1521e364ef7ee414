"""What can be wrong with data: the run's, or one sample's."""

from mtuner_jax import configs


class DataError(configs.ConfigError):
    """Data, or a setting about data, that the user has to change."""


class SampleError(configs.UserError):
    """One sample that can't be used; the reader adds file and line.

    Attributes:
      reason: A few words that are counted in the summary, such as `invalid JSON`.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
