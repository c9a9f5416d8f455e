"""The program that makes a corpus ready for training: `python -m mpi_impl.data.prepare`.

preparation.py       the program, from its options to its report
chunks.py            how the corpus is cut, so that a piece of work is small
clean.py             a text made uniform
encoded_chunk.py     what becomes of a chunk, by one worker, and the files it leaves
encoded_corpus.py    all chunks in their order
near_duplicates.py   which documents say again what an earlier one said
dropped.py           which documents are not kept, and why
workers.py           processes
progress.py          how far they are
"""
