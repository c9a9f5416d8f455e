"""BERT's two layouts: what transformers has saved computes the same here, on any topology, and we save it again.

Where transformers is not installed, tests/checkpoints/bert_golden.json says what it has computed.
"""
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints.huggingface import WEIGHTS, Weights, check_weights, places_of
from mpi_impl.checkpoints.huggingface_config import CONFIG, config_of, layout_of
from mpi_impl.data.tokenizer import NullTokenizer
from reference.config import ARCHITECTURES, Recompute
from reference.layers.attention import Attention
from reference.layers.block import Block
from reference.layers.embedding import Embedding
from reference.layers.heads import MaskedLMHead
from reference.layers.layer_norm import LayerNorm
from reference.layers.linear import Linear
from reference.layers.mlp import MLP
from reference.models.bert import BERT, bert_forward
from reference.models.model import model_tensors
from reference.parallel import stages
from tests.cases import close
from tests.checkpoints.bert_golden import GOLDEN, HEADS, direction, golden_batch
from tests.checkpoints.bert_runs import Run, agrees, compute_on, gradients_of, learn_and_save, model_in
from tests.checkpoints.gpt2_runs import empty, refuses, same_tensors, taking_turns, weights_of, write_model
from tests.checkpoints.reading import assert_read_once
from tests.strategies import ANY_MODEL, cases
from tests.training_theorems import Plan

GOLDEN_BERTS = json.loads(GOLDEN.read_text())

PLACES = [      # t, d, the rest, and whether the sequence is cut
    (1, 1, Plan(), False),
    (2, 1, Plan(), False),
    (4, 1, Plan(), False),
    (2, 1, Plan(), True),
    (1, 1, Plan(2), False),
    (1, 4, Plan(zero_stage=1), False),
    (2, 1, Plan(2, "zb-h1"), True),
    (1, 2, Plan(2, zero_stage=3, cpu_offload=True), False),
    (2, 2, Plan(zero_stage=2, bucket_size=50), False),
    (2, 2, Plan(2, recompute=Recompute("full")), False),
]


@pytest.fixture(params=sorted(GOLDEN_BERTS))
def kind(request):
    return request.param


@pytest.fixture
def golden(kind):
    return GOLDEN_BERTS[kind]


@pytest.fixture
def folder(golden, tmp_path):
    """Write the golden model as transformers saves it; return its folder."""
    return write_model(tmp_path / "model", golden["config"], weights_of(golden))


@pytest.fixture
def model(golden, folder):
    return model_in(folder, HEADS[golden["config"]["architectures"][0]], make_vocab_size_divisible_by=1)


@pytest.mark.parametrize("kind, t, d, plan, cut", taking_turns(sorted(GOLDEN_BERTS), PLACES))
def test_golden_logits_losses_and_gradients(ranks, golden, folder, model, t, d, plan, cut):
    """They equal transformers' on any topology, to rounding."""
    run = Run(model, t, d, plan, cut)
    found = ranks.run(run.n, compute_on, run, folder, golden_batch(model.heads))
    agrees(run, found, (golden["logits"], golden["losses"]), 1e-12)
    gradients = gradients_of(run, found)
    assert gradients.keys() == golden["tensors"].keys()
    for name, grad in gradients.items():
        along = (grad * direction(name, golden["tensors"][name])).sum()
        close(np.array(along), np.array(golden["gradients"][name]), 1e-11)


def test_the_textbook_agrees_with_the_golden_file(golden, model):
    """The tensors are laid out by hand here, so that a wrong name cannot hide behind a wrong layer."""
    batch = golden_batch(model.heads)
    losses, _ = bert_forward(None, by_hand(weights_of(golden), model), model, batch)
    for loss, weights, expected in zip(losses, batch.weights_of_heads(model.heads), golden["losses"], strict=True):
        close(np.array((loss * weights).sum() / weights.sum()), np.array(expected), 1e-13)


