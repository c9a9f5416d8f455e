"""transformers itself: its Llamas, Mistrals and Qwens compute and learn what ours do, and it opens what we save."""
import numpy as np
import pytest

from reference.models.gpt import gpt_tensors
from tests.checkpoints import gpt2_golden, llama_golden
from tests.checkpoints.gpt2_runs import P, T, empty, learn_and_save, options
from tests.checkpoints.llama_runs import in_their_layout, learn_on, model_of
from tests.strategies import close


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="it comes with `pip install -e '.[huggingface]'`")


SIZES = dict(num_hidden_layers=3, hidden_size=24, num_attention_heads=6, vocab_size=37, intermediate_size=36,
             max_position_embeddings=9, bos_token_id=0, eos_token_id=0, pad_token_id=None, initializer_range=0.3)
MODELS = [
    ("Llama", dict(num_key_value_heads=3, head_dim=8, rope_parameters=llama_golden.ROPE, tie_word_embeddings=True)),
    ("Llama", dict(num_key_value_heads=6)),
    ("Mistral", dict(num_key_value_heads=2, sliding_window=None, rms_norm_eps=1e-3)),
    ("Qwen2", dict(num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    ("Qwen3", dict(num_key_value_heads=3, head_dim=10, tie_word_embeddings=True)),
]
PLACES = [(1, ""), (2, f"{T} 2"), (3, f"{T} 3 --make-vocab-size-divisible-by 1"), (6, f"{T} 3 {P} 2"),
          (6, f"{T} 6"), (4, f"{P} 2 --zero-stage 2"), (3, "--zero-stage 3"), (6, f"{T} 6 --sequence-parallel"),
          (6, f"{T} 3 --zero-stage 1 --sequence-parallel"), (2, f"{P} 2 --pipeline-schedule zb-h2"),
          (2, f"{P} 2 --recompute-granularity full"), (2, f"{P} 2 --recompute-granularity selective")]
FITS = [[0, 1, 2, 3, 4], [1, 2, 3], [0, 1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4], *[[0, 1, 2, 3, 4]] * 3, [0, 1, 3, 4],
        *[[0, 1, 2, 3, 4]] * 3]      # models whose groups, or copies of them, go on so many ranks


def random_model(transformers, number, seed):
    """Return a model whose weights, biases and gains are so large that an error in any of them shows."""
    import torch

    torch.manual_seed(seed)
    name, choices = MODELS[number]
    config = getattr(transformers, f"{name}Config")(**SIZES | choices)
    model = llama_golden.in_float64(getattr(transformers, f"{name}ForCausalLM")(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


CASES = [pytest.param(model, n, more, marks=[] if model == models[i % len(models)] else pytest.mark.deep)
         for i, ((n, more), models) in enumerate(zip(PLACES, FITS, strict=True)) for model in models]


@pytest.mark.parametrize("number, n, more", CASES)
def test_same_logits_loss_gradients_and_steps(ranks, transformers, tmp_path, number, n, more):
    """Logits token by token, with the KV cache; and three steps of AdamW."""
    theirs = random_model(transformers, number, seed=n)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if n == 6 else {}))
    rng = np.random.default_rng(n)
    batches = [rng.integers(0, 37, (12 if n % 3 == 0 else 8, 7)) for _ in range(3)]
    logits, loss, gradients = gpt2_golden.compute(theirs, batches[0])
    after = llama_golden.learn(theirs, batches)
    found = ranks.run(n, learn_on, tmp_path, more, batches)
    for one in found:
        close(np.array(one.loss), np.array(loss), 1e-11)
        if one.logits[0] is not None:
            close(np.stack(one.logits)[:, :37], logits[0], 1e-11)
    tensors, kind = gpt_tensors(model_of(tmp_path)), theirs.config.model_type
    for ours, expected, tolerance in ((in_their_layout(found, tensors, kind), gradients, 1e-10),
                                      (in_their_layout([one.steps for one in found], tensors, kind), after, 1e-7)):
        assert ours.keys() == expected.keys()
        for name, x in expected.items():
            close(ours[name], x, tolerance)


@pytest.mark.parametrize("number, n, more", CASES[::3])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, number, n, more):
    """No key is missing, and none too many; the same parameters, to the bit, so the same logits."""
    import torch

    theirs = random_model(transformers, number, seed=n)
    theirs.save_pretrained(tmp_path)
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(tmp_path, f"{more} --seq-length 6"), 0, again)
    opened, said = transformers.AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not any(said.values()), said
    assert opened.dtype == torch.float64
    for (name, x), (other, y) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y)
    tokens = torch.arange(7)[None]
    close(llama_golden.in_float64(opened).eval()(tokens).logits.detach().numpy(),
          theirs.eval()(tokens).logits.detach().numpy(), 1e-14)
