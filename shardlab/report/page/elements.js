// The elements of pages, those of the playground too. Texts from a run become text nodes.
"use strict";
const $ = id => document.getElementById(id);

function add(parent, tag, attributes = {}, ...children) {
  const svg = parent instanceof SVGElement || tag === "svg";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map(String));
  parent.append(node);
  return node;
}
const number = x => x.toLocaleString("en-US");
const fixed = (x, digits = 4) => x === null ? "not finite" : x.toFixed(digits);
const sum = list => list.reduce((a, b) => a + b, 0);
const plural = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;
function bytes(size) {
  const [unit, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([unit]) => size >= unit) || [1, "bytes"];
  return `${Number((size / unit).toPrecision(3))} ${name}`;
}
function ms(micro) { return `${(micro / 1e3).toFixed(2)} ms`; }
function luminance(color) {
  const parts = [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16) / 255)
    .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}
const textOn = color => luminance(color) > 0.179 ? "#000" : "#fff";       // of black and white, the clearer
function key(parent, color, letter, words) {
  const entry = add(parent, "span");
  add(entry, "b", {class: "key", style: `background:${color};color:${textOn(color)}`, "aria-hidden": true}, letter);
  entry.append(words);
}
function table(parent, titles, rows, numeric) {
  const found = add(parent, "table"), head = add(add(found, "thead"), "tr"), body = add(found, "tbody");
  titles.forEach((title, i) => add(head, "th", {scope: "col", class: numeric.has(i) ? "number" : ""}, title));
  for (const row of rows) {
    const line = add(body, "tr");
    row.forEach((cell, i) => add(line, "td", {class: numeric.has(i) ? "number" : ""}, cell));
  }
  return found;
}
