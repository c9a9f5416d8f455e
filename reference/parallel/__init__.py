"""The division of a model and its states over ranks: flat buffers, stages, pipelines, replicas, ZeRO."""
