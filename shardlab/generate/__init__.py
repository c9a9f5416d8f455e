"""The program `generate`: texts from a trained GPT, whoever has trained it.

options.py      the options of the program
sources.py      a checkpoint of ours, or a model in Hugging Face's layout; and their tokenizer
generation.py   prompts in, texts out
stream.py       tokens as text, written as they come
"""
