"""What a step computes, tensor by tensor: seen while it runs, recorded, compared with another run's, searched for NaN.

names.py         what is seen, under which name, and in which order it is computed
observer.py      where what a rank sees of a step lies in the whole tensor
observed.py      a step's pass, whose layers are handed what the observer sees
recorder.py      keeps what the observer sees, and writes it: pretrain_gpt --record
recording.py     a recording, in memory or on disk
differences.py   the first tensor in which two recordings differ beyond rounding
not_finite.py    the first tensor of a step that is not finite
"""
