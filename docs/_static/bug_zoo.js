// Filters of the bug zoo's page: words, and what a detector says. Kinds with a bug that fits unfold.
addEventListener("DOMContentLoaded", () => {
  const kinds = [...document.querySelectorAll("article details")].filter(kind => kind.querySelector("table th"));
  if (!location.pathname.endsWith("/bug_zoo.html") || !kinds.length) return;
  const rowsOf = kind => [...kind.querySelectorAll("tbody tr")];
  const headings = [...kinds[0].querySelectorAll("thead th")].map(heading => heading.textContent.trim());
  const detectors = [...document.querySelector("article table").querySelectorAll("tbody tr")].map(row =>
    [...row.children].slice(0, 2).map(cell => cell.textContent.trim()));

  const form = document.createElement("form");
  form.className = "zoo";
  form.innerHTML = `<label>words <input name="words" type="search" placeholder="tied, Megatron-LM, ledger ..."></label>
    <label>that <select name="detector"><option value="">any detector</option>${detectors.map(([letter, name]) =>
      `<option value="${letter}">${name}</option>`).join("")}</select></label>
    <label><select name="says" aria-label="sees it or not"><option value="seen">sees</option><option value="silent">does not see</option></select></label>
    <output></output>`;
  kinds[0].before(form);

  // What a cell of a detector means: a step or an x, a dash, or nothing.
  const verdict = cell => ({"": "none", "-": "silent"})[cell.textContent.trim()] || "seen";
  function fits(row) {
    const {words, detector, says} = Object.fromEntries(new FormData(form));
    const text = row.textContent.toLowerCase(), column = headings.indexOf(detector);
    return words.toLowerCase().split(/\s+/).every(word => text.includes(word)) &&
      (!detector || verdict(row.children[column]) === says);
  }
  function filter() {
    let found = 0;
    const all = !form.elements.words.value.trim() && !form.elements.detector.value;
    for (const kind of kinds) {
      const rows = rowsOf(kind), fitting = rows.filter(fits);
      for (const row of rows) row.hidden = !fitting.includes(row);
      kind.hidden = !fitting.length;
      kind.open = !all && fitting.length > 0;
      found += fitting.length;
    }
    form.querySelector("output").value = all ? "" : `${found} bugs`;
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
});
