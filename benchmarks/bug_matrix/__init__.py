"""The bug matrix: every bug of the zoo is planted, and every way of checking tells whether it sees it."""
