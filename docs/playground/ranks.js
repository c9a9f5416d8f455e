// Draws what ranks.py computes: a bar and a formula for each part of a rank's memory and of its traffic.
"use strict";

const form = document.getElementById("settings"), find = id => document.getElementById(id);
const {presets, start, answer} = PAGE.first, LIMIT = 80e9, OWN = "own sizes";
const NAMES = {optimizer: "optimizer states", A: "A, a layer's activations for a microbatch",
  data: "data, the replicas"};
let python = null, asked = 0;

const giga = bytes => `${(bytes / 1e9).toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2})} GB`;

function make(tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

// ---- the state, which is in the address, too ----

function currentState() {
  const state = Object.fromEntries(new FormData(form));
  delete state.model;
  return state;
}

function show(state) {
  for (const [name, value] of Object.entries(state).filter(([name]) => name in start)) {
    const input = form.elements[name];
    input.value = value;
    if (input.selectedIndex === -1) input.add(new Option(value)), input.value = value;   // for Python to refuse
  }
  const same = preset => Object.entries(preset).every(([name, value]) => form.elements[name].value === value);
  form.elements.model.value = Object.keys(presets).find(name => same(presets[name])) || OWN;
}

const fromAddress = () => ({...start, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))});

// ---- drawing ----

function item({name, value, text, numbers, source}, scale, limit) {
  const li = document.createElement("li"), head = make("h3", `${NAMES[name] || name}: `);
  head.append(make("b", giga(value)));
  li.append(head);
  li.dataset.name = name;
  li.dataset.value = value;
  if (scale) {
    const track = make("div", "", "track"), fill = make("i", "", "fill");
    fill.style.width = `${100 * value / scale}%`;
    track.append(fill);
    if (limit) track.append(limitAt(scale));
    li.append(track);
  }
  if (text === "0") li.append(make("p", "There is none with these settings."));
  else if (text) li.append(make("p", `${text} = ${numbers}`, "formula"), make("p", source, "source"));
  return li;
}

function limitAt(scale) {
  const line = make("span", "", "limit");
  line.style.left = `${100 * LIMIT / scale}%`;
  return line;
}

function draw({ranks, parameters, m, stage, memory, traffic}) {
  const total = memory.reduce((sum, {name, value}) => sum + (name === "A" ? 0 : value), 0);
  const scale = 1.05 * Math.max(total, LIMIT), most = Math.max(1, ...traffic.map(({value}) => value));
  find("summary").textContent = `${(parameters / 1e9).toFixed(1)} billion parameters on ${ranks.toLocaleString("en")} `
    + `ranks, ${m.toLocaleString("en")} microbatches a step. A rank holds ${giga(total)}, which `
    + (total > LIMIT ? `is ${giga(total - LIMIT)} more than the 80 GB of a device.` : "fits in the 80 GB of a device.");
  find("memory-say").textContent = `The fullest rank, of the ${stage} stage. The dashed line is at 80 GB.`;
  find("memory").replaceChildren(item({name: "total", value: total}, scale, true),
    ...memory.map(part => item(part, part.name !== "A" && scale, true)));
  find("traffic").replaceChildren(...traffic.map(part => item(part, most, false)));
  find("costs").hidden = false;
  find("refusal").hidden = true;
}

// ---- asking Python ----

async function ask() {
  const state = currentState(), number = ++asked;
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  if (!python) return;
  try {
    const found = await python.call("ranks", "costs", state);
    if (number === asked) draw(found);
  } catch (error) {
    if (number !== asked) return;
    find("refusal").firstChild.textContent = error.message;
    find("refusal").hidden = false;
    find("costs").hidden = true;
  }
}

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", ({target}) => {
  if (target.name === "model") show(presets[target.value]);
  show(currentState());
  ask();
});
addEventListener("hashchange", () => { show(fromAddress()); ask(); });

form.elements.model.append(...Object.keys(presets).map(name => new Option(name)), new Option(OWN));
form.elements.model.lastChild.disabled = true;      // it is chosen by typing sizes
show(fromAddress());
draw(answer);
startPython(PAGE, (part, words) => {
  find("progress").value = part;
  find("loading-words").textContent = `${words}. Until then, you see GPT-3 on 768 ranks.`;
}).then(async ready => {
  python = ready;
  await ask();
  find("loading").remove();
}, error => { find("progress").remove(); find("loading-words").textContent = error.message; });
