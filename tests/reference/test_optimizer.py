"""Adam, clipping and the learning rate, against their definitions."""
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from reference.optimizers.adam import OptimizerConfig, adam_update, clip_coefficient, learning_rate
from tests.strategies import close


@given(st.integers(1, 6), st.booleans(), st.integers(0, 2**32 - 1), st.floats(0, 0.99), st.floats(0, 0.999))
def test_adam_is_algorithm_2_of_the_paper(steps, decay, seed, beta1, beta2):
    """Loshchilov and Hutter 2019, line by line, with decay only where it is asked for."""
    c = OptimizerConfig(lr=1e-2, lr_decay_iters=10, weight_decay=0.1, adam_beta1=beta1, adam_beta2=beta2)
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=5)
    param, m, v = theta.copy(), np.zeros(5), np.zeros(5)
    first, second = np.zeros(5), np.zeros(5)
    for step in range(1, steps + 1):
        g = rng.normal(size=5)
        lr = 1e-2 / step                          # as the schedule has it, not the config
        adam_update(param, g.copy(), m, v, step, lr, decay, c)
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g**2
        m_hat, v_hat = first / (1 - beta1**step), second / (1 - beta2**step)
        theta = theta - lr * (m_hat / (np.sqrt(v_hat) + 1e-8) + (0.1 * theta if decay else 0))
    close(param, theta, 1e-12)


@given(st.floats(0, 1e3), st.just(0.0) | st.floats(1e-3, 10))
@example(10.0, 0.5)
def test_clipping_bounds_the_norm_and_keeps_the_direction(norm, limit):
    coefficient = clip_coefficient(norm, limit)
    if limit == 0:
        assert coefficient == 1
    else:
        assert 0 < coefficient <= 1 and coefficient * norm <= limit
        assert norm > limit or coefficient > 1 - 1e-5 / limit
        assert norm < limit or coefficient == pytest.approx(limit / (norm + 1e-6), rel=1e-12)   # Megatron's 1e-6


@pytest.mark.parametrize("style, halfway", [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)])
def test_the_learning_rate_rises_falls_and_stays(style, halfway):
    c = OptimizerConfig(1.0, 20, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=10)
    assert [learning_rate(c, i) for i in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert learning_rate(c, 11) == 1.0 and abs(learning_rate(c, 16) - halfway) < 1e-12
    assert learning_rate(c, 21) == learning_rate(c, 1000) == pytest.approx(1.0 if style == "constant" else 0.1)
    assert learning_rate(c, 20) > learning_rate(c, 21) or style == "constant"
    if style == "cosine":
        assert abs(learning_rate(c, 13) - (0.1 + 0.9 * 0.5 * (1 + np.cos(0.2 * np.pi)))) < 1e-12


def test_a_constant_rate_may_rise_for_longer_than_others_fall():
    """Nothing comes down, so that nothing must have come up by then."""
    c = OptimizerConfig(1.0, 10, lr_decay_style="constant", lr_warmup_iters=20)
    assert [learning_rate(c, i) for i in (1, 10, 11, 20, 21)] == [0.05, 0.5, 0.55, 1.0, 1.0]
