"""Training: one loop, a Task for each job, configurations, checkpoints."""
