"""What every program needs of its machine: arrays on a core or a GPU, files, formats, the environment of a rank."""
