"""transformers itself: it computes what we compute, and opens what we save."""
import numpy as np
import pytest

from mpi_impl.data.tokenizer import GPT2BPETokenizer
from tests.checkpoints import gpt2_golden
from tests.checkpoints.gpt2_runs import (GOLDEN_MODELS, P, T, compute_on, empty, full_name, learn_and_save, options,
                                         taking_turns, whole_gradients)
from tests.strategies import close

SHAPES = [      # of models: sizes that divide, and a vocabulary that does not
    dict(n_layer=3, n_embd=24, n_head=6, vocab_size=37, n_positions=9),
    dict(n_layer=2, n_embd=24, n_head=6, vocab_size=50, n_positions=7, tie_word_embeddings=False,
         activation_function="relu", n_inner=96),
    dict(n_layer=2, n_embd=36, n_head=6, vocab_size=13, n_positions=7, activation_function="gelu",
         layer_norm_epsilon=1e-3),
]
PLACES = [(1, ""), (2, f"{T} 2"), (3, f"{T} 3 --make-vocab-size-divisible-by 1"), (6, f"{T} 3 {P} 2"), (6, f"{T} 6"),
          (4, f"{P} 2 --zero-stage 2"), (2, "--zero-stage 1"), (3, "--zero-stage 3"), (2, "--zero-stage 3"),
          (8, f"{T} 2 {P} 2 --zero-stage 3 --sequence-parallel"), (6, f"{T} 3 --zero-stage 1 --sequence-parallel"),
          (6, f"{T} 6 --sequence-parallel"), (4, f"{T} 2 --zero-stage 2"), (2, f"{P} 2 --pipeline-schedule zb-h2"),
          (2, f"{P} 2 --recompute-granularity full")]


def random_model(transformers, shape, seed):
    """Return a model without dropout whose weights, biases and gains are so large that an error in any of them shows.
    """
    import torch

    torch.manual_seed(seed)
    config = transformers.GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3,
                                     bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shape, n, more", taking_turns(range(len(SHAPES)), PLACES))
def test_same_logits_loss_and_gradients(ranks, transformers, tmp_path, shape, n, more):
    """A random model that transformers has saved computes the same, to rounding."""
    theirs = random_model(transformers, SHAPES[shape], seed=n)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if n == 6 else {}))
    tokens = np.random.default_rng(n).integers(0, theirs.config.vocab_size, (12 if n % 3 == 0 else 8, 7))
    logits, loss, gradients = gpt2_golden.compute(theirs, tokens)
    found = ranks.run(n, compute_on, [*options(tmp_path, more), "--seq-length", "6", "--global-batch-size",
                                      str(len(tokens))], tokens)
    for one in found:
        close(np.array(one.loss), np.array(loss), 1e-11)
        if one.logits[0] is not None:
            close(np.concatenate(one.logits)[:, :theirs.config.vocab_size], logits[0], 1e-11)
    ours = whole_gradients(found)
    assert {full_name(name) for name in ours} == gradients.keys()
    for name, grad in ours.items():
        close(grad.reshape(gradients[full_name(name)].shape), gradients[full_name(name)], 1e-10)


@pytest.mark.parametrize("shape, n, more", [(i % 3, *place) for i, place in enumerate(PLACES[::2])])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, shape, n, more):
    """No key is missing, and none too many; the same parameters, to the bit, so the same logits."""
    import torch

    theirs = random_model(transformers, SHAPES[shape], seed=n)
    theirs.save_pretrained(tmp_path)
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, [*options(tmp_path, more), "--seq-length", "6"], 0, again)
    opened, said = transformers.GPT2LMHeadModel.from_pretrained(again, output_loading_info=True)
    assert not any(said.values()), said
    assert opened.dtype == torch.float64
    for (name, x), (other, y) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y)
    tokens = torch.arange(7)[None]
    close(opened.eval()(tokens).logits.detach().numpy(), theirs.eval()(tokens).logits.detach().numpy(), 1e-14)


def test_what_the_program_saves_opens_there(transformers, run_and_saved):
    """The tokenizer, too, by the folder alone."""
    common, saved = run_and_saved
    model, said = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(said.values()), said
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    ours = GPT2BPETokenizer(str(saved / "vocab.json"), str(saved / "merges.txt"))
    text = "12 times 5 is 60."
    assert tokenizer.encode(text) == ours.encode(text) and len(tokenizer) == model.config.vocab_size == 300
    assert tokenizer.eos_token_id == model.config.eos_token_id == ours.eod


def test_the_golden_file_is_what_transformers_computes(transformers):
    """The installed version computes the same, to rounding."""
    for kind, golden in GOLDEN_MODELS.items():
        made = gpt2_golden.golden_of(gpt2_golden.KINDS[kind])
        assert made["tensors"] == golden["tensors"]
        for name in ("logits", "loss"):
            close(np.array(made[name]), np.array(golden[name]), 1e-13)
        for name, value in golden["gradients"].items():
            close(np.array(made["gradients"][name]), np.array(value), 1e-12)
