// Draws the numbers that mlp.py has computed, and marks those that differ from the whole MLP's.
"use strict";

const form = document.getElementById("choices"), {split, draw, f, g} = form.elements;
const isOn = button => button.getAttribute("aria-pressed") === "true";

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function cell(value, right = value) {
  const found = make("td", "", String(value).replace("-", "−"));
  if (right === value) return found;
  const mark = make("span", "mark", "✗");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", found.title = `wrong: ${right} in the whole MLP`);
  found.className = "wrong";
  found.append(mark);
  return found;
}

const matrix = (name, rows, expected) => make("table", "matrix", make("caption", "", name),
  ...rows.map((row, i) => make("tr", "", ...row.map((value, j) => cell(value, expected?.[i][j])))));

function fill(id, title, say, common, matricesOf) {
  const head = make("h2", "", title), cards = [0, 1].map(rank => make("div", "card", make("h3", "", `Rank ${rank}`),
    make("div", "matrices", ...matricesOf(rank))));
  head.id = `${id}-title`;
  document.getElementById(id).replaceChildren(head, make("p", "say", say), make("div", "matrices", ...common),
    make("div", "halves", ...cards));
}

function verdict(name, ranks, expected, reason) {
  const wrong = ranks.map(rank => rank[name].flat().filter((value, i) => value !== expected.flat()[i]).length);
  return wrong.every(n => n === 0) ? make("p", "good", `✓ ${name} is correct on both ranks.`)
    : make("p", "bad", `✗ ${name} is wrong: ${wrong[0]} of 16 numbers on rank 0, ${wrong[1]} on rank 1. ${reason}`);
}

function drawColumns({whole, columns}) {
  const ranks = columns[`${Number(isOn(f))}${Number(isOn(g))}`], own = rank => `${2 * rank} and ${2 * rank + 1}`;
  fill("forward", "Forward", "Each rank has all of x, 2 columns of A and 2 rows of B. f does nothing; g sums both "
    + "ranks' results.", [matrix("x, on both ranks", whole.x)], rank => [
    matrix(`A, columns ${own(rank)}`, ranks[rank].A), matrix("x A", ranks[rank].z), matrix("ReLU(x A)", ranks[rank].a),
    matrix(`B, rows ${own(rank)}`, ranks[rank].B), matrix("ReLU(x A) B, a partial sum", ranks[rank].before_g),
    matrix(isOn(g) ? "y, after g: all-reduce" : "y, without g", ranks[rank].y, whole.y)]);
  fill("backward", "Backward", "The gradient dy of y is given, the same on both ranks. g does nothing; f sums both "
    + "ranks' results, since both have used x.", [matrix("dy, on both ranks", whole.dy)], rank => [
    matrix("dB", ranks[rank].dB), matrix("dA", ranks[rank].dA), matrix("dx, a partial sum", ranks[rank].before_f),
    matrix(isOn(f) ? "dx, after f: all-reduce" : "dx, without f", ranks[rank].dx, whole.dx)]);
  return [verdict("y", ranks, whole.y, "Without g, each rank keeps its own partial sum."),
    verdict("dx", ranks, whole.dx, "Without f, each rank keeps the gradient from its own columns of A. The gradients of "
      + "A and B are correct, and those of all layers below will be wrong.")];
}

function drawRows({whole, rows}) {
  fill("forward", "Forward", "Each rank has 2 columns of x, 2 rows of A and all of B. Its x A is a partial sum, but ReLU "
    + "comes before both ranks' results are summed.", [], rank => [
    matrix("x", rows[rank].x), matrix("A", rows[rank].A), matrix("x A, a partial sum", rows[rank].z),
    matrix("ReLU of it", rows[rank].a), matrix("y, from the sum of both", rows[rank].y, whole.y)]);
  return [verdict("y", rows, whole.y, "ReLU(x₀ A₀) + ReLU(x₁ A₁) is not ReLU(x₀ A₀ + x₁ A₁). Summed before ReLU, it would "
    + "be correct, but take a message of the MLP's width, four times as large in a GPT.")];
}

function update() {
  const columns = split.value === "columns";
  for (const button of [f, g]) {
    button.textContent = `${button.name} is ${isOn(button) ? "on" : "off"}`;
    button.hidden = !columns;
  }
  document.getElementById("backward").hidden = !columns;
  document.getElementById("verdict").replaceChildren(...(columns ? drawColumns : drawRows)(PAGE.first[draw.value]));
}

for (const button of [f, g]) button.addEventListener("click", () => {
  button.setAttribute("aria-pressed", !isOn(button));
  update();
});
form.addEventListener("change", update);
draw.append(...PAGE.first.map((_, i) => new Option(i + 1, i)));
update();
