"""Bugs about which exact proofs must be silent, and why. Those of memory change no number, and are not listed."""

UNPROVED = {
    "the pieces gathered, but the whole sent": "more is sent, and the same is computed",
    "a send before the receive that the other side waits for": "the same is computed, unless the ranks hang",
    "every bucket waited for immediately": "the same is computed, and later",
    "targets are the tokens themselves": "the textbook takes its targets from the same function",
    "scores divided by the root of the model's size": "it is in a kernel of floats, in whose place exact numbers have "
                                                      "the textbook's",
    "token counts in 16 bits": "it shows with counts above 256, and so many exact tokens take minutes"}