def by_hand(w, model) -> BERT:
    def linear(module):
        return Linear(w[f"{module}.weight"].T, w[f"{module}.bias"])

    def norm(module):
        return LayerNorm(w[f"{module}.weight"], w[f"{module}.bias"])

    def has(head, make):
        return make() if head in model.heads else None

    original, h, a, d = (model.apply_residual_connection_post_layernorm, model.hidden_size, model.num_attention_heads,
                         model.head_size)
    layers = [f"bert.encoder.layer.{i}" for i in range(model.num_layers)]
    first = ["bert.embeddings.LayerNorm", *(f"{layer}.output.LayerNorm" for layer in layers)] if original else [
        *(f"{layer}.attention.ln" for layer in layers), "bert.encoder.ln"]
    second = [f"{layer}.attention.output.LayerNorm" if original else f"{layer}.ln" for layer in layers]
    blocks = {}
    for i, layer in enumerate(layers):
        qkv = [linear(f"{layer}.attention.self.{which}") for which in ("query", "key", "value")]
        out, up, down = (linear(f"{layer}.{module}.dense")
                         for module in ("attention.output", "intermediate", "output"))
        attention = Attention(np.stack([one.w.reshape(h, a, d) for one in qkv], 1),
                              np.stack([one.b.reshape(a, d) for one in qkv]), out.w, out.b)
        blocks[i] = Block(norm(first[i]), attention, norm(second[i]), MLP(up.w, up.b, down.w, down.b))
    tables = [w[f"bert.embeddings.{which}_embeddings.weight"] for which in ("word", "position", "token_type")]
    head = "cls.predictions"
    return BERT(Embedding(*tables), blocks, norm(first[-1]), has("lm", lambda: MaskedLMHead(
        linear(f"{head}.transform.dense"), norm(f"{head}.transform.LayerNorm"), w[f"{head}.bias"])),
        linear("bert.pooler.dense") if model.heads != ("lm",) else None,
        has("sop", lambda: linear("cls.seq_relationship")), has("choice", lambda: linear("classifier")))


# ---- and out again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, t, d, plan, cut", taking_turns(sorted(GOLDEN_BERTS, reverse=True), PLACES))
def test_what_is_saved_is_what_was_loaded(ranks, golden, folder, model, tmp_path, t, d, plan, cut):
    """The tensors are bitwise identical, with the same names and shapes, and so is config.json."""
    again, run = empty(tmp_path / "again"), Run(replace(model, make_vocab_size_divisible_by=3), t, d, plan, cut)
    ranks.run(run.n, learn_and_save, run, folder, 0, again)
    same_tensors(again, folder)
    ours, theirs = (json.loads((place / CONFIG).read_text()) for place in (again, folder))
    assert ours.pop("position_embedding_type") == "absolute" and ours.pop("pad_token_id") is None
    assert ours == {name: theirs[name] for name in ours}
    assert sorted(path.name for path in again.iterdir()) == [CONFIG, WEIGHTS], "nothing is left over"


