"""What each rank did when: taken from a trace, written for a viewer, drawn beside its prediction."""
