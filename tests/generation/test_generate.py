"""The program: from a folder to text, on any number of ranks."""
import re
import subprocess
import sys

import numpy as np
import pytest

from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.checkpoint import TOKENIZER
from mpi_impl.checkpoints.huggingface import save_model
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer, NullTokenizer
from mpi_impl.generate import Generation
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.programs.generation_options import parse
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.generation.decoding import Sampling, generate
from reference.models.model import model_tensors
from reference.optimizer import OptimizerConfig
from reference.params import initialize
from reference.precision import Precision
from tests.checkpoints.reading import with_a_layer_too_few
from tests.program import refusal
from tests.training_theorems import connected

T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
TEXT = "the cat sat on the mat, and the dog sat on the cat. Grüße! " * 20
SEED = 5


def model_of(vocab_size, **choices) -> ModelConfig:
    return ModelConfig(4, 16, 4, vocab_size, 12, init_method_std=0.3, **choices)


def params_of(model):
    """Return the parameters of the runs below."""
    return initialize(model_tensors(model), SEED, np.float64)


def save_run(group, model, tokenizer, root, folder=None) -> None:
    """Save the state of a run before its first step: a checkpoint, and in Hugging Face's layout."""
    parallel = ParallelConfig.for_world(group.size, 2, 1, zero_stage=1)
    with connected(group, parallel) as topology:
        trainer = Trainer(ModelState(model, topology, SEED, Precision("float64")), OptimizerConfig(1e-2, 5))
        checkpoint.save(trainer, str(root), {"tokenizer_type": tokenizer.name, TOKENIZER: tokenizer.fingerprint})
        if folder is not None:
            save_model(trainer, str(folder), tokenizer if group.rank == 0 else None)


@pytest.fixture(scope="module")
def bytes_run(ranks, tmp_path_factory):
    """Return the model, the byte-level BPE tokenizer, and both folders."""
    root, folder = (tmp_path_factory.mktemp(name) for name in ("checkpoint", "hf"))
    tokenizer = ByteLevelBPETokenizer.train([TEXT], 270)
    model = model_of(tokenizer.vocab_size)
    ranks.run(4, save_run, model, tokenizer, root, folder)
    saved_tokenizer.save(tokenizer, str(root))
    return model, tokenizer, root, folder


@pytest.fixture(scope="module")
def ids_run(ranks, tmp_path_factory):
    """Return a model with rope, a NullTokenizer with few ids, so that texts soon end, and the folder."""
    root, tokenizer = tmp_path_factory.mktemp("ids"), NullTokenizer(9)
    model = model_of(10, position_embedding_type="rope", rotary_percent=0.5, untie_embeddings_and_output_weights=True)
    ranks.run(2, save_run, model, tokenizer, root)
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


CHOICES = {"greedy": (["--greedy"], Sampling(0.0)), "all": ([], Sampling()),
           "top-k": (["--temperature", "0.7", "--top-k", "5", "--seed", "3"], Sampling(0.7, 5, seed=3)),
           "top-p": (["--top-p", "0.8"], Sampling(top_p=0.8))}


@pytest.mark.parametrize("options, sampling", CHOICES.values(), ids=CHOICES)
def test_the_text_is_the_same_on_any_ranks(ranks, capfd, bytes_run, options, sampling):
    """Longer than the model's positions, too."""
    model, tokenizer, root, _ = bytes_run
    expected = [whole_text(model, tokenizer, "the dog", 20, sampling)]
    for t, p in ((1, 1), (2, 1), (1, 3), (2, 2)):
        split = ["--prompt", "the dog", "--tokens-to-generate", 20, T, t, P, p]
        assert texts_printed(ranks, capfd, t * p, "--load", root, *split, *options) == expected


def test_a_model_in_hugging_faces_layout(ranks, capfd, bytes_run):
    model, tokenizer, _, folder = bytes_run
    options = ["--load-hf", folder, "--prompt", "the dog", "--tokens-to-generate", 20, T, 2, P, 2]
    assert texts_printed(ranks, capfd, 4, *options) == [whole_text(model, tokenizer, "the dog", 20, Sampling())]


