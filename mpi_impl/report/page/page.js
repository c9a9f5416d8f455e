// The page of a run. All numbers are in the JSON of this file; nothing is loaded. Texts from the run become text nodes.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);

// ---- small helpers --------------------------------------------------------------------------------------------------

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

const step = data.player, colors = data.colors.actions, words = data.words, LANE = 40, BOX = 24;
const lanes = step.ranks.map((one, rank) => ({
  rank, slices: one.slices.map(([name, start, end, ...wait]) => ({name: step.names[name], start, end,
    ...(wait.length ? {result: wait[0], from: wait[1]} : {})})),
  actions: one.actions.map(([name, start, end], index) => {
    const [, stage, kind, microbatch] = name.match(/^(\d+)([FBIW])(\d+)$/);
    return {name, start, end, index, rank, stage: Number(stage), kind, microbatch: Number(microbatch)};
  })}));
const flights = step.messages.map(([from, to, result, sent, arrived, used]) => ({from, to, result, sent, arrived, used}));
const events = [...new Set([0, step.end, ...lanes.flatMap(lane => lane.actions.flatMap(a => [a.start, a.end])),
  ...flights.flatMap(one => [one.sent, one.arrived])])].sort((a, b) => a - b);
let now = 0, playing = false, before = 0, chosen = null, scale = 1, focusable = null;

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
  (lanes.length < ranks.length ? ` Of ${ranks.length} ranks the first ${lanes.length} are shown.` : "");

const describe = a => `${words[a.kind]} of stage ${a.stage}, microbatch ${a.microbatch}`;
const kinds = [..."FBIW"].filter(kind => lanes.some(lane => lane.actions.some(a => a.kind === kind)));
for (const kind of kinds) key($("legend"), colors[kind], kind, words[kind]);
add(add($("legend"), "span"), "b", {class: "key adam", "aria-hidden": true}).after("optimizer");
if (lanes.length > 1) key($("legend"), data.colors.actions.communication, "▁", "exchanges with other ranks");
if (flights.length) {
  add(add($("legend"), "span"), "b", {class: "key waiting", "aria-hidden": true}).after("waits for another stage");
  add($("legend"), "span", {}, "● a message under way, ○ arrived and not yet used");
}
for (const lane of lanes) add($("lanes"), "div", {}, `rank ${lane.rank}`);

const zooms = [1, 2, 4, 8, 16, 32, 64];
for (const zoom of zooms) add($("zoom"), "option", {value: zoom}, zoom === 1 ? "whole step" : `${zoom} ×`);
(function () {                                  // so that most boxes have room for their name
  const widths = lanes.flatMap(lane => lane.actions.map(a => a.end - a.start)).sort((a, b) => a - b);
  const typical = widths[Math.floor(widths.length / 3)] / step.end * Math.max(280, $("view").clientWidth);
  $("zoom").value = zooms.find(zoom => zoom * typical >= 26) || 64;
})();

const view = $("view");
let svg, playhead, overlay, nodes;
function drawTimeline() {
  const width = Math.max(280, view.clientWidth) * Number($("zoom").value), height = LANE * lanes.length;
  scale = width / step.end;
  view.replaceChildren();
  svg = add(view, "svg", {width, height});
  const defs = add(svg, "defs");
  for (const [kind, path] of [["B", "M-2 6 L6 -2 M2 10 L10 2"], ["I", "M0 4 H8"], ["W", "M3 3 h2 v2 h-2 z"]]) {
    const pattern = add(defs, "pattern", {id: `of-${kind}`, width: 8, height: 8, patternUnits: "userSpaceOnUse"});
    add(pattern, "path", {d: path, stroke: "#fff", "stroke-width": 1, opacity: 0.4, fill: "none"});
  }
  nodes = lanes.map((lane, r) => {
    add(svg, "rect", {class: "lane", x: 0, y: r * LANE + 3, width, height: LANE - 6});
    for (const kind of ["strip", "wait"]) {           // collectives, and waits for other stages
      const bars = lane.slices.filter(s => s.end > s.start && s.name !== "optimizer" &&
        (kind === "wait") === ("result" in s)).map(s => {
        const width = Math.max(0.5, (s.end - s.start) * scale).toFixed(1);
        return `M${(s.start * scale).toFixed(1)} ${r * LANE + 31}h${width}v5h-${width}z`;
      });
      add(svg, "path", {class: kind, d: bars.join("") || "M0 0"});
    }
    for (const s of lane.slices.filter(s => s.name === "optimizer"))
      add(svg, "rect", {class: "adam", x: s.start * scale, y: r * LANE + 5, width: Math.max(1, (s.end - s.start) * scale),
        height: BOX, rx: 2});
    return lane.actions.map(a => drawAction(a, r));
  });
  overlay = add(svg, "g");
  playhead = add(svg, "line", {class: "playhead", y1: 0, y2: height});
  makeFocusable(focusable || lanes[0].actions[0]);
  if (chosen) node(chosen).classList.add("chosen");
}
function drawAction(a, r) {
  const x = a.start * scale, width = Math.max(1, (a.end - a.start) * scale);
  const group = add(svg, "g", {class: "action", role: "button", tabindex: -1, "aria-label":
    `rank ${a.rank}: ${a.name}, ${describe(a)}, from ${ms(a.start)} to ${ms(a.end)}`});
  const box = {x: x.toFixed(1), y: r * LANE + 5, width: width.toFixed(1), height: BOX, rx: 2};
  add(group, "rect", {...box, class: "box", fill: colors[a.kind]});
  if (a.kind !== "F") add(group, "rect", {...box, fill: `url(#of-${a.kind})`, "pointer-events": "none"});
  if (width >= 7.4 * a.name.length + 2)
    add(group, "text", {x: (x + width / 2).toFixed(1), y: r * LANE + 21.5, style: `fill:${textOn(colors[a.kind])}`}, a.name);
  group.action = a;
  return group;
}
const node = a => nodes[a.rank][a.index];
function makeFocusable(a) {
  if (!a) return;
  if (focusable) node(focusable).setAttribute("tabindex", -1);
  focusable = a;
  node(a).setAttribute("tabindex", 0);
}

