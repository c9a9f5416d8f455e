"""The tensors of a step: observed while it runs, recorded, compared with another run's, searched for NaN.

names.py         the names of the tensors, and the order in which they are computed
observer.py      the place in the whole tensor of each part that a rank sees
observed.py      a step's pass that shows its tensors to the observer
recorder.py      an observer that keeps and writes them: pretrain_gpt --record
recording.py     a recording, in memory or on disk
differences.py   the first tensor in which two recordings differ beyond rounding
not_finite.py    the first tensor of a step that is not finite
"""