@st.composite
def runs(draw, architectures):
    """Draw a model of an architecture that transformers has, of ragged sizes, a case of it, and its ranks."""
    case = draw(cases(sizes=st.sampled_from([1, 2, 3, 4]), architectures=architectures, hidden_dropout=0.0,
                      attention_dropout=0.0, position_embedding_type="learned_absolute", rotary_percent=1.0,
                      llama=False))
    if case.model.architecture == "gpt":
        case = replace(case, model=replace(case.model, apply_residual_connection_post_layernorm=False))
    p = draw(st.integers(1, min(2, case.model.num_layers)), "p")
    d = draw(st.integers(1, min(3, 8 // (case.t * p))), "d")
    plan = Plan(p, bucket_size=draw(st.sampled_from([1, 100, 1000]), "bucket size"),
                zero_stage=draw(st.integers(0, 3), "ZeRO stage"))
    return case, Run(case.model, case.t, d, plan, case.sequence_parallel)


@settings(max_examples=settings().max_examples // 2)
@given(runs(ANY_MODEL))
def test_any_model_on_any_ranks_is_saved_as_it_was_loaded(ranks, case_and_run):
    """Bitwise, GPT-2, too, for any sizes and any padding of the vocabulary."""
    case, run = case_and_run
    full_name = layout_of(run.model).full_name
    tensors = {full_name(place.name): case.array(place.name, *place.shape)
               for _, _, places in places_of(run.model) for place in places}
    with tempfile.TemporaryDirectory() as root:
        config = config_of(run.model, NullTokenizer(3), "float64")
        folder, again = write_model(Path(root, "model"), config, tensors), empty(Path(root, "again"))
        ranks.run(run.n, learn_and_save, run, folder, 0, again)
        same_tensors(again, folder)


@pytest.mark.parametrize("kind", ["original", "choices"])
def test_what_was_learnt_is_saved(ranks, folder, model, tmp_path):
    """After some steps, too, and by whom it is saved makes no difference."""
    learnt, again, batch = empty(tmp_path / "learnt"), empty(tmp_path / "again"), golden_batch(model.heads)
    one, other = Run(model, 2, 1, Plan(2)), Run(model, 1, 4, Plan(zero_stage=3))
    ranks.run(one.n, learn_and_save, one, folder, 2, learnt, batch)
    ranks.run(other.n, learn_and_save, other, learnt, 0, again)
    same_tensors(again, learnt)
    before, after = load_file(folder / WEIGHTS), load_file(learnt / WEIGHTS)
    without_effect = {name for name in after if name.endswith(("key.bias", "classifier.bias"))}      # softmax is blind
    assert {name for name, x in after.items() if np.allclose(x, before[name], atol=1e-4)} == without_effect


@pytest.mark.parametrize("kind", ["original", "rearranged"])
def test_every_form_in_which_a_model_is_found(ranks, golden, folder, model, tmp_path):
    """It may lack the prefix, have buffers, tied tensors twice, or the names of the first published files."""
    w = weights_of(golden)
    bare = {name.removeprefix("bert."): x for name, x in w.items()}
    more = {"bert.embeddings.position_ids": np.arange(7)[None], DECODER: w["bert.embeddings.word_embeddings.weight"],
            "cls.predictions.decoder.bias": w["cls.predictions.bias"]}
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
           for name, x in w.items()}
    for i, tensors in enumerate([bare, w | more, old]):
        form = write_model(tmp_path / f"form {i}", golden["config"], tensors)
        ranks.run(2, learn_and_save, Run(model, 2), form, 0, form)       # over itself, too
        same_tensors(form, folder)


@pytest.mark.parametrize("kind", ["original", "words alone", "choices"])
@pytest.mark.parametrize("heads", ARCHITECTURES["bert"])
def test_heads_that_the_model_has_not_are_passed_over(ranks, folder, model, heads, tmp_path):
    """A model for choices begins with a new head if the file has none; any other head must be there."""
    other, there = replace(model, heads=heads), model.heads
    lacking = set(heads) - set(there) - {"choice"}
    if lacking:
        tensor = "cls.predictions.transform" if "lm" in lacking else "pooler"
        refuses(lambda: check_weights(str(folder), other), f"has no tensor {tensor}.dense.weight in")
        return
    again = empty(tmp_path / "again")
    ranks.run(2, learn_and_save, Run(other, 2), folder, 0, again)
    before, after = load_file(folder / WEIGHTS), load_file(again / WEIGHTS)
    new = after.keys() - before.keys()
    assert new == ({"classifier.weight", "classifier.bias"} if set(heads) - set(there) else set()) | (
        {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} if there == ("lm",) != heads else set())
    assert all(x.any() == name.endswith("weight") if name in new else np.array_equal(x, before[name])
               for name, x in after.items()), "what is new has its initial values"


@pytest.mark.parametrize("kind", ["original"])
def test_no_rank_reads_more_than_its_part(folder, model):
    """All ranks together read each element of a split tensor once, and no padding."""
    run = Run(replace(model, make_vocab_size_divisible_by=2), 4)
    layout = stages.layout_of(model_tensors(run.model), run.parallel())
    assert_read_once(Weights(str(folder)), layout.segments, 4)


# ---- files that cannot be loaded ------------------------------------------------------------------------------------


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS) | change
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / WEIGHTS)


QUERY, DECODER = "encoder.layer.1.attention.self.query.weight", "cls.predictions.decoder.weight"


@pytest.mark.parametrize("change, sentence", [
    ({f"bert.{QUERY}": None}, f"--load-hf {{folder}} has no tensor {QUERY} in model.safetensors, but the model "
     "has one, [8, 8]."),
    ({"bert.encoder.layer.0.intermediate.dense.weight": np.zeros((8, 32))}, "has encoder.layer.0.intermediate.dense."
     "weight as [8, 32], but the folder's config.json asks for [32, 8]."),
    ({"bert.encoder.layer.2.output.LayerNorm.bias": np.zeros(8)}, "has a tensor encoder.layer.2.output.LayerNorm.bias, "
     "for which the model of the folder's config.json has no place."),
    ({DECODER: np.zeros((11, 8))}, f"has a tensor {DECODER}, for which the model of"),
    ({"cls.predictions.decoder.bias": np.zeros(11)}, "has a tensor cls.predictions.decoder.bias, for which the model"),
    ({"bert.pooler.dense.bias": np.zeros(8, int)}, "has pooler.dense.bias in the format I64, but it must be one of"),
])
@pytest.mark.parametrize("kind", ["original"])
def test_weights_that_are_not_the_models_are_refused(folder, model, change, sentence):
    change_tensors(folder, change)
    refuses(lambda: check_weights(str(folder), model), sentence.format(folder=folder))


@pytest.mark.parametrize("kind", ["original", "rearranged"])
def test_one_order_is_not_the_other(folder, golden, model):
    """Each order has other names for its norms, and a file with the other order's names is refused."""
    swapped = {"bert": "megatron-bert", "megatron-bert": "bert"}[golden["config"]["model_type"]]
    (folder / CONFIG).write_text(json.dumps(golden["config"] | {"model_type": swapped}))
    refuses(lambda: check_weights(str(folder), model_in(folder, model.heads)), "has no tensor encoder.layer.0."
            if swapped == "megatron-bert" else "has no tensor embeddings.LayerNorm.weight")