// What a rank does at a time: {action, slice}, either of which may be missing.
function doing(lane, time) {
  return {action: lane.actions.find(a => a.start <= time && time < a.end),
    slice: lane.slices.find(s => s.start <= time && time < s.end)};
}
function held(lane, time) {
  const found = new Map();
  for (const a of lane.actions) {
    const name = `${a.stage}.${a.microbatch}`;
    if (a.kind === "F" && a.start <= time) found.set(name, a);
    if ((a.kind === "B" || a.kind === "W") && a.end <= time) found.delete(name);
  }
  return [...found.values()];
}
function groupsOf(reason, rank) {
  const names = new Set(data.sent.reasons.filter(one => one[2] === reason && one[1] !== "evaluation").map(one => one[0]));
  return [...names].map(name => {
    const others = (ranks[rank].groups[name] || []).filter(other => other !== rank);
    return others.length ? `${name}: with rank${others.length > 1 ? "s" : ""} ${others.join(", ")}` : name;
  }).join("; ");
}
function sliceText(slice, rank) {
  if (slice.result) return `waits for ${slice.result} from rank ${slice.from}`;
  if (slice.name === "optimizer") return "updates its weights (Adam)";
  if (slice.name.startsWith("send ")) return `waits until its ${slice.name.slice(5)} has been taken`;
  const groups = groupsOf(slice.name, rank);
  return `exchanges: ${slice.name}${groups ? ` (${groups})` : ""}`;
}
function doingText(lane, {action, slice}, time) {
  if (action) return `${action.name}: ${words[action.kind]}${slice ? `; ${sliceText(slice, lane.rank)}` : ""}`;
  if (slice) return sliceText(slice, lane.rank);
  return time >= step.end ? "has finished the step" : "between two actions";
}

