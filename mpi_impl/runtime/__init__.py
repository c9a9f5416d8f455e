"""The ground that every program stands on: arrays on a core or a GPU, files, formats, the environment of a rank."""
