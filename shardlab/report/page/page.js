// The page of a run. All numbers are in its JSON; nothing is loaded.
const data = JSON.parse($("data").textContent);

// ---- the head, and the summary --------------------------------------------------------------------------------------

const {t, p, d, c} = data.run, losses = data.losses.training, validation = data.losses.validation;
const model = data.run.model;
$("lead").textContent = `${number(model.parameters)} parameters in ${plural(model.layers, "layer")} of ` +
  `${model["hidden size"]} columns and ${plural(model.heads, "head")}, in ${data.run.format}, on ` +
  `${plural(t * c * p * d, "rank")}: tensor parallel ${t} × ${c > 1 ? `context parallel ${c} × ` : ""}` +
  `pipeline parallel ${p}${p > 1 ? ` (${data.run.schedule})` : ""} ` +
  `× data parallel ${d}${data.run.zero_stage ? `, ZeRO-${data.run.zero_stage}` : ""}` +
  `${data.run.sequence_parallel ? ", sequence parallel" : ""}. A step is ` +
  `${plural(data.run.step["microbatches of a replica"], "microbatch").replace(/hs$/, "hes")} of ` +
  `${plural(data.run.step["sequences of a microbatch"], "sequence")} on each replica.` +
  `${data.run.device ? ` It is ${data.run.device}.` : ""}`;

for (const line of data.summary) {
  const card = add($("summary"), "div", {class: "card"});
  add(card, "h2", {}, line.subject[0].toUpperCase() + line.subject.slice(1));
  const [told, verdict] = line.as_predicted === null ? [line.text] : line.text.split(/; (?=[^;]*$)/);
  if (line.as_predicted === null) add(card, "p", {class: "big"}, fixed(losses.at(-1)[1]));
  else add(card, "p", {class: `big ${line.as_predicted ? "good" : "bad"}`},
    line.as_predicted ? "= as predicted" : "≠ not as predicted");
  add(card, "p", {}, told + (verdict ? "; " : "") + (verdict || ""));
  if (line.subject === "loss" && validation.length)
    add(card, "p", {}, `validation ${fixed(validation.at(-1)[1])}` + (data.losses.baseline === null ? "" :
      `; a model that only knows how frequent each token is: ${fixed(data.losses.baseline)}`));
}

// ---- the losses -----------------------------------------------------------------------------------------------------

function drawLosses() {
  const host = $("curve"), width = Math.max(280, host.clientWidth), height = 250;
  const left = 48, right = 12, top = 10, bottom = 30;
  const known = [...losses, ...validation].filter(one => one[1] !== null);
  host.replaceChildren();
  if (!known.length) return;
  const xs = known.map(one => one[0]), ys = known.map(one => one[1]);
  if (data.losses.baseline !== null) ys.push(data.losses.baseline);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1), low = Math.min(...ys), high = Math.max(...ys);
  const pad = (high - low || 1) * 0.06, y0 = low - pad, y1 = high + pad;
  const x = i => left + (i - x0) / (x1 - x0) * (width - left - right);
  const y = v => top + (y1 - v) / (y1 - y0) * (height - top - bottom);
  const svg = add(host, "svg", {width, height, role: "img", "aria-label":
    `Training loss from ${fixed(losses[0][1])} to ${fixed(losses.at(-1)[1])}`});
  for (const v of ticks(y0, y1, 5)) {
    add(svg, "line", {x1: left, x2: width - right, y1: y(v), y2: y(v), class: "axis"});
    add(svg, "text", {x: left - 8, y: y(v) + 4, "text-anchor": "end"}, Number(v.toPrecision(6)));
  }
  for (const i of ticks(x0, x1, width / 110).filter(Number.isInteger))
    add(svg, "text", {x: x(i), y: height - 9, "text-anchor": i - x0 < (x1 - x0) / 50 ? "start" :
      x1 - i < (x1 - x0) / 50 ? "end" : "middle"}, `${number(i)}`);
  if (data.losses.baseline !== null)
    add(svg, "line", {x1: left, x2: width - right, y1: y(data.losses.baseline), y2: y(data.losses.baseline),
      class: "baseline"});
  const drawn = losses.filter(one => one[1] !== null);
  add(svg, "polyline", {class: "training", points: drawn.map(one => `${x(one[0])},${y(one[1])}`).join(" ")});
  if (drawn.length < 40) for (const one of drawn) add(svg, "circle", {cx: x(one[0]), cy: y(one[1]), r: 3, fill:
    "var(--accent)"});
  for (const [i, v] of validation) if (v !== null)
    add(svg, "path", {class: "validation", d: `M${x(i)} ${y(v) - 6} l6 6 l-6 6 l-6 -6 z`});
  svg.addEventListener("pointermove", event => {
    const at = x0 + (event.offsetX - left) / (width - left - right) * (x1 - x0);
    const [i, v] = losses.reduce((best, one) => Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best);
    $("curve-value").textContent = `iteration ${number(i)}: loss ${fixed(v)}`;
  });
}
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough), found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}
drawLosses();
$("curve-legend").append("iterations to the right. ");
key($("curve-legend"), "#0072b2", "—", data.losses.every > 1 ?
  `training, every ${data.losses.every}th iteration` : "training, each iteration");
