"""Tuning on ranks equals that of one process, step by step, in the tuned model's answers, too; it learns what can be
learnt; and an ensemble answers with the mean of its probabilities.
"""
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mpi_impl.data.tokenizer import BertWordPieceLowerCase
from mpi_impl.training.batches import whole_batch
from reference.config import ModelConfig
from reference.models.bert import answer_logits
from reference.models.model import model_tensors
from reference.ops import softmax
from reference.optimizers.adam import OptimizerConfig
from reference.params import initialize, leaves, tree_map, with_names
from reference.precision import Precision
from reference.training import trainer as training
from shardlab.evaluate.arguments import FineTuningLength
from shardlab.evaluate.fine_tuning import describe_measures, metrics_of
from shardlab.evaluate.glue import MNLI, QQP
from shardlab.evaluate.race import LEVELS, PARTS
from shardlab.evaluate.tasks import TASKS
from shardlab.evaluate.tuning_data import TuningDataset
from tests.evaluate.runs import evaluate, metrics, params_of, refused, save, split
from tests.evaluate.test_glue import write
from tests.evaluate.test_race import written
from tests.evaluate.test_squad import write as write_squad

WORDS = "the a cat dog boat was is old red and it who what ? . yes no never".split()
QUESTIONS = {"train": (5, 4), "validation": (3, 4), "test": (2, 5)}       # at each level, in passages of one or two
COMMON = ["--micro-batch-size", "1", "--lr-warmup-fraction", "0.3", "--adam-eps", "1e-4", "--seed", "3"]
OTHERS, RATE = [*COMMON, "--max-qa-length", "8"], ["--global-batch-size", "4", "--lr", "0.01"]
TUNING = [*OTHERS, *RATE]
SEED = 3


def passages(rng, count: int) -> list[dict]:
    """Return passages of random words with questions, all different, whose right answer is always "yes"."""
    def text(longest):
        return " ".join(rng.choice(WORDS[:-3], rng.integers(1, longest + 1)))

    found = []
    for first in range(0, count, 2):
        answers = rng.integers(0, 4, min(2, count - first)).tolist()
        options = [["yes" if i == answer else str(rng.choice(["no", "never"])) for i in range(4)] for answer in answers]
        found.append({"article": text(12), "questions": [f"{text(6)} ?" for _ in answers], "options": options,
                      "answers": ["ABCD"[answer] for answer in answers]})
    return found


@pytest.fixture(scope="module")
def race(ranks, tmp_path_factory):
    """Return the data, a BERT that was trained on something else, its tokenizer, and its folders."""
    rng, data = np.random.default_rng(1), tmp_path_factory.mktemp("race")
    for part, counts in QUESTIONS.items():
        written(data, PARTS[part], [passages(rng, count) for count in counts])
    tokenizer = BertWordPieceLowerCase.train([" ".join(WORDS)] * 9, 100)
    model = ModelConfig(3, 16, 4, tokenizer.vocab_size, 32, architecture="bert", heads=("lm", "sop"),
                        init_method_std=0.3)
    root, folder = tmp_path_factory.mktemp("bert"), tmp_path_factory.mktemp("hf")
    ranks.run(2, save, model, tokenizer, root, folder)
    return data, model, tokenizer, root, folder


class Textbook:
    """The same in one process."""

    def __init__(self, dataset: TuningDataset, head: str, pretrained: ModelConfig, iterations: int, seed: int = SEED):
        self.dataset = dataset
        self.model = replace(pretrained, heads=(head,), init_method_std=0.02, hidden_dropout=0.2)
        optimizer = OptimizerConfig(0.01, iterations, lr_warmup_iters=round(0.3 * iterations), adam_eps=1e-4)
        self.trainer = training.Trainer(self.model, optimizer, seed, Precision("float64"))
        known = dict(leaves(params_of(pretrained)))
        self.trainer.params = tree_map(lambda named: known.get(named.name, named.leaf),
                                       with_names(initialize(model_tensors(self.model), seed, np.float64)))

    def step(self, iteration: int, batch: int) -> tuple[float, float]:
        """Return the loss, and the norm of its gradient."""
        return self.trainer.step(whole_batch(self.dataset, self.model, "train", iteration - 1, batch))[:2]

    def probabilities(self, part: str):
        """Return the probabilities of the answers to a part."""
        batch = whole_batch(self.dataset, self.model, part, 0, self.dataset.samples(part))
        return softmax(answer_logits(None, self.trainer.params, self.model, batch))


def accuracies(row: dict, part: str) -> list[float]:
    return [row[name] for name in (f"{part}_accuracy", *(f"{part}_{level}_accuracy" for level in LEVELS))]


PAIRS = {"mnli": MNLI, "qqp": QQP}


