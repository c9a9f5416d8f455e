"""Random numbers that do not depend on the number of ranks, and what dropout makes of them."""
