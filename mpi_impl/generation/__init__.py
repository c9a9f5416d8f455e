"""Texts from a GPT on t x p ranks, one token after another. How one is drawn: reference/generation/decoding.py.

replica.py    a model's parameters, sharded over ranks, without the states of training
sources.py    a checkpoint of ours, or a model in Hugging Face's layout; and their tokenizer
decoding.py   the texts of a batch, one token after another, with a KV cache
stream.py     tokens as text, written as they come
"""
