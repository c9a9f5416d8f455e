"""Near-duplicates: signatures are MinHashes of the shingles, and the index misses nothing that its bands show."""
import numpy as np
from hypothesis import given, strategies as st

from mpi_impl.data.prepare.near_duplicates import (PERMUTATIONS, SHINGLE, bands_for, find_suspects, near_duplicates,
                                                   signature)


@given(st.text("abc \né中", min_size=1, max_size=60))
def test_a_signature_is_that_of_the_set_of_shingles(text):
    """Which are the same however often a text is repeated."""
    text *= SHINGLE
    assert np.array_equal(signature(text), signature(text + text))


def test_signatures_are_the_same_on_every_machine():
    """And by every version of rensa: those of two chunks may come from two."""
    assert signature("The quick brown fox")[:4].tolist() == [1089231254, 2670550711, 2311045705, 3378390367]


@st.composite
def families(draw):
    """Draw the signatures of documents, uint32 [128, n], or none; many are copies of another with some values changed.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    signatures = np.empty((0, PERMUTATIONS), np.uint32)
    for n in range(draw(st.integers(0, 25))):
        drawn = rng.integers(0, 2**32, PERMUTATIONS, np.uint32)
        changed = rng.random(PERMUTATIONS) < rng.choice([0, 0.1, 0.3, 0.4, 1])
        like = signatures[rng.integers(n)] if n else drawn
        signatures = np.vstack([signatures, np.where(changed, drawn, like)])
    return signatures.T


@given(families(), st.sampled_from([0.3, 0.5, 0.7, 0.9]), st.lists(st.integers(0, 25), max_size=3))
def test_the_result_is_that_of_comparing_all_that_share_a_band(signatures, jaccard, cuts):
    """One after another, with all that are kept; the signatures may lie in any number of arrays."""
    bands, n = bands_for(jaccard), signatures.shape[1]
    kept, original, most = [], [], []
    for i in range(n):
        similarity = [float((signatures[:, i] == signatures[:, j]).mean()) for j in kept]
        shares = [any((signatures[band, i] == signatures[band, j]).all() for band in bands) for j in kept]
        similar = [(s, -j) for s, j, shared in zip(similarity, kept, shares) if shared and s >= jaccard]
        original.append(-max(similar)[1] if similar else -1)
        most.append(max(similar)[0] if similar else 0)
        kept += [] if similar else [i]
    found = near_duplicates(np.split(signatures, sorted(min(cut, n) for cut in cuts), axis=1), jaccard)
    assert found.original.tolist() == original
    assert np.array_equal(found.jaccard, np.array(most, np.float32))


def test_one_band_in_common_is_enough_for_a_suspicion():
    """Any band, the last one too."""
    bands = bands_for(0.7)
    signatures = np.random.default_rng(0).integers(0, 2**32, (PERMUTATIONS, 2, 18), np.uint32)
    for pair, band in enumerate(bands):
        signatures[band, 1, pair] = signatures[band, 0, pair]
    assert find_suspects([signatures.reshape(PERMUTATIONS, -1)], bands).all()
