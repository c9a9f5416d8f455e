"""A preparation of a corpus written as Megatron-LM's tools/preprocess_data.py is, without its options.

    python preprocess_data.py CORPUS.jsonl TOKENIZER.json PREFIX WORKERS

A pool of WORKERS processes encodes a line of JSON at a time, by `imap` with chunks of 32 lines, and the first process
appends the tokens of each document to PREFIX.bin; PREFIX.idx is written in the end. As there, each document ends with
the end-of-document token, and the library `tokenizers` encodes.
"""
import json
import multiprocessing
import os
import struct
import sys

import numpy as np
from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
CHUNK = 32      # lines that a worker gets at a time, as in Megatron-LM
UINT16 = 8      # the code of a type of tokens


class Encoder:
    """The function that workers call."""

    tokenizer: Tokenizer

    def __init__(self, path: str):
        self.path = path

    def initializer(self) -> None:
        Encoder.tokenizer = Tokenizer.from_file(self.path)

    def encode(self, line: str) -> tuple[list[int], int]:
        """Return the tokens of a document, and the size of its line."""
        ids = Encoder.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        return [*ids, Encoder.tokenizer.token_to_id(END_OF_DOCUMENT)], len(line)


class IndexedDatasetBuilder:
    """A writer of PREFIX.bin and PREFIX.idx."""

    def __init__(self, prefix: str):
        self.prefix, self.lengths = prefix, list[int]()
        self.file = open(f"{prefix}.bin", "wb")     # noqa: SIM115 - it is closed by `finalize`

    def add_document(self, ids: list[int]) -> None:
        array = np.array(ids, np.uint16)
        self.file.write(array.tobytes(order="C"))
        self.lengths.append(array.size)

    def finalize(self) -> None:
        self.file.close()
        lengths = np.array(self.lengths, np.int32)
        with open(f"{self.prefix}.idx", "wb") as file:
            file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, UINT16, len(lengths), len(lengths) + 1))
            for numbers in (lengths, 2 * (np.cumsum(lengths, dtype=np.int64) - lengths), np.arange(len(lengths) + 1)):
                file.write(numbers.tobytes(order="C"))


def main() -> None:
    corpus, tokenizer, prefix, workers = sys.argv[1:]
    encoder, builder = Encoder(tokenizer), IndexedDatasetBuilder(prefix)
    with open(corpus, encoding="utf-8") as lines, multiprocessing.Pool(int(workers), encoder.initializer) as pool:
        for ids, _ in pool.imap(encoder.encode, lines, CHUNK):
            builder.add_document(ids)
    builder.finalize()


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"      # processes instead of threads
    main()
