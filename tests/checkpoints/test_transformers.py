"""transformers itself: it computes and learns what we compute and learn, and opens what we save."""
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings

from mpi_impl.checkpoints.huggingface_config import class_of, config_of
from mpi_impl.checkpoints.huggingface_tokenizer import save_tokenizer
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, GPT2BPETokenizer, NullTokenizer
from reference.batches import GPTBatch
from reference.config import ModelConfig, Recompute
from tests.checkpoints import golden
from tests.checkpoints.runs import GOLDEN_MODELS, agrees, compute_on, empty, learn_and_save, model_in, tensors_agree
from tests.checkpoints.test_huggingface import classics, run_of
from tests.strategies import close
from tests.training_theorems import Plan

GPT2 = {"n_layer": 3, "n_embd": 24, "n_head": 6, "vocab_size": 37, "n_positions": 9, "n_inner": 96}
SIZES = {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "vocab_size": 37,
         "max_position_embeddings": 9, "norm_topk_prob": True, "num_local_experts": 6}
GROUPS = {"Llama": 3, "Mistral": 2, "Qwen2": 1, "Qwen3": 6, "Mixtral": 2, "Qwen3Moe": 6}
PLACES = [(1, 1, Plan(), False), (2, 1, Plan(), False), (3, 1, Plan(), False), (3, 1, Plan(2), False),
          (1, 2, Plan(2, zero_stage=2, e=2), False), (1, 3, Plan(zero_stage=3, e=3), False),
          (3, 2, Plan(zero_stage=1, e=2), True), (2, 2, Plan(2, zero_stage=3, e=2), True), (6, 1, Plan(), True),
          (1, 1, Plan(2, "zb-h2"), False), (1, 4, Plan(2, recompute=Recompute("full"), e=2), False)]


def configuration_of(kind: str) -> tuple[str, dict]:
    """Return the class of a golden model, and its configuration with sizes that divide, and a vocabulary that does not.
    """
    class_name, config = golden.KINDS[kind]
    sizes = GPT2 if class_name.startswith("GPT2") else SIZES | {"intermediate_size": 96 if class_name in golden.HEADS
                                                                else 36}
    more = {"num_key_value_heads": GROUPS[kind]} if kind in GROUPS else {}
    return class_name, config | {"initializer_range": 0.3} | sizes | more


def models_that_fit(family: list[str], t: int) -> list[str]:
    """Return the models of which t ranks can share the groups, or hold copies of one."""
    return [kind for kind in family for groups in [GROUPS.get(kind, t)] if groups % t == 0 or t % groups == 0]


def cases_of(families) -> list:
    return [pytest.param(kind, *place, marks=[] if kind == models[i % len(models)] else pytest.mark.deep)
            for family in families for i, place in enumerate(PLACES) for models in [models_that_fit(family, place[0])]
            for kind in models]


