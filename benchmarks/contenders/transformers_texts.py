"""transformers' side of generation.py: greedy texts by `GPT2LMHeadModel.generate`, with its KV cache.

Its arguments are the folder of the model, the sizes of the texts, a file for them, the format to compute in, the
number of threads, and the implementation of attention, eager or sdpa. With a folder alone it saves GPT-2's smallest
model there, with 124 million random weights.
"""
import sys
from functools import partial

import torch
import transformers
from texts import serve_texts


def load(folder: str, attention: str, form: str):
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation=attention,
                                                         dtype=getattr(torch, form)).eval()
    model.generation_config.eos_token_id = None      # a text goes on behind the end of a document
    return model


def extend(model, prompts, count: int) -> list[list[int]]:
    """Return the `count` most probable tokens after each prompt."""
    tokens = torch.tensor(prompts)
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False,
                           use_cache=True, pad_token_id=0)
    return found[:, tokens.shape[1]:].tolist()


def save_random_model(folder: str, **sizes) -> None:
    """Save a model whose weights are so large that its most probable token is far ahead of the others."""
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.1)).save_pretrained(folder)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    if len(sys.argv) == 2:
        save_random_model(sys.argv[1])
        return
    folder, texts, path, form, threads, attention = sys.argv[1:]
    torch.set_num_threads(int(threads))
    serve_texts(partial(extend, load(folder, attention, form)), texts, path)


if __name__ == "__main__":
    main()
