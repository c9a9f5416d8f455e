"""Megatron's options become configs; what cannot be is refused in a sentence before any work."""
import re
from contextlib import nullcontext
from dataclasses import MISSING

import pytest
from hypothesis import given, strategies as st

from mpi_impl.launch.entry import ArgumentParser
from mpi_impl.launch.megatron_options import INSTEAD, WITHOUT_EFFECT
from mpi_impl.launch.option_fields import add_options, declared, parse_given
from reference.config import ModelConfig, ParallelConfig, Recompute, option
from reference.config.rope_scaling import RopeScaling
from reference.errors import UserError
from reference.generation.decoding import Sampling
from reference.optimizer import OptimizerConfig
from reference.parallel.stages import stages_of_ranks
from reference.precision import LossScaling, Precision
from shardlab.evaluate.options import RACEOptions
from shardlab.generate.options import GenerationOptions
from shardlab.programs.arguments import parse
from shardlab.programs.options import BERTPretrainingOptions, GPTPretrainingOptions

EVERY_OPTION = """--tensor-model-parallel-size 2 --num-layers 6 --hidden-size 48 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 24 --lr 0.01 --min-lr 0.001
    --lr-decay-style cosine --lr-decay-iters 40 --lr-warmup-fraction 0.25 --train-iters 50 --weight-decay 0.1
    --clip-grad 0.5 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6 --init-method-std 0.01 --seed 7
    --log-interval 5 --eval-interval 20 --eval-iters 3 --split 90,10 --make-vocab-size-divisible-by 64
    --untie-embeddings-and-output-weights --data-path corpus.txt --tokenizer-type GPT2BPETokenizer
    --vocab-file vocab.json --merge-file merges.txt --exit-interval 30 --hidden-dropout 0.2 --attention-dropout 0.0
    --position-embedding-type rope --rotary-percent 0.5 --dtype float64 --verify --metrics-file m --ledger l
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
    --distributed-timeout-minutes 0.5 --trace t
    --trace-clock virtual --sequence-parallel --keep-gathered-inputs --zero-stage 3 --cpu-offload --offload-folder swap
    --recompute-granularity full --recompute-method block --recompute-num-layers 1
    --save out --save-interval 5 --exit-signal-handler --load in --record r""".split()


LLAMA = """--normalization RMSNorm --swiglu --ffn-hidden-size 24 --group-query-attention --num-query-groups 2
    --kv-channels 6 --disable-bias-linear --add-qkv-bias --qk-layernorm --rotary-base 5e5 --use-rope-scaling
    --rope-scaling-factor 32 --position-embedding-type rope --num-attention-heads 4 --hidden-size 16
    --optimizer muon --muon-momentum 0.9 --muon-nesterov --muon-num-ns-steps 3 --muon-scale-mode shape_scaling
    --muon-extra-scale-factor 0.2 --muon-tp-mode distributed --zero-stage 1""".split()


@pytest.mark.parametrize("options, ranks", [(EVERY_OPTION, 12), (LLAMA, 4)])
def test_every_option_arrives(options, ranks):
    """In each config that has a field of its name."""
    settings = parse(options, ranks)
    holders = settings.args, settings.model(50_257), settings.optimizer, settings.parallel
    for name, value in parse_given("", "", GPTPretrainingOptions, options).items():
        found = [getattr(holder, name) for holder in holders if hasattr(holder, name)]
        assert found == [value] * len(found) != [], name


