"""What a run will send and hold: a rank runs itself, on arrays without data, in a world that is not there."""
