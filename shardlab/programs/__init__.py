"""Programs from their options to their reports: options, presets, checks of their combinations, and a training run."""