def random_model(transformers, class_name: str, config: dict, seed: int):
    """Return a model whose weights, biases and gains are so large that an error in any of them shows."""
    import torch

    torch.manual_seed(seed)
    kind = getattr(transformers, class_name)
    model = golden.in_float64(kind(kind.config_class.from_dict(config)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def random_bert(transformers, model: ModelConfig, seed: int):
    return random_model(transformers, class_of(model), config_of(model, NullTokenizer(3), "float64"), seed)


@pytest.mark.parametrize("kind, t, d, plan, sharded", cases_of([family for family in golden.FAMILIES
                                                                if "original" not in family]))
def test_same_logits_loss_gradients_and_steps(ranks, transformers, tmp_path, kind, t, d, plan, sharded):
    """A random model that transformers has saved, in several files, computes the same, to rounding: its logits token by
    token, with the KV cache; its gradients; and three steps of AdamW, but of a GPT-2, whose key biases have none.
    """
    theirs = random_model(transformers, *configuration_of(kind), t + d)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    rng = np.random.default_rng(t + d)
    batches = [GPTBatch.unpack(rng.integers(0, 37, (2 * d, 7))) for _ in range(3)]
    logits, losses, gradients = golden.compute(theirs, batches[0])
    gradients, after = (golden.as_in_files(theirs, x) for x in (gradients, golden.learn(theirs, batches)))
    run = run_of(model_in(tmp_path), t, d, plan, sharded)
    found = ranks.run(run.n, compute_on, run, tmp_path, batches)
    agrees(found, logits["lm"][0], losses, 1e-11)
    tensors_agree(run, found, "gradients", gradients, 1e-10)
    if kind in GROUPS:
        tensors_agree(run, found, "after", after, 1e-7)


@settings(max_examples=settings().max_examples // 5)
@given(classics(("bert",), hidden_dropout=0.0, attention_dropout=0.0))
def test_same_logits_losses_and_gradients_of_a_bert(ranks, transformers, case_and_run):
    """The batches are of any lengths, masks and types."""
    case, run = case_and_run
    theirs, batch = random_bert(transformers, case.model, case.seed), case.batch("", case.b * run.d)
    _, losses, gradients = golden.compute(theirs, batch)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        assert model_in(folder, make_vocab_size_divisible_by=case.model.make_vocab_size_divisible_by) == case.model
        found = ranks.run(run.n, compute_on, run, folder, [batch])
    agrees(found, None, losses, 1e-10)
    tensors_agree(run, found, "gradients", gradients, 1e-10)


@pytest.mark.parametrize("kind, t, d, plan, sharded", [
    (kind, *place) for kind, place in zip(golden.KINDS, [*PLACES, PLACES[5]], strict=True)])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, kind, t, d, plan, sharded):
    """No key is missing, and none too many; the parameters are the same, to the bit, and so are the logits."""
    import torch

    (class_name, config), again = configuration_of(kind), empty(tmp_path / "again")
    theirs = random_model(transformers, class_name, config, t + d)
    theirs.save_pretrained(tmp_path)
    run = run_of(model_in(tmp_path), t, d, plan, sharded)
    ranks.run(run.n, learn_and_save, run, tmp_path, again)
    opener = type(theirs) if class_name in golden.HEADS else transformers.AutoModelForCausalLM
    opened, said = opener.from_pretrained(again, output_loading_info=True)
    assert not any(said.values()), said
    assert opened.dtype == torch.float64
    for (name, x), (other, y) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y)
    batch = golden.golden_batch(class_name)
    ours, expected = (golden.compute(model, batch)[0] for model in (golden.in_float64(opened), theirs.eval()))
    for head, logits in expected.items():
        close(ours[head], logits, 1e-14)


def test_what_the_program_saves_opens_there(transformers, saved_run):
    """The tokenizer, too, by the folder alone."""
    _, _, saved = saved_run("gpt2")
    model, said = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(said.values()), said
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    ours = GPT2BPETokenizer(str(saved / "vocab.json"), str(saved / "merges.txt"))
    text = "12 times 5 is 60."
    assert tokenizer.encode(text) == ours.encode(text) and len(tokenizer) == model.config.vocab_size == 300
    assert tokenizer.eos_token_id == model.config.eos_token_id == ours.eod


@pytest.mark.parametrize("original, kind", [(True, BertWordPieceLowerCase), (False, BertWordPieceCase)])
def test_the_tokenizer_opens_there(transformers, tmp_path, original, kind):
    """AutoTokenizer opens the folder, and returns the same ids between [CLS] and [SEP]."""
    ours = kind.train(["Some words, more words: the same Words again, and Élan."], 100)
    model = ModelConfig(1, 8, 2, ours.vocab_size, 9, architecture="bert", heads=("lm", "sop"),
                        apply_residual_connection_post_layernorm=original)
    theirs = random_bert(transformers, model, 1)
    theirs.config.update(config_of(model, ours, "float64"))
    theirs.save_pretrained(tmp_path)
    save_tokenizer(str(tmp_path), ours)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("More words, élan!", "the Same: 字 again"):
        assert tokenizer.encode(text) == [ours.cls, *ours.encode(text), ours.sep]
    assert tokenizer.pad_token_id == theirs.config.pad_token_id == ours.pad
    assert (tokenizer.mask_token_id, len(tokenizer)) == (ours.mask, ours.vocab_size)


@pytest.mark.parametrize("kind", golden.KINDS)
def test_the_golden_file_is_what_transformers_computes(transformers, kind):
    """The installed version computes the same, to rounding."""
    made, expected = golden.golden_of(*golden.KINDS[kind]), GOLDEN_MODELS[kind]
    assert made.keys() == expected.keys() and made["tensors"] == expected["tensors"]
    for name in {"losses", "logits"} & expected.keys():
        close(np.array(made[name]), np.array(expected[name]), 1e-13)
    for name, tolerance in (("gradients", 1e-12), ("after", 1e-9)):
        for tensor, value in expected.get(name, {}).items():
            close(np.array(made[name][tensor]), np.array(value), tolerance)
