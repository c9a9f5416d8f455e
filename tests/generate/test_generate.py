"""The program: from a folder to text, on any number of ranks."""
import json
import re
import shutil
from pathlib import Path

import pytest

from mpi_impl.data import saved_tokenizer
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer, NullTokenizer
from reference.config import ModelConfig
from reference.generation.decoding import Sampling, generate
from shardlab.generate.generation import Generation
from shardlab.generate.options import parse
from tests.evaluate.runs import params_of, save
from tests.generate.test_saved_tokenizer import a_models
from tests.program import refusal

T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
TEXT = "the cat sat on the mat, and the dog sat on the cat. Grüße! " * 20


def model_of(vocab_size, **choices) -> ModelConfig:
    return ModelConfig(4, 16, 4, vocab_size, 12, init_method_std=0.3, **choices)


def save_bytes_run(ranks, parent, model, tokenizer):
    """Return the model, its tokenizer, and both folders."""
    root, folder = parent / "checkpoint", parent / "hf"
    root.mkdir()
    folder.mkdir()
    ranks.run(2, save, model, tokenizer, root, folder)
    return model, tokenizer, root, folder


@pytest.fixture(scope="module")
def bytes_run(ranks, tmp_path_factory):
    tokenizer = ByteLevelBPETokenizer.train([TEXT], 270)
    return save_bytes_run(ranks, tmp_path_factory.mktemp("bytes"), model_of(tokenizer.vocab_size), tokenizer)


@pytest.fixture(scope="module")
def ids_run(ranks, tmp_path_factory):
    """Return a model with rope, a NullTokenizer with few ids, so that texts soon end, and the folder."""
    root, tokenizer = tmp_path_factory.mktemp("ids"), NullTokenizer(9)
    model = model_of(10, position_embedding_type="rope", rotary_percent=0.5, untie_embeddings_and_output_weights=True)
    ranks.run(2, save, model, tokenizer, root)
    (root / saved_tokenizer.SAVED).unlink()      # a run's settings say how many ids there are
    return model, tokenizer, root


def program(group, options):
    Generation(parse(options, group.size), group).run()


def texts_printed(ranks, capfd, n, *options) -> list[str]:
    """Return the texts that the program prints."""
    ranks.run(n, program, [*map(str, options), "--dtype", "float64"])
    printed = capfd.readouterr().out
    begun, *texts, last = re.split(r"\n\n", printed.replace("\n\n\n", "\n\n"))
    assert re.fullmatch(r"[\d,]+ tokens in [\d.]+ s: [\d.]+ tokens/s\n", last) and begun.startswith("loaded ")
    return texts


def whole_text(model, tokenizer, prompt, count, sampling, number=0):
    """Return the text that the textbook generates."""
    begin = tokenizer.encode(prompt)
    found, = generate([begin or [tokenizer.eod]], count, params_of(model), model, sampling, number)
    end = found.index(tokenizer.eod) if tokenizer.eod in found else count
    return tokenizer.decode(begin + found[:end])


def text_on_any_ranks(ranks, capfd, bytes_run, places, sampling, options=()):
    """Check that the textbook's text is generated from both folders. It is longer than the model's positions."""
    model, tokenizer, root, folder = bytes_run
    expected = [whole_text(model, tokenizer, "the dog", 20, sampling)]
    common = ["--prompt", "the dog", "--tokens-to-generate", 20, *options]
    for t, p in places:
        for source in (["--load", root], ["--load-hf", folder]):
            assert texts_printed(ranks, capfd, t * p, *source, *common, T, t, P, p) == expected


@pytest.mark.parametrize("options, sampling", [
    ("--greedy", Sampling(0.0)), ("--temperature 0.7 --top-k 5 --top-p 0.8 --seed 3", Sampling(0.7, 5, 0.8, seed=3))])
def test_the_text_is_the_same_on_any_ranks(ranks, capfd, bytes_run, options, sampling):
    text_on_any_ranks(ranks, capfd, bytes_run, ((1, 1), (2, 3)), sampling, options.split())