@pytest.fixture(scope="module")
def folders(race, tmp_path_factory) -> dict[str, Path]:
    """Return the folders of the tasks, of random words; in those for pairs the second sentence tells the class."""
    rng, found = np.random.default_rng(2), {name: tmp_path_factory.mktemp(name) for name in (*PAIRS, "squad")}
    for name, task in PAIRS.items():
        write(found[name], task, [[(" ".join(rng.choice(WORDS, 9)), WORDS[i], task.classes[i])
                                   for i in rng.integers(0, len(task.classes), count)] for count in (7, 40, 4)])
    texts = [" ".join(rng.choice(WORDS[:-3], n)) for n in rng.integers(3, 30, 8)]
    passages = [{"context": text, "qas": [
        {"question": str(rng.choice(WORDS)), "answers": [{"text": text[i:i + 8], "answer_start": i}]} for i in (0, 3)]}
        for text in texts]
    write_squad(found["squad"], passages[:4], passages[4:])
    return found | {"race": race[0]}


def textbook_of(task: str, folder, tokenizer, model, iterations: int, seed: int = SEED) -> Textbook:
    dataset = TASKS[task].dataset(str(folder), tokenizer, 24, seed, *[8] * (task in ("race", "squad")))
    return Textbook(dataset, TASKS[task].head, model, iterations, seed)


LENGTHS = {"race": "--epochs 2 --max-qa-length 8", "squad": "--train-iters 5 --max-query-length 8"}


@pytest.mark.parametrize("task, n, source, batch, options", [
    ("race", 8, "--load", 4, [*split(2, 2), "--sequence-parallel", "--zero-stage", "1"]),
    ("race", 3, "--load-hf", 3, [*split(1, 3), "--pipeline-schedule", "zb-h1"]),
    ("mnli", 4, "--load", 4, [*split(2, 2), "--sequence-parallel"]),
    ("qqp", 2, "--load", 4, ["--context-parallel-size", "2"]),
    ("squad", 8, "--load", 4, [*split(2, 2), "--sequence-parallel", "--context-parallel-size", "2"])])
