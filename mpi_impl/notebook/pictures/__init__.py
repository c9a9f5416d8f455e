"""The pictures of the walkthroughs: each a function that returns a Figure."""
