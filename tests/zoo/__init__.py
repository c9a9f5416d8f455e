"""The bug zoo: the mistakes of parallel training, each with its story, its source, and the theorem that catches it.

Read it as a list of what goes wrong in practice: the right text, the wrong one, and the theorem that falls. It is plain
data, one file for each subject. tests/test_bug_zoo.py plants every bug; other programs can, with tests/planted.py.
"""
from tests.zoo import (below_rounding, bert, checkpoints, context_parallelism, data_parallelism, experts, llama, muon,
                       optimizer, pipelines, precision, recompute, sequence_parallelism, tensor_parallelism, vocabulary,
                       zero)
from tests.zoo.entry import Entry

SUBJECTS = (tensor_parallelism, llama, vocabulary, sequence_parallelism, context_parallelism, pipelines,
            data_parallelism, experts, zero, optimizer, muon, precision, recompute, bert, checkpoints, below_rounding)
ENTRIES: tuple[Entry, ...] = tuple(entry for subject in SUBJECTS for entry in subject.ENTRIES)
BY_NAME = {entry.name: entry for entry in ENTRIES}