def test_tuning_is_that_of_one_process(ranks, race, folders, tmp_path, task, n, source, batch, options):
    """The loss and the gradient's norm at each step, dropout on; the figures of the validation part after each epoch,
    and in the end those of the test part, if there is one: to the last sample.
    """
    _, model, tokenizer, root, folder = race
    rows = iter(metrics(ranks, n, tmp_path / "metrics", task, "--data-path", folders[task], source,
                        {"--load": root, "--load-hf": folder}[source], *COMMON, *RATE, "--global-batch-size", batch,
                        "--seq-length", 24, "--hidden-dropout", 0.2, *options,
                        *LENGTHS.get(task, "--train-iters 5").split()))
    iterations = -(-18 // batch)        # two epochs of RACE's nine questions
    textbook = textbook_of(task, folders[task], tokenizer, model, iterations)

    def figures(part):
        return pytest.approx({"iteration": iteration} | metrics_of(
            part, textbook.dataset.measures(part, textbook.probabilities(part))))

    length = FineTuningLength(textbook.dataset.samples("train"), batch, iterations)
    for iteration in range(1, iterations + 1):
        row = next(rows)
        losses = row[f"{TASKS[task].head}_loss"], row["grad_norm"]
        assert losses == pytest.approx(textbook.step(iteration, batch), rel=1e-10)
        if length.ends_epoch(iteration):
            assert next(rows) == figures("validation")
    assert [*rows] == [figures(part) for part in textbook.dataset.parts if part == "test"]


def test_an_ensemble_answers_with_the_mean_of_its_probabilities(ranks, race, folders, tmp_path, capfd):
    """Three models, tuned with different seeds, have other figures together than each of them alone."""
    _, model, tokenizer, root, _ = race
    common, probabilities = ["--data-path", folders["qqp"], "--seq-length", 24], []
    for seed in "345":
        metrics(ranks, 2, tmp_path / "metrics", "qqp", *common, *COMMON, *RATE, "--load", root, "--seed", seed,
                "--train-iters", 3, "--hidden-dropout", 0.2, "--save", tmp_path / seed)
        textbook = textbook_of("qqp", folders["qqp"], tokenizer, model, 3, int(seed))
        for iteration in (1, 2, 3):
            textbook.step(iteration, 4)
        probabilities.append(textbook.probabilities("validation"))
    capfd.readouterr()
    (row,) = metrics(ranks, 4, tmp_path / "metrics", "qqp", *common, *split(2), "--load", tmp_path / "3", "--ensemble",
                     tmp_path / "4", tmp_path / "5")
    *each, together = [textbook.dataset.measures("validation", p) for p in (*probabilities, sum(probabilities) / 3)]
    assert row == pytest.approx(metrics_of("validation", together)) and together not in each
    said = capfd.readouterr().out
    assert all(f" | validation {describe_measures(found)}\n" in said for found in (*each, together))


def test_what_can_be_learnt_is_learnt_and_saved(ranks, race, tmp_path, capfd):
    """All answers right, at every level; and the saved model knows as much at once, on other ranks."""
    data, _, _, root, _ = race
    common = ["--data-path", data, *TUNING, "--seq-length", 24, "--hidden-dropout", 0, "--attention-dropout", 0]
    *_, row = metrics(ranks, 4, tmp_path / "metrics", "race", *common, "--load", root, "--train-iters", 20,
                      "--save", tmp_path / "tuned", *split(2, 2))
    assert accuracies(row, "test") == [1, 1, 1]
    said = capfd.readouterr().out
    assert "test at     20 | accuracy 100.00%, middle accuracy 100.00%, high accuracy 100.00%\n" in said
    (row,) = metrics(ranks, 3, tmp_path / "metrics", "race", *common[:2], "--max-qa-length", 8, "--load",
                     tmp_path / "tuned", "--epochs", 0)
    assert accuracies(row, "test") == [1, 1, 1]


def test_the_protocol_takes_the_best_rate_and_the_median_of_seeds(ranks, race, tmp_path, capfd):
    """Each run is the one that the options would have made alone; the rate that learns nothing is not the best."""
    data, _, _, root, _ = race
    common = ["--data-path", data, "--load", root, *OTHERS, "--seq-length", 24, "--train-iters", 4]
    ranks.run(2, evaluate, [*map(str, ["--task", "race", "--dtype", "float64", *common, "--tune-lr", 1e-9, 0.01,
                                       "--tune-global-batch-size", 2, 4, "--seeds", 4, *split(2)])])
    text = capfd.readouterr().out
    said = {name: float(found) for name, found in
            re.findall(r"^(lr .*, seed \d+) \| validation accuracy ([\d.]+)%$", text, re.MULTILINE)}
    assert len(said) == 4 + 3
    best, middle = re.search(r"^(lr .*) \| median validation accuracy over 4 seeds ([\d.]+)%", text, re.M).groups()
    first = {name: found for name, found in said.items() if name.endswith("seed 3")}
    assert len(set(first.values())) >= 3 and first[f"{best}, seed 3"] == max(first.values()) > min(first.values())
    assert float(middle) == pytest.approx(median(said[f"{best}, seed {seed}"] for seed in range(3, 7)), abs=0.006)
    lr, batch = re.fullmatch(r"lr (.*), batch (\d+)", best).groups()
    *_, row, _ = metrics(ranks, 2, tmp_path / "metrics", "race", *common, "--lr", lr, "--global-batch-size", batch,
                         "--seed", 5, *split(2))
    assert said[f"{best}, seed 5"] == round(100 * row["validation_accuracy"], 2)


@pytest.mark.parametrize("questions, batch, iterations, ends", [
    (10, 4, 7, {3, 5, 7}), (3, 8, 2, {1, 2}), (10, 4, 0, set())])
def test_epochs_end_where_every_question_was_asked_once_more(questions, batch, iterations, ends):
    length = FineTuningLength(questions, batch, iterations)
    assert {iteration for iteration in range(1, iterations + 1) if length.ends_epoch(iteration)} == ends


BAD = [
    (["--epochs", "1", "--train-iters", "1"], "--epochs is 1 and --train-iters is 1"),
    (["--epochs", "0"], "has not been tuned on --task race"), (["--seq-length", "33"], "--seq-length is 33"),
    (["--data-path", "no/such"], "--data-path no/such"), (["--sequence-parallel"], "--sequence-parallel"),
    (["--lr", "1e200", "--train-iters", "3"], "the run has diverged"),
    (["--save", __file__], f"{__file__} is a file"), (["--seeds", "2", "--save", "runs/none"], "--save runs/none"),
    (["--seeds", "2", "--epochs", "0"], "--epochs is 0, but --seeds"), (["--lr", "0.1", "--tune-lr", "0.2"], "--lr"),
    (["--tune-global-batch-size", "4", "5"], "--global-batch-size is 5"),
    (["--ensemble", "a", "--seeds", "2"], "--seeds is for tuning"),
    (["--ensemble", "a"], "has not been tuned on --task race"),
]


@pytest.mark.parametrize("options, said", BAD)
def test_bad_input_is_one_sentence_on_all_ranks(ranks, race, options, said):
    data, _, _, root, _ = race
    others = OTHERS if any(option.startswith("--tune") for option in options) else TUNING
    assert refused(ranks, "race", "--data-path", data, "--load", root, *others, *options).count(said) == 1
