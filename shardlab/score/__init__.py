"""A leaderboard without GPUs: schedules, layouts and plans, proved equal and scored without noise."""
