"""Why a training run ended before its last step."""


class RunEnded(Exception):
    """A run ended early; the message says what to do."""


class Stopped(RunEnded):
    """The run was asked to stop by a signal and has written a checkpoint."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Diverged(RunEnded):
    """The loss, the gradients or the weights are NaN or infinite."""
