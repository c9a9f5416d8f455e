"""Choices that the variants of several labs share."""

# Which part of what is split a rank takes, modulo the number of ranks, and which rank takes a part.
PARTS = ("rank + 1", "rank + 2", "rank + 3", "-1 - rank", "-rank", "1 - rank", "2 - rank")
RANKS = ("part - 1", "part - 2", "part - 3", "-1 - part", "-part", "1 - part", "2 - part")

# Functions y = f(z): the formula, the code, and the code of the slope, for z and y in braces.
CURVES = (
    (r"\arctan({z})", "np.arctan({z})", "np.cos({y}) ** 2"),
    (r"\mathrm{{arsinh}}({z})", "np.arcsinh({z})", "1 / np.cosh({y})"),
    (r"\log(1 + e^{{{z}}})", "np.logaddexp(0, {z})", "1 - np.exp(-{y})"),
    (r"1 / (1 + e^{{-{z}}})", "1 / (1 + np.exp(-({z})))", "{y} * (1 - {y})"),
    (r"{z} / (1 + |{z}|)", "({z}) / (1 + np.abs({z}))", "(1 - np.abs({y})) ** 2"),
    (r"{z} / \sqrt{{1 + ({z})^2}}", "({z}) / np.sqrt(1 + ({z}) ** 2)", "(1 - {y} ** 2) ** 1.5"),
)
