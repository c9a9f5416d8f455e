"""All refusals in one table: what a program or a function is given, and what its sentence must name.

The rows are in tests/refusals/*.toml, by program, as `given = named`. PLAYERS, below, says how a section is
played. What can be wrong inside a file is tested with its reader.
"""
import os
import re
import shlex
import tomllib
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from docs.playground import pipelines
from mpi_impl.checkpoints.huggingface import check_weights
from mpi_impl.comm.group import world
from mpi_impl.data import cached
from mpi_impl.data.bert import BERTDataset
from mpi_impl.data.blend import parse_blend
from mpi_impl.data.corpus import Corpus
from mpi_impl.data.dataset import split_samples
from mpi_impl.data.prepare import preparation
from mpi_impl.data.saved_tokenizer import SAVED, load as load_saved
from mpi_impl.data.spans import Spans
from mpi_impl.data.tokenizer import SPECIAL, NullTokenizer
from mpi_impl.data.tokenizer_choice import TRAINED, TokenizerChoice, given_tokenizer
from mpi_impl.launch import launcher
from mpi_impl.launch.entry import ArgumentParser
from mpi_impl.launch.hostfile import fill_hosts, read_hosts
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.training.fsdp import FSDP
from reference.config import ExpertsConfig, ModelConfig, ParallelConfig, check_model_fits
from reference.costs.hardware import Link
from reference.errors import UserError
from reference.generation import batching
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stale_weights import STASHED
from reference.schedules.actions import from_csv, to_csv
from reference.schedules.generators import zero_bubble_v
from reference.schedules.validate import validate
from shardlab.command import program_of
from shardlab.compare import __main__ as compare
from shardlab.dry_run import options as dry_run
from shardlab.plan import __main__ as plan
from shardlab.plan.profiles import HERE, hardware_of, load
from shardlab.programs.settings import parse
from shardlab.score import __main__ as score, traffic
from shardlab.score.entry import Entry
from tests.cases import Case
from tests.checkpoints.runs import GOLDEN_MODELS, model_in, options as load_options, weights_of, write_model
from tests.data.test_bert import corpus as documents_of, word_pieces
from tests.fsdp_theorems import Wrapping, layers_of
from tests.generate.test_generate import bytes_run, program as generate  # noqa: F401
from tests.launching import ROOT, command
from tests.mpi_impl.test_files import NAMES, named
from tests.mpi_impl.test_pretrain import SMALL as TINY
from tests.mpi_impl.test_prove import sizes_of
from tests.plan_cases import IDEAL
from tests.program import pretrain, pretrain_bert, refusal
from tests.reference.test_stale_weights import UNTIED, trained

ROWS = [pytest.param(section, given, said, id=f"{section}: {given}")
        for path in sorted((ROOT / "tests/refusals").glob("*.toml"))
        for section, rows in tomllib.loads(path.read_text("utf-8")).items() for given, said in rows.items()]
GPT = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, vocab_size=50, max_position_embeddings=8)
GRAPH = "--cuda-graph-impl full_iteration --device cuda"
TO_PLAN = "--num-gpus 8 --global-batch-size 16"
PLANNED = f"{TO_PLAN} --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256"
DRY = """--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 128 --global-batch-size 32
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --bf16"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Fill the current folder with what rows name: files, each of which holds its own name, and odd ones."""
    for name in NAMES:
        write(tmp_path / name, name)
    for name, content in {
            "binary.csv": "\xff\xfe\0", "long.csv": "0F" + 5000 * "9", "gap.csv": "0F0,0B0\n\n1F0,1B0\n",
            "circle.csv": "0F0,0B0\n1B0,1F0\n", "hollow/empty.txt": "", "vocab.txt": "\n".join(SPECIAL)}.items():
        write(tmp_path / name, content)
    for name in "empty", "cache":
        (tmp_path / name).mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> str:
    """Write a file, in Latin-1, in which any byte can be written."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    return str(path)


def seen_in(folder: Path) -> dict:
    """Return all paths of a folder, with the times of files, but for what a row's player has made of the row."""
    return {path: path.is_file() and path.stat().st_mtime_ns for path in folder.rglob("*")
            if path.relative_to(folder).parts[0] != "given"}


@pytest.mark.parametrize("section, given, said", ROWS)
def test_what_cannot_be_is_refused_in_a_sentence(section, given, said, folder, request, capsys):
    """It names what is at fault, and comes before any work: nothing is printed, and no file is made or changed."""
    before = seen_in(folder)
    with pytest.raises(UserError) as refused:
        player_of(section)(given, request)
    sentence = str(refused.value)
    assert said in sentence and re.search("[.?]$", sentence, re.M) and "Traceback" not in sentence, sentence
    assert capsys.readouterr().out == ""
    assert seen_in(folder) == before