def test_what_follows_from_several_options():
    settings, llama = parse(EVERY_OPTION, world_size=12), parse(LLAMA, 4).model(100)
    model, parallel = settings.model(50_257), settings.parallel
    assert (model.rotary_size, model.padded_vocab_size(2), settings.optimizer.lr_warmup_iters) == (6, 50_304, 10)
    assert (parallel.data_parallel_size, settings.microbatches, parallel.virtual_pipeline_size) == (3, 4, 3)
    assert parallel.pipeline_schedule == "interleaved" and parallel.recompute == Recompute("full", "block", 1)
    assert settings.precision == Precision("float64")
    assert (llama.ffn_size, llama.groups, llama.head_size, llama.rope_scaling) == (24, 2, 6, RopeScaling(32.0))
    assert parse(["--group-query-attention"], 1).model(100).groups == 1, "one group by default, as in Megatron"
    gated = parse("--swiglu --disable-bias-linear --hidden-size 768 --num-attention-heads 8".split(), 1)
    assert gated.model(100).ffn_size == 2048, "8/3 of the hidden size, as in Megatron"
    for options, k in (("1", 1), ("8", 2), ("8 --moe-router-topk 3", 3)):
        experts = parse(f"--num-experts {options}".split(), 1).model(96).experts
        assert experts and experts.moe_router_topk == k, "two experts for each token, if there are two"
    parallel = parse("--ddp-bucket-size 77 --no-scatter-gather-tensors-in-pipeline --use-distributed-optimizer "
                     "--num-distributed-optimizer-instances 2 --recompute-activations".split(), world_size=4).parallel
    assert parallel.ddp_bucket_size == 77 and not parallel.scatter_gather_tensors_in_pipeline
    assert (parallel.zero_stage, parallel.instance_size, parallel.shards) == (1, 2, 2)
    assert parallel.recompute == Recompute("selective")
    assert parse("--norm-epsilon 0.1 --seed 1 --layernorm-epsilon 0.2 --seed 2".split(), 1).args.seed == 2


@pytest.mark.parametrize("options, precision", [
    ("", Precision("float32")), ("--bf16", Precision("bfloat16")),
    ("--fp16", Precision("float16", LossScaling(None, 2.0**32, 1.0, 1000, 2))),
    ("--fp16 --initial-loss-scale 64 --min-loss-scale 2 --loss-scale-window 50 --hysteresis 3 --loss-scale-factor 4",
     Precision("float16", LossScaling(None, 64.0, 2.0, 50, 3, 4.0)))])
def test_precision(options, precision):
    assert parse(options.split(), world_size=1).precision == precision


def test_what_is_left_open_follows_from_the_rest():
    settings = parse("--micro-batch-size 3 --seq-length 20 --train-iters 9".split(), world_size=4)
    assert settings.parallel == ParallelConfig(data_parallel_size=4) and settings.args.global_batch_size == 12
    assert settings.microbatches == 1 and settings.optimizer.lr_decay_iters == 9
    assert settings.args.max_position_embeddings == 20
    assert settings.model(50).hidden_dropout == settings.model(50).attention_dropout == 0.1      # as in Megatron


@pytest.mark.parametrize("layers, each, chunks", [(8, 3, 2), (7, 2, 2)])
def test_layers_of_a_virtual_stage_give_the_number_of_stages(layers, each, chunks):
    """Each stage has at most that number of layers; if it does not divide evenly, some have fewer."""
    settings = parse(["--num-layers", str(layers), "--num-layers-per-virtual-pipeline-stage", str(each),
                      "--pipeline-model-parallel-size", "2", "--global-batch-size", "8"], 2)
    held = [len(layers) for stages in stages_of_ranks(settings.model(50), settings.parallel)
            for layers in stages.values()]
    assert settings.parallel.virtual_pipeline_size == chunks and max(held) <= each and sum(held) == layers


T2, P4 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4"
EACH, FULL = "--num-layers-per-virtual-pipeline-stage", "--recompute-granularity full --recompute-num-layers"
ROPE, GRAPH = "--position-embedding-type rope", "--cuda-graph-impl full_iteration"
GROUPS = ("--group-query-attention --num-query-groups 6 --num-attention-heads 12 --hidden-size 48 "
          "--tensor-model-parallel-size")