if (validation.length) key($("curve-legend"), "#d55e00", "◇", "validation");
if (data.losses.baseline !== null) key($("curve-legend"), "#888888", "- -", "a unigram model, which knows no context");
table($("loss-table"), ["iteration", "training loss", "validation loss"],
  [...new Set([...losses, ...validation].map(one => one[0]))].sort((a, b) => a - b).map(i => [number(i),
    ...[losses, validation].map(curve => { const one = curve.find(one => one[0] === i); return one ? fixed(one[1], 6) : "";
    })]), new Set([0, 1, 2]));

// ---- the ranks ------------------------------------------------------------------------------------------------------

const ranks = data.topology;
function span([first, last]) { return first === last ? `layer ${first}` : `layers ${first} to ${last}`; }
function holds(rank) {
  return [...(rank.embedding ? ["embedding"] : []), ...Object.values(rank.stages).map(span),
    ...(rank.head ? ["head"] : [])].join(", ");
}
$("ranks-say").textContent = "Each box is one rank, one process." +
  (t > 1 ? ` The ${t} ranks of a frame share each of their layers (t).` : "") +
  (p > 1 ? " To the right follow the later layers (p)." : "") + (d > 1 ? " Each row is a replica of the whole model, which sees " +
  "other samples (d)." : "");
(function () {
  const grid = add($("grid"), "table"), head = add(add(grid, "thead"), "tr"), body = add(grid, "tbody");
  add(head, "td");
  for (let i = 0; i < p; i++) add(head, "th", {scope: "col"}, p > 1 ? `place ${i} in the pipeline` : "");
  for (let j = 0; j < d; j++) {
    const row = add(body, "tr");
    add(row, "th", {scope: "row"}, d > 1 ? `replica ${j}` : "");
    for (let i = 0; i < p; i++) {
      const team = add(add(row, "td"), "div", {class: "team"});
      for (const rank of ranks.filter(one => one.pipeline === i && one.data === j)) {
        const box = add(team, "div", {class: "rank"});
        add(box, "b", {}, `rank ${rank.rank}`);
        add(box, "small", {class: "mono"}, `t${rank.tensor} p${rank.pipeline} d${rank.data}`);
        add(box, "div", {}, holds(rank) + (t > 1 ? `: 1/${t} of each` : ""));
        add(box, "small", {}, `${number(rank.parameters)} parameters`);
      }
    }
  }
})();

// ---- the played step ------------------------------------------------------------------------------------------------

const step = data.player, controls = makeControls();
$("step-say").textContent = (p > 1 ? "Look how later stages wait for the first message, how forward and backward passes " +
  "then take turns, and how the first stages wait at the end. " : "Look where all ranks of a group compute the same, and where " +
  "they wait for one another. ") + (step.clock === "virtual" ?
  "Times are of a virtual clock: as if each rank had a device of its own, joined by a fast network (5 µs, 25 GB/s), " +
  "however many ranks share your cores." : step.clock === "DeviceClock" ?
  "Times are of the wall's clock, read when a rank's GPU has finished. Ranks that share a GPU slow one another down, and " +
  "work that the GPU could overlap is waited for." :
  "Times are of the wall's clock, as --trace-clock wall chose: where ranks share cores, they slow one another down.") +
  " Each row is a rank; a box is an action: its stage, its kind, its microbatch. The thin line below boxes is " +
  "communication." + (step.shown_microbatches < step.microbatches ?
  ` Of ${number(step.microbatches)} microbatches only the actions of the first ${step.shown_microbatches} are shown.` : "") +
  (step.left_out ? " Communication inside of actions is left out, to keep the page small." : "") +
  (step.ranks.length < ranks.length ? ` Of ${ranks.length} ranks the first ${step.ranks.length} are shown.` : "");
controls.start(makePlayer(data, $, controls));

// ---- the traffic ----------------------------------------------------------------------------------------------------

const axes = data.colors.axes, letters = {tensor: "T", pipeline: "P", data: "D", embedding: "E", model: "M", world: "W",
  context: "C", replicas: "R", copies: "K", expert: "X", "expert replicas": "Y", holders: "H", shards: "S", instances: "I"};
