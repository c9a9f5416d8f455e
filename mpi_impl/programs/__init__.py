"""Programs from their options to their reports: options, presets, what they mean together, and a training run."""