REFUSED = {       # on 8 ranks
    "--tensor-model-parallel-size 3": "must be a multiple of 3, but it is 8",
    f"{T2} --pipeline-model-parallel-size 8": "must be a multiple of 16, but it is 8",
    "--tensor-model-parallel-size 8 --num-attention-heads 4": "must divide --num-attention-heads, which is 4",
    "--num-attention-heads 7": "--num-attention-heads is 7, but must divide --hidden-size",
    "--kv-channels 4 --hidden-size 30 --tensor-model-parallel-size 4": "must divide --hidden-size, which is 30.",
    "--global-batch-size 30": "--global-batch-size is 30, but must be a multiple of",
    "--max-position-embeddings 8": "--max-position-embeddings is 8, but must be at least --seq-length",
    "--attention-dropout -0.1": "--attention-dropout is -0.1, but must be in [0, 1)",
    "--lr nan": "--lr: nan is not a finite number", "--norm-epsilon inf": "inf is not a finite number",
    "--seed 1234567890123456": "1234567890123456 has more than 15 digits",
    "--hidden-size big": "--hidden-size: invalid int value: 'big'", "--hidden-sise 64": "--hidden-size",
    "--hidden 64": "has no option --hidden", "--lr-decay-style step": "--lr-decay-style",
    "--eval-iters -1": "--eval-iters is -1", "--lr-warmup-fraction 1.5": "--lr-warmup-fraction is 1.5",
    "--lr-warmup-iters 5 --lr-warmup-fraction 0.1": "the same thing twice",
    # Llama
    "--num-query-groups 2": "without --group-query-attention", "--add-qkv-bias": "without --disable-bias-linear",
    "--use-rope-scaling": "without --position-embedding-type rope", "--rotary-base 5e5": "--rotary-base is given, but",
    "--rotary-percent 0.5": "--rotary-percent is given, but without --position-embedding-type rope",
    f"{ROPE} --rope-scaling-factor 4": "without --use-rope-scaling", f"{ROPE} --rotary-base 0": "--rotary-base is 0.0",
    f"{ROPE} --use-rope-scaling --rope-scaling-factor 0.5": "--rope-scaling-factor is 0.5",
    f"{ROPE} --kv-channels 5": "rope turns pairs", "--kv-channels 0": "--kv-channels is 0",
    "--swiglu": "--swiglu and --disable-bias-linear go together", "--disable-bias-linear": "go together",
    "--swiglu --squared-relu --disable-bias-linear": "--swiglu and --squared-relu",
    "--swiglu --disable-bias-linear --activation relu": "--activation is relu",
    "--swiglu --disable-bias-linear --ffn-hidden-size 30 --tensor-model-parallel-size 4": "divide --ffn-hidden-size",
    f"{GROUPS} 4": "--num-query-groups is 6, but one must divide the other", "--ffn-hidden-size 0": "--ffn-hidden-size",
    # experts
    "--expert-model-parallel-size 3": "must divide data-parallel size x context-parallel size, which is 8",
    "--expert-model-parallel-size 2": "the model has no experts", "--num-experts 0": "--num-experts is 0",
    "--num-experts 6 --expert-model-parallel-size 4": "must divide --num-experts, which is 6",
    "--num-experts 4 --moe-router-topk 5": "--moe-router-topk is 5, but --num-experts is 4",
    "--num-experts 4 --moe-router-topk 1": "a new router would never learn",
    "--num-experts 4 --moe-ffn-hidden-size 6 --tensor-model-parallel-size 4": "must divide --moe-ffn-hidden-size",
    "--num-experts 4 --save-hf /tmp": "--save-hf writes a gpt2",
    "--num-experts 4 --moe-expert-capacity-factor 1 --verify": "--verify would compare two different runs",
    **{f"--moe-{name}": f"--moe-{name.split()[0]} is given, but without --num-experts" for name in (
        "aux-loss-coeff 0", "z-loss-coeff 0.1", "router-topk 2", "layer-freq 1", "router-pre-softmax",
        "ffn-hidden-size 8", "shared-expert-intermediate-size 8", "expert-capacity-factor 1")},
    # Muon
    "--optimizer muon --zero-stage 2": "which needs whole matrices", "--muon-momentum 0.9": "Add --optimizer muon",
    "--optimizer muon --muon-tp-mode blockwise": "--muon-tp-mode is blockwise",
    # what is sharded, offloaded and recomputed
    "--zero-stage 4": "--zero-stage is 4", "--cpu-offload": "Choose --zero-stage 1, 2 or 3",
    "--zero-stage 3 --ddp-bucket-size 9": "--ddp-bucket-size is 9", "--ddp-bucket-size 0": "--ddp-bucket-size is 0",
    "--use-distributed-optimizer --zero-stage 2": "--use-distributed-optimizer is ZeRO-1, but --zero-stage is 2",
    "--zero-stage 1 --offload-folder swap": "Add --cpu-offload", "--sequence-parallel": "Choose at least 2, or",
    f"{T2} --sequence-parallel --no-scatter-gather-tensors-in-pipeline": "with --sequence-parallel no rank has one",
    f"{T2} --keep-gathered-inputs": "--keep-gathered-inputs needs --sequence-parallel",
    f"{T2} --sequence-parallel --seq-length 31": "must divide --seq-length, which is 31",
    "--recompute-method block": "--recompute-method is block, which belongs to --recompute-granularity full",
    "--recompute-granularity selective --recompute-num-layers 1": "--recompute-num-layers is 1, which belongs to",
    "--recompute-activations --recompute-granularity full": "Give one of them",
    f"{FULL} 0": "--recompute-num-layers is 0", f"{FULL} 5": "--recompute-num-layers is 5, but no stage has more",
    f"{P4} --num-layers 8 {FULL} 3": "--recompute-num-layers is 3, but no stage has more layers than 2",
    # formats
    "--fp16 --bf16": "Give one of them", "--fp16 --dtype float64": "--fp16 has its master weights in float32",
    "--loss-scale 2": "--loss-scale belongs to --fp16", "--bf16 --hysteresis 2": "--hysteresis belongs to --fp16",
    "--fp16-lm-cross-entropy": "belongs to --fp16", "--fp16 --loss-scale 0": "--loss-scale is 0",
    "--fp16 --loss-scale 2 --min-loss-scale 1": "--min-loss-scale is for a loss scale that follows the gradients",
    "--fp16 --min-loss-scale 1e10": "must not be below --min-loss-scale",
    # files
    "--save-interval 5": "Give a folder with --save", "--save d --save-interval 0": "--save-interval is 0",
    "--exit-signal-handler": "--exit-signal-handler saves a checkpoint before a SIGTERM ends the run, but nothing is",
    "--load a --load-hf b": "--load is a and --load-hf is b", "--trace-clock virtual": "Give a folder with --trace",
    **{f"--{name}=": f"--{name} is empty" for name in (         # as an unset variable of a script gives it
        "data-path", "vocab-file", "merge-file", "tokenizer-model", "data-cache-path", "metrics-file", "ledger", "plot",
        "trace", "offload-folder", "save", "load", "load-hf", "save-hf", "record")},
    # schedules
    f"{P4} --pipeline-schedule interleaved": "which needs --num-layers-per-virtual-pipeline-stage",
    f"{P4} {EACH} 1 --pipeline-schedule zb-h1": "--pipeline-schedule is zb-h1, which takes no",
    f"{EACH} 0": f"{EACH} is 0", f"{EACH} 1 --pipeline-model-parallel-size 0": "--pipeline-model-parallel-size is 0",
    f"{EACH} 1 --num-layers 0": "--num-layers is 0", f"{P4} {EACH} 3 --num-layers 8": "a rank holds no more than 2",
    f"{P4} {EACH} 1 --num-layers 8 --global-batch-size 48": "which makes 6 microbatches",
    f"{P4} --num-layers 3": "has 4 stages, 1 on each",
    f"{P4} --num-layers 7 --pipeline-schedule zb-v": "Choose more layers, a schedule with one",
    f"{P4} --num-layers 5 {EACH} 1 --global-batch-size 32": f"Choose more layers, a larger {EACH}",
    "--global-batch-size 9600000": "300,000 forwards", "--global-batch-size 1000000000": "must be at most 10,000,000",
    "--pipeline-schedule zbh1": "Did you mean zb-h1?", "--pipeline-schedule forward-only": "'forward-only' (choose",
    # ranks
    "--distributed-backend nccl": "add --device cuda", "--distributed-backend gloo": "'gloo' (choose from",
    "--cuda-graph-impl local": "'local' (choose from", GRAPH: "--device is cpu", f"{GRAPH} --device cuda": "8 ranks",
    **{f"--distributed-timeout-minutes {minutes}": "must be at least 0.01" for minutes in ("-1", "1e5")},
}


