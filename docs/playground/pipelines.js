// The playground of pipeline schedules. pipelines.py computes, in this page's Python; this file draws, and reads input.
"use strict";
const form = $("choices"), {colors, words: WORDS} = PAGE;
const {state: DEFAULTS, answers: FIRST, takes_v: TAKES_V} = PAGE.first;
const LANE = 74, BOX = 26, HELD = 32;       // heights: of a rank, of an action, and of the graph of what it holds
const past = [];        // addresses before each edit, for Undo
let python = null, state, answer, turn = 0, announce = null;
let nodes = [], scale = 1, at = {rank: 0, place: 0}, marked = [];

// ---- the state, which the address holds ---------------------------------------------------------------------------

const readAddress = () => {
  const {order = "", ...rest} = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return {...DEFAULTS, ...rest, order: order.replaceAll("_", ",").replaceAll(".", "\n")};
};
// An edit is a step for Undo, and for the browser's Back; what the reader types in the form is not.
function go(next, edit = false) {
  const {order, ...rest} = next;
  if (order) rest.order = order.trim().replaceAll(",", "_").replaceAll("\n", ".");
  const hash = `#${new URLSearchParams(rest)}`;
  if (edit) past.push(location.hash || "#"), location.hash = hash;
  else location.replace(hash);
}
function firstAnswer() {
  const first = {...DEFAULTS, schedule: state.schedule};
  return Object.keys(first).every(name => first[name] === state[name]) ? FIRST[state.schedule] : undefined;
}

async function show() {
  state = readAddress();
  const mine = ++turn, written = $("csv").value;
  for (const input of form.elements) if (input.value !== state[input.name]) input.value = state[input.name];
  form.elements.v.disabled = !TAKES_V.includes(state.schedule);
  $("reset").disabled = !state.order;
  $("undo").disabled = !past.length;
  try {
    const got = python ? await python.call("pipelines", "play", state) : firstAnswer();
    if (mine !== turn) return;
    refuse(null);
    $("picture").setAttribute("aria-busy", !got);
    const typed = $("csv").value !== written;       // while Python computed: it is the reader's, and stays
    if (got || !answer) draw(got || FIRST[DEFAULTS.schedule], typed);
    if (!got) $("summary").textContent = "What you chose needs Python, which is not ready. This is another schedule.";
    $("moved").textContent = announce?.(answer.takes) || "";
    announce = null;
  } catch (error) {
    if (mine === turn) refuse({refusal: error.message, marked: []}), $("picture").setAttribute("aria-busy", true);
    if (!(error instanceof UserError)) throw error;
  }
}

// ---- pictures -------------------------------------------------------------------------------------------------------

