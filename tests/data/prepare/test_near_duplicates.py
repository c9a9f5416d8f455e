"""Near-duplicates: signatures are MinHashes of the shingles, and the index misses nothing that its bands show."""
import numpy as np
import pytest
from datasketch import MinHashLSH
from hypothesis import given, strategies as st

from mpi_impl.data.prepare import near_duplicates as module
from mpi_impl.data.prepare.near_duplicates import PERMUTATIONS, SHINGLE, near_duplicates, signature

TEXT = st.text("abc \né中", min_size=1, max_size=60)
WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstz"]


def shingles(text):
    return {text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))}


def prose(seed, n=400):
    """Draw n words with a seed."""
    return np.random.default_rng(seed).choice(WORDS, n).tolist()


def together(*texts):
    return np.stack([signature(text) for text in texts], axis=1)


@given(TEXT, st.integers(1, 70))
def test_a_signature_is_the_smallest_of_its_shingles(text, block):
    """In every place: so it depends on their set alone, and not on how many are computed at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        assert signature(text).dtype == np.uint32
        each = [signature(shingle) for shingle in shingles(text)]
        assert signature(text).tolist() == np.min(each, axis=0).tolist()


@given(st.integers(0, 10**6), st.integers(0, 100))
def test_agreement_estimates_the_jaccard_index(seed, percent):
    """To within five standard deviations, at any similarity."""
    one, other = prose(seed), prose(seed + 1)
    cut = len(one) * percent // 100
    a, b = " ".join(one), " ".join(one[:cut] + other[cut:])
    jaccard = len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))
    estimate = (signature(a) == signature(b)).mean()
    assert abs(estimate - jaccard) <= 5 * np.sqrt(jaccard * (1 - jaccard) / PERMUTATIONS) + 1e-9


def test_signatures_are_the_same_on_every_machine():
    """And by every version of datasketch: those of two chunks may come from two."""
    assert signature("The quick brown fox")[:4].tolist() == [196011289, 62470591, 446576687, 76328550]


@st.composite
def families(draw):
    """Draw the signatures of documents, uint32 [128, n]; many are copies of another with some values changed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    signatures = [rng.integers(0, 2**32, PERMUTATIONS)]
    for _ in range(draw(st.integers(0, 25))):
        changed = rng.random(PERMUTATIONS) < rng.choice([0, 0.1, 0.3, 0.4, 1])
        like = signatures[rng.integers(len(signatures))]
        signatures.append(np.where(changed, rng.integers(0, 2**32, PERMUTATIONS), like))
    return np.array(signatures, np.uint32).T


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


@pytest.mark.parametrize("bands, rows", [(18, 7), (2, 64), (42, 3)])
def test_one_band_in_common_is_enough_for_a_suspicion(bands, rows):
    """Any band, the last one too; and nothing less than a whole one."""
    random = np.random.default_rng(0).integers(0, 2**32, (PERMUTATIONS, 3, bands), np.uint32)
    for band in range(bands):
        whole = slice(band * rows, (band + 1) * rows)
        random[whole, 1:, band] = random[whole, :1, band]
        random[whole.start + band % rows, 2, band] += 1
    suspected = module.find_suspects(np.split(random.reshape(PERMUTATIONS, -1), [5], axis=1), bands, rows)
    assert suspected.reshape(3, bands).tolist() == [[True] * bands, [True] * bands, [False] * bands]


def test_similar_documents_are_found_and_others_are_kept():
    """A hundred documents, each followed by itself with one word in fifty changed: of each pair the first is kept."""
    texts = []
    for seed in range(100):
        words = prose(seed)
        texts += [" ".join(words), " ".join("other" if i % 50 == 7 else word for i, word in enumerate(words))]
    found = near_duplicates([together(*texts)], 0.7)
    assert found.original.tolist() == [i - 1 if i % 2 else -1 for i in range(200)]
    assert (found.jaccard[1::2] >= 0.7).all()


def test_what_lies_between_two_does_not_drop_both():
    """B is similar to A, and C to B, but not to A: only B is dropped, since C is not compared with a dropped one."""
    words, other = prose(1, 1000), prose(2, 1000)
    a, b, c = signatures = together(*(" ".join(other[:cut] + words[cut:]) for cut in (0, 100, 200))).T
    assert (a == c).mean() < 0.85 <= min((a == b).mean(), (b == c).mean())
    assert near_duplicates([signatures.T], 0.85).original.tolist() == [-1, 0, -1]


def test_short_texts_are_distinguished():
    """Texts shorter than a shingle, and one of just its length."""
    texts = ["a", "b", "ab", "abcde", "a", "abcdf"]
    assert near_duplicates([together(*texts)], 0.7).original.tolist() == [-1, -1, -1, -1, 0, -1]


def test_no_documents_have_no_duplicates():
    assert near_duplicates([], 0.7).original.tolist() == []
    assert near_duplicates([np.empty((PERMUTATIONS, 0), np.uint32)], 0.7).jaccard.tolist() == []
