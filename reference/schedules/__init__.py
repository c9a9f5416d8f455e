"""Pipeline schedules as data: the actions, the papers' schedules, what they cost, and why a wrong one is wrong."""