function draw(got, typed) {
  answer = got;
  const had = $("view").contains(document.activeElement);
  $("about").textContent = got.about;
  $("summary").textContent = `A step takes ${got.takes}. Its bubble: idle / ideal time ${got.bubble}, ` +
    `idle / longest span ${got.rate}.`;
  if (!typed) $("csv").value = got.csv;
  if (state.order) Object.assign(form.elements.p, {value: got.p}), Object.assign(form.elements.m, {value: got.m});
  $("download").href = `data:text/csv;charset=utf-8,${encodeURIComponent(got.csv)}`;
  drawTimeline();
  drawTable();
  choose(Math.min(at.rank, got.ranks.length - 1), at.place, had);
}
function drawTimeline() {
  const {ranks, makespan} = answer, lengths = ranks.flatMap(rank => rank.actions.map(([, start, end]) => end - start));
  const mean = lengths.reduce((sum, x) => sum + x) / lengths.length, shortest = Math.min(...lengths.filter(Boolean));
  const most = Math.max(1, ...ranks.map(rank => rank.peak)), least = Math.min(27 / shortest, 54 / mean);
  $("lanes").replaceChildren();
  $("view").replaceChildren();
  ranks.forEach(({peak}, r) => add($("lanes"), "div", {}, `rank ${r}\nup to ${peak}`));
  // All of it fits, or else most names fit into their actions, and the timeline scrolls.
  scale = Math.min(Math.max(($("view").clientWidth - 6) / makespan, least), 30000 / makespan);
  const width = Math.ceil(makespan * scale) + 4;
  const svg = add($("view"), "svg", {width, height: ranks.length * LANE, role: "group", "aria-label":
    `Timeline of ${ranks.length} ranks; a table below has its totals`});
  nodes = ranks.map((rank, r) => {
    const lane = add(svg, "g", {role: "listbox", "aria-orientation": "horizontal", "aria-label": `Order of rank ${r}`,
      transform: `translate(0 ${r * LANE})`});
    add(lane, "rect", {class: "lane", y: 2, width, height: BOX + 4, rx: 3});
    // What the rank holds during each action, and until the next one.
    const y = held => (BOX + 8 + HELD * (1 - held / most)).toFixed(1), base = y(0);
    let path = `M0 ${base}`, after = 0;
    for (const [name, start, end, held] of rank.actions) {
      path += `H${(start * scale).toFixed(1)}V${y(held)}H${(end * scale).toFixed(1)}`;
      after = /[BW]/.test(name) ? held - 1 : held;
      path += `V${y(after)}`;
    }
    add(lane, "path", {class: "held", d: `${path}V${base}z`});
    return rank.actions.map((action, place) => drawAction(lane, action, r, place));
  });
  mark();
}
function mark() {
  for (const node of nodes.flat()) node.classList.toggle("marked", marked.includes(nameOf(node)));
}
function drawAction(lane, [name, start, end, held], rank, place) {
  const [, stage, kind, microbatch] = name.match(/(\d+)(\w)(\d+)/), fill = colors[kind];
  const width = Math.max(1, (end - start) * scale - 2), x = start * scale + 1;
  const group = add(lane, "g", {class: "action", role: "option", tabindex: -1, "aria-selected": false, "aria-label":
    `${name}: stage ${stage}, ${WORDS[kind]} of microbatch ${microbatch}; place ${place + 1} of rank ${rank}; from ` +
    `${+start.toPrecision(4)} to ${+end.toPrecision(4)}; ${held} in flight`});
  add(group, "rect", {class: "box", x, y: 4, width, height: BOX, rx: 2, fill});
  if (width > 7.3 * name.length)
    add(group, "text", {x: x + width / 2, y: 21, style: `fill:${textOn(fill)}`}, name);
  Object.assign(group, {rank, place});
  return group;
}
function drawTable() {
  const most = Math.max(...answer.ranks.map(rank => rank.memory)) || 1;
  $("ranks").replaceChildren();
  const found = table($("ranks"), ["rank", "stages", "busy", "idle", "most in flight", "memory"], answer.ranks.map(
    ({stages, busy, idle, peak}, r) => [r, stages, busy, idle, peak, ""]), new Set());
  answer.ranks.forEach(({memory, says}, r) => {
    const cell = found.tBodies[0].rows[r].lastChild;
    add(cell, "span", {class: "meter", style: `width:calc(${memory / most} * min(120px, 15vw))`});
    cell.append(says);
  });
}
function refuse(why) {
  $("refusal").hidden = !why;
  $("refusal").replaceChildren();
  marked = why ? why.marked : [];
  mark();
  if (!why) return;
  $("moved").textContent = "";
  add($("refusal"), "p", {}, why.refusal);
  if (!why.table) return;
  const details = add($("refusal"), "details");
  add(details, "summary", {}, "The order that was refused");
  add(details, "pre", {class: "scroll", tabindex: 0}, why.table);
}

// ---- choosing and moving actions ------------------------------------------------------------------------------------

const nameOf = ({rank, place}) => answer.ranks[rank].actions[place][0];
function choose(rank, place, focus = true) {
  for (const node of nodes.flat().filter(node => node.tabIndex === 0))
    node.setAttribute("tabindex", -1), node.setAttribute("aria-selected", false);
  at = {rank, place: Math.max(0, Math.min(place, nodes[rank].length - 1))};
  const node = nodes[at.rank][at.place];
  node.setAttribute("tabindex", 0);
  node.setAttribute("aria-selected", true);
  if (focus) node.focus();
  $("chosen").value = `${nameOf(at)}, place ${at.place + 1} of ${nodes[rank].length} on rank ${rank}`;
}
async function move(to) {
  const {rank, place} = at, before = answer.takes, name = nameOf(at);
  if (to < 0 || to >= nodes[rank].length || to === place || !editable()) return;
  const asked = state, got = await python.call("pipelines", "move", asked, rank, place, to);
  if (JSON.stringify(readAddress()) !== JSON.stringify(asked)) return;    // the reader has gone on
  if (got.refusal) return refuse(got);
  at = {rank, place: to};
  announce = now => `${name} is at place ${to + 1} of rank ${rank} now. A step takes ${now}` +
    (now === before ? ", as before." : ` instead of ${before}.`);
  go({...state, order: got.order}, true);
}
function editable() {
  if (!python) refuse({refusal: "Actions can be moved when Python is ready.", marked: []});
  return python && $("picture").getAttribute("aria-busy") === "false";
}

