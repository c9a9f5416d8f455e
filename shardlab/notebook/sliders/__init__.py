"""Sliders that redraw a picture: of a plan (a choice of t, p, d, v, m and ZeRO), and of a step of ZeRO.

They are plain HTML and JavaScript with all numbers in tables, which the project's own functions have made. So they
move in JupyterLab, and on the site, where nothing runs.
"""
from shardlab.notebook.sliders.plans import explore
from shardlab.notebook.sliders.zero import play_zero

__all__ = ["explore", "play_zero"]
