"""A cell's output with sliders: controls, the tables that they look into, and the script that draws (sliders.js)."""
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from reference.errors import UserError

HTML = """<div class="shardlab-sliders"><p>Sliders, where JavaScript may run: run this cell, or see the site.{words}</p>
</div>
<script>
{script}
shardlabSliders({page});
</script>"""


class Sliders:
    """Sliders and their picture. `draw` is the name of a function of sliders.js, `tables` makes what it looks into."""

    def __init__(self, draw: str, controls: Mapping[str, Sequence], start: Mapping, tables: Callable[[], Mapping],
                 words: str = ""):
        """Make controls with these values each, at the `start` values. `words` are for pages where no script may run.
        Raise UserError where there is no such value.
        """
        for name, value in start.items():
            if name not in controls:
                raise UserError(f"There is no slider {name}. There are {', '.join(controls)}.")
            if value not in controls[name]:
                raise UserError(f"The slider {name} has no {value!r}. It has {', '.join(map(str, controls[name]))}.")
        self.words = words
        self.page = {"draw": draw, "tables": tables(),
                     "controls": {name: [list(values), list(values).index(start.get(name, values[0]))]
                                  for name, values in controls.items()}}

    def _repr_html_(self) -> str:
        page = json.dumps(self.page, separators=(",", ":")).replace("</", "<\\/")
        return HTML.format(script=(files(__package__) / "sliders.js").read_text().strip(), page=page,
                           words=self.words)

    def __repr__(self) -> str:
        return "Sliders, where JavaScript may run."