@pytest.mark.parametrize("options, said", REFUSED.items(), ids=[*REFUSED])
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(UserError, match=re.escape(said)):
        parse(options.split(), world_size=8)


@given(st.lists(st.sampled_from([*sorted(WITHOUT_EFFECT), *INSTEAD, "--nope"]), min_size=1))
def test_all_unknown_options_are_refused_at_once(names):
    """Megatron's with what to write in place of them; and a value is not an option."""
    with pytest.raises(UserError) as error:
        parse([word for name in names for word in (name, "-1")], 8)
    assert "-1" not in str(error.value)
    assert all((f"write {INSTEAD[name]}." if name in INSTEAD else name) in str(error.value) for name in names)


@pytest.mark.parametrize("more, said", [
    ("", "--hidden-dropout 0"), ("--hidden-dropout 0", "dropout draws another mask"),
    *((f"--hidden-dropout 0 --attention-dropout 0 {more}", said) for more, said in [
        ("--num-experts 4", "experts get"), ("--zero-stage 1", "ZeRO moves states"),
        ("--use-distributed-optimizer", "ZeRO moves states"),
        ("--bf16 --seq-length 100", "--seq-length is 100, and 128 does not divide it"), ("", ""),
        ("--seq-length 100", ""), ("--fp16 --seq-length 256 --max-position-embeddings 256", "")])])
