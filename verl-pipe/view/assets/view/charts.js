// A curve as a card: its name, its plot, and its values under the pointer.

const WHAT = {
  value: "", length: "length", k1: "k1", ess: "effective sample size",
  probability_diff: "difference of probabilities", truncated_share: "truncated",
};
const drawn = new Set();
let showBand = true;
let withoutOutliers = false;

function chart(curve, options = {}) {
  const name = el("div", { class: "name" }, curve.key);
  const more = [];
  if (curve.stage) more.push(curve.side === "input" ? `into ${curve.stage}` : curve.stage);
  if (curve.name) more.push(`as ${curve.name}`);
  if (WHAT[curve.what]) more.push(WHAT[curve.what]);
  if (curve.counterpart) more.push(`compared with ${curve.counterpart}`);
  if (curve.unit) more.push(curve.unit);
  if (more.length) name.append(" ", el("small", {}, more.join(" · ")));
  const about = el("div", { class: "about", title: curve.meaning }, curve.meaning || "\u00a0");
  const read = el("div", { class: "read" }, "\u00a0");
  const plot = el("div", { class: "plot" });
  const card = el("div", { class: "card" }, name, about, plot, read);
  card.view = { curve, plot, read, options, at: -1, plotted: null };
  readOut(card, nearest(curve.step, state.step ?? Infinity));
  later.observe(card);
  return card;
}

/** Plots are created when they come near the viewport: a run has a hundred curves. */
const later = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting || entry.target.view.plotted) continue;
    later.unobserve(entry.target);
    plotCurve(entry.target);
  }
}, { rootMargin: "300px" });

/** Resizes plots with the window. */
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const plotted = entry.target.parentElement?.view?.plotted;
    const width = Math.floor(entry.contentRect.width);
    if (plotted && width > 0 && plotted.width !== width) plotted.setSize({ width, height: 170 });
  }
});

function columns(curve) {
  const band = curve.low && showBand;
  const hidden = curve.step.map(() => null);
  return [curve.step, band ? curve.high : hidden, band ? curve.low : hidden, (showBand && curve.p50) || hidden, curve.mean];
}

function plotCurve(card) {
  const { curve, plot } = card.view;
  if (!curve.step.length) {
    plot.replaceChildren(el("div", { class: "empty" }, "no steps yet"));
    return;
  }
  const points = { show: curve.step.length <= 60, size: 5 };
  const axis = {
    stroke: () => colour("soft"), font: "11px system-ui, sans-serif",
    grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1, size: 4 },
  };
  const plotted = new uPlot({
    width: Math.max(120, Math.floor(plot.clientWidth)), height: 170, legend: { show: false }, padding: [10, 20, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (_, low, high) => room(...(withoutOutliers ? middle(curve) : [low, high])) } },
    axes: [
      { ...axis, size: 26, space: 42, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6], values: (_, ticks) => ticks.map(String) },
      { ...axis, size: 54, space: 28, values: (_, ticks) => ticks.map(tick(ticks)) },
    ],
    series: [
      {},
      { stroke: "transparent", points: { show: false } },
      { stroke: "transparent", points: { show: false } },
      { stroke: () => colour("median"), width: 1, dash: [3, 3], points: { show: false } },
      { stroke: () => colour("curve"), width: curve.step.length > 400 ? 1 : 1.6, points: { ...points, fill: () => colour("curve") } },
    ],
    bands: [{ series: [1, 2], fill: () => colour("band") }],
    cursor: { y: false, sync: { key: "run", scales: ["x", null] }, points: { size: 6, fill: () => colour("curve") } },
    hooks: {
      draw: [(u) => drawMarks(u, card)],
      setCursor: [(u) => readOut(card, u.cursor.idx ?? nearest(curve.step, state.step ?? Infinity))],
    },
  }, columns(curve), plot);
  card.view.plotted = plotted;
  drawn.add(card);
  resized.observe(plot);
  listen(card);
}

/** The range of the means without the smallest and the largest 1 %. */
function middle(curve) {
  const values = curve.mean.filter((value) => value !== null).sort((a, b) => a - b);
  const at = (share) => values[Math.round(share * (values.length - 1))];
  return values.length ? [at(0.01), at(0.99)] : [null, null];
}

function room(low, high) {
  if (low === null || high === null || low === undefined) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  return uPlot.rangeNum(low, high, 0.08, true);
}

