"""Which part of what is split a rank takes, in variants of labs 2 and 3."""
PARTS = ("rank + 1", "rank + 2", "rank + 3", "-1 - rank", "-rank", "1 - rank", "2 - rank")     # of a rank, modulo size
RANKS = ("part - 1", "part - 2", "part - 3", "-1 - part", "-part", "1 - part", "2 - part")     # the rank of that part
