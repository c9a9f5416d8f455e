"""Near-duplicates: signatures are MinHashes of the shingles, and the index misses nothing that its bands show."""
import numpy as np
import pytest
from datasketch import MinHashLSH
from hypothesis import given, strategies as st

from mpi_impl.data.prepare import near_duplicates as module
from mpi_impl.data.prepare.near_duplicates import PERMUTATIONS, SHINGLE, near_duplicates, signature


def shingles(text):
    return {text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))}


@given(st.text("abc \né中", min_size=1, max_size=60), st.integers(1, 70))
def test_a_signature_is_the_smallest_of_its_shingles(text, block):
    """In every place: so it depends on their set alone, and not on how many are computed at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        assert signature(text).dtype == np.uint32
        each = [signature(shingle) for shingle in shingles(text)]
        assert signature(text).tolist() == np.min(each, axis=0).tolist()


def test_signatures_are_the_same_on_every_machine():
    """And by every version of datasketch: those of two chunks may come from two."""
    assert signature("The quick brown fox")[:4].tolist() == [196011289, 62470591, 446576687, 76328550]


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
    index, n = MinHashLSH(jaccard, PERMUTATIONS, weights=(1 - 0.8, 0.8)), signatures.shape[1]
    bands = [slice(i * index.r, (i + 1) * index.r) for i in range(index.b)]
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
    bands, rows = 18, 7
    signatures = np.random.default_rng(0).integers(0, 2**32, (PERMUTATIONS, 2, bands), np.uint32)
    for band in range(bands):
        whole = slice(band * rows, (band + 1) * rows)
        signatures[whole, 1, band] = signatures[whole, 0, band]
    assert module.find_suspects([signatures.reshape(PERMUTATIONS, -1)], bands, rows).all()
