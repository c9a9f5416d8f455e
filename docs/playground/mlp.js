// Draws the numbers that mlp.py has computed, and marks those that differ from the whole MLP's.
"use strict";

const form = document.getElementById("choices"), {split, draw, f, g} = form.elements;
const draws = PAGE.first, RANKS = [0, 1];
const isOn = button => button.getAttribute("aria-pressed") === "true";

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

const differing = (found, expected) =>
  found.flatMap((row, i) => row.filter((value, j) => value !== expected[i][j])).length;

function matrix(name, rows, expected) {
  const cell = (value, right) => {
    const text = String(value).replace("-", "−");
    if (right === undefined || right === value) return make("td", "", text);
    const mark = make("span", "mark", "✗");
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", `wrong: ${right} in the whole MLP`);
    const found = make("td", "wrong", text, mark);
    found.title = `${right} in the whole MLP`;
    return found;
  };
  const body = rows.map((row, i) => make("tr", "", ...row.map((value, j) => cell(value, expected?.[i][j]))));
  return make("table", "matrix", make("caption", "", name), make("tbody", "", ...body));
}

function fill(id, title, say, common, ofRank) {
  const head = make("h2", "", title);
  head.id = `${id}-title`;
  document.getElementById(id).replaceChildren(head, make("p", "say", say), make("div", "matrices", ...common),
    make("div", "halves", ...RANKS.map(rank =>
      make("div", "card", make("h3", "", `Rank ${rank}`), make("div", "matrices", ...ofRank(rank))))));
  document.getElementById(id).hidden = false;
}

function verdict(name, found, expected, reason) {
  const wrong = found.map(rows => differing(rows, expected));
  if (!wrong.some(Boolean)) return make("p", "good", `✓ ${name} is correct on both ranks.`);
  return make("p", "bad", `✗ ${name} is wrong: ${wrong[0]} of 16 numbers on rank 0, ${wrong[1]} on rank 1. ${reason}`);
}

function drawColumns({whole, columns}) {
  const ranks = columns[`${Number(isOn(f))}${Number(isOn(g))}`], of = name => ranks.map(rank => rank[name]);
  document.getElementById("verdict").replaceChildren(
    verdict("y", of("y"), whole.y, "Without g, each rank keeps its own partial sum."),
    verdict("dx", of("dx"), whole.dx, "Without f, each rank keeps the gradient from its own columns of A alone. "
      + "The gradients of A and B are correct, but those of all layers below will be wrong."));
  fill("forward", "Forward",
    "Each rank has all of x, 2 columns of A and 2 rows of B. f does nothing; g sums both ranks' y.",
    [matrix("x, on both ranks", whole.x)], rank => [
      matrix(`A, columns ${2 * rank} and ${2 * rank + 1}`, ranks[rank].A), matrix("x A", ranks[rank].z),
      matrix("ReLU(x A)", ranks[rank].a), matrix(`B, rows ${2 * rank} and ${2 * rank + 1}`, ranks[rank].B),
      matrix("ReLU(x A) B, a partial sum", ranks[rank].before_g),
      matrix(isOn(g) ? "y, after g: all-reduce" : "y, without g", ranks[rank].y, whole.y)]);
  fill("backward", "Backward", "The gradient dy of y is given, and the same on both ranks. g does nothing; f sums both "
    + "ranks' dx, since both have used x.",
    [matrix("dy, on both ranks", whole.dy)], rank => [
      matrix("dB", ranks[rank].dB), matrix("dA", ranks[rank].dA), matrix("dx, a partial sum", ranks[rank].before_f),
      matrix(isOn(f) ? "dx, after f: all-reduce" : "dx, without f", ranks[rank].dx, whole.dx)]);
}

function drawRows({whole, rows}) {
  const before = split.value === "before", y = rows[before ? "y_before" : "y_after"];
  const hidden = rows[before ? "a_before" : "a_after"];
  document.getElementById("verdict").replaceChildren(verdict("y", [y, y], whole.y,
    "ReLU(x₀ A₀) + ReLU(x₁ A₁) is not ReLU(x₀ A₀ + x₁ A₁): a nonlinear function of a partial sum."));
  fill("forward", "Forward", "Each rank has 2 columns of x and 2 rows of A, so its x A is a partial sum. "
    + (before ? "ReLU comes before the ranks' results are summed." : "The ranks sum it before ReLU: this is correct, but "
      + "an all-reduce in the middle of the layer, of 4h numbers for each token where the MLP is 4h wide."),
    [], rank => [
      matrix(`x${"₀₁"[rank]}, columns ${2 * rank} and ${2 * rank + 1}`, rows.ranks[rank].x),
      matrix(`A${"₀₁"[rank]}, rows ${2 * rank} and ${2 * rank + 1}`, rows.ranks[rank].A),
      matrix("x A, a partial sum", rows.ranks[rank].z),
      ...(before ? [matrix("ReLU of it", rows.ranks[rank].a)] : []),
      matrix(before ? "the sum of both ranks' ReLU" : "ReLU of the sum", hidden, rows.a_after),
      matrix("y, with all of B", y, whole.y)]);
  document.getElementById("backward").hidden = true;
}

function update() {
  for (const button of [f, g]) {
    button.textContent = `${button.name} is ${isOn(button) ? "on" : "off"}`;
    button.disabled = split.value !== "columns";
  }
  (split.value === "columns" ? drawColumns : drawRows)(draws[draw.value]);
}

for (const button of [f, g]) button.addEventListener("click", () => {
  button.setAttribute("aria-pressed", String(!isOn(button)));
  update();
});
form.addEventListener("change", update);
form.addEventListener("submit", event => event.preventDefault());
draw.append(...draws.map((_, i) => new Option(`draw ${i + 1}`, i)));
update();