@pytest.mark.parametrize("own", [True, False])
def test_a_llama(ranks, capfd, tmp_path, own):
    """From a checkpoint and from Hugging Face's layout, on more ranks than groups, too; with a tokenizer of its own,
    its table has unused rows.
    """
    tokenizer = ByteLevelBPETokenizer.train([TEXT], 270)
    if own:
        tokenizer = HuggingFaceTokenizer(tokenizer.library, "<|endoftext|>", 280)
    model = model_of(tokenizer.vocab_size, normalization="RMSNorm", swiglu=True, add_bias_linear=False, kv_channels=6,
                     ffn_hidden_size=12, num_query_groups=2, qk_layernorm=True, position_embedding_type="rope")
    root, folder = tmp_path / "checkpoint", tmp_path / "hf"
    folder.mkdir()
    ranks.run(4, save_run, model, tokenizer, root, folder)
    saved_tokenizer.save(tokenizer, str(root))
    assert (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists()
    expected = [whole_text(model, tokenizer, "the dog", 20, Sampling())]
    for t, p in ((1, 1), (2, 2), (4, 1)):
        for source in (["--load", root], ["--load-hf", folder]):
            split = ["--prompt", "the dog", "--tokens-to-generate", 20, T, t, P, p]
            assert texts_printed(ranks, capfd, t * p, *source, *split) == expected


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
    assert texts_printed(ranks, capfd, 2, *options, T, 2) == expected
    assert texts_printed(ranks, capfd, 2, *options, T, 2, "--micro-batch-size", 4) == expected
    for text, prompt in zip(texts_printed(ranks, capfd, 2, *options, "--ignore-eod", P, 2), prompts, strict=True):
        assert len(text.split()) == len(prompt.split()) + 8


def test_ids_may_be_named_as_the_tokenizer(ranks, capfd, ids_run):
    """As many as the model has words, of which one ends a document."""
    model, tokenizer, root = ids_run
    options = ["--load", root, "--tokenizer-type", "NullTokenizer", "--prompt", "1 2", "--tokens-to-generate", 4]
    assert texts_printed(ranks, capfd, 1, *options) == [whole_text(model, tokenizer, "1 2", 4, Sampling())]


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


def refusal_of(ranks, options, n=2) -> str:
    """Return the message with which all ranks refuse."""
    return ranks.run(n, refusal, program, [T, "2", *map(str, options)])[0]


@pytest.mark.parametrize("options, sentence", [
    ("", "A text comes from one model"), ("--load A --load-hf B", "A text comes from one model"),
    ("--load nowhere", "nowhere holds no checkpoint"), ("--load ''", "--load is empty"),
    ("--load-hf nowhere", "nowhere has no config.json"),
    ("--load R --temperature -1", "--temperature is -1.0, but must be"),
    ("--load R --top-p 0", "--top-p is 0.0, but must be above 0"), ("--load R --top-k 0", "--top-k is 0, but must be"),
    ("--load R --top-k 271", "--top-k is 271, but the model has 270 tokens"),
    ("--load R --greedy --top-k 3", "whatever --top-k says"),
    ("--load R --greedy --temperature 0.5", "whatever --temperature says"),
    ("--load R --tokens-to-generate 0", "--tokens-to-generate is 0, but must be at least 1"),
    ("--load R --num-samples 1000000000000", "--num-samples is 1,000,000,000,000, but must be at most 1,000,000"),
    ("--load R --temperature nan", "argument --temperature: nan is not a finite number"),
    ("--load R --num-samples 0", "--num-samples is 0, but must be at least 1"),
    ("--load R --micro-batch-size 0", "--micro-batch-size is 0, but must be at least 1"),
    ("--load R --prompt a --prompts-file b", "--prompt and --prompts-file b are both given"),
    ("--load R --prompts-file nowhere", "nowhere cannot be read"),
    ("--load R --prompt " + "cat" * 20, "but the model has 12 positions"),
    ("--load R --distributed-timeout-minutes 0", "--distributed-timeout-minutes is 0.0"),
    (f"--load R {T} 1", "there are 2 ranks, and a text comes from one copy of the model. Start 1 ranks"),
    (f"--load R {T} 3", "must be a multiple of 3"),
    ("--load R --tokenizer-type NullTokenizer", "The tokenizer is not that of"),
    ("--load R --vocab-size 3", "generate has no option --vocab-size"),
    ("--load R --vocab-file x", "--vocab-file is for"),
    ("--load R --tokenizer-model x", "x cannot be read: No such file"),
])
def test_what_cannot_be_done_is_said_in_a_sentence(ranks, bytes_run, options, sentence):
    words = [{"R": str(bytes_run[2]), "''": ""}.get(word, word) for word in options.split()]
    assert sentence in refusal_of(ranks, words)


def test_what_no_model_of_this_kind_can_do(ranks, tmp_path, bytes_run):
    bert = model_of(10, architecture="bert", heads=("lm", "sop"))
    ranks.run(2, save_run, bert, NullTokenizer(9), tmp_path)
    assert "holds a BERT" in refusal_of(ranks, ["--load", tmp_path])
    root = bytes_run[2]
    assert "--num-layers is 4, but the 1f1b schedule has 5 stages" in ranks.run(
        5, refusal, program, ["--load", str(root), P, "5"])[0]
    assert "--tensor-model-parallel-size is 3, but must divide --num-attention-heads" in ranks.run(
        3, refusal, program, ["--load", str(root), T, "3"])[0]


def test_a_folder_that_lacks_tensors_is_refused(ranks, bytes_run, tmp_path):
    """Before anything is read."""
    folder = with_a_layer_too_few(bytes_run[3], tmp_path / "hf")
    assert f"{folder} has no tensor h.4." in refusal_of(ranks, ["--load-hf", folder])


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


def test_it_starts_from_the_command_line(bytes_run):
    """As a person starts it, and errors end it with status 2."""
    model, tokenizer, root, _ = bytes_run
    command = [sys.executable, "-m", "mpi_impl.launch", "-n", "2", "-m", "mpi_impl.generate", "--load", str(root),
               P, "2", "--dtype", "float64", "--tokens-to-generate", "5", "--prompt", "Grüße"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"\n{whole_text(model, tokenizer, 'Grüße', 5, Sampling())}\n" in done.stdout
    done = subprocess.run([*command, "--top-p", "2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("error: --top-p is 2.0") == 1