def test_a_llama(ranks, capfd, tmp_path):
    """On more ranks than groups, too; with a tokenizer of its own, its table has unused rows."""
    tokenizer = a_models(ByteLevelBPETokenizer.train([TEXT], 270).library, 280)
    model = model_of(tokenizer.vocab_size, normalization="RMSNorm", swiglu=True, add_bias_linear=False, kv_channels=6,
                     ffn_hidden_size=12, num_query_groups=2, qk_layernorm=True, position_embedding_type="rope")
    saved = save_bytes_run(ranks, tmp_path, model, tokenizer)
    folder = saved[-1]
    assert (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists()
    text_on_any_ranks(ranks, capfd, saved, ((2, 2), (4, 1)), Sampling())


def test_several_texts_each_with_draws_of_its_own(ranks, capfd, ids_run, tmp_path):
    """Two for each line of a file; the empty one begins as a document does. They end with the document, or not. And
    they are the same in batches, whose prompts have different lengths.
    """
    model, tokenizer, root = ids_run
    (tmp_path / "prompts").write_text("1 2 3\n\n4\n")
    options = ["--load", root, "--prompts-file", tmp_path / "prompts", "--num-samples", 2, "--tokens-to-generate", 8]
    prompts = ["1 2 3", "1 2 3", "", "", "4", "4"]
    expected = [whole_text(model, tokenizer, prompt, 8, Sampling(), number) for number, prompt in enumerate(prompts)]
    lengths = {len(text.split()) - len(prompt.split()) for text, prompt in zip(expected, prompts)}
    assert len(lengths) > 2
    named = ["--tokenizer-type", "NullTokenizer"]      # whose ids are as many as the model has tokens
    assert texts_printed(ranks, capfd, 2, *options, *named, T, 2) == expected
    assert texts_printed(ranks, capfd, 2, *options, T, 2, "--micro-batch-size", 4) == expected
    for text, prompt in zip(texts_printed(ranks, capfd, 2, *options, "--ignore-eod", P, 2), prompts, strict=True):
        assert len(text.split()) == len(prompt.split()) + 8


def test_without_a_saved_tokenizer_one_is_named(ranks, capfd, bytes_run, tmp_path):
    model, tokenizer, root, _ = bytes_run
    (root / saved_tokenizer.SAVED).rename(tmp_path / "away.json")
    options = ["--load", root, "--prompt", "the", "--tokens-to-generate", 4]
    try:
        expected = [whole_text(model, tokenizer, "the", 4, Sampling())]
        assert texts_printed(ranks, capfd, 1, *options, "--tokenizer-model", tmp_path / "away.json") == expected
        assert "holds no tokenizer: tokenizer.json is not there" in refusal_of(ranks, options)
        options += ["--tokenizer-type", ByteLevelBPETokenizer.name]
        assert "no file with it is named" in refusal_of(ranks, options)
    finally:
        (tmp_path / "away.json").rename(root / saved_tokenizer.SAVED)


def with_a_layer_too_few(folder, to) -> Path:
    """Copy a folder in Hugging Face's layout; the copy's config.json says that the model has a layer more."""
    to = shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (name,) = {"n_layer", "num_hidden_layers"} & config.keys()
    (to / "config.json").write_text(json.dumps(config | {name: config[name] + 1}))
    return to


def refusal_of(ranks, options, n=2) -> str:
    """Return the message with which all ranks refuse."""
    return ranks.run(n, refusal, program, [T, "2", *map(str, options)])[0]


def test_what_no_model_of_this_kind_can_do(ranks, tmp_path, bytes_run):
    ranks.run(2, save, model_of(10, architecture="bert", heads=("lm", "sop")), NullTokenizer(9), tmp_path)
    assert "holds a BERT" in refusal_of(ranks, ["--load", tmp_path])
    _, _, root, folder = bytes_run
    for option, n, words in ((P, 5, "has 5 stages"), (T, 3, "--tensor-model-parallel-size is 3")):
        assert words in refusal_of(ranks, ["--load", root, T, 1, option, n], n)
    folder = with_a_layer_too_few(folder, tmp_path / "hf")
    assert f"{folder} has no tensor h.4." in refusal_of(ranks, ["--load-hf", folder]), "before anything is read"


def test_damaged_parameters_are_refused_and_moments_do_not_matter(ranks, capfd, ids_run):
    _, _, root = ids_run
    options = ["--load", root, "--prompt", "1", "--tokens-to-generate", 2]
    for name, matters in (("m-00000.safetensors", False), ("parameters-00001.safetensors", True)):
        file = root / "iter_0000000" / name
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        try:
            assert ("is damaged" in refusal_of(ranks, options)) == matters
        finally:
            file.write_bytes(good)
