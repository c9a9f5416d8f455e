"""Groups of ranks, what they send one another and by which transport, and the record of it."""
