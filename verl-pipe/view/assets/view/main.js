// Assembles the page.

/** Metrics of the overview in this order; of each entry, the first metric that the run has. */
const FIRST = [
  [/^reward\/mean$/, /^reward.*mean$/, /accuracy/, /margin/], [/^eval\/exact_match$/, /^eval\//], [/\/loss$/], [/\/kl$/, /\/ppo_kl$/], [/entropy/],
  [/grad_norm$/], [/response\/length_mean$/], [/clipfrac$/], [/learning_rate$/],
];

function overviewCurves() {
  const chosen = [];
  for (const patterns of FIRST) {
    const found = patterns.map((pattern) => data.metrics.find((curve) => pattern.test(curve.key))).find(Boolean);
    if (found && !chosen.includes(found)) chosen.push(found);
  }
  // If no stage records entropy as a metric, it is a key.
  const entropies = data.keys.find((curve) => curve.key === "entropies" && curve.what === "value");
  if (entropies && !chosen.some((curve) => /entropy/.test(curve.key))) chosen.splice(4, 0, entropies);
  const rewards = data.keys.find((curve) => (curve.name || curve.key) === "rewards" && curve.what === "value");
  if (rewards && !chosen.some((curve) => /^reward/.test(curve.key))) chosen.unshift(rewards);
  // Every curve with an anomaly belongs to the overview.
  const odd = new Set(data.anomalies.map(curveOf).filter((curve) => curve && !chosen.includes(curve)));
  return [...chosen, ...[...odd].slice(0, 6)];
}

/** The statistic that rules on two keys, or on lengths, measure. */
const MEASURES = {
  length_limit: "truncated_share", low_ess: "ess", negative_kl: "k1", probability_difference: "probability_diff", ratio_not_one: "k1",
  same_responses: "length", looping_responses: "length",
};

/** The curve that best shows an anomaly. */
function curveOf(anomaly) {
  const curves = [...data.metrics, ...data.keys].filter((curve) => anomaliesOf(curve).includes(anomaly));
  const shows = (what) => curves.find((curve) => curve.what === what);
  return shows(MEASURES[anomaly.rule]) || shows(undefined) || shows("value") || curves[0];
}

function drawHead() {
  const { run } = data;
  byId("title").textContent = run.pipeline && run.pipeline !== run.name ? `${run.name} · ${run.pipeline}` : run.name;
  const state = run.status === "running" ? "running, or the process was killed" : run.status || "unknown";
  const facts = [
    ["state", state, run.status === "failed" ? "stop" : ""], ["step", run.target ? `${run.step} of ${run.target}` : "–"],
    ["seed", run.seed ?? "–"], ["anomalies", data.anomalies.length, data.anomalies.length ? severer(data.anomalies) : ""],
    ["verl", run.version ?? "–"],
  ];
  if (run.timestamp) facts.push(["as of", new Date(run.timestamp * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC"]);
  if (run.reason) facts.push(["reason", run.reason, "stop"]);
  byId("facts").append(...facts.map(([name, value, kind]) => el("div", {}, el("dt", {}, name), el("dd", { class: kind || undefined }, String(value)))));
  byId("notes").append(...data.notes.map((note) => el("li", {}, note)));
}

/** A served page can be reloaded automatically; the selection is kept. */
function watch() {
  if (!location.protocol.startsWith("http")) return;
  const step = Number(sessionStorage.getItem("step") || NaN);
  if (!Number.isNaN(step)) chooseStep(step);
  const label = byId("watch");
  const box = label.querySelector("input");
  label.hidden = data.run.status !== "running";
  box.checked = sessionStorage.getItem("watch") === "yes";
  const again = () => { if (box.checked && !label.hidden) setTimeout(() => box.checked && location.reload(), 10000); };
  box.addEventListener("change", () => { sessionStorage.setItem("watch", box.checked ? "yes" : "no"); again(); });
  again();
}

function draw() {
  drawHead();
  const overview = overviewCurves();
  byId("overview-grid").append(...overview.map((curve) => chart(curve, { all: true })));
  if (!overview.length) byId("overview-grid").append(el("p", { class: "empty" }, "No step is complete yet."));
  drawAnomalies();
  drawGraph();
  drawSteps();
  drawSamples();
  drawTexts();
  drawCurves();
  showStep();
  watch();
  const root = document.documentElement.dataset;
  root.curves = data.keys.length + data.metrics.length;
  root.ready = Math.round(performance.now());
}

try {
  draw();
} catch (error) {
  failed(error.stack || error);
  byId("notes").append(el("li", { class: "stop" }, `The page could not be drawn: ${error}`));
}