def test_a_graph_repeats_what_can_be_repeated(more, said):
    options = f"{GRAPH} --device cuda {more}".split()
    with pytest.raises(UserError, match=re.escape(said)) if said else nullcontext():
        parse(options, world_size=1)


def test_a_graph_is_not_for_a_bert():
    with pytest.raises(UserError, match="a BERT's losses"):
        parse(f"{GRAPH} --device cuda --hidden-dropout 0 --attention-dropout 0".split(), 1, "bert")


@pytest.mark.parametrize("kind, config", [(GPTPretrainingOptions, ModelConfig), (BERTPretrainingOptions, ModelConfig),
                                          (GPTPretrainingOptions, OptimizerConfig), (GenerationOptions, Sampling)])
def test_a_default_is_that_of_the_config_which_it_fills(kind, config):
    """It stands once: in the textbook, where that has one. (BERT's table is tied, so that no option says so.)"""
    options, filling = declared(kind), declared(config)
    for name in options.keys() & filling.keys():
        if filling[name].default is not MISSING and filling[name].default is not None:
            assert options[name].default == filling[name].default, name


@pytest.mark.parametrize("kind", [GPTPretrainingOptions, GenerationOptions, RACEOptions])
def test_help_tells_of_every_option_and_its_default(kind):
    parser = ArgumentParser(prog="program")
    add_options(parser, kind)
    text = " ".join(parser.format_help().split())
    for name, one in declared(kind).items():
        assert option(name) in text
        if one.default not in (MISSING, None, False):
            assert f"default: {one.default}" in text, name