PROGRAMS = """mpi_impl.launch mpi_impl.pretrain_gpt mpi_impl.pretrain_bert mpi_impl.data.prepare shardlab.compare
    shardlab.dry_run shardlab.evaluate shardlab.generate shardlab.hang shardlab.plan shardlab.plot_schedule
    shardlab.prove shardlab.score""".split()


@pytest.mark.parametrize("line", [*PROGRAMS, "reference.prove --seed -1", "reference.schedules -p 0"])
def test_a_program_that_refuses_ends_with_status_2(line):
    done = command("-m", *line.split(), *["--nope"][:line in PROGRAMS])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ---- how the rows of a section are played ---------------------------------------------------------------------------


def player_of(section: str):
    """Return the player of a section; one without an entry in PLAYERS is a function or a program, module:name."""
    if section in PLAYERS:
        return PLAYERS[section]
    return (line if section.endswith(":main") else arguments)(resolve_name(section))


def line(act, before: str = ""):
    """Play rows that are command lines, after some options that fit."""
    return lambda given, _: act([*before.split(), *shlex.split(given)])


def arguments(act):
    """Play rows that are arguments by name, as TOML writes them."""
    return lambda given, _: act(**tomllib.loads(f"arguments = {{{given}}}")["arguments"])


def rewritten(text: str, act):
    """Play rows that say what stands in this text in place of what."""
    return lambda given, _: act(text.replace(*given.split(" -> "), 1))


def text(act):
    return lambda given, _: act(given)


def contents(name: str, act):
    """Play rows that are the contents of a file of this name."""
    return lambda given, _: act(write(Path("given", name), given))


def on_ranks(program, options: str = ""):
    """Play rows on two ranks, all of which must say the same sentence, after options that fit and a corpus. That may
    be encoded before.
    """
    def play(given, request):
        corpus = [] if program is generate else request.getfixturevalue("corpus")
        if "given/R" in given:
            Path("given").mkdir()
            Path("given/R").symlink_to(request.getfixturevalue("bytes_run")[2])
        ranks = request.getfixturevalue("ranks")
        (said, _) = ranks.run(2, refusal_in, os.getcwd(), program, [*options.split(), *corpus, *shlex.split(given)])
        assert "iteration 1" not in request.getfixturevalue("capsys").readouterr().out
        if said:
            raise UserError(said)

    return play


def refusal_in(group, folder, program, options) -> str:
    with chdir(folder):
        return refusal(group, program, options)


def a_program():
    parser = ArgumentParser(prog="train")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument_group("training").add_argument("--lr", type=float, nargs="+")
    return parser.parse_args


def compare_runs(words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["compare", *words])
        compare.main()


def on_board(task: str):
    def play(every_part=None, **content):
        layout = dict.fromkeys(traffic.PARTS, every_part)
        score.TASKS[task].score(Entry(task, "me", **content or {"layout": layout}))

    return play


def changed(fields: dict, changes: dict) -> dict:
    """Return fields with other values; {} says that one is missing."""
    return {name: value for name, value in (fields | changes).items() if value != {}}


def profile(**changes):
    hardware_of("mine", changed(tomllib.loads((HERE / "dgx-a100.toml").read_text()), changes))


def golden_folder(kind: str, **changes) -> Path:
    """Write a golden model as transformers saves it; return its folder."""
    golden = GOLDEN_MODELS[kind]
    Path("given").mkdir()
    return write_model(Path("given/hf"), changed(golden["config"], changes), weights_of(golden))


def begin_with(kind: str, words):
    architecture = "bert" if kind == "rearranged" else "gpt"
    parse(load_options(golden_folder(kind), " ".join(words)), 1, architecture)


def check_model_of(kind: str, **changes):
    folder = golden_folder(kind, **changes)
    check_weights(str(folder), model_in(folder))


def model(moe_layer_freq=None, **choices):
    replace(GPT, **choices, **{"experts": ExpertsConfig(4, moe_layer_freq=moe_layer_freq)} if moe_layer_freq else {})


def requests(requests, server):
    batching.static_batches([batching.Request(*one) for one in requests], batching.Server(*server))


def bert_samples(tokenizer=None, **choices):
    fitting = {"indexed": documents_of([[5, 5]]), "seq_length": 8, "seed": 1, "split": "1"}
    BERTDataset(**fitting | {"tokenizer": NullTokenizer(tokenizer) if tokenizer else word_pieces(20)} | choices)


def texts(path):
    return list(Corpus(path).documents())


def document(path):
    """Refuse a document alone, and the only one of its folder."""
    with pytest.raises(UserError, match=f"{path} is "):
        texts(os.path.dirname(path))
    texts(path)