const meaning = {tensor: "ranks that share layers", pipeline: "stages of a model", data: "replicas",
  embedding: "first and last stage, which share a table", model: "one replica", world: "all ranks",
  context: "ranks with other positions of the same samples", replicas: "copies of the same parameters",
  copies: "ranks with the same heads of keys", expert: "ranks to which experts are dealt out",
  "expert replicas": "copies of the same experts", holders: "one replica with all its experts",
  shards: "shards of one copy", instances: "the same shard of other copies"};
const {reasons, rows: sent} = data.sent, groups = [...new Set(reasons.map(one => one[0]))];
for (const group of groups) key($("axes"), axes[group], letters[group], `${group}: ${meaning[group]}`);
add($("reason"), "option", {value: ""}, "all reasons");
for (const group of groups) {
  add($("reason"), "option", {value: group}, `${group}: all`);
  reasons.forEach(([of, phase, why], i) => {
    if (of === group && why) add($("reason"), "option", {value: i}, `${group}: ${phase}, ${why}`);
  });
}
function drawMatrix() {
  const value = $("reason").value, wanted = i => value === "" || value === reasons[i][0] || value === String(i);
  const pairs = new Map();
  for (const [from, to, reason, size] of sent) if (wanted(reason)) {
    const name = `${from} ${to}`;
    if (!pairs.has(name)) pairs.set(name, []);
    pairs.get(name).push([reason, size]);
  }
  const total = list => sum(list.map(one => one[1])), most = Math.max(0, ...[...pairs.values()].map(total));
  const host = $("matrix"), n = ranks.length;
  const cell = Math.max(n > 24 ? 16 : 26, Math.min(52, Math.floor((host.clientWidth - 16) / (n + 1))));
  host.replaceChildren();
  host.style.setProperty("--cell", `${cell}px`);
  $("pair").textContent = pairs.size ? `${bytes(sum([...pairs.values()].map(total)))} from all ranks together. ` +
    "Choose a square for its reasons." : "Nothing was sent.";
  const found = add(host, "table"), head = add(add(found, "thead"), "tr"), body = add(found, "tbody");
  add(head, "th", {title: "from the row's rank to the column's"}, n > 1 ? "↘" : "");
  for (let to = 0; to < n; to++) add(head, "th", {scope: "col"}, to);
  for (let from = 0; from < n; from++) {
    const row = add(body, "tr");
    add(row, "th", {scope: "row"}, from);
    for (let to = 0; to < n; to++) {
      const list = pairs.get(`${from} ${to}`), td = add(row, "td", {class: from === to ? "self" : ""});
      if (!list) continue;
      const sizes = {}, size = total(list);
      for (const [reason, part] of list) sizes[reasons[reason][0]] = (sizes[reasons[reason][0]] || 0) + part;
      const group = Object.keys(sizes).reduce((a, b) => sizes[b] > sizes[a] ? b : a);
      const side = Math.max(13, Math.sqrt(size / most) * (cell - 6)), color = axes[group];
      const words = `rank ${from} to rank ${to}: ${bytes(size)}, most of it ${group}`;
      const button = add(td, "button", {type: "button", "aria-label": words, title: words});
      add(button, "span", {style: `width:${side}px;height:${side}px;background:${color};color:${textOn(color)}`},
        letters[group]);
      button.addEventListener("click", () => {
        $("pair").textContent = `Rank ${from} → rank ${to}: ${bytes(size)}`;
        const why = add($("pair"), "ul");
        for (const [reason, part] of list.sort((a, b) => b[1] - a[1])) {
          const [of, phase, text] = reasons[reason];
          add(why, "li", {}, `${bytes(part)} ${of}${phase ? `, ${phase}` : ""}${text ? `: ${text}` : ""}`);
        }
      });
    }
  }
}
$("reason").addEventListener("change", drawMatrix);
drawMatrix();

$("ledger-say").textContent = `Every kind of call ${p > 1 ? `of the ${p} ranks of rank 0's pipeline, added up` : "of rank 0"}, ` +
  `next to its prediction, if it has one: ${plural(data.ledger.length, "line")}, which scroll. Ring bytes are what a rank sends if the call runs as ` +
  "a ring. The titles sort.";
