"""Random numbers that are a function of seed, purpose and index."""
import numpy as np
from hypothesis import given, strategies as st

from reference.random.counter_rng import bits, key, normal, uniform

SEEDS = st.integers(0, 2**63)
N = 1 << 16


def indices(n=N, first=0):
    return np.arange(first, first + n, dtype=np.uint64)


def test_known_bits():
    """The generator never changes: a seed in a paper gives the same weights years later."""
    assert bits(key(1234, "weights", "output"), indices(4, 2**32 - 2)).tolist() == [
        1615315268, 3407260193, 4048227718, 2059241261]


@given(SEEDS, st.sampled_from([0, 2**32 - N // 2, 2**40]))
def test_bits_are_even(seed, first):
    """Every bit is set half of the time, and no two bits go together more than chance allows (6 standard errors)."""
    words = bits(key(seed, "test"), indices(first=first))
    table = np.unpackbits(words.view(np.uint8).reshape(-1, 4), axis=1) - np.float32(0.5)   # sums are exact: N is small
    assert np.abs(table.mean(0)).max() < 6 * 0.5 / np.sqrt(N)
    together = table.T @ table / N - np.diag(np.full(32, 0.25))
    assert np.abs(together - np.diag(np.diag(together))).max() < 6 * 0.25 / np.sqrt(N)


@given(SEEDS)
def test_uniform_is_inside_the_open_interval_and_flat(seed):
    u = np.sort(uniform(key(seed, "test"), indices()))
    assert u[0] > 0 and u[-1] < 1
    assert np.abs(u - (np.arange(N) + 0.5) / N).max() < 3 / np.sqrt(N)       # Kolmogorov and Smirnov's distance


@given(SEEDS)
def test_normal_has_the_moments_of_the_normal_distribution(seed):
    """Mean 0, variance 1, skewness 0, fourth moment 3, and neighbours are unrelated (6 standard errors)."""
    z = normal(key(seed, "test"), indices())
    for moment, expected, variance in ((z, 0, 1), (z**2, 1, 2), (z**3, 0, 15), (z**4, 3, 96), (z[1:] * z[:-1], 0, 1)):
        assert abs(moment.mean() - expected) < 6 * np.sqrt(variance / N)


@given(SEEDS)
def test_seeds_and_purposes_are_independent(seed):
    ours = normal(key(seed, "weights", "a"), indices())
    for other in (key(seed + 1, "weights", "a"), key(seed, "weights", "b"), key(seed, "dropout", "a")):
        assert abs((ours * normal(other, indices())).mean()) < 6 / np.sqrt(N)
