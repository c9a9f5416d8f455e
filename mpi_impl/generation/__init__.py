"""Text from a GPT on t x p ranks, one token after another. How one is drawn: reference/generation/decoding.py.

replica.py    a model's parameters, shared out over ranks, and nothing that training needs beside them
sources.py    where they come from: a checkpoint of ours, or a GPT-2 in Hugging Face's layout; and their tokenizer
words.py      one word after another, with the keys and values of those before it kept
stream.py     words as text, written as they come
"""
