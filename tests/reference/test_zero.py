"""ZeRO holds and sends what the paper says. test_theorems.py proves that it trains as one process does."""
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.batches import GPTBatch
from reference.comm.ring import ring_all_gather
from reference.costs.volumes import data_parallel_traffic
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.model_states import model_states
from reference.parallel.zero import ZeroTrainer
from reference.params import assign, join, split, tree_map
from reference.precision import Precision
from reference.training.trainer import Trainer
from tests.reference.test_layout import BUCKET
from tests.strategies import Case, cases, close, trees_close

STAGE, D, M = st.integers(0, 3), st.integers(1, 5), st.integers(1, 3)
SPREAD = dict(init_method_std=0.2)     # gradients, and what ranks do wrong, are not small


def trainer_of(case: Case, d, stage, bucket_size=1 << 20, clip_grad=0.5, dtype=np.float64) -> ZeroTrainer:
    return ZeroTrainer(case.model, optimizer_of(clip_grad), case.seed, dtype, d, stage, bucket_size)


def optimizer_of(clip_grad) -> OptimizerConfig:
    """Return options whose eps is above the rounding in the key bias's gradient, which is otherwise zero."""
    return OptimizerConfig(1e-2, 10, lr_warmup_iters=1, weight_decay=0.1, clip_grad=clip_grad, adam_eps=1e-4)


def batch_of(case: Case, step: int, d: int, m: int):
    return [case.ids(f"{what} {step}", d * m * case.b, case.s) for what in ("tokens", "targets")]


def flats(trainer: ZeroTrainer):
    """Return each rank's whole flat parameters: its own, or in stage 3 the shards of all ranks together."""
    if trainer.stage < 3:
        return [rank.params for rank in trainer.ranks]
    layout = trainer.layout
    flat = np.full_like(trainer.ranks[0].params, -np.inf, shape=layout.size)
    for rank in trainer.ranks:
        for bucket in layout.buckets:
            _, in_buffer, in_shard = layout.owned_piece(bucket, rank.part)
            flat[in_buffer] = rank.params[in_shard]
    return [flat]


def padding_of(trainer: ZeroTrainer):
    """Return a mask of the flat buffer's elements outside all tensors. (A table's padding is part of its tensor.)"""
    padding = np.ones(trainer.layout.size, bool)
    for segment in trainer.layout.segments:
        padding[segment.slice] = False
    return padding


def zero_equals_one_process(case: Case, d, m, stage, bucket_size, clip_grad=0.5):
    """Check loss, norm and weights after every step against one process; replicas stay bitwise identical, and padding
    stays zero.
    """
    ours = trainer_of(case, d, stage, bucket_size, clip_grad)
    textbook, padding = Trainer(case.model, optimizer_of(clip_grad), case.seed, Precision("float64")), padding_of(ours)
    if case.exact:
        start_from_random_numbers(case, ours, textbook)
    for step in range(2):
        tokens, targets = batch_of(case, step, d, m)
        loss, norm = ours.step(tokens, targets, case.b)
        expected_loss, expected_norm, _ = textbook.step(GPTBatch(tokens, targets))
        close(np.stack([loss, norm]), np.stack([expected_loss, expected_norm]), 1e-10)
        for flat in flats(ours):
            assert (flat == flats(ours)[0]).all(), "replicas differ"
            assert (flat[padding] == 0).all(), "padding has moved"
            trees_close(join([ours.layout.views(flat)], ours.tensors), textbook.params, 1e-10)
        vocabulary = ours.layout.views(flats(ours)[0]).embedding.word[case.model.vocab_size:]
        assert (vocabulary == 0).all(), "padded words have moved"


def start_from_random_numbers(case: Case, ours: ZeroTrainer, textbook: Trainer):
    """Give both the same exact parameters. The initial ones are few numbers, often 0 or 1."""
    textbook.params = case.params(ours.tensors)
    textbook.m, textbook.v = (tree_map(np.zeros_like, textbook.params) for _ in "mv")
    flat = np.zeros_like(textbook.params.embedding.word, shape=ours.layout.size)
    tree_map(assign, ours.layout.views(flat), split(textbook.params, ours.tensors, 1)[0])
    ours.start(flat)


# ---- what it costs --------------------------------------------------------------------------------------------------


@given(cases(sizes=st.just(1)), D, STAGE, BUCKET, st.sampled_from([np.float16, np.float32, np.float64]))
def test_ranks_hold_what_the_paper_says(case, d, stage, bucket_size, dtype):
    """Rajbhandari et al. 2020, section 5: Psi counts the padding too, which is less than N elements a bucket."""
    trainer, w = trainer_of(case, d, stage, bucket_size, dtype=dtype), np.dtype(dtype).itemsize
    assert trainer.bytes_held() == [model_states(trainer.layout.size, d, stage, w, w, 2 * w)] * d
    assert padding_of(trainer).sum() <= (d - 1) * len(trainer.layout.buckets)


@given(cases(sizes=st.just(1)), D, M, STAGE, BUCKET)
def test_ranks_send_what_the_paper_says(case, d, m, stage, bucket_size):
    """Section 7: 2 Psi and 3 Psi, for one microbatch. Stage 2 reduces and stage 3 gathers too for every one.

    The 3 Psi are for what is used once, and needed again in its backward. A lookup's backward does without the table
    (2 Psi). A tied table is looked up, and then used once more as what gives the logits, all with one reduction.
    """
    trainer = trainer_of(case, d, stage, bucket_size)
    trainer.step(*batch_of(case, 0, d, m), case.b)
    psi = trainer.layout.size
    word, position = (trainer.layout.bucket_of[unit].size if unit in trainer.layout.bucket_of else 0
                      for unit in ("embedding.word", "embedding.position"))
    more = 0
    if stage == 3:
        more = m * (-word - position if case.model.untie_embeddings_and_output_weights else word - position)
    expected = (psi if stage < 2 else m * psi, psi if stage < 3 else m * 2 * psi + more)
    assert (trainer.reduced, trainer.gathered) == expected
    assert trainer.elements_sent() == ring_all_gather(sum(expected), d)
    assert data_parallel_traffic(psi, d, stage, m) == pytest.approx(ring_all_gather(sum(expected) - more, d))


@given(cases(sizes=st.just(1)), st.integers(2, 5), st.integers(1, 2))
def test_stage_3_materializes_only_units_in_use(case, d, m):
    """At most a block is whole; or the embedding's tables; or the final layer norm and the table of the logits."""
    trainer = trainer_of(case, d, 3)
    with gathers_observed(trainer) as most:
        trainer.step(*batch_of(case, 0, d, m), case.b)
    used_together = [[f"blocks.{layer}"] for layer in trainer.tensors.blocks]
    used_together += [["embedding.word", "embedding.position"], ["final_layernorm", trainer.table]]
    bucket_of = trainer.layout.bucket_of
    assert max(most) == max(sum(bucket_of[unit].size for unit in units if unit in bucket_of)
                            for units in used_together)


@contextmanager
def gathers_observed(trainer):
    """Record, at every all-gather inside the block, how many gathered elements are still in memory."""
    gathered, most, gather = [], [], trainer.all_gather

    def observed(shards):
        flats = gather(shards)
        gathered.append(weakref.ref(flats[0]))      # what all ranks hold is one array in the textbook
        most.append(sum(flat.size for ref in gathered if (flat := ref()) is not None))
        return flats

    trainer.all_gather = observed
    yield most