PLAYERS: dict[str, Any] = {
    "pretrain_gpt on 8 ranks": line(partial(parse, world_size=8)),
    "pretrain_gpt on a GPU, its step a graph": line(partial(parse, world_size=1), GRAPH),
    "pretrain_bert": line(partial(parse, world_size=1, architecture="bert")),
    "pretrain_gpt, started on 2 ranks": on_ranks(pretrain, " ".join(TINY)),
    "pretrain_bert, started on 2 ranks": on_ranks(pretrain_bert, " ".join(TINY)),
    "generate on 2 ranks, t 2": on_ranks(generate, "--tensor-model-parallel-size 2"),
    **{f"a model of transformers, {kind}": line(partial(begin_with, kind)) for kind in GOLDEN_MODELS},
    **{f"a config.json, {kind}": arguments(partial(check_model_of, kind)) for kind in GOLDEN_MODELS},
    # functions of the textbook, and its programs
    "ModelConfig": arguments(model),
    "ExpertsConfig": arguments(partial(ExpertsConfig, num_experts=4)),
    "ParallelConfig": arguments(partial(ParallelConfig, 1, 1, 4)),
    "check_model_fits": arguments(lambda **plan: check_model_fits(replace(GPT, share_layers=True),
                                                                  ParallelConfig(**plan))),
    "OptimizerConfig": arguments(partial(OptimizerConfig, **{"lr": 1.0, "lr_decay_iters": 10})),
    "Hardware": arguments(partial(replace, IDEAL)),
    "Link": arguments(lambda **link: replace(IDEAL, inside=Link(**link))),
    "FSDP": arguments(lambda **choices: FSDP(layers_of(Wrapping((2, 2), ()), np.random.default_rng(0)), world(),
                                             **choices)),
    "stale weights": arguments(lambda **choices: trained((Case(1, replace(UNTIED, **choices), 2, 5, seed=7), 4, 6),
                                                         STASHED)),
    "batches of requests": arguments(requests),
    "validate": text(lambda ranks: validate(from_csv(ranks.replace(" ", ",").replace("/", "\n")))),
    # the bench
    "shardlab": line(lambda words: launcher.check_options(program_of(words))),
    "mpi_impl.launch": line(lambda words: launcher.check_options(launcher.parse_options(words))),
    "a hostfile for 4 ranks": contents("hosts", lambda path: fill_hosts(read_hosts(path), 4, path)),
    "a hostfile's path": text(read_hosts),
    "a program's options": line(a_program()),
    "dry_run": line(dry_run.parse, DRY),
    "plan": line(plan.main, PLANNED),
    "plan without a model": line(plan.main, TO_PLAN),
    "a profile of hardware": arguments(profile),
    "a profile's text": contents("mine.toml", load),
    "prove on 4 ranks": line(lambda words: sizes_of(" ".join(words), 4)),
    "prove on 6,400 ranks": line(lambda words: sizes_of(" ".join(words), 6400)),
    "compare": line(compare_runs),
    "score: memory": text(lambda options: on_board("memory")(options=options)),
    "score: bytes": arguments(on_board("bytes")),
    "score: bubble": rewritten(to_csv(zero_bubble_v(4, 8)), lambda schedule: on_board("bubble")(schedule=schedule)),
    "outputs of programs": text(lambda options: check_outputs(named(options))),
    "the playground's schedules": arguments(lambda **state: pipelines.play(pipelines.DEFAULTS | state)),
    # texts and tokens
    "prepare": line(preparation.main, "--input corpus --output-prefix out --workers 1 --jaccard 0"),
    "a tokenizer's options": arguments(lambda **options: given_tokenizer(TokenizerChoice(**options))),
    "a vocabulary to be trained": arguments(lambda kind, size: TRAINED[kind].train(["ab"], size)),
    "ids of 11 tokens": text(NullTokenizer(10).encode),
    "a saved tokenizer": contents(SAVED, lambda path: load_saved(os.path.dirname(path))),
    "a path of texts": text(texts),
    "a line of JSON": lambda given, _: texts(write(Path("given/texts.json"), '{"text": "good"}\n\n' + given)),
    **{f"a document named {name}": contents(name, document) for name in ("a.json", "a", "a.txt")},
    "parse_blend": text(lambda words: parse_blend(words.split())),
    "split_samples": text(lambda split: split_samples(split, 10)),
    "BERTDataset": arguments(bert_samples),
    "Spans of documents of sentences": arguments(lambda documents: Spans(documents_of(documents), 20, 1, 0.1)),
    "a cache of tokens": arguments(lambda data_path="corpus", cache="cache": cached.prepare(
        data_path, TokenizerChoice(vocab_size=270), False, Path(cache), lambda _: None)),
}
