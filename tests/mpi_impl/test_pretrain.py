"""The training programs of GPT and BERT on real ranks and real text, and the papers' models that they know by name."""
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from mpi_impl.launch.pool import RankFailure
from mpi_impl.parallel import buffers
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from shardlab.programs.presets import PRESETS, VOCABULARIES
from shardlab.programs.settings import parse
from shardlab.report import metrics
from tests.deep import one_fast_of
from tests.planted import Bug, planted_run
from tests.program import pretrain, pretrain_bert, refusal

SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --micro-batch-size 2
    --global-batch-size 8 --train-iters 6 --lr 0.01 --lr-warmup-iters 2 --vocab-size 300 --log-interval 2
    --eval-interval 4 --eval-iters 2 --split 8,2 --dtype float64""".split()
T2, P2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


def train(ranks, n, options, program=pretrain):
    ranks.run(n, program, options, timeout=120)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("program, n, more", one_fast_of(2, [
    (pretrain, 8, f"{T2} {P2} --num-layers 5 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 16 "
                  "--ddp-bucket-size 5000 --sample-tokens 20"),
    (pretrain, 4, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h2 --num-layers 5 --micro-batch-size 1 "
                  "--position-embedding-type rope --rotary-percent 0.5 --untie-embeddings-and-output-weights"),
    (pretrain_bert, 8, f"{T2} {P2} --sequence-parallel --zero-stage 3 --recompute-granularity full"),
    (pretrain_bert, 2, "--bert-no-binary-head --zero-stage 1 --dtype float32 --bf16 "
                       "--attention-dropout 0 --num-attention-heads 1")]))    # here cuDNN would keep other arrays
def test_a_verified_run_with_everything_it_writes(ranks, corpus, tmp_path, capfd, program, n, more):
    """It agrees with one process, learns, and every number that it sent, and byte that it held, is predicted."""
    files = {name: tmp_path / f"{name}.png" for name in ("metrics-file", "ledger", "plot")}
    named = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    train(ranks, n, [*SMALL, *corpus, *more.split(), "--verify", "--verbose", *named], program)
    printed, sampled = capfd.readouterr().out, "--sample-tokens" in more
    assert "verified against one process, every iteration" in printed and "NOT" not in printed
    if sampled:
        (prompt,) = re.findall(r"after <\|> 20 tokens sampled from the model:\n(.+?)<\|>", printed, re.DOTALL)
        assert Path(corpus[1]).read_text().index(prompt) > 5000, "the prompt is the beginning of the validation data"
    rows = rows_of(files["metrics-file"])
    steps = [row for row in rows if "lm_loss" in row]
    assert [row["iteration"] for row in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert all(("sop_loss" in row) == (program is pretrain_bert and "no-binary" not in more) for row in steps)
    validation = [row for row in rows if "validation_loss" in row]
    assert [row["iteration"] for row in validation] == [4, 6]
    assert all(program is pretrain_bert or math.isclose(row["validation_perplexity"], math.exp(row["validation_loss"]))
               for row in validation)
    lines = json.loads(files["ledger"].read_text())
    assert all((line["calls"], line["elements"]) == (line["predicted_calls"], line["predicted_elements"])
               for line in lines if line["predicted_elements"] is not None)
    assert {line["phase"] for line in lines if line["predicted_elements"] is None} == (
        {"verification", "sampling"} if sampled else {"verification"})
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_a_run_with_its_parameters_sharded_and_in_files(ranks, corpus, tmp_path, capfd):
    """It trains as one process. All replicas take part in the sampling, and one speaks. Activations are measured."""
    options = [*SMALL, *corpus, "--train-iters", "3", "--sample-tokens", "2", "--zero-stage", "3", "--cpu-offload",
               "--offload-folder", str(tmp_path), "--verbose", "--verify"]
    made = ranks.run(2, folders_of_files, options, timeout=20)      # a replica that gathers alone would deadlock
    assert made == [[str(tmp_path)] * 3] * 2, "parameters and two moments on each rank"
    printed = capfd.readouterr().out
    assert printed.count("2 tokens sampled from the model") == 1
    (columns,) = (line for line in printed.splitlines() if line.startswith("ranks") and "offloaded" in line)
    assert "activations" in columns and "NOT" not in printed


def folders_of_files(group, options):
    """Return the folders in which a run makes the files of its shards."""
    with mock.patch.object(buffers, "TemporaryFile", wraps=buffers.TemporaryFile) as files:
        pretrain(group, options)
    return [call.kwargs["dir"] for call in files.call_args_list]


STEP = "return StepResult(losses, norm, rate, scale, auxiliary)"


@pytest.mark.parametrize("part, module, right, wrong", [
    ("gradient", "mpi_impl.training.optimizer",
     'np.sqrt(everyone.all_reduce(to_host(squares), "gradient norm")[0])', "np.sqrt(to_host(squares)[0])"),
    *((part, "mpi_impl.training.trainer", STEP,
       f"self.state.{buffer}.own.flat[0] += 1e-6 * self.topology.place.data\n        {STEP}")
      for part, buffer in (("weights", "parameters"), ("gradient", "gradients")))])
def test_verify_fails_a_run_that_is_wrong(ranks, corpus, part, module, right, wrong):
    """A wrong loss, norm, gradient or weight, if only on one replica: --verify says which, and the run fails."""
    options = [*SMALL, *corpus, *T2.split(), *P2.split(), "--clip-grad", "0.1", "--verify"]
    with pytest.raises(RankFailure, match=f"--verify: the {part} of iteration 1 and that of one process differ"):
        ranks.run(8, planted_run, Bug(module, right, wrong), pretrain, options)


CHAOTIC = f"""{T2} --lr-warmup-iters 0 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
    --verify"""


@pytest.mark.parametrize("options", [
    "--dtype float32 --lr 3", "--dtype float64 --lr 30", "--dtype float32 --bf16 --lr 30",
    "--dtype float32 --lr 3 --optimizer muon"])
def test_verify_accepts_rounding_that_a_high_rate_magnifies(ranks, corpus, capfd, options):
    """Differences exceed the tolerance of each format, and the ranks compute the same model."""
    train(ranks, 4, [*SMALL, *corpus, *CHAOTIC.split(), *options.split()])
    assert " iterations more, by rounding alone" in capfd.readouterr().out


@pytest.mark.parametrize("module, right, wrong, iteration, verdict", [
    ("mpi_impl.training.trainer", STEP, f"self.state.gradients.own.flat[0] += 1e-2\n        {STEP}", 1,
     "float64. The ranks do not compute the same model"),
    ("mpi_impl.training.trainer", STEP, "self.state.gradients.own.flat[0] += 1e-2 * (self.state.precision.compute == "
     f"'float32')\n        {STEP}", 1, "float32. In float64 they agree"),
    ("mpi_impl.training.trainer", STEP, f"self.state.optimizer_states['m'].flat[:] *= 1.5\n        {STEP}", 2,
     "float32. In float64 they agree")])
def test_verify_knows_a_wrong_step_from_rounding(ranks, corpus, module, right, wrong, iteration, verdict):
    """A fault of every format, of one format alone, and of the moments, which shows one iteration later."""
    with pytest.raises(RankFailure, match=f"of iteration {iteration} and that of one process differ .* in {verdict}"):
        ranks.run(4, planted_run, Bug(module, right, wrong), pretrain,
                  [*SMALL, *corpus, *T2.split(), "--verify", "--dtype", "float32"])


def test_an_evaluation_is_the_mean_over_its_batches(ranks, corpus, tmp_path):
    """Without training, the loss over 4 batches is the mean of their losses; training data differ."""
    def validation(*options):
        path = tmp_path / "metrics"
        train(ranks, 4, [*P2.split(), *SMALL, *corpus, "--lr", "0", "--train-iters", "3", "--metrics-file", str(path),
                         *options])
        return rows_of(path)[0]["lm_loss"], rows_of(path)[-1]["validation_loss"]

    training, two = validation("--eval-iters", "2")
    _, larger = validation("--eval-iters", "1", "--global-batch-size", "16")
    assert two == pytest.approx(larger, rel=1e-12) and training != two


def test_skipped_steps_are_predicted_too(ranks, corpus, capfd):
    """A step without an update sends no new parameters: the ledger's prediction knows, and so does the textbook. And
    probabilities take 2 bytes each where the loss is computed in float16.
    """
    train(ranks, 4, [*SMALL, *corpus, *T2.split(), "--dtype", "float32", "--fp16", "--initial-loss-scale", "2e9",
                     "--hysteresis", "1", "--train-iters", "20", "--zero-stage", "1", "--verify",
                     "--fp16-lm-cross-entropy"])
    printed = capfd.readouterr().out
    assert " skipped |" in printed and "iteration     20/20" in printed and "NOT" not in printed


# ---- refused runs, and a full disk ----------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_a_sentence(ranks, corpus, tmp_path):
    """It fills up when a line of metrics is written; what is written whole is in test_files.py."""
    options = [*SMALL, *corpus, "--metrics-file", str(tmp_path / "metrics")]
    assert ranks.run(1, refusal, on_a_full_disk, options) == ["/dev/full cannot be written: No space left on device."]


def on_a_full_disk(group, options):
    with mock.patch.object(metrics, "open_for_writing", lambda path, begins: open("/dev/full", "w")):
        pretrain(group, options)


def test_a_refused_run_loses_nothing(ranks, corpus, tmp_path):
    """Neither the last run's metrics, nor the tokenizer beside its checkpoint, which one of another vocabulary cannot
    resume.
    """
    (tmp_path / "metrics").write_text("the last run's")
    assert ranks.run(1, refusal, pretrain, [*SMALL, "--metrics-file", str(tmp_path / "metrics"), "--data-path", "no"])
    assert (tmp_path / "metrics").read_text() == "the last run's"
    options = [*SMALL, *corpus, "--eval-iters", "0", "--save", str(tmp_path / "S")]
    train(ranks, 1, [*options, "--train-iters", "3"], pretrain_bert)
    before = (tmp_path / "S" / "tokenizer.json").read_bytes()
    found = ranks.run(1, refusal, pretrain_bert, [*options, "--load", str(tmp_path / "S"), "--vocab-size", "110"])[0]
    assert "The tokenizer is not that of " in found and (tmp_path / "S" / "tokenizer.json").read_bytes() == before


# ---- models by name -------------------------------------------------------------------------------------------------

WORDS = {"gpt": 50_257, "bert": 30_522}
LLAMAS = {"smollm2-135m": 134_515_008, "tinyllama-1.1b": 1_100_048_384, "llama3-8b": 8_030_261_248,
          "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "qwen3-0.6b": 596_049_920,
          "mixtral-8x7b": 46_702_792_704}
UNITS = {"m": 1e6, "b": 1e9}


@pytest.mark.parametrize("architecture, name", [(kind, name) for kind, presets in PRESETS.items() for name in presets])
def test_a_preset_is_the_published_model(architecture, name):
    """A Llama has the parameters of the weights' files, to the last one, others as many as their name says. Every
    preset passes all checks on one rank, and has the FLOPs that Megatron counts: its num_floating_point_operations,
    12 B s L h^2 (1 + g/a + s/h + f/h + V/(2 L h)), with its own terms for the size of a head, the gate and experts, and
    without padding of the vocabulary; we also count BERT's heads, and its logits where tokens are to be predicted.
    """
    settings = parse(["--preset", name], 1, architecture)
    c = settings.model(VOCABULARIES.get(name) or WORDS[architecture])
    if published := LLAMAS.get(name):
        assert parameters(c) == published and settings.precision.compute == "bfloat16"
    else:
        said = name.partition("-")[2]
        near = 0.05 if said[-1] == "b" else 0.005
        assert parameters(c) == pytest.approx(float(said[:-1]) * UNITS[said[-1]], rel=near)
        assert settings.precision.compute == "float16" and settings.parallel.recompute.granularity == "full"
    B, s, L, h = settings.args.global_batch_size, settings.args.seq_length, c.num_layers, c.hidden_size
    k, routed = (c.experts.moe_router_topk, c.experts.num_experts) if c.experts else (1, 0)
    attention = (1 + c.groups / c.num_attention_heads + s / h) * c.head_size * c.num_attention_heads / h
    mlp = ((1.5 if c.swiglu else 1) * k * c.ffn_size + routed / 2) / h
    heads = 6 * B * (s * h**2 + h**2 + 2 * h) if architecture == "bert" else 0  # the layer, the pooler, the order
    assert c.most_predicted(s) == (round(0.15 * s) if architecture == "bert" else s)
    assert iteration_flops(replace(c, predicted_share=1.0), B, s) == pytest.approx(
        12 * B * s * L * h**2 * (attention + mlp + c.vocab_size / (2 * L * h)) + heads, rel=1e-12)


@pytest.mark.parametrize("options, found", [
    ("--num-layers 2 --dtype float32", (2, "float32", 3_000, "full")),
    ("--bf16 --recompute-activations", (24, "bfloat16", 3_000, "selective")),
    ("--lr-warmup-fraction 0.5 --train-iters 8 --recompute-granularity none", (24, "float16", 4, "none"))])
def test_an_option_has_the_last_word(options, found):
    """Also one in other words, which is not said to be given twice."""
    settings = parse(["--preset", "gpt2-355m", *options.split()], 1)
    assert (settings.args.num_layers, settings.precision.compute, settings.optimizer.lr_warmup_iters,
            settings.parallel.recompute.granularity) == found
