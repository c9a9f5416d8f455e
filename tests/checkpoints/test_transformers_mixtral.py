"""transformers itself: its models with experts compute and learn what ours do, and it opens what we save."""
import numpy as np
import pytest

from reference.models.gpt import gpt_tensors
from tests.checkpoints import gpt2_golden, llama_golden
from tests.checkpoints.gpt2_runs import P, T, empty, learn_and_save, options
from tests.checkpoints.llama_runs import in_their_layout, learn_on, model_of
from tests.checkpoints.test_mixtral_huggingface import E
from tests.checkpoints.transformers_models import opens_as, random_model
from tests.strategies import close

MODELS = [
    ("Mixtral", dict(num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=3, tie_word_embeddings=True)),
    ("Mixtral", dict(num_key_value_heads=2, num_local_experts=12, head_dim=6, rms_norm_eps=1e-3)),
    ("Qwen3Moe", dict(num_key_value_heads=1, num_experts=6, num_experts_per_tok=4, moe_intermediate_size=12,
                      norm_topk_prob=True, head_dim=10)),
    ("Qwen3Moe", dict(num_key_value_heads=6, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=18,
                      norm_topk_prob=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
]
PLACES = [(1, 1, ""), (2, 2, ""), (6, 3, f"{T} 2 --zero-stage 2"), (4, 2, f"{P} 2 --pipeline-schedule zb-h1"),
          (6, 6, "--zero-stage 3"), (8, 2, f"{T} 2 {P} 2 --sequence-parallel"),
          (4, 2, "--zero-stage 1 --recompute-granularity full")]      # ranks, e, and further options
CASES = [pytest.param(model, *place, marks=[] if model == i % len(MODELS) and i < 4 else pytest.mark.deep)
         for i, place in enumerate(PLACES) for model in range(len(MODELS))]


@pytest.mark.parametrize("number, n, e, more", CASES)
def test_same_logits_loss_gradients_and_steps(ranks, transformers, tmp_path, number, n, e, more):
    """Logits token by token, with the KV cache; and three steps of AdamW."""
    theirs = random_model(transformers, *MODELS[number], seed=n)
    theirs.save_pretrained(tmp_path)
    rng = np.random.default_rng(n)
    batches = [rng.integers(0, 37, (12 if n % 3 == 0 else 8, 7)) for _ in range(3)]
    logits, loss, gradients = gpt2_golden.compute(theirs, batches[0])
    expected = [llama_golden.as_in_files(theirs, gradients)]
    expected.append(llama_golden.as_in_files(theirs, llama_golden.learn(theirs, batches)))
    found = ranks.run(n, learn_on, tmp_path, f"{more} {E} {e}", batches)
    for one in found:
        close(np.array(one.loss), np.array(loss), 1e-11)
        if one.logits[0] is not None:
            close(np.concatenate(one.logits)[:, :37], logits[0], 1e-11)
    tensors, kind = gpt_tensors(model_of(tmp_path)), theirs.config.model_type
    for ours, theirs_, tolerance in ((in_their_layout(found, tensors, kind, e), expected[0], 1e-10),
                                     (in_their_layout([one.steps for one in found], tensors, kind, e), expected[1],
                                      1e-7)):
        assert ours.keys() == theirs_.keys()
        for name, x in theirs_.items():
            close(ours[name], x, tolerance)


@pytest.mark.parametrize("number, n, e, more", CASES[::5])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, number, n, e, more):
    """No key is missing, and none too many; the same parameters, to the bit."""
    theirs = random_model(transformers, *MODELS[number], seed=n)
    theirs.save_pretrained(tmp_path)
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(tmp_path, f"{more} {E} {e} --seq-length 6"), 0, again)
    opens_as(transformers, again, theirs)
