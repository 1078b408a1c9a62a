"""Image files, samplers and loaders: nothing here knows a task."""
