"""How a model and its states are divided over ranks: flat buffers, stages, pipelines, replicas, ZeRO."""
