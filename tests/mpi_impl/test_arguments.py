"""Megatron's options become configs, each option in the one that has a field of its name."""
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
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stages import stages_of_ranks
from reference.precision import LossScaling, Precision
from shardlab.evaluate.options import RACEOptions
from shardlab.generate.options import GenerationOptions
from shardlab.programs.options import BERTPretrainingOptions, GPTPretrainingOptions
from shardlab.programs.settings import parse

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


@given(st.lists(st.sampled_from([*sorted(WITHOUT_EFFECT), *INSTEAD, "--nope"]), min_size=1))
def test_all_unknown_options_are_refused_at_once(names):
    """Megatron's with what to write in place of them; and a value is not an option."""
    with pytest.raises(UserError) as error:
        parse([word for name in names for word in (name, "-1")], 8)
    assert "-1" not in str(error.value)
    assert all((f"write {INSTEAD[name]}." if name in INSTEAD else name) in str(error.value) for name in names)


@pytest.mark.parametrize("more", ["", "--seq-length 100", "--fp16 --seq-length 256 --max-position-embeddings 256"])
def test_a_graph_repeats_a_step_without_dropout(more):
    parse(f"--cuda-graph-impl full_iteration --device cuda --hidden-dropout 0 --attention-dropout 0 {more}".split(), 1)


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
