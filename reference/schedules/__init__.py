"""Pipeline schedules as data: the actions, the papers' schedules, their simulation and validation."""
