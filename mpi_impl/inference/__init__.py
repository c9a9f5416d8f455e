"""Texts from a GPT on t x p ranks, one token after another. How one is drawn: reference/generation/decoding.py.

replica.py    a model's parameters, sharded over ranks, without the states of training
decoding.py   the texts of a batch, one token after another, with a KV cache
"""
