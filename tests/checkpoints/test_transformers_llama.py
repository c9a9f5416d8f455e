"""transformers itself: its Llamas, Mistrals and Qwens compute and learn what ours do, and it opens what we save."""
import numpy as np
import pytest

from reference.models.gpt import gpt_tensors
from tests.checkpoints import gpt2_golden, llama_golden
from tests.checkpoints.gpt2_runs import P, T, empty, learn_and_save, options
from tests.checkpoints.llama_runs import in_their_layout, learn_on, model_of
from tests.checkpoints.transformers_models import opens_as, random_model
from tests.strategies import close

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


CASES = [pytest.param(model, n, more, marks=[] if model == models[i % len(models)] else pytest.mark.deep)
         for i, ((n, more), models) in enumerate(zip(PLACES, FITS, strict=True)) for model in models]


@pytest.mark.parametrize("number, n, more", CASES)
def test_same_logits_loss_gradients_and_steps(ranks, transformers, tmp_path, number, n, more):
    """Logits token by token, with the KV cache; and three steps of AdamW."""
    theirs = random_model(transformers, *MODELS[number], seed=n)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if n == 6 else {}))
    rng = np.random.default_rng(n)
    batches = [rng.integers(0, 37, (12 if n % 3 == 0 else 8, 7)) for _ in range(3)]
    logits, loss, gradients = gpt2_golden.compute(theirs, batches[0])
    after = llama_golden.learn(theirs, batches)
    found = ranks.run(n, learn_on, tmp_path, more, batches)
    for one in found:
        close(np.array(one.loss), np.array(loss), 1e-11)
        if one.logits[0] is not None:
            close(np.concatenate(one.logits)[:, :37], logits[0], 1e-11)
    tensors, kind = gpt_tensors(model_of(tmp_path)), theirs.config.model_type
    for ours, expected, tolerance in ((in_their_layout(found, tensors, kind), gradients, 1e-10),
                                      (in_their_layout([one.steps for one in found], tensors, kind), after, 1e-7)):
        assert ours.keys() == expected.keys()
        for name, x in expected.items():
            close(ours[name], x, tolerance)


@pytest.mark.parametrize("number, n, more", CASES[::3])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, number, n, more):
    """No key is missing, and none too many; the same parameters, to the bit, so the same logits."""
    theirs = random_model(transformers, *MODELS[number], seed=n)
    theirs.save_pretrained(tmp_path)
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(tmp_path, f"{more} --seq-length 6"), 0, again)
    opens_as(transformers, again, theirs)
