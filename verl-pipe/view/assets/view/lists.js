// The list of anomalies, the table of a step, and all curves with their filter.

/** Maximum number of anomalies in the list. */
const LISTED = 500;

function drawAnomalies() {
  const place = byId("anomaly-list");
  if (!data.anomalies.length) {
    place.append(el("p", { class: "empty" }, "No anomalies were found."));
    return;
  }
  const head = ["step", "rule", "stage", "key", "value", "limit", "what", "likely causes", "next", "samples"];
  const rows = data.anomalies.slice(0, LISTED).map((a) => {
    const row = el("tr", { class: "link", tabindex: 0, "data-step": a.step },
      el("td", { class: "n" }, String(a.step)),
      el("td", { class: "k" }, el("span", { class: a.severity === "stop" ? "stop" : "warn" }, a.severity === "stop" ? "■ " : "▲ "), a.rule),
      el("td", { class: "k" }, a.stage), el("td", { class: "k" }, a.key),
      el("td", { class: "n" }, short(a.value)), el("td", { class: "n" }, short(a.limit)),
      el("td", { class: "w" }, a.what), el("td", { class: "w" }, a.causes),
      el("td", { class: "w" }, a.advice, ...(a.command ? [el("br"), el("code", {}, a.command)] : [])),
      el("td", {}, ...a.samples.slice(0, 4).flatMap((id) => [sampleLink(a.step, id), " "])));
    press(row, () => chooseStep(a.step, true));
    return row;
  });
  place.append(table(head, ["n", "", "", "", "n", "n"], rows));
  if (data.anomalies.length > LISTED) place.append(el("p", { class: "hint" }, `and ${data.anomalies.length - LISTED} more in anomalies.jsonl of the run`));
  state.listeners.push(() => rows.forEach((row) => row.classList.toggle("chosen", Number(row.dataset.step) === state.step)));
}

/** The id of a sample, as a link if the sample is on the page. */
function sampleLink(step, id) {
  const at = data.samples.findIndex((sample) => sample.step === step && sample.id === id);
  if (at < 0) return el("span", { class: "rule" }, id);
  return el("a", { href: "#samples", class: "rule", onclick: (event) => { event.stopPropagation(); showSample(at); } }, id);
}

function table(head, classes, rows) {
  const cells = head.map((name, at) => el("th", { class: classes[at] || undefined }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, ...cells)), el("tbody", {}, ...rows));
}

function drawSteps() {
  const choice = byId("step-choice");
  const marked = new Set(data.anomalies.map((a) => a.step));
  choice.append(...data.tables.map((step) => el("option", { value: step }, marked.has(step) ? `${step} ▲` : String(step))));
  choice.addEventListener("change", () => chooseStep(Number(choice.value)));
  const move = (by) => {
    const at = data.tables.indexOf(Number(choice.value)) + by;
    if (at >= 0 && at < data.tables.length) chooseStep(data.tables[at]);
  };
  byId("step-back").addEventListener("click", () => move(-1));
  byId("step-on").addEventListener("click", () => move(1));
  byId("step-inputs").addEventListener("change", showStep);
  state.listeners.push(showStep);
  if (!data.tables.length) byId("step-table").append(el("p", { class: "empty" }, "No step has statistics."));
}

function showStep() {
  // Until a step is selected: the first step with an anomaly, else the last step.
  const at = nearest(data.tables, state.step ?? data.anomalies[0]?.step ?? Infinity);
  if (at < 0) return;
  const step = data.tables[at];
  byId("step-choice").value = String(step);
  byId("step-note").textContent = state.step !== null && step !== state.step
    ? `Step ${state.step} has no table on this page; showing the nearest step that has one.` : "";
  const { columns, keys, steps } = block("tables");
  const order = (data.graph?.nodes || []).map((node) => node.name);
  const place = (number) => order.indexOf(keys[number][0]);
  const inputs = byId("step-inputs").checked;
  const found = data.anomalies.filter((a) => a.step === step);
  const chosen = steps[step].filter(([number]) => inputs || keys[number][1] === "output" || found.some((a) => isOf(a, keys[number])));
  chosen.sort((a, b) => place(a[0]) - place(b[0]) || keys[a[0]][1].localeCompare(keys[b[0]][1]));
  let last = "";
  const rows = chosen.map(([number, ...cells]) => {
    const [stage, side, key] = keys[number];
    const marks = found.filter((a) => isOf(a, keys[number]));
    const first = stage === last ? "" : stage;
    last = stage;
    const mark = marks.length ? el("span", { class: severer(marks), title: marks.map(sayAnomaly).join("\n") }, " ▲") : null;
    return el("tr", {}, el("td", { class: "k" }, first), el("td", { class: "k" }, side === "input" ? `→ ${key}` : key, mark),
      ...cells.map((cell, column) => el("td", { class: columns[column] === "non_finite" && cell ? "n bad" : "n" }, cell === null ? "" : short(cell))));
  });
  const head = ["stage", "key", ...columns.map((name) => name.replace(/_/g, " "))];
  byId("step-table").replaceChildren(
    ...found.map((a) => el("p", { class: `found ${severer([a])}` }, `▲ ${a.rule}, ${a.stage}, ${a.key}: ${a.what}`)),
    table(head, ["", "", ...columns.map(() => "n")], rows));
}

const isOf = (anomaly, [stage, , key]) => anomaly.stage === stage && anomaly.key === key;

const curveCards = [];

function drawCurves() {
  const grid = byId("curve-grid");
  const groups = new Map();
  for (const curve of [...data.keys, ...data.metrics]) {
    const group = curve.stage || `metrics ${curve.key.split("/")[0]}`;
    groups.set(group, [...(groups.get(group) || []), curve]);
  }
  byId("curve-stage").append(el("option", { value: "" }, "everything"), ...[...groups.keys()].map((group) => el("option", { value: group }, group)));
  for (const [group, curves] of groups) {
    for (const curve of curves) {
      const words = [group, curve.key, curve.name, curve.side, curve.counterpart, WHAT[curve.what], curve.meaning].join(" ").toLowerCase();
      curveCards.push({ group, words, curve, card: null });
    }
  }
  byId("curve-stage").addEventListener("change", filterCurves);
  byId("curve-filter").addEventListener("input", filterCurves);
  byId("curve-band").addEventListener("change", (event) => {
    showBand = event.target.checked;
    for (const card of drawn) card.view.plotted.setData(columns(card.view.curve));
  });
  byId("outliers").addEventListener("change", (event) => {
    withoutOutliers = event.target.checked;
    for (const card of drawn) card.view.plotted.setData(columns(card.view.curve));
  });
  filterCurves();
  if (!curveCards.length) grid.append(el("p", { class: "empty" }, "There are no curves yet."));
}

function filterCurves() {
  const stage = byId("curve-stage").value;
  const words = byId("curve-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = curveCards.filter((entry) => (!stage || entry.group === stage) && words.every((word) => entry.words.includes(word)));
  for (const entry of shown) entry.card ??= chart(entry.curve);
  byId("curve-grid").replaceChildren(...shown.map((entry) => entry.card));
  byId("curve-count").textContent = `${shown.length} of ${plural(curveCards.length, "curve")}`;
}

/** Shows the curves of a stage, or of one of its keys. */
function showCurves(stage, key) {
  const choice = byId("curve-stage");
  choice.value = stage;
  if (choice.value !== stage) choice.value = "";
  byId("curve-filter").value = choice.value ? key : stage;
  filterCurves();
  byId("curves").scrollIntoView();
}