const KEYS = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity};
$("view").addEventListener("keydown", event => {
  const step = KEYS[event.key], {rank, place} = at;
  if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    const other = answer.ranks[rank + step];
    if (!other) return;
    const start = answer.ranks[rank].actions[place][1], distance = ([, time]) => Math.abs(time - start);
    const near = other.actions.reduce((best, action) => distance(action) < distance(best) ? action : best);
    choose(rank + step, other.actions.indexOf(near));
  } else if (event.shiftKey && Math.abs(step) === 1) move(place + step);
  else choose(rank, place + step);
});

// A drag: `drop` is the place among the rank's other actions where the pointer is.
let drag = null;
$("view").addEventListener("pointerdown", event => {
  const node = event.target.closest(".action");
  if (!node || event.button) return;
  const wasChosen = node.ariaSelected === "true";
  choose(node.rank, node.place);
  if (event.pointerType !== "mouse" && !wasChosen) return;      // a first touch chooses, so that touches can scroll
  drag = {node, x: event.clientX, drop: node.place, line: null};
  $("view").setPointerCapture(event.pointerId);
});
$("view").addEventListener("pointermove", event => {
  if (!drag || Math.abs(event.clientX - drag.x) < 5 && !drag.line) return;
  const {node} = drag, others = nodes[node.rank].filter(other => other !== node), svg = node.ownerSVGElement;
  const x = event.clientX - svg.getBoundingClientRect().left, actions = answer.ranks[node.rank].actions;
  drag.drop = others.filter(({place}) => (actions[place][1] + actions[place][2]) / 2 * scale < x).length;
  node.classList.add("dragged");
  const next = others[drag.drop], edge = (next ? actions[next.place][1] : actions.at(-1)[2]) * scale;
  drag.line ||= add(svg, "line", {class: "drop", y1: node.rank * LANE, y2: node.rank * LANE + BOX + 8});
  for (const end of ["x1", "x2"]) drag.line.setAttribute(end, edge);
});
function endDrag(event) {
  if (!drag) return;
  const {node, drop, line} = drag;
  drag = null;
  node.classList.remove("dragged");
  line?.remove();
  if (event.type === "pointerup") move(drop);
}
for (const type of ["pointerup", "pointercancel"]) $("view").addEventListener(type, endDrag);

$("earlier").addEventListener("click", () => move(at.place - 1));
$("later").addEventListener("click", () => move(at.place + 1));
$("undo").addEventListener("click", () => location.replace(past.pop()));
$("reset").addEventListener("click", () => go({...state, order: ""}, true));

// ---- the form, the file, the link -----------------------------------------------------------------------------------

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", ({target: {name}}) => {
  const next = {...state, ...Object.fromEntries(new FormData(form))};
  if (["schedule", "p", "m", "v"].includes(name)) next.order = "";
  go(next);
});
$("use").addEventListener("click", () => go({...state, order: $("csv").value}, true));
$("copy").addEventListener("click", async () => {
  const copied = navigator.clipboard?.writeText(location.href) ?? Promise.reject();     // some pages may not
  $("copy").textContent = await copied.then(() => "Copied", () => "Copy it from the address bar");
});
addEventListener("hashchange", show);
addEventListener("resize", () => { drawTimeline(); choose(at.rank, at.place, false); });

for (const name of Object.keys(FIRST)) add(form.elements.schedule, "option", {}, name);
for (const kind of "FBIW") key($("legend"), colors[kind], kind, WORDS[kind]);
add(add($("legend"), "span"), "span", {}, "Below a rank's actions: the activations that it holds.");
show();
startPython(PAGE, (part, words) => {
  $("progress").value = part;
  $("loading-words").textContent = words;
}).then(started => {
  python = started;
  $("loading").hidden = true;
  return show();
}).catch(error => {
  $("progress").remove();
  $("loading-words").textContent = error.message;
  if (!(error instanceof UserError)) throw error;
});
