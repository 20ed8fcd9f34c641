// Answers at two steps of the run, side by side, and samples of training.

function drawTexts() {
  const place = byId("text-pairs");
  const of = (kind) => data.texts.filter((line) => line.kind === kind);
  const kinds = [...new Set(data.texts.map((line) => line.kind))];
  if (!kinds.length) place.append(el("p", { class: "empty" }, "samples.jsonl has no texts yet."));
  // Evaluations repeat the same questions; rows of training differ from step to step.
  kinds.sort((a, b) => (b === "evaluation") - (a === "evaluation"));
  for (const kind of kinds) place.append(...pairs(kind, of(kind)));
}

function pairs(kind, lines) {
  const steps = [...new Set(lines.map((line) => line.step))];
  const same = kind === "evaluation";
  const choose = (step, label) => {
    const select = el("select", {}, ...steps.map((s) => el("option", { value: s }, s === 0 ? "0 (before the run)" : String(s))));
    select.value = String(step);
    select.addEventListener("change", fill);
    return [el("label", {}, `${label} `, select), select];
  };
  const [beforeLabel, before] = choose(steps[0], "before: step");
  const [afterLabel, after] = choose(steps[steps.length - 1], "after: step");
  const body = el("div", { class: "scroll tall pairs" });
  function fill() {
    const at = (select) => lines.filter((line) => String(line.step) === select.value);
    body.replaceChildren(same ? joined(at(before), at(after)) : el("div", {}, listed(at(before)), steps.length > 1 ? listed(at(after)) : null));
  }
  fill();
  return [el("h3", {}, same ? "Evaluation, before and after" : `Rows of ${kind}, before and after`), el("div", { class: "controls" }, beforeLabel, steps.length > 1 ? afterLabel : null), body];
}

function answer(line) {
  if (!line) return el("td", {}, "–");
  const mark = line.correct === undefined ? null : el("span", { class: line.correct ? "good" : "stop" }, line.correct ? "✓ " : "✗ ");
  return el("td", {}, mark, line.response ?? "");
}

/** Rows of two evaluations, joined by the row of the data set. */
function joined(first, last) {
  const rows = [...new Set([...first, ...last].map((line) => line.row))];
  const find = (lines, row) => lines.find((line) => line.row === row);
  return table(["prompt", "before", "after", "expected"], [], rows.map((row) => {
    const [a, b] = [find(first, row), find(last, row)];
    return el("tr", {}, el("td", {}, (b || a).prompt ?? ""), answer(a), answer(b), el("td", {}, (b || a).answer ?? ""));
  }));
}

function listed(lines) {
  const known = ["prompt", "response", "answer", "reward", "advantage", "correct"];
  const used = known.filter((name) => lines.some((line) => line[name] !== undefined));
  const others = [...new Set(lines.flatMap(Object.keys))].filter((name) => !known.includes(name) && !["kind", "step"].includes(name));
  const cell = (value) => (value === undefined || value === null ? "" : typeof value === "object" ? JSON.stringify(value) : short(value));
  const columns = [...used, ...others];
  return el("div", {}, el("h3", {}, `step ${lines[0]?.step}`), table(columns, [], lines.map((line) => el("tr", {}, ...columns.map((name) => el("td", {}, cell(line[name])))))));
}
