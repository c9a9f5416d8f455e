"""A proof that a topology computes the same formulas as one process, on numbers modulo a prime (reference/exact/).

sizes.py        the smallest model and batch that keep the structures of a run
drawn.py        the random weights and samples
runs.py         two steps: on all ranks, on one rank, and in the textbook, with every tensor recorded
comparison.py   the first tensor, in the order of computation, that is another formula
options.py      the options of the program, and those that a proof cannot have
proof.py        proofs with fresh numbers, and what they say
"""
