"""What a step computes, tensor by tensor: seen while it runs, recorded, compared with another run's, searched for NaN.

names.py         what is seen, under which name, and in which order it is computed
observer.py      sees the tensors of a step, from outside the layers
recording.py     tensors in memory and on disk, each with its place in the whole one
differences.py   the first tensor in which two recordings differ beyond rounding
not_finite.py    the first tensor of a step that is not finite
"""