(function () {
  const columns = [["group", r => `${r.group} ×${r.group_size}`], ["phase", r => r.phase], ["reason", r => r.reason],
    ["operation", r => r.operation], ["calls", r => r.calls], ["elements", r => r.elements], ["ring bytes", r => r.ring_bytes],
    ["predicted elements", r => r.predicted_elements],
    ["", r => r.predicted_elements === null ? null : r.calls === r.predicted_calls && r.elements === r.predicted_elements ?
      "=" : "≠"]];
  const numeric = new Set([4, 5, 6, 7]), cell = (value, i) => value === null ? "" : numeric.has(i) ? number(value) : value;
  let rows = data.ledger.map(r => columns.map(([, value]) => value(r)));
  const host = $("ledger"), found = table(host, columns.map(([title]) => title), [], numeric);
  const body = found.querySelector("tbody"), heads = [...found.querySelectorAll("th")];
  function fill() {
    body.replaceChildren();
    for (const row of rows) {
      const line = add(body, "tr");
      row.forEach((value, i) => add(line, "td", {class: numeric.has(i) ? "number" : i === 8 ? (value === "=" ? "good" : "bad") :
        ""}, cell(value, i)));
    }
  }
  heads.forEach((head, i) => {
    if (i === 8) { head.setAttribute("aria-label", "as predicted"); return; }
    head.replaceChildren();
    add(head, "button", {type: "button"}, columns[i][0]).addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === (numeric.has(i) ? "descending" : "ascending") ? !numeric.has(i) : numeric.has(i);
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows = [...rows].sort((a, b) => (a[i] < b[i] ? -1 : a[i] > b[i] ? 1 : 0) * (down ? -1 : 1));
      fill();
    });
  });
  fill();
})();

// ---- the memory -----------------------------------------------------------------------------------------------------

const parts = {parameters: ["parameters", "P", "parameters"], gradients: ["gradients", "G", "gradients"],
  optimizer: ["optimizer", "O", "Adam's moments, and master weights"], offloaded: ["offloaded", "H", "in host memory or files"],
  gathered: ["whole for a while", "g", "parameters gathered for a while"], unreduced: ["whole for a while", "u", "gradients not yet sent"],
  activations: ["activations", "A", "activations"], recomputed: ["computed again", "R", "computed again"]};
(function () {
  const same = new Map();
  data.memory.forEach((one, rank) => {
    const name = JSON.stringify(one);
    if (!same.has(name)) same.set(name, {one, ranks: []});
    same.get(name).ranks.push(rank);
  });
  const used = Object.keys(parts).filter(name => data.memory.some(one => one.held[name] || one.compared.some(([of, , value]) =>
    of === name && value)));
  for (const name of used) key($("memory-legend"), data.colors.memory[parts[name][0]], parts[name][1], parts[name][2]);
  const most = Math.max(1, ...data.memory.map(one => Math.max(sum(Object.values(one.held)), sum(one.compared.map(c => c[2])))));
  for (const {one, ranks: of} of same.values()) {
    const row = add($("bars"), "div", {class: "bar-row"});
    const runs = of.filter(r => !of.includes(r - 1)).map(r => { let end = r; while (of.includes(end + 1)) end++; return r === end ?
      `${r}` : `${r} to ${end}`; }).join(", ");
    add(row, "div", {}, `rank${of.length > 1 ? "s" : ""} ${runs}`);
    const predicted = Object.fromEntries(one.compared.map(([name, , value]) => [name, value]));
    const agree = one.compared.every(([, found, value]) => found === value);
    for (const [kind, values] of [["measured", one.held], ["predicted", predicted]]) {
      const bar = add(row, "div", {class: `bar ${kind}`, role: "img", "aria-label": `${kind}: ` + used.filter(name => values[name])
        .map(name => `${bytes(values[name])} ${parts[name][2]}`).join(", ")}), whole = add(bar, "div", {class: "whole"});
      for (const name of used) if (values[name]) {
        const share = values[name] / most * 100, color = data.colors.memory[parts[name][0]];
        add(whole, "i", {style: `width:${share}%;background:${color};color:${textOn(color)}`, title:
          `${parts[name][2]}: ${number(values[name])} bytes`}, share > 4 ? parts[name][1] : "");
      }
      const text = add(bar, "span", {class: "sum"}, kind === "measured" ? bytes(sum(Object.values(values))) : "");
      if (kind === "predicted") add(text, "span", {class: agree ? "good" : "bad"}, agree ? "= predicted" : "≠ predicted");
    }
  }
  table($("memory-table"), ["rank", "part", "measured", "predicted", ""], data.memory.flatMap((one, rank) => used.map(name => {
    const compared = one.compared.find(([of]) => of === name);
    return [rank, parts[name][2], number(one.held[name] || 0), compared ? number(compared[2]) : "not predicted",
      compared ? (compared[1] === compared[2] ? "=" : "≠") : ""];
  })), new Set([0, 2, 3]));
})();

// ---- the rest -------------------------------------------------------------------------------------------------------

$("text").textContent = data.text;
$("written").hidden = !data.written;
$("written-text").textContent = data.written;
table($("options"), ["option", "value"], Object.entries(data.run.options).map(([name, value]) =>
  [`--${name.replaceAll("_", "-")}`, Array.isArray(value) ? value.join(" ") : value === true ? "" : String(value)]), new Set());
let lastWidth = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  if (document.documentElement.clientWidth === lastWidth) return;
  lastWidth = document.documentElement.clientWidth;
  drawLosses();
  controls.redraw();
  drawMatrix();
});
