"""transformers itself: it computes what the golden file says, opens what we save, and reads config.json as we do."""
import copy
import json
import tempfile
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, reject, strategies as st

from mpi_impl.checkpoints import huggingface_config
from mpi_impl.checkpoints.huggingface_config import CONFIG, check_expressible, class_of, config_of, options_of
from mpi_impl.checkpoints.huggingface_tokenizer import save_tokenizer
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, GPT2BPETokenizer, NullTokenizer
from reference.config import ModelConfig
from reference.errors import UserError
from tests.checkpoints import golden
from tests.checkpoints.runs import GOLDEN_MODELS, ODD_FIELDS, Run, agrees, compute_on, empty, learn_and_save, model_in
from tests.sampled_runs import RUNS, sampled_runs
from tests.strategies import close


def random_model(transformers, class_name: str, config: dict, seed: int, double=golden.in_float64):
    """Return a model whose weights, biases and gains are so large that an error in any of them shows."""
    import torch

    torch.manual_seed(seed)
    kind = getattr(transformers, class_name)
    model = double(kind(kind.config_class.from_dict(copy.deepcopy(config))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def saved_there(transformers, kind: str, changes: dict, folder: str):
    """Let transformers save a model with such fields, and return it as it opens again. Raise what transformers raises,
    be it in computing.
    """
    import torch

    class_name, config = golden.KINDS[kind]
    random_model(transformers, class_name, config | changes, 1, lambda model: model.double()).save_pretrained(folder)
    saved = json.loads(Path(folder, CONFIG).read_text())
    Path(folder, CONFIG).write_text(json.dumps(
        {name: saved[name] for name in ("architectures", "model_type")} | config | changes))
    opened = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float64)
    opened.config._experts_implementation, opened.config.return_dict = "eager", True
    opened(torch.tensor([[1, 2, 3, 4, 5, 6]]))
    return opened


def check_both_compute_alike(ranks, theirs, folder: str) -> None:
    """Compare losses and logits of the model in a folder with transformers', without dropout."""
    model = model_in(folder, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)
    batch = golden.golden_batch(type(theirs).__name__)
    logits, losses, _ = golden.compute(golden.in_float64(theirs.eval()), batch)
    agrees(ranks.run(1, compute_on, Run(model), folder, [batch]),
           logits["lm"][0] if model.architecture == "gpt" else None, losses, 1e-12)


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


@given(st.sampled_from(["llama", "experts"]), st.integers(0, RUNS - 1))
def test_a_sampled_model_opens_there_or_cannot_be_saved(ranks, transformers, kind, number):
    """Both read our config.json as the same model, whatever its heads, groups, biases, norms of heads, and experts."""
    model = replace(sampled_runs(kind)[number].case.model, vocab_size=11, max_position_embeddings=6, swiglu=True,
                    squared_relu=False, normalization="RMSNorm", add_bias_linear=False, activation="gelu")
    try:
        check_expressible(Namespace(**options_of(model), disable_bias_linear=True), "gpt")
    except UserError:
        reject()
    config = config_of(model, NullTokenizer(10), "float64")
    with tempfile.TemporaryDirectory() as folder:
        theirs = random_model(transformers, class_of(model), config, number)
        theirs.save_pretrained(folder)
        Path(folder, CONFIG).write_text(json.dumps(config))
        check_both_compute_alike(ranks, theirs, folder)


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
    theirs = random_model(transformers, class_of(model), config_of(model, ours, "float64"), 1)
    theirs.save_pretrained(tmp_path)
    save_tokenizer(str(tmp_path), ours)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("More words, élan!", "the Same: 字 again"):
        assert tokenizer.encode(text) == [ours.cls, *ours.encode(text), ours.sep]
    assert tokenizer.pad_token_id == theirs.config.pad_token_id == ours.pad
    assert (tokenizer.mask_token_id, len(tokenizer)) == (ours.mask, ours.vocab_size)


# ---- config.json ----------------------------------------------------------------------------------------------------

MODELS = [kind for kind in golden.KINDS if kind not in ("untied", "words alone", "choices")]     # of each class, one
WITHOUT_EFFECT, ROPE_AND_WINDOW, OTHERS = (ODD_FIELDS[part] for part in ("without_effect", "rope_and_window", "others"))


@st.composite
def odd_configs(draw):
    """Draw a kind of model, and some fields of config.json at odd values, of other kinds of models, too."""
    return draw(st.sampled_from(MODELS)), {
        name: draw(st.sampled_from(values[name]), name) for values in (WITHOUT_EFFECT | OTHERS, ROPE_AND_WINDOW)
        for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True))}


class Noted(dict):
    """A config.json that notes the names of the fields that are read."""

    def get(self, name, default=None):
        self.__dict__.setdefault("names", set()).add(name)
        return super().get(name, default)


@pytest.mark.parametrize("kind", MODELS)
def test_a_missing_field_has_the_default_of_transformers(transformers, kind, tmp_path):
    """A file with a model_type alone says the same as the whole of its class, but for a window."""
    config_class = getattr(transformers, golden.KINDS[kind][0]).config_class
    config_class(sliding_window=None).save_pretrained(tmp_path)
    architecture = huggingface_config.layout_in(str(tmp_path))[0].architecture
    whole = huggingface_config.adopt_options(str(tmp_path), architecture, {})
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": config_class.model_type, "sliding_window": None}))
    assert huggingface_config.adopt_options(str(tmp_path), architecture, {}) == whole


@pytest.mark.parametrize("kind", MODELS)
def test_a_field_that_is_not_read_has_no_effect_in_transformers(ranks, transformers, kind, tmp_path):
    """Each field of a class is read, or in a list; with all of the list at odd values both compute the same."""
    odd = {name: values[0] for name, values in WITHOUT_EFFECT.items()}
    theirs = saved_there(transformers, kind, odd, str(tmp_path))
    check_both_compute_alike(ranks, theirs, str(tmp_path))
    layout, found = huggingface_config.layout_in(str(tmp_path))
    noted = Noted(found)
    with mock.patch.object(huggingface_config, "layout_in", lambda folder: (layout, noted)):
        huggingface_config.adopt_options(str(tmp_path), layout.architecture, {})
    assert {field.name for field in fields(theirs.config)} - noted.names <= WITHOUT_EFFECT.keys()


@example(("Llama", {"rope_parameters": golden.ROPE, "rope_scaling": {"rope_theta": 50.0}}))
@example(("Mistral", {"sliding_window": 3, "use_sliding_window": False}))
@example(("Mixtral", {"num_experts_per_tok": 1}))
@given(odd_configs())
def test_config_json_is_read_as_transformers_reads_it_or_refused(ranks, transformers, kind_and_changes):
    """Both compute the same, or the error names a field that is odd. (What transformers cannot open is not tried.)"""
    kind, changes = kind_and_changes
    with tempfile.TemporaryDirectory() as folder:
        try:
            theirs = saved_there(transformers, kind, changes, folder)
        except Exception:
            reject()
        try:
            model_in(folder)
        except UserError as error:
            assert any(name in str(error) for name in changes), error
        else:
            check_both_compute_alike(ranks, theirs, folder)


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
