"""BERT's program, on real ranks and real text: the run is pretrain_gpt's, with other samples and other heads."""
import json
import math

import pytest

from tests.program import pretrain_bert, refusal

SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --micro-batch-size 2
    --global-batch-size 8 --train-iters 6 --lr 0.01 --lr-warmup-iters 2 --vocab-size 120 --log-interval 2
    --eval-interval 4 --eval-iters 2 --split 8,2 --dtype float64""".split()


def text(first):
    """Return paragraphs of sentences."""
    return "\n\n".join(" ".join(f"Here {i} times {i % 7} is {i * (i % 7)}." for i in range(n, n + 12))
                       for n in range(first, first + 240, 12))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Write two text files; return their paths and the options of a cache of tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, first in (("a", 0), ("b", 1000)):
        (folder / f"{name}.txt").write_text(text(first))
    return str(folder / "a.txt"), str(folder / "b.txt"), ["--data-cache-path", str(folder / "cache")]


@pytest.mark.parametrize("n, extra", [
    (1, "--apply-residual-connection-post-layernorm --activation gelu_exact --layernorm-epsilon 1e-12"),
    (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --zero-stage 3 "
        "--recompute-granularity full"),
    pytest.param(8, "--tensor-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 "
                    "--pipeline-model-parallel-size 2 --num-layers 4", marks=pytest.mark.deep),
    pytest.param(4, "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 "
                    "--num-layers 5 --bert-no-binary-head --position-embedding-type rope --micro-batch-size 1",
                 marks=pytest.mark.deep),
    pytest.param(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
                    "--num-layers 4 --apply-residual-connection-post-layernorm", marks=pytest.mark.deep),
    (2, "--zero-stage 1 --dtype float32 --bf16"),
])
def test_a_verified_run(ranks, corpora, tmp_path, capfd, n, extra):
    """It agrees with one process, learns, and every number that it sent, and every byte that it held, is predicted."""
    a, _, cache = corpora
    files = {name: tmp_path / f"{name}.png" for name in ("metrics-file", "ledger", "plot")}
    named = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    ranks.run(n, pretrain_bert, [*SMALL, "--data-path", a, *cache, *extra.split(), "--verify", *named], timeout=120)
    printed = capfd.readouterr().out
    assert "verified against one process, every iteration" in printed and "NOT" not in printed
    rows = [json.loads(line) for line in files["metrics-file"].read_text().splitlines()]
    steps = [row for row in rows if "lm_loss" in row]
    assert [row["iteration"] for row in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert all(("sop_loss" in row) == ("no-binary-head" not in extra) for row in steps)
    validation = [row for row in rows if "validation_loss" in row]
    assert all(row["validation_loss"] == pytest.approx(row.get("validation_lm_loss", row["validation_loss"])
                                                       + row.get("validation_sop_loss", 0)) for row in validation)
    lines = json.loads(files["ledger"].read_text())
    assert all((line["calls"], line["elements"]) == (line["predicted_calls"], line["predicted_elements"])
               for line in lines if line["predicted_elements"] is not None)
    assert {line["phase"] for line in lines if line["predicted_elements"] is None} == {"verification"}


@pytest.mark.deep
def test_the_loss_curve_does_not_depend_on_the_ranks_nor_on_an_interruption(ranks, corpora, tmp_path):
    """The data are a blend; the last runs begin with the checkpoint of the one before, on other ranks."""
    a, b, cache = corpora
    both = ["--data-path", "0.3", a, "0.7", b, *cache, "--tokenizer-model", str(tmp_path / "tokenizer.json")]
    tokenizer(a).save(tmp_path / "tokenizer.json")
    t, p = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    curves = []
    for name, parts in (("one", [(1, "")]), ("four", [(4, f"{t} 2 {p} 2 --sequence-parallel")]),
                        ("halves", [(4, f"{t} 4 --exit-interval 3"), (8, f"{p} 2 --zero-stage 2")])):
        for i, (n, options) in enumerate(parts):
            states = ["--save", str(tmp_path / name), *(["--load", str(tmp_path / name)] if i else [])]
            ranks.run(n, pretrain_bert, [*SMALL, *both, *(states if len(parts) > 1 else []), "--vocab-size",
                                         str(tokenizer(a).vocab_size), "--metrics-file", str(tmp_path / f"{name}.m"),
                                         "--micro-batch-size", "1", *options.split()], timeout=120)
        rows = map(json.loads, (tmp_path / f"{name}.m").read_text().splitlines())
        curves.append({row["iteration"]: (row["lm_loss"], row["sop_loss"], row["grad_norm"]) for row in rows
                       if "lm_loss" in row})
    for curve in curves[1:]:
        assert curve.keys() == curves[0].keys()
        for iteration, found in curve.items():
            assert found == pytest.approx(curves[0][iteration], rel=1e-11)
    assert math.isclose(curves[0][1][1], math.log(2), rel_tol=0.01)


def tokenizer(path):
    from mpi_impl.data.tokenizer import BertWordPieceLowerCase
    return BertWordPieceLowerCase.train([open(path).read()], 120)


@pytest.mark.parametrize("options, said", [
    ("--untie-embeddings-and-output-weights", "no option --untie-embeddings-and-output-weights"),
    ("--tokenizer-type ByteLevelBPETokenizer --vocab-size 300", "has no [CLS], [SEP] and [MASK]"),
    ("--mask-prob 1.5", "--mask-prob 1.5 leaves nothing to predict"),
    ("--seq-length 4", "--seq-length 4 is too short for a pair of sentences"),
    ("--sample-tokens 5", "no option --sample-tokens"),
])
def test_what_is_refused(ranks, corpora, options, said):
    """All ranks refuse it with the same sentence, before the work."""
    a, _, cache = corpora
    assert said in ranks.run(2, refusal, pretrain_bert, [*SMALL, "--data-path", a, *cache, *options.split()])[0]


def test_a_blend_has_one_tokenizer(ranks, corpora):
    a, b, cache = corpora
    found = ranks.run(1, refusal, pretrain_bert, [*SMALL, "--data-path", "1", a, "1", b, *cache])[0]
    assert "a tokenizer that is trained on one is another" in found and "--tokenizer-model" in found


def test_a_refused_run_leaves_the_tokenizer_of_the_one_before(ranks, corpora, tmp_path):
    """Another vocabulary cannot go on from there, and what was saved beside the checkpoint stays."""
    a, _, cache = corpora
    options = [*SMALL, "--data-path", a, *cache, "--eval-iters", "0", "--save", str(tmp_path / "S")]
    ranks.run(1, pretrain_bert, [*options, "--train-iters", "3"])
    before = (tmp_path / "S" / "tokenizer.json").read_bytes()
    found = ranks.run(1, refusal, pretrain_bert, [*options, "--load", str(tmp_path / "S"), "--vocab-size", "110"])[0]
    assert "The tokenizer is not that of " in found and (tmp_path / "S" / "tokenizer.json").read_bytes() == before
