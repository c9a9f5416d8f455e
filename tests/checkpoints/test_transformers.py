"""transformers itself: it computes what the golden file says, and opens what we save."""
import numpy as np
import pytest

from mpi_impl.checkpoints.huggingface_config import class_of, config_of
from mpi_impl.checkpoints.huggingface_tokenizer import save_tokenizer
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, GPT2BPETokenizer, NullTokenizer
from reference.config import ModelConfig
from tests.checkpoints import golden
from tests.checkpoints.runs import GOLDEN_MODELS, Run, empty, learn_and_save, model_in
from tests.strategies import close


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


@pytest.mark.parametrize("kind", golden.KINDS)
def test_what_we_save_opens_there(ranks, transformers, tmp_path, kind):
    """No key is missing, and none too many; the parameters are the same, to the bit, and so are the logits."""
    import torch

    (class_name, config), again = golden.KINDS[kind], empty(tmp_path / "again")
    theirs = random_model(transformers, class_name, config, 1)
    theirs.save_pretrained(tmp_path)
    ranks.run(1, learn_and_save, Run(model_in(tmp_path)), tmp_path, again)
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
