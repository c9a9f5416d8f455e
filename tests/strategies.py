"""What hypothesis draws for the theorems: a model's sizes, a batch's, and a seed for the numbers in them."""
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from reference.config import ModelConfig, Recompute
from reference.dropout import Dropout
from reference.mappings import TENSOR_PARALLEL, SequenceParallelRegion
from reference.ops import ACTIVATIONS
from reference.params import leaves, tree_map, with_names

SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8])


@dataclass(frozen=True)
class Case:
    """A model on t tensor-parallel ranks, and a batch. Numbers are a function of the seed."""

    t: int
    model: ModelConfig
    b: int
    s: int
    seed: int
    integers: bool = False   # whole numbers: their sums and products are exact, in any order
    sequence_parallel: bool = False
    keep_gathered_inputs: bool = False
    main = np.float64        # the dtype of gradients

    @property
    def region(self):
        """Of the textbook."""
        return SequenceParallelRegion(self.keep_gathered_inputs) if self.sequence_parallel else TENSOR_PARALLEL

    @property
    def dropout(self) -> Dropout:
        """Of a microbatch that is not the first, in some step and layer."""
        return Dropout(self.model, self.seed, step=3, sample=2, layer=1)

    def array(self, what: str, *shape):
        """float64, of order 1; an independent draw for each name."""
        rng = np.random.default_rng([self.seed, *what.encode()])
        return rng.integers(-4, 5, shape).astype(float) if self.integers else rng.normal(size=shape)

    def ids(self, what: str, *shape):
        """Words of the vocabulary: int64."""
        return np.random.default_rng([self.seed, *what.encode()]).integers(0, self.model.vocab_size, shape)

    def params(self, tensors):
        """A tree of whole tensors, all of them random, biases and norms too; h of them sum to O(1)."""
        scale = 1.0 if self.integers else 1 / np.sqrt(self.model.hidden_size)
        return tree_map(lambda named: scale * self.array(named.name, *named.leaf.shape), with_names(tensors))

    def x(self, what: str = "x"):
        """[b, s, h]."""
        return self.array(what, self.b, self.s, self.model.hidden_size)


@st.composite
def cases(draw, sizes=SIZES, integers=False, **model_choices):
    """Ragged on purpose: sizes that are no powers of two, vocabularies that do not divide, one position, one head."""
    t = draw(sizes)
    heads = t * draw(st.integers(1, 2))
    cut = t > 1 and draw(st.booleans(), "sequence parallel")
    s = t * draw(st.integers(1, 2)) if cut else draw(st.integers(1, 6))
    pairs, turned = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]))   # of dimensions of a head
    choices = dict(
        num_layers=draw(st.integers(1, 3)), hidden_size=heads * 2 * pairs, rotary_percent=turned / pairs,
        num_attention_heads=heads, vocab_size=draw(st.integers(2, 40)),
        max_position_embeddings=s + draw(st.integers(0, 2)),
        position_embedding_type=draw(st.sampled_from(["learned_absolute", "rope"])),
        untie_embeddings_and_output_weights=draw(st.booleans()), activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        make_vocab_size_divisible_by=draw(st.integers(1, 5)),
        hidden_dropout=draw(st.sampled_from([0.0, 0.1, 0.5])), attention_dropout=draw(st.sampled_from([0.0, 0.1, 0.5])),
    ) | model_choices
    return Case(t, ModelConfig(**choices), draw(st.integers(1, 3)), s, draw(st.integers(0, 2**32 - 1)), integers,
                cut, cut and draw(st.booleans(), "keep gathered inputs"))


def recomputes():
    """Every way to keep less of the activations, and none."""
    return st.one_of(st.sampled_from([Recompute(), Recompute("selective")]),
                     st.builds(Recompute, st.just("full"), st.sampled_from(["uniform", "block"]), st.integers(1, 3)))


def close(actual, expected, tolerance=1e-11):
    """Equal within the tolerance, relative to the largest expected element (or to 1, if that is larger)."""
    assert actual.shape == expected.shape, f"shape {actual.shape} is not {expected.shape}"
    difference = np.abs(actual - expected).max(initial=0)
    limit = tolerance * max(1.0, np.abs(expected).max(initial=0))
    assert difference <= limit, f"largest difference {difference:.1e}, allowed {limit:.1e}"


def trees_close(actual, expected, tolerance=1e-11):
    """The same tensors, each close; an error names the tensor."""
    for (name, x), (other, y) in zip(leaves(actual), leaves(expected), strict=True):
        assert name == other
        try:
            close(x, y, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
