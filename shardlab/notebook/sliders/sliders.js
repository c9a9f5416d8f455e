// Sliders and a picture that follows them. All numbers are in tables; this script looks up, adds, and draws.
function shardlabSliders({draw, controls, tables}) {
  const box = [...document.querySelectorAll(".shardlab-sliders:not(.ready)")].pop();
  if (!box) return;
  box.classList.add("ready");
  const labels = {zero_stage: "ZeRO", sequence_parallel: "sequence parallel"};
  const words = value => value === true ? "on" : value === false ? "off" : value;
  const style = "font:14px/1.4 system-ui,sans-serif;color:#222;background:#fff;padding:10px;border-radius:6px";

  // ---- the controls ----
  const rows = Object.entries(controls).map(([name, [values, start]]) => {
    const input = values.every(Number.isInteger)
      ? `<input type="range" name="${name}" min="0" max="${values.length - 1}" value="${start}" style="width:9em">`
      : `<select name="${name}">${values.map((value, i) =>
        `<option value="${i}"${i === start ? " selected" : ""}>${words(value)}</option>`).join("")}</select>`;
    const buttons = name === "frame" ? '<button type="button" value="-1">back</button> <button type="button" value="1">next</button> ' : "";
    return `${buttons}<label style="display:inline-flex;gap:6px;align-items:center;margin:2px 18px 2px 0">
      <span>${labels[name] || name}</span>${input}<output style="min-width:2em"></output></label>`;
  });
  box.innerHTML = `<div style="${style}"><form>${rows.join("")}</form>
    <p role="status" style="margin:8px 0;font-weight:600"></p><div style="overflow-x:auto"></div></div>`;
  const form = box.querySelector("form"), said = box.querySelector("p"), picture = said.nextElementSibling;

  function redraw() {
    const chosen = {};
    for (const [name, [values]] of Object.entries(controls)) {
      const input = form.elements[name];
      chosen[name] = values[input.value];
      if (input.type === "range") {
        input.nextElementSibling.value = chosen[name];
        input.setAttribute("aria-valuetext", chosen[name]);
      }
    }
    const [sentence, svg] = pictures[draw](chosen);
    said.textContent = sentence;
    picture.innerHTML = svg;
  }

  // ---- drawing ----
  const svg = (height, label, parts) => `<svg viewBox="0 0 1000 ${height}" width="100%" style="min-width:36em" role="img" aria-label="${label}"
    font-family="system-ui,sans-serif" font-size="14" fill="#222">${parts.join("")}</svg>`;
  const rect = (x, y, width, height, fill) => `<rect x="${x.toFixed(2)}" y="${y}" width="${width.toFixed(2)}"
    height="${height}" fill="${fill}" stroke="#fff" stroke-width=".6"/>`;
  const text = (x, y, what, extra = "") => `<text x="${x.toFixed(2)}" y="${y}" ${extra}>${what}</text>`;
  const percent = share => `${(100 * share).toFixed(1)} %`;
  const sum = list => list.reduce((a, b) => a + b, 0);

  function bar(y, title, parts, unit, end, limit) {
    let left = 0, at = 0;
    const scale = 980 / end, drawn = [text(0, y, title, 'font-weight="600"')];
    for (const [name, size, color] of parts) {
      drawn.push(rect(left * scale, y + 8, size * scale, 30, color), rect(at, y + 46, 12, 12, color),
        text(at + 17, y + 57, `${name} ${size.toFixed(1)} ${unit}`));
      left += size;
      at += 245;
    }
    if (limit) drawn.push(`<path d="M${limit * scale} ${y + 2}v42" stroke="#505050" stroke-dasharray="4 3"/>`,
      text(limit * scale + 4, y + 6, `an A100 has ${limit}`, 'fill="#505050" font-size="12"'));
    return drawn;
  }

  const pictures = {
    // Python has drawn the picture, with an `@` for the state of each cell. The row that the sentence names is in bold.
    zero({stage, frame}) {
      const step = tables.steps[stage], end = step.length - 1, at = Math.min(frame, end), [sentence, cells] = step[at];
      form.elements.frame.max = end;
      form.elements.frame.nextElementSibling.value = `${at} of ${end}`;
      let next = 0;
      const row = `>${/ of (\S+)\. /.exec(sentence)?.[1]}<`;
      return [sentence, tables.picture.replace(row, ` font-weight="700"${row}`).replace(/@/g, () => cells[next++])];
    },

    // What the fullest rank holds and sends. Sizes are MB in the tables.
    plan({model, t, p, d, v, m, zero_stage: zero, sequence_parallel: sequence}) {
      const costs = tables.ranks[`${model} ${t} ${p} ${v} ${Number(sequence)}`], pipe = tables.pipelines[`${p} ${v} ${m}`];
      for (const found of [costs, pipe]) if (typeof found === "string") return [found, ""];
      const [inFirst, inLast, bubble] = pipe, state = tables.states[`${zero} ${d}`];
      const held = [[0, inFirst], [3, inLast]].map(([i, caches]) =>
        [...state.map(bytes => bytes * costs[i] / 1e3), (costs[i + 1] * caches + costs[i + 2]) / 1e3]);
      const fullest = sum(held[0]) >= sum(held[1]) ? held[0] : held[1];
      const sent = [costs[6] * m, costs[7] * m, costs[0] * tables.gradients[`${zero} ${d} ${m}`]].map(mb => mb / 1e3);
      const named = (colors, sizes) => Object.keys(colors).slice(0, sizes.length).map((name, i) => [name, sizes[i], colors[name]]);
      const total = sum(fullest), all = sum(sent);
      return [`${t * p * d} ranks, ${m * d} samples a step; the fullest rank holds ${total.toFixed(1)} GB and sends ` +
        `${all.toFixed(1)} GB; idle / ideal time ${percent(bubble)}`,
      svg(256, "memory, messages and idle time", [
        ...bar(16, "GB that the fullest rank holds", named(tables.colors.memory, fullest), "GB", Math.max(total, 90), 80),
        ...bar(104, "GB that a rank of the first stage sends in a step", named(tables.colors.messages, sent), "GB", all || 1),
        ...bar(192, "share of a step's time", [["busy", 100 / (1 + bubble), "#0072B2"],
          ["idle", 100 * bubble / (1 + bubble), "#D0D0D0"]], "% of it", 100)])];
    },
  };
  form.addEventListener("input", redraw);
  form.addEventListener("click", ({target}) => {
    if (target.type !== "button") return;
    form.elements.frame.value = Number(form.elements.frame.value) + Number(target.value);
    redraw();
  });
  redraw();
}
