"""WikiText-103 and LAMBADA on ranks: the figures equal those of a model in one process, sample by sample."""
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.data.tokenizer import ByteLevelBPETokenizer, NullTokenizer
from mpi_impl.parallel.passes import ForwardPass
from reference.config import ModelConfig, ParallelConfig
from reference.models.gpt import gpt_forward, gpt_logits, gpt_tensors
from shardlab.evaluate.passes import WordsPass
from shardlab.evaluate.scored import Excerpt, ScoredDataset
from shardlab.evaluate.sums import Sums
from shardlab.evaluate.wikitext103 import WikiText103, detokenize
from shardlab.evaluate.zero_shot import ScoredBatches
from tests.evaluate.runs import evaluations, metrics, params_of, refused, save, split
from tests.generate.texts import replica_of
from tests.rank_theorems import as_is
from tests.spy import SpyArray
from tests.strategies import Case
from tests.training_theorems import connected

# ---- sums over ranks ------------------------------------------------------------------------------------------------


def excerpts(case: Case, count: int) -> list[Excerpt]:
    """Draw excerpts of any length; every other one ends as the model would continue, wholly or but for one token."""
    rng, params, found = np.random.default_rng(case.seed), case.params(gpt_tensors(case.model)), []
    for i in range(count):
        n = rng.integers(1, case.s + 1)
        tokens, asked = case.ids(f"excerpt {i}", n + 1), int(rng.integers(1, n + 1))
        for place in range(n + 1 - asked, n + 1 - i % 4 // 2):
            if i % 2:
                tokens[place] = gpt_logits(tokens[None, :place], params, case.model)[0, -1].argmax()
        found.append(Excerpt(tokens, asked))
    return found


def one_by_one(case: Case, samples: list[Excerpt]) -> list[float]:
    """Sum the losses of the scored tokens, and count the samples that have all of them right."""
    params, c, losses, right = case.params(gpt_tensors(case.model)), case.model, 0.0, 0
    for tokens, asked in samples:
        given, targets = tokens[None, :-1], tokens[None, 1:]
        losses += gpt_forward(given, params, c, targets)[0][0, -asked:].sum()
        right += (gpt_logits(given, params, c)[0, -asked:].argmax(-1) == targets[0, -asked:]).all()
    return [losses, right]


def sums(group, p: int, case: Case, samples: list[Excerpt], wrap=as_is) -> list[float]:
    parallel = ParallelConfig.for_world(group.size, case.t, p)
    with connected(group, parallel) as topology:
        replica = replica_of(topology, case, wrap(np.empty(0)))
        dataset = ScoredDataset(samples, case.s, 0) if topology.place.tensor == 0 else None
        batches = ScoredBatches(dataset, case.model, topology, case.s, case.b, wrap(np.empty(0)))
        return [Sums(replica, batches, make_pass).over("test", len(samples)) for make_pass in (ForwardPass, WordsPass)]


@settings(max_examples=settings().max_examples * 2 // 5)
@given(evaluations(), st.sampled_from([as_is, as_is, as_is, SpyArray]))
def test_sums_on_ranks_are_those_over_samples_one_by_one(ranks, evaluation, wrap):
    """On any t, p and d, and any number of samples, which need not fill the batches: identical on all ranks."""
    n, p, case, count = evaluation
    samples = excerpts(case, count)
    losses, right = one_by_one(case, samples)
    for found in ranks.run(n, sums, p, case, samples, wrap):
        assert found == [pytest.approx(losses, rel=1e-11), right]


def test_some_samples_are_right_and_some_are_not():
    """What the theorem above counts is neither nothing nor everything."""
    case = Case(1, ModelConfig(2, 8, 2, 11, 6), 1, 6, seed=1)
    assert 3 <= one_by_one(case, excerpts(case, 20))[1] <= 17


# ---- the program ----------------------------------------------------------------------------------------------------

TEXT = " \n = A boat = \n \n" + "".join(
    f" The boat {i} was a well @-@ known boat , and {i * i % 7} @.@ 5 m long ; it is gone . \n" for i in range(20))


@pytest.fixture(scope="module")
def wikitext(ranks, tmp_path_factory):
    """Return the file, the model, the tokenizer and the model's folders."""
    root, folder = tmp_path_factory.mktemp("gpt"), tmp_path_factory.mktemp("hf")
    path = tmp_path_factory.mktemp("data") / "wiki.test.tokens"
    path.write_text(TEXT)
    tokenizer = ByteLevelBPETokenizer.train([detokenize(TEXT)], 270)
    model = ModelConfig(4, 16, 4, tokenizer.vocab_size, 40, init_method_std=0.3)
    ranks.run(2, save, model, tokenizer, root, folder)
    return path, model, tokenizer, root, folder


def test_perplexities_are_those_of_one_process_on_any_ranks(ranks, wikitext, tmp_path):
    """Windows that do not fill the batches, shorter than what the model can see; and by default the paper's: all that
    it sees, and an overlap of 32. The model is a checkpoint, or one in Hugging Face's layout. (Sums are those over
    samples: above. The figures made of them: test_wikitext103.py.)
    """
    path, _, tokenizer, root, folder = wikitext
    for (n, t, p), s, o, source in (((8, 2, 2), 11, 9, ["--load", root]), ((3, 1, 3), 40, 32, ["--load-hf", folder])):
        dataset = WikiText103(str(path), tokenizer, s, o)
        sizes = ["--seq-length", s, "--overlapping-eval", o]
        (one,) = metrics(ranks, 1, tmp_path / "metrics", "wikitext103", "--data-path", path, "--load", root, *sizes)
        (row,) = metrics(ranks, n, tmp_path / "metrics", "wikitext103", "--data-path", path, "--micro-batch-size", 5,
                         *source, *sizes * (s < 40), *split(t, p))
        _, figures = dataset.measures(one["loss"] * (dataset.tokens - 1))
        assert {name: row[name] for name in figures} == pytest.approx(figures, rel=1e-10)


@pytest.fixture(scope="module")
def lambada(ranks, tmp_path_factory):
    """Write a model, and passages of numbers a third of which end as the model predicts; return their file and the
    model's folder.
    """
    root, path = tmp_path_factory.mktemp("gpt"), tmp_path_factory.mktemp("data") / "lambada_test.jsonl"
    tokenizer, model = NullTokenizer(499), ModelConfig(4, 16, 4, 500, 12, init_method_std=0.3)
    ranks.run(1, save, model, tokenizer, root)
    rng, params, lines = np.random.default_rng(1), params_of(model), []
    for i in range(31):
        context = rng.integers(0, 500, rng.integers(1, 30))
        said = gpt_logits(context[None, -12:], params, model)[0, -1].argmax()
        words = [*context, said if i % 3 == 0 else (said + 1) % 500]
        lines.append(json.dumps({"text": " ".join(map(str, words))}))
    path.write_text("\n".join(lines))
    return path, root


def test_as_a_person_starts_it(lambada):
    """In float32, which changes no word here; and a sentence ends all ranks."""
    path, root = lambada
    command = [sys.executable, "-m", "mpi_impl.launch", "-n", "2", "--timeout", "60", "-m", "shardlab.evaluate",
               "--task", "lambada", "--data-path", path, "--load", root]
    for options, status, said in (([], 0, "of 31 last words 11 are right"),
                                  (["--load", "no/such"], 2, "error: --load no/such holds no checkpoint")):
        ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=70)
        assert ended.returncode == status and (ended.stdout + ended.stderr).count(said) == 1, ended.stderr
        assert "Traceback" not in ended.stderr


# ---- bad input ------------------------------------------------------------------------------------------------------


BAD: list = [      # the task, other options than usual, and what the sentence names
    ("wikitext103", ["--seq-length", "41"], "--seq-length is 41"), ("wikitext103", split(4, 1), "multiple of 4"),
    ("wikitext103", ["--metrics-file", "no/such/folder/f"], "no/such"),
    ("wikitext103", ["--load-hf", "no/such"], "one model"), ("lambada", [], "line 2,"),
    ("lambada", ["--overlapping-eval", "3"], "has no option --overlapping-eval"),
    ("wikitext", [], "Did you mean wikitext103?"),
]


@pytest.mark.parametrize("task, options, said", BAD)
def test_bad_input_is_one_sentence_on_all_ranks(ranks, wikitext, task, options, said):
    path, _, _, root, _ = wikitext
    assert said in refused(ranks, task, "--data-path", path, "--load", root, *options)


@pytest.mark.parametrize("task", ["wikitext103", "lambada"])
def test_a_model_that_has_diverged_has_neither_perplexity_nor_accuracy(ranks, wikitext, lambada, tmp_path, task):
    """Its weights are finite in 16 bits, its logits are not. The file keeps the figures of the run before."""
    path, model, tokenizer, *_ = wikitext
    path, file = path if task == "wikitext103" else lambada[0], tmp_path / "metrics"
    file.write_text("the last run's")
    ranks.run(1, save, replace(model, init_method_std=3e4), tokenizer, tmp_path)
    assert "the model's logits are infinite or NaN" in refused(
        ranks, task, "--data-path", path, "--load", tmp_path, "--dtype", "float16", "--metrics-file", file)
    assert file.read_text() == "the last run's"