/** Formats the labels of an axis with as many decimals as their distance needs. */
function tick(ticks) {
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 0;
  const most = Math.max(...ticks.map(Math.abs));
  if (!step || most >= 1e5 || step < 1e-4) return (value) => short(value);
  let decimals = 0;
  while (decimals < 8 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  return (value) => value.toFixed(decimals);
}

/** Clicks and keys on a plot select a step. */
function listen(card) {
  const { plotted, curve, plot } = card.view;
  let down = 0;
  plotted.over.addEventListener("mousedown", (event) => { down = event.clientX; });
  plotted.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - down) < 4 && plotted.cursor.idx !== null) chooseStep(curve.step[plotted.cursor.idx]);
  });
  plot.tabIndex = 0;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${curve.key} over ${plural(curve.steps, "step")}; arrow keys move along it, Enter selects the step`);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const at = Math.min(curve.step.length - 1, Math.max(0, card.view.at + move));
      plotted.setCursor({ left: plotted.valToPos(curve.step[at], "x"), top: 10 });
      event.preventDefault();
    } else if (event.key === "Enter" && event.target === plot) chooseStep(curve.step[card.view.at]);
  });
}

function readOut(card, at) {
  const { curve, read } = card.view;
  card.view.at = at;
  if (at < 0) return;
  const parts = [`step ${curve.step[at]}: ${curve.what ? "mean " : ""}${short(curve.mean[at])}`];
  if (curve.low) parts.push(`${short(curve.low[at])} … ${short(curve.high[at])}`);
  if (curve.p50) parts.push(`p50 ${short(curve.p50[at])}`);
  if (curve.non_finite?.[at]) parts.push(`${curve.non_finite[at]} not finite`);
  read.textContent = parts.join(" · ");
  read.title = read.textContent;
}

/** Draws the selected step, anomalies, and values that are not finite. */
function drawMarks(u, card) {
  const { curve, options } = card.view;
  const own = anomaliesOf(curve);
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  const line = (step, stroke, dash, width) => {
    const x = Math.round(u.valToPos(step, "x", true));
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) return;
    ctx.beginPath();
    ctx.strokeStyle = stroke;
    ctx.lineWidth = width * ratio;
    ctx.setLineDash(dash.map((d) => d * ratio));
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  };
  ctx.save();
  if (options.all) {
    ctx.globalAlpha = 0.35;
    for (const step of new Set(data.anomalies.map((a) => a.step))) line(step, colour("warn"), [2, 4], 1);
    ctx.globalAlpha = 1;
  }
  for (const anomaly of own) line(anomaly.step, colour(anomaly.severity === "stop" ? "stop" : "warn"), [5, 3], 1.2);
  if (state.step !== null) line(state.step, colour("chosen"), [], 0.8);
  ctx.fillStyle = colour("stop");
  (curve.non_finite || []).forEach((n, at) => {
    const x = u.valToPos(curve.step[at], "x", true);
    if (n && x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillRect(x - 2 * ratio, bbox.top + bbox.height - 5 * ratio, 4 * ratio, 5 * ratio);
  });
  ctx.restore();
  placeMarks(u, own);
}

/** Places clickable marks, one for all anomalies at the same place. */
function placeMarks(u, anomalies) {
  // A mark keeps the focus as long as nothing moves.
  const place = [u.scales.x.min, u.scales.x.max, u.over.clientWidth].join();
  if (u.marked === place) return;
  u.marked = place;
  for (const old of u.over.querySelectorAll(".mark")) old.remove();
  const places = new Map();
  for (const anomaly of anomalies) {
    const x = u.valToPos(anomaly.step, "x");
    if (x < -1 || x > u.over.clientWidth + 1) continue;
    const near = Math.round(x / 8);
    places.set(near, [...(places.get(near) || []), anomaly]);
  }
  for (const group of places.values()) {
    const step = group[0].step;
    const text = group.map((a) => `step ${a.step}, ${a.rule}: ${a.what}`).join("\n");
    u.over.append(el("button", {
      class: `mark ${severer(group)}`, title: text, "aria-label": text, style: `left:${u.valToPos(step, "x")}px`,
      onmousedown: (event) => event.stopPropagation(),
      onclick: (event) => { event.stopPropagation(); chooseStep(step, true); },
    }, "▼"));
  }
}

/** Redraws all plots after another step or colour scheme was selected. */
function redraw() {
  for (const card of drawn) {
    if (card.isConnected) card.view.plotted.redraw(false);
    readOut(card, nearest(card.view.curve.step, state.step ?? Infinity));
  }
}
state.listeners.push(redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
