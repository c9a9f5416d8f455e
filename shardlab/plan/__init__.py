"""The choice of a parallelism for a cluster before it exists: plans that fit, their speed, and the reasons."""
