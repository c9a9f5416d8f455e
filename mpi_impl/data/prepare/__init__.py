"""The program that prepares a corpus for training: `python -m mpi_impl.data.prepare`.

options.py           the options and their checks
preparation.py       the program, from its options to its report
chunks.py            the division of the corpus into small pieces of work
clean.py             normalization of text
encoded_chunk.py     the encoding of a chunk by one worker, and its files
encoded_corpus.py    all chunks in their order
near_duplicates.py   detection of documents that repeat an earlier one
dropped.py           dropped documents, and the reasons
workers.py           processes
"""
