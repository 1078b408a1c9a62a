"""Images into classes: data, the task, evaluation, prediction, the demo."""
