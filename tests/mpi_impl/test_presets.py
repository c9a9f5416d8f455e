"""The paper's models, by name: their sizes, their training, and that options have the last word."""
import pytest

from mpi_impl.programs.arguments import parse
from mpi_impl.programs.presets import PRESETS, VOCABULARIES
from mpi_impl.reports.forecast import MeasuredRate, RunSizes
from mpi_impl.reports.throughput import describe_flops, throughput_of
from reference.config import ModelConfig
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from reference.errors import UserError

WORDS = {"gpt": 50_257, "bert": 30_522}
LLAMAS = {"smollm2-135m": 134_515_008, "tinyllama-1.1b": 1_100_048_384, "llama3-8b": 8_030_261_248,
          "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "qwen3-0.6b": 596_049_920,
          "mixtral-8x7b": 46_702_792_704}
UNITS = {"m": 1e6, "b": 1e9}
NAMES = [(architecture, name) for architecture, presets in PRESETS.items() for name in presets if name not in LLAMAS]


@pytest.mark.parametrize("architecture, name", NAMES)
def test_it_has_as_many_parameters_as_its_name_says(architecture, name):
    """Every preset passes all checks on one rank, too."""
    settings, said = parse(["--preset", name], 1, architecture), name.partition("-")[2]
    size, near = float(said[:-1]) * UNITS[said[-1]], 0.05 if said[-1] == "b" else 0.005
    assert parameters(settings.model(WORDS[architecture])) == pytest.approx(size, rel=near)
    assert settings.precision.compute == "float16" and settings.parallel.recompute.granularity == "full"


@pytest.mark.parametrize("name, published", LLAMAS.items())
def test_a_llama_has_the_parameters_of_the_published_weights(name, published):
    """Counted in their files, to the last one."""
    settings = parse(["--preset", name], 1)
    model = settings.model(VOCABULARIES[name])
    assert parameters(model) == published and settings.precision.compute == "bfloat16"
    assert set(LLAMAS) == set(VOCABULARIES) == PRESETS["gpt"].keys() - {name for _, name in NAMES}


@pytest.mark.parametrize("name", LLAMAS)
def test_a_llamas_flops_are_megatrons(name):
    """With its own terms for groups, the gate, the size of a head, and the experts of a token."""
    settings = parse(["--preset", name], 1)
    c, B, s = settings.model(VOCABULARIES[name]), settings.args.global_batch_size, settings.args.seq_length
    ratio = c.head_size * c.num_attention_heads / c.hidden_size
    k, routed = (c.experts.moe_router_topk, c.experts.num_experts) if c.experts else (1, 0)
    layer = (1 + c.groups / c.num_attention_heads + s / c.hidden_size) * ratio + (
        1.5 * k * c.ffn_size + routed / 2) / c.hidden_size
    assert iteration_flops(c, B, s) == pytest.approx(12 * B * s * c.num_layers * c.hidden_size**2 * (
        layer + c.vocab_size / (2 * c.num_layers * c.hidden_size)), rel=1e-12)


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("architecture, name", NAMES)
def test_its_flops_are_megatrons(architecture, name, t):
    """They count the tokens of the vocabulary. Megatron also counts its padding, which depends on t, and we also count
    BERT's heads. A run prints the number, and the number with the presets' recompute.
    """
    settings = parse(["--preset", name], 1, architecture)
    c, B, s = settings.model(WORDS[architecture]), settings.args.global_batch_size, settings.args.seq_length
    h, padded = c.hidden_size, c.padded_vocab_size(t)
    heads = 3 * 2 * B * (s * h**2 + h**2 + 2 * h) if architecture == "bert" else 0   # the layer, the pooler, the order
    assert iteration_flops(c, B, s) == megatrons_flops(c, B, s, c.vocab_size) + heads
    padding = 6 * B * s * h * (padded - c.vocab_size)
    assert padding > 0 and iteration_flops(c, B, s) == megatrons_flops(c, B, s, padded) + heads - padding
    plan = RunSizes(c, settings.parallel, settings.precision, settings.args.micro_batch_size, s, settings.microbatches)
    assert describe_flops(plan, throughput_of(plan, 1, [], MeasuredRate(1e9, "float32"))).startswith(
        f"a step is {iteration_flops(c, B, s):.3e} FLOPs of the model, and {iteration_flops(c, B, s, 'full'):.3e} with "
        "what is computed again")
    later = megatrons_flops(c, B, s, padded, core=0.5)
    assert iteration_flops(c, B, s) == later + 6 * c.num_layers * B * s**2 * h + heads - padding


def megatrons_flops(c: ModelConfig, B: int, s: int, V: int, core: float = 1) -> float:
    """Return num_floating_point_operations of Megatron-LM's training.py for dense layers: 12 B s L h^2 (1 + f/h + 1 +
    s/h + V/(2 L h)). Later versions count half of attention's core, the term s/h.
    """
    L, h, f = c.num_layers, c.hidden_size, 4 * c.hidden_size
    return 12 * B * s * L * h * (h + f + h + core * s) + 6 * B * s * h * V


def test_the_papers_training():
    """Shoeybi et al. 2019, section 4.2."""
    gpt, bert = (parse(["--preset", name], 1, name[:4].strip("2-")) for name in ("gpt2-8.3b", "bert-3.9b"))
    assert (gpt.optimizer.lr, gpt.optimizer.min_lr, gpt.optimizer.lr_decay_style) == (1.5e-4, 1e-5, "cosine")
    assert (gpt.optimizer.lr_warmup_iters, gpt.args.train_iters, gpt.args.global_batch_size) == (3_000, 300_000, 512)
    assert (bert.optimizer.lr, bert.optimizer.lr_decay_style, bert.args.global_batch_size) == (1e-4, "linear", 1024)
    assert bert.model(10).heads == ("lm", "sop") and bert.model(10).head_size == 64 and gpt.model(10).head_size == 96


@pytest.mark.parametrize("options, compute", [("--bf16", "bfloat16"), ("--dtype float32", "float32"), ("", "float16")])
def test_an_option_has_the_last_word(options, compute):
    settings = parse(["--preset", "gpt2-355m", "--num-layers", "2", *options.split()], 2)
    assert settings.args.num_layers == 2 and settings.args.hidden_size == 1024 and settings.microbatches == 32
    assert settings.precision.compute == compute


@pytest.mark.parametrize("options, compute", [("--fp16", "float16"), ("--dtype float64", "float64")])
def test_an_option_takes_the_place_of_a_llamas_format(options, compute):
    assert parse(["--preset", "qwen3-0.6b", *options.split()], 1).precision.compute == compute


@pytest.mark.parametrize("options, gone", [
    ("--lr-warmup-fraction 0.5 --train-iters 8", "lr_warmup_iters"), ("--recompute-activations", "none"),
    ("--recompute-granularity none", "none")])
def test_an_option_in_other_words_takes_the_place_of_the_presets(options, gone):
    """Neither is said to be given twice."""
    settings = parse(["--preset", "gpt2-355m", *options.split()], 1)
    assert settings.optimizer.lr_warmup_iters == (4 if gone == "lr_warmup_iters" else 3_000)
    assert settings.parallel.recompute.granularity == {"lr_warmup_iters": "full"}.get(
        gone, "selective" if "activations" in options else "none")


def test_the_other_programs_preset_is_refused():
    with pytest.raises(UserError, match="gpt2-355m"):
        parse(["--preset", "bert-336m"], 1)
