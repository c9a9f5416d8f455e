// A player of one step of a run, in elements that `$` finds: its timeline, what each rank does now, and explanations.
function makePlayer(data, $, controls) {
  const step = data.player, colors = data.colors.actions, words = data.words, ranks = data.topology, p = data.run.p;
  const marks = data.marks || [], LANE = data.marks ? 54 : 40, BOX = 24;
  const clock = step.clock === "ticks" ? at => plural(Math.round(at), "tick") : ms;
  const lanes = step.ranks.map((one, rank) => ({
    rank, slices: one.slices.map(([name, start, end, ...wait]) => ({name: step.names[name], start, end,
      ...(wait.length ? {result: wait[0], from: wait[1]} : {})})),
    actions: one.actions.map(([name, start, end], index) => {
      const [, stage, kind, microbatch] = name.match(/^(\d+)([FBIW])(\d+)$/);
      return {name, start, end, index, rank, stage: Number(stage), kind, microbatch: Number(microbatch)};
    })}));
  const flights = step.messages.map(([from, to, result, sent, arrived, used]) => ({from, to, result, sent, arrived, used}));
  const events = [...new Set([0, step.end, ...lanes.flatMap(lane => lane.actions.flatMap(a => [a.start, a.end])),
    ...flights.flatMap(one => [one.sent, one.arrived]), ...marks.map(mark => mark.at)])].sort((a, b) => a - b);
  let now = 0, chosen = null, scale = 1, focusable = null;

  const describe = a => `${words[a.kind]} of stage ${a.stage}, microbatch ${a.microbatch}`;
  const kinds = [..."FBIW"].filter(kind => lanes.some(lane => lane.actions.some(a => a.kind === kind)));
  for (const kind of kinds) key($("legend"), colors[kind], kind, words[kind]);
  add(add($("legend"), "span"), "b", {class: "key adam", "aria-hidden": true}).after("optimizer");
  if (lanes.length > 1) key($("legend"), data.colors.actions.communication, "▁", "exchanges with other ranks");
  if (flights.length) {
    add(add($("legend"), "span"), "b", {class: "key waiting", "aria-hidden": true}).after("waits for another stage");
    add($("legend"), "span", {}, "● a message under way, ○ arrived and not yet used");
  }
  for (const lane of lanes) add($("lanes"), "div", {style: `height:${LANE}px`}, `rank ${lane.rank}`);

  const view = $("view");
  let svg, playhead, overlay, nodes, drawnMarks;
  function draw(zoom, end) {
    const width = Math.max(280, view.clientWidth) * zoom, height = LANE * lanes.length;
    scale = width / end;
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
    drawnMarks = marks.map(drawMark);
    overlay = add(svg, "g");
    playhead = add(svg, "line", {class: "playhead", y1: 0, y2: height});
    makeFocusable(focusable || lanes[0].actions[0]);
    if (chosen) node(chosen).classList.add("chosen");
  }
  function drawAction(a, r) {
    const x = a.start * scale, width = Math.max(1, (a.end - a.start) * scale);
    const group = add(svg, "g", {class: "action", role: "button", tabindex: -1, "aria-label":
      `rank ${a.rank}: ${a.name}, ${describe(a)}, from ${clock(a.start)} to ${clock(a.end)}`});
    const box = {x: x.toFixed(1), y: r * LANE + 5, width: width.toFixed(1), height: BOX, rx: 2};
    add(group, "rect", {...box, class: "box", fill: colors[a.kind]});
    if (a.kind !== "F") add(group, "rect", {...box, fill: `url(#of-${a.kind})`, "pointer-events": "none"});
    if (width >= 7.4 * a.name.length + 2)
      add(group, "text", {x: (x + width / 2).toFixed(1), y: r * LANE + 21.5, style: `fill:${textOn(colors[a.kind])}`}, a.name);
    group.action = a;
    return group;
  }
  // Marks of what differs from the other run: by shape, and lit once their time has come.
  const ENVELOPE = "M-8 -5 h16 v10 h-16 z M-8 -5 l8 6 l8 -6";
  const SHAPES = {first: "M0 -8 L8 0 L0 8 L-8 0 z", differs: "M-1.5 -4 h3 v8 h-3 z", sent: ENVELOPE,
    changed: `${ENVELOPE} M-8 9 h16`, missing: "M-8 -5 h16 v10 h-16 z M-6 -9 L6 9 M-6 9 L6 -9"};
  function drawMark(mark) {
    const y = mark.rank * LANE + (mark.kind === "first" ? 17 : 45), size = mark.named === false ? 0.6 : 1;
    const group = add(svg, "g", {class: `mark-${mark.kind}`, transform:
      `translate(${(mark.at * scale).toFixed(1)} ${y}) scale(${size})`});
    add(group, "title", {}, mark.text);
    add(group, "path", {d: SHAPES[mark.kind]});
    return group;
  }
  for (const [kind, words] of [["first", "the first tensor that differs"], ["differs", "a tensor that differs"],
    ["sent", "a message that only this run sends"], ["missing", "the place where this run does not send it"],
    ["changed", "a message that differs"]]) if (marks.some(mark => mark.kind === kind)) {
    const entry = add($("legend"), "span"), icon = add(entry, "svg", {width: 22, height: 20, "aria-hidden": true});
    add(add(icon, "g", {class: `mark-${kind} lit`, transform: "translate(11 10)"}), "path", {d: SHAPES[kind]});
    entry.append(words);
  }
  function tensorText(rank, time) {
    const seen = data.tensors?.ranks[rank].findLast(([at]) => at <= time);
    const mark = seen && marks.find(mark => mark.rank === rank && mark.at === seen[0] && /first|differs/.test(mark.kind));
    return seen ? `; last tensor: ${data.tensors.names[seen[1]]}${mark ? ", which differs" : ""}` : "";
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
  function show(time, follow) {
    now = Math.min(step.end, time);
    playhead.setAttribute("x1", now * scale);
    playhead.setAttribute("x2", now * scale);
    if (follow && (now * scale < view.scrollLeft + 20 || now * scale > view.scrollLeft + view.clientWidth * 0.8))
      view.scrollLeft = now * scale - view.clientWidth * 0.2;
    for (const old of svg.querySelectorAll(".action.on")) old.classList.remove("on");
    lanes.forEach((lane, r) => {
      const does = doing(lane, now), kept = held(lane, now), card = cards[r];
      if (does.action) node(does.action).classList.add("on");
      const text = doingText(lane, does, now) + tensorText(lane.rank, now), is = text + kept.map(a => a.stage + "." + a.microbatch);
      if (card.was === is) return;
      card.was = is;
      card.card.style.borderLeftColor = does.action ? colors[does.action.kind] : does.slice ? "var(--head)" : "var(--line)";
      card.doing.textContent = text;
      card.held.textContent = kept.length ? `holds ${plural(kept.length, "activation")}: ` : "holds no activations";
      for (const a of kept.slice(0, 24)) add(card.held, "i", {title: `stage ${a.stage}, microbatch ${a.microbatch}`},
        `${a.stage}F${a.microbatch}`);
      if (kept.length > 24) card.held.append("…");
    });
    marks.forEach((mark, i) => drawnMarks[i].classList.toggle("lit", mark.at <= now));
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
    host.closest("details")?.setAttribute("open", "");
    const first = a.microbatch * samples["a microbatch"] + replica * samples["a replica"], last = first + samples.each - 1;
    add(host, "p", {class: "mono"}, a.name);
    add(host, "p", {}, `The ${describe(a)}, on rank ${a.rank}: sample${first < last ? `s ${first} to ${last}` : ` ${first}`} ` +
      `of the global batch. It takes ${clock(a.end - a.start)}, from ${clock(a.start)} to ${clock(a.end)}.`);
    const inside = lanes[a.rank].slices.filter(s => a.start <= s.start && s.start < a.end);
    if (inside.length) add(host, "p", {}, `${step.clock === "ticks" ? "It has" : `Of that, ${ms(sum(inside.map(s => Math.min(s.end, a.end) - s.start)))} in`} ` +
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
    host.closest("details")?.setAttribute("open", "");
    add(host, "p", {}, `Rank ${rank} ${sliceText(slice, rank)}${step.clock === "ticks" ? "" : `, for ${ms(slice.end - slice.start)}`}.`);
    const list = add(host, "dl");
    for (const row of rows) {
      add(list, "dt", {}, `${row.operation} in the ${row.group} group, ${row.phase}`);
      add(list, "dd", {class: "mono"}, `${number(Math.round(row.elements / Math.max(1, row.calls)))} elements a call (${row.dtype})` + (row.predicted_elements === undefined ? "" :
        `; predicted ${row.predicted_elements === null ? "nothing" : number(row.predicted_elements)}`));
    }
    add(host, "p", {class: "mono"}, "mpi_impl/comm/group.py");
  }
  $("details").append("Click a box, or go to it with the keyboard and press Enter: here are its shapes and the files that do it.");

  function say() {
    const near = at => Math.abs(at - now) < 0.05;
    const actions = lanes.flatMap(lane => lane.actions);
    $("status").textContent = `${clock(now)}: ` + ([...actions.filter(a => near(a.end)).map(a => `rank ${a.rank} ends ${a.name}`),
      ...flights.filter(one => near(one.arrived)).map(one => `${one.result} arrives at rank ${one.to}`),
      ...actions.filter(a => near(a.start)).map(a => `rank ${a.rank} begins ${a.name}`),
      ...marks.filter(mark => near(mark.at)).map(mark => `rank ${mark.rank}: ${mark.text}`)].join("; ") ||
      (now <= 0 ? "the step begins" : now >= step.end ? "the step ends" : "between events"));
  }

  // By mouse and by keyboard, from action to action.
  view.addEventListener("click", event => {
    const group = event.target.closest(".action"), at = event.clientX - svg.getBoundingClientRect().left;
    const y = event.clientY - svg.getBoundingClientRect().top, lane = lanes[Math.floor(y / LANE)];
    if (group) choose(group.action);
    else if (lane && y % LANE > 28) {
      const slice = lane.slices.find(s => s.start * scale - 3 <= at && at <= s.end * scale + 3);
      if (slice) chooseSlice(slice, lane.rank);
    }
    controls.jump(group ? group.action.start : at / scale, false);
    if (group && matchMedia("(max-width: 800px)").matches)       // on a phone they are a screen below
      $("details").parentElement.scrollIntoView({block: "nearest"});
  });
  function goToAction(a) {
    if (!a) return;
    makeFocusable(a);
    controls.jump(a.start);
    node(a).focus({preventScroll: true});
  }
  view.addEventListener("keydown", event => {
    const a = event.target.closest(".action")?.action, lane = a && lanes[a.rank].actions;
    if (!a || event.ctrlKey || event.altKey || event.metaKey) return;
    const near = other => other && other.actions.reduce((best, one) => !best || Math.abs(one.start - a.start) <
      Math.abs(best.start - a.start) ? one : best, null);
    const keys = {
      ArrowRight: () => goToAction(lane[a.index + 1]), ArrowLeft: () => goToAction(lane[a.index - 1]),
      ArrowDown: () => goToAction(near(lanes[a.rank + 1])), ArrowUp: () => goToAction(near(lanes[a.rank - 1])),
      Home: () => goToAction(lane[0]), End: () => goToAction(lane.at(-1)), Enter: () => choose(a)};
    const does = keys[event.key];
    if (does) { event.preventDefault(); does(); }
  });
  return {end: step.end, events, clock, lanes, view, draw, show, say};
}

// The controls: of one player, or of several that step together.
function makeControls() {
  const players = [];
  let now = 0, playing = false, before = 0, end = 0, events = [];

  function show(time, follow = true) {
    now = Math.min(end, Math.max(0, time));
    const clock = players[0].clock;
    $("slider").value = Math.round(now / end * 1000);
    $("slider").setAttribute("aria-valuetext", clock(now));
    $("time").textContent = `${clock(now)} of ${clock(end)}`;
    for (const player of players) player.show(now, follow);
  }
  function setPlaying(on) {
    playing = on && end > 0;
    if (playing && now >= end) show(0);
    $("play").textContent = playing ? "❚❚ Pause" : "▶︎ Play";
    if (playing) { before = performance.now(); requestAnimationFrame(frame); }
  }
  function frame(time) {
    if (!playing) return;
    show(now + Math.max(0, time - before) / 1e3 * end / Number($("speed").value));
    before = time;
    if (now >= end) setPlaying(false); else requestAnimationFrame(frame);
  }
  function jump(time, follow) {
    setPlaying(false);
    show(time, follow);
    for (const player of players) player.say();
  }
  function go(direction) {
    const next = direction > 0 ? events.find(e => e > now + 0.01) : events.findLast(e => e < now - 0.01);
    jump(next === undefined ? (direction > 0 ? end : 0) : next);
  }
  function redraw() {
    for (const player of players) player.draw(Number($("zoom").value), end);
    show(now);
  }
  function start(...shown) {
    players.push(...shown);
    end = Math.max(...players.map(player => player.end));
    events = [...new Set(players.flatMap(player => player.events))].sort((a, b) => a - b);
    const zooms = [1, 2, 4, 8, 16, 32, 64], lanes = players.flatMap(player => player.lanes);
    for (const zoom of zooms) add($("zoom"), "option", {value: zoom}, zoom === 1 ? "whole step" : `${zoom} ×`);
    const widths = lanes.flatMap(lane => lane.actions.map(a => a.end - a.start)).sort((a, b) => a - b);
    const typical = widths[Math.floor(widths.length / 3)] / end * Math.max(280, players[0].view.clientWidth);
    $("zoom").value = zooms.find(zoom => zoom * typical >= 26) || 64;      // so that most boxes have room for their name
    redraw();
  }

  $("play").addEventListener("click", () => setPlaying(!playing));
  $("next").addEventListener("click", () => go(1));
  $("back").addEventListener("click", () => go(-1));
  $("slider").addEventListener("input", event => jump(event.target.value / 1000 * end));
  $("zoom").addEventListener("change", redraw);
  $("player").addEventListener("keydown", event => {
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.target.matches("select")) return;
    const keys = {ArrowRight: () => go(1), ArrowLeft: () => go(-1), Home: () => jump(0), End: () => jump(end),
      " ": !event.target.matches("button") && (() => setPlaying(!playing))};
    const does = keys[event.key];
    if (does) { event.preventDefault(); does(); }
  });
  return {start, jump, redraw};
}
