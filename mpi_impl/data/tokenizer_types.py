"""The names of the tokenizers, which options offer, and the options from whose files each may be read."""

READS: dict[str, tuple[str, ...]] = {
    "ByteLevelBPETokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file", "tokenizer_model"),
    "BertWordPieceCase": ("vocab_file", "tokenizer_model"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": (),
}
TOKENIZER_TYPES = tuple(READS)
