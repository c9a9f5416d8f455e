"""transformers itself, on BERT: it computes what we compute, in either order, and opens what we save."""
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from mpi_impl.checkpoints.huggingface_config import class_of, config_of
from mpi_impl.checkpoints.huggingface_tokenizer import save_tokenizer
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, NullTokenizer
from reference.config import ARCHITECTURES, ModelConfig
from tests.checkpoints import bert_golden
from tests.checkpoints.bert_runs import Run, agrees, compute_on, gradients_of, learn_and_save, model_in
from tests.checkpoints.gpt2_runs import empty
from tests.checkpoints.test_bert_huggingface import runs
from tests.strategies import close
from tests.training_theorems import Plan


def random_model(transformers, model: ModelConfig, seed: int):
    """Return a model whose weights, biases and gains are so large that an error in any of them shows."""
    import torch

    torch.manual_seed(seed)
    kind = getattr(transformers, class_of(model))
    made = kind(kind.config_class.from_dict(config_of(model, NullTokenizer(3), "float64"))).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@settings(max_examples=settings().max_examples // 5)
@given(runs(("bert",)))
def test_same_logits_losses_and_gradients(ranks, transformers, case_and_run):
    """A random model that transformers has saved computes the same, to rounding.

    The batches are of any lengths, masks and types.
    """
    case, run = case_and_run
    theirs = random_model(transformers, case.model, case.seed)
    batch = case.batch("", case.b * run.d)
    logits, losses, gradients = bert_golden.compute(theirs, batch)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        assert model_in(folder, case.model.heads,
                        make_vocab_size_divisible_by=case.model.make_vocab_size_divisible_by) == case.model
        found = ranks.run(run.n, compute_on, run, folder, batch)
    agrees(run, found, (logits, losses), 1e-10)
    ours = gradients_of(run, found)
    assert ours.keys() == gradients.keys()
    for name, grad in ours.items():
        close(grad, gradients[name], 1e-10)


MODELS = [ModelConfig(2, 24, 6, 37, 9, architecture="bert", heads=heads, activation="gelu_exact",
                      layernorm_epsilon=1e-12, apply_residual_connection_post_layernorm=original)
          for heads in ARCHITECTURES["bert"] for original in (True, False)]


@pytest.mark.parametrize("i, t, d, plan", [
    (0, 2, 1, Plan()), (1, 1, 2, Plan(2)), (2, 3, 1, Plan(zero_stage=1)), (3, 1, 3, Plan(zero_stage=3)),
    (4, 2, 2, Plan(2, zero_stage=2)), (5, 6, 1, Plan())])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, i, t, d, plan):
    """No key is missing, and none too many; the same parameters, to the bit."""
    import torch

    theirs = random_model(transformers, MODELS[i], i)
    theirs.save_pretrained(tmp_path)
    again, run = empty(tmp_path / "again"), Run(MODELS[i], t, d, plan)
    ranks.run(run.n, learn_and_save, run, tmp_path, 0, again)
    opened, said = type(theirs).from_pretrained(again, output_loading_info=True)
    assert not any(said.values()), said
    assert opened.dtype == torch.float64
    for (name, x), (other, y) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y)


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert"])
@pytest.mark.parametrize("kind", [BertWordPieceLowerCase, BertWordPieceCase])
def test_the_tokenizer_opens_there(transformers, tmp_path, model_type, kind):
    """AutoTokenizer opens the folder, and returns the same ids between [CLS] and [SEP]."""
    ours = kind.train(["Some words, more words: the same Words again, and Élan."], 100)
    model = ModelConfig(1, 8, 2, ours.vocab_size, 9, architecture="bert", heads=("lm", "sop"),
                        apply_residual_connection_post_layernorm=model_type == "bert")
    theirs = random_model(transformers, model, 1)
    theirs.config.update(config_of(model, ours, "float64"))
    theirs.save_pretrained(tmp_path)
    save_tokenizer(str(tmp_path), ours)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("More words, élan!", "the Same: 字 again"):
        assert tokenizer.encode(text) == [ours.cls, *ours.encode(text), ours.sep]
    assert tokenizer.pad_token_id == theirs.config.pad_token_id == ours.pad
    assert (tokenizer.mask_token_id, len(tokenizer)) == (ours.mask, ours.vocab_size)
    assert Path(tmp_path, "vocab.txt").exists()


def test_the_golden_file_is_what_transformers_computes(transformers):
    """The installed version computes the same, to rounding."""
    for kind, golden in json.loads(bert_golden.GOLDEN.read_text()).items():
        made = bert_golden.golden_of(*bert_golden.KINDS[kind])
        assert made["tensors"] == golden["tensors"]
        close(np.array(made["losses"]), np.array(golden["losses"]), 1e-13)
        for head, logits in golden["logits"].items():
            close(np.array(made["logits"][head]), np.array(logits), 1e-13)
        for name, value in golden["gradients"].items():
            close(np.array(made["gradients"][name]), np.array(value), 1e-12)