const cards = lanes.map(lane => {
  const card = add($("now"), "div", {class: "does"});
  add(card, "span", {class: "who"}, `rank ${lane.rank}`);
  return {card, doing: add(card, "span", {class: "doing"}), held: add(card, "span", {class: "held"}), was: ""};
});
function show(time, follow = true) {
  now = Math.min(step.end, Math.max(0, time));
  $("slider").value = Math.round(now / step.end * 1000);
  $("slider").setAttribute("aria-valuetext", ms(now));
  $("time").textContent = `${ms(now)} of ${ms(step.end)}`;
  playhead.setAttribute("x1", now * scale);
  playhead.setAttribute("x2", now * scale);
  if (follow && (now * scale < view.scrollLeft + 20 || now * scale > view.scrollLeft + view.clientWidth * 0.8))
    view.scrollLeft = now * scale - view.clientWidth * 0.2;
  for (const old of svg.querySelectorAll(".action.on")) old.classList.remove("on");
  lanes.forEach((lane, r) => {
    const does = doing(lane, now), kept = held(lane, now), card = cards[r];
    if (does.action) node(does.action).classList.add("on");
    const text = doingText(lane, does, now), is = text + kept.map(a => a.stage + "." + a.microbatch);
    if (card.was === is) return;
    card.was = is;
    card.card.style.borderLeftColor = does.action ? colors[does.action.kind] : does.slice ? "var(--head)" : "var(--line)";
    card.doing.textContent = text;
    card.held.textContent = kept.length ? `holds ${plural(kept.length, "activation")}: ` : "holds no activations";
    for (const a of kept.slice(0, 24)) add(card.held, "i", {title: `stage ${a.stage}, microbatch ${a.microbatch}`},
      `${a.stage}F${a.microbatch}`);
    if (kept.length > 24) card.held.append("…");
  });
  showMessages();
}
let listed = null;
function showMessages() {
  const live = flights.filter(one => one.sent <= now && now < Math.max(one.used, one.arrived));
  overlay.replaceChildren();
  for (const one of live) {
    const there = now >= one.arrived, y0 = one.from * LANE + 17, y1 = one.to * LANE + 17;
    const part = there ? 1 : (now - one.sent) / (one.arrived - one.sent || 1);
    const x0 = one.sent * scale, x1 = (there ? Math.max(one.used, one.arrived) : now) * scale;
    add(overlay, "line", {class: `flight${there ? " there" : ""}`, x1: x0, y1: y0, x2: x1, y2: y1});
    add(overlay, "circle", {class: "mark", cx: there ? x1 : x0 + (x1 - x0) * part, cy: y0 + (y1 - y0) * part, r: 5,
      style: there ? "fill:var(--card);stroke:var(--ink)" : ""});
  }
  const lines = live.map(one => `${one.result[one.result.search(/[FB]/)] === "F" ? "activation" : "gradient"} ` +
    `${one.result}, ${bytes(step.message_bytes)}: rank ${one.from} → rank ${one.to}, ` +
    (now < one.arrived ? "under way" : "arrived, waits for its use"));
  if (lines.join() === listed) return;
  listed = lines.join();
  $("messages").replaceChildren();
  for (const line of lines.slice(0, 12)) add($("messages"), "li", {}, line);
  if (lines.length > 12) add($("messages"), "li", {}, `and ${lines.length - 12} more`);
  if (!lines.length) add($("messages"), "li", {}, p > 1 ? "none" : "none: without a pipeline, ranks only meet in collectives");
}

function choose(a) {
  if (chosen) node(chosen).classList.remove("chosen");
  chosen = a;
  node(a).classList.add("chosen");
  makeFocusable(a);
  const host = $("details"), samples = data.player.samples, replica = ranks[a.rank].data;
  host.replaceChildren();
  const first = a.microbatch * samples["a microbatch"] + replica * samples["a replica"], last = first + samples.each - 1;
  add(host, "p", {class: "mono"}, a.name);
  add(host, "p", {}, `The ${describe(a)}, on rank ${a.rank}: sample${first < last ? `s ${first} to ${last}` : ` ${first}`} ` +
    `of the global batch. It takes ${ms(a.end - a.start)}, from ${ms(a.start)} to ${ms(a.end)}.`);
  const inside = lanes[a.rank].slices.filter(s => a.start <= s.start && s.start < a.end);
  if (inside.length) add(host, "p", {}, `Of that, ${ms(sum(inside.map(s => Math.min(s.end, a.end) - s.start)))} in ` +
    `${plural(inside.length, "exchange")} with other ranks: ${[...new Set(inside.map(s => s.name))].join(", ")}.`);
  const list = add(host, "dl");
  for (const [what, shapes, file] of step.work[`${a.stage}${a.kind}`] || []) {
    add(list, "dt", {}, what);
    add(list, "dd", {class: "mono"}, shapes);
    add(list, "dd", {class: "mono"}, file);
  }
  for (const one of flights.filter(one => one.from === a.rank && one.sent === a.end)) {
    add(list, "dt", {}, `sends ${one.result} to rank ${one.to}`);
    add(list, "dd", {class: "mono"}, `${bytes(step.message_bytes)}; mpi_impl/parallel/pipeline.py`);
  }
  add(host, "p", {class: "mono"}, "all of it is called from mpi_impl/parallel/passes.py");
}
function chooseSlice(slice, rank) {
  if (chosen) node(chosen).classList.remove("chosen");
  chosen = null;
  const host = $("details"), rows = data.ledger.filter(row => row.reason === slice.name && row.phase !== "evaluation");
  host.replaceChildren();
  add(host, "p", {}, `Rank ${rank} ${sliceText(slice, rank)}, for ${ms(slice.end - slice.start)}.`);
  const list = add(host, "dl");
  for (const row of rows) {
    add(list, "dt", {}, `${row.operation} in the ${row.group} group, ${row.phase}`);
    add(list, "dd", {class: "mono"}, `${number(Math.round(row.elements / Math.max(1, row.calls)))} elements a call (${row.dtype}); ` +
      `predicted ${row.predicted_elements === null ? "nothing" : number(row.predicted_elements)}`);
  }
  add(host, "p", {class: "mono"}, "mpi_impl/comm/group.py");
}
$("details").append("Click a box, or go to it with the keyboard and press Enter: here are its shapes and the files that do it.");

