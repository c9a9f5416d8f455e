// The page of two runs beside each other. All numbers are in its JSON; nothing is loaded.
const data = JSON.parse($("data").textContent);
$("first-text").textContent = data.tensor;
$("message-text").textContent = data.message;
$("bug").hidden = !data.about;
for (const [id, text] of Object.entries(data.about || {})) $(id).textContent = text;
$("step-title").textContent = `Iteration ${data.iteration} of both, played`;
const controls = makeControls();
data.runs.forEach((run, i) => {
  const part = add($("runs"), "section", {"aria-label": `Run ${run.name}`, class: "run"});
  part.append($("run").content.cloneNode(true));
  for (const one of part.querySelectorAll("[data-id]")) one.id = `${one.dataset.id}-${i}`;
  $(`name-${i}`).textContent = `Run ${run.name}${run.about ? `: ${run.about}` : ""}`;
  $(`view-${i}`).setAttribute("aria-label", `Timeline of run ${run.name}: arrow keys go from action to action`);
});
controls.start(...data.runs.map((run, i) => makePlayer(run, id => $(`${id}-${i}`), controls)));
$("go").hidden = !data.at.length;
$("go").addEventListener("click", () => {
  controls.jump(data.at[0]);
  $("player").scrollIntoView({block: "start"});
  $("next").focus({preventScroll: true});
});
controls.jump(data.at[0] ?? 0);

function list(id, titles, rows, numeric, none) {
  if (rows.length) table($(id), titles, rows, numeric);
  else add($(id), "p", {}, none);
}
list("calls", ["message", "times", "on ranks"], data.calls, new Set([1]), "None: both sent the same.");
list("differences", ["tensor, in the order of computation", "off by", "relative", "where"], data.differences,
  new Set([1, 2]), "None, beyond rounding.");
$("text").textContent = data.text;
let lastWidth = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  if (document.documentElement.clientWidth !== lastWidth) controls.redraw();
  lastWidth = document.documentElement.clientWidth;
});
