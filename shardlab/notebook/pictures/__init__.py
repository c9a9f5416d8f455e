"""The pictures of the walkthroughs: functions that return a Figure."""