// playing, stepping, scrubbing
function setPlaying(on) {
  playing = on && step.end > 0;
  if (playing && now >= step.end) show(0);
  $("play").textContent = playing ? "❚❚ Pause" : "▶︎ Play";
  if (playing) { before = performance.now(); requestAnimationFrame(frame); }
}
function frame(time) {
  if (!playing) return;
  show(now + Math.max(0, time - before) / 1e3 * step.end / Number($("speed").value));
  before = time;
  if (now >= step.end) setPlaying(false); else requestAnimationFrame(frame);
}
function say() {
  const begun = lanes.flatMap(lane => lane.actions).filter(a => Math.abs(a.start - now) < 0.05);
  const ended = lanes.flatMap(lane => lane.actions).filter(a => Math.abs(a.end - now) < 0.05);
  const there = flights.filter(one => Math.abs(one.arrived - now) < 0.05);
  $("status").textContent = `${ms(now)}: ` + ([...ended.map(a => `rank ${a.rank} ends ${a.name}`),
    ...there.map(one => `${one.result} arrives at rank ${one.to}`),
    ...begun.map(a => `rank ${a.rank} begins ${a.name}`)].join("; ") || (now <= 0 ? "the step begins" : now >= step.end ?
    "the step ends" : "between events"));
}
function go(direction) {
  setPlaying(false);
  const next = direction > 0 ? events.find(e => e > now + 0.01) : events.findLast(e => e < now - 0.01);
  show(next === undefined ? (direction > 0 ? step.end : 0) : next);
  say();
}
$("play").addEventListener("click", () => setPlaying(!playing));
$("next").addEventListener("click", () => go(1));
$("back").addEventListener("click", () => go(-1));
$("slider").addEventListener("input", event => { setPlaying(false); show(event.target.value / 1000 * step.end); say(); });
$("zoom").addEventListener("change", () => { drawTimeline(); show(now); });
view.addEventListener("click", event => {
  const group = event.target.closest(".action"), at = event.clientX - svg.getBoundingClientRect().left;
  const y = event.clientY - svg.getBoundingClientRect().top, lane = lanes[Math.floor(y / LANE)];
  setPlaying(false);
  if (group) choose(group.action);
  else if (lane && y % LANE > 28) {
    const slice = lane.slices.find(s => s.start * scale - 3 <= at && at <= s.end * scale + 3);
    if (slice) chooseSlice(slice, lane.rank);
  }
  show(group ? group.action.start : at / scale, false);
  say();
  if (group && matchMedia("(max-width: 800px)").matches)       // on a phone they are a screen below
    $("details").parentElement.scrollIntoView({block: "nearest"});
});
function goToAction(a) {
  if (!a) return;
  makeFocusable(a);
  setPlaying(false);
  show(a.start);
  say();
  node(a).focus({preventScroll: true});
}
$("player").addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("select")) return;
  const a = event.target.closest(".action")?.action, lane = a && lanes[a.rank].actions;
  const near = other => other && other.actions.reduce((best, one) => !best || Math.abs(one.start - a.start) <
    Math.abs(best.start - a.start) ? one : best, null);
  const keys = {
    ArrowRight: () => a ? goToAction(lane[a.index + 1]) : go(1), ArrowLeft: () => a ? goToAction(lane[a.index - 1]) : go(-1),
    ArrowDown: a && (() => goToAction(near(lanes[a.rank + 1]))), ArrowUp: a && (() => goToAction(near(lanes[a.rank - 1]))),
    Home: () => a ? goToAction(lane[0]) : (setPlaying(false), show(0), say()),
    End: () => a ? goToAction(lane.at(-1)) : (setPlaying(false), show(step.end), say()),
    Enter: a && (() => choose(a)),
    " ": !event.target.matches("button") && (() => setPlaying(!playing))};
  const does = keys[event.key];
  if (does) { event.preventDefault(); does(); }
});
drawTimeline();
show(0);

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
  drawTimeline();
  show(now);
  drawMatrix();
});
