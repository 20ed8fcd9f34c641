// One sample: its tokens coloured by a computed value, its values, its texts.

const MASK = { 0: "observation", 1: "action" };
let current = null;

function drawSamples() {
  const steps = [...new Set(data.samples.map((sample) => sample.step))];
  if (!steps.length) {
    byId("sample").append(el("p", { class: "empty" }, "No step was recorded in full; start the run with --debug-trace-step N or --debug-trace-every N to see tokens."));
    byId("sample-list").hidden = true;
    return;
  }
  const choice = byId("sample-step");
  choice.append(el("option", { value: "" }, "every step"), ...steps.map((step) => el("option", { value: step }, String(step))));
  choice.addEventListener("change", listSamples);
  byId("sample-list").addEventListener("change", (event) => showSample(Number(event.target.value)));
  byId("sample-colour").addEventListener("change", colourTokens);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", colourTokens);
  state.listeners.push(() => {
    if (!steps.includes(state.step) || data.samples[current?.at]?.step === state.step) return;
    choice.value = String(state.step);
    listSamples();
  });
  const named = data.samples.findIndex((sample) => sample.rules);
  choice.value = String(named >= 0 ? data.samples[named].step : steps[steps.length - 1]);
  listSamples();
  if (named >= 0) showSample(named);
}

function listSamples() {
  const step = byId("sample-step").value;
  const list = byId("sample-list");
  const options = data.samples.flatMap((sample, at) => {
    if (step && String(sample.step) !== step) return [];
    const rules = sample.rules || [];
    const parts = [step ? "" : `step ${sample.step}`, rules.length ? `▲ ${sample.id}` : sample.id, ...rules, sample.reward === undefined ? "" : `reward ${short(sample.reward)}`, plural(sample.tokens, "token")];
    return [el("option", { value: at }, parts.filter(Boolean).join(" · "))];
  });
  list.replaceChildren(...options);
  const kept = options.find((option) => Number(option.value) === current?.at);
  showSample(Number((kept || options[0]).value));
}

function showSample(at) {
  const head = data.samples[at];
  const list = byId("sample-list");
  if (![...list.options].some((option) => Number(option.value) === at)) {
    byId("sample-step").value = String(head.step);
    current = { at };
    listSamples();
    return;
  }
  list.value = String(at);
  const sample = block(`sample-${at}`);
  current = { at, sample, columns: columnsOf(sample), spans: [], here: 0 };
  const title = el("h3", { class: "sample-title" }, `Sample ${head.id} of step ${head.step}`);
  const prompt = el("div", { class: "tokens", id: "prompt-tokens" }, ...sample.prompt.map((id) => token(id, "off")));
  current.spans = sample.response.map((id) => token(id));
  const response = el("div", { class: "tokens", id: "response-tokens", tabindex: 0, role: "listbox", "aria-label": "Tokens of the response; arrow keys move" }, ...current.spans);
  response.addEventListener("mouseover", (event) => pointAt(current.spans.indexOf(event.target)));
  response.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: current.here - 1, ArrowRight: current.here + 1, Home: 0, End: current.spans.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    pointAt(Math.min(current.spans.length - 1, Math.max(0, to)));
  });
  byId("sample").replaceChildren(title,
    ...(sample.prompt.length ? [el("h3", {}, `Prompt, ${plural(sample.prompt.length, "token")}`), prompt] : sample.prompt_text ? [el("h3", {}, "Prompt"), el("pre", {}, sample.prompt_text)] : []),
    ...(sample.response.length ? [el("h3", {}, `Response, ${plural(sample.response.length, "token")}`), response, el("div", { class: "detail", id: "token-detail", role: "status" })] : []),
    ...(sample.response_text !== undefined && sample.response_text !== null ? [el("h3", {}, "Response as text"), el("pre", { id: "response-text" }, sample.response_text)] : []),
    el("h3", {}, "Values of the row"), rowValues(sample));
  const choice = byId("sample-colour");
  const before = choice.value;
  choice.replaceChildren(...current.columns.map((column) => el("option", { value: column.name }, column.name)));
  if (current.columns.some((column) => column.name === before)) choice.value = before;
  colourTokens();
  if (current.spans.length) pointAt(0);
}

/** A token as text; invisible characters are replaced by symbols. */
function token(id, kind) {
  const text = data.words[id];
  const shown = text === undefined || text === "" ? `⟨${id}⟩` : text.replace(/\r/g, "␍").replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
  return el("span", { class: kind }, shown);
}

/** Values by which tokens can be coloured: those recorded per token, and ratios of log-probs. */
function columnsOf(sample) {
  // Ids of other answers that happen to have the same length do not describe these tokens.
  const measured = sample.per_token.filter(([name]) => !/(responses|targets|prompts)$/.test(name));
  const columns = measured.map(([name, values]) => ({ name, values, kind: kindOf(name, values) }));
  const find = (name) => columns.find((column) => column.name === name)?.values;
  const against = (name, key, other, of) => {
    const [a, b] = [find(key), find(other)];
    if (!a || !b) return;
    const values = a.map((value, at) => (typeof value === "number" && typeof b[at] === "number" ? of(value - b[at]) : null));
    columns.push({ name, values, kind: name.startsWith("ratio") ? "ratio" : "signed" });
  };
  against("ratio old / rollout", "old_log_probs", "rollout_log_probs", Math.exp);
  against("rollout − reference log-prob", "rollout_log_probs", "ref_log_probs", (d) => d);
  against("old − reference log-prob", "old_log_probs", "ref_log_probs", (d) => d);
  const first = (column) => (column.name.endsWith("log_probs") ? 0 : column.name === "advantages" ? 1 : column.kind === "mask" ? 3 : 2);
  return columns.sort((a, b) => first(a) - first(b));
}

function kindOf(name, values) {
  if (name === "mask_kinds" || name.endsWith("masks")) return "mask";
  if (name.endsWith("log_probs")) return "log_prob";
  return values.some((value) => value < 0) ? "signed" : "positive";
}

function colourTokens() {
  if (!current?.sample) return;
  const column = current.columns.find((c) => c.name === byId("sample-colour").value);
  const numbers = (column?.values || []).filter((value) => typeof value === "number");
  const scale = { least: Math.min(0, ...numbers), most: Math.max(0, ...numbers), far: Math.max(1e-12, ...numbers.map(Math.abs)) };
  if (column?.kind === "ratio") scale.far = Math.max(1e-12, ...numbers.map((value) => Math.abs(Math.log(value))));
  current.spans.forEach((span, at) => {
    const value = column?.values[at];
    span.classList.toggle("odd", typeof value === "string");
    span.style.background = column ? shade(column.kind, value, scale) : "";
  });
  drawScale(column, scale);
}

const tint = (name, share) => `rgba(${colour(name)}, ${(0.75 * Math.min(1, Math.max(0, share))).toFixed(3)})`;

function shade(kind, value, scale) {
  if (typeof value !== "number") return "";
  if (kind === "mask") return value === 1 ? tint("high", 0.35) : tint("mask", 0.6);
  if (kind === "log_prob") return tint("low", value / Math.min(-1e-12, scale.least));
  if (kind === "ratio") return tint(value < 1 ? "low" : "high", Math.abs(Math.log(value)) / scale.far);
  return tint(value < 0 ? "low" : "high", Math.abs(value) / scale.far);
}

function drawScale(column, scale) {
  const place = byId("sample-scale");
  const ramp = (from, to) => el("span", { class: "ramp", style: `background: linear-gradient(to right, ${from}, ${to})` });
  const box = (paint, name) => [el("span", { class: "swatch", style: `background: ${paint}` }), name];
  if (!column) place.replaceChildren();
  else if (column.kind === "mask") place.replaceChildren(...box(shade("mask", 1), "action"), ...box(shade("mask", 0), "observation"));
  else if (column.kind === "log_prob") place.replaceChildren(short(scale.least), ramp(tint("low", 1), tint("low", 0)), "0 nats");
  else if (column.kind === "positive") place.replaceChildren("0", ramp(tint("high", 0), tint("high", 1)), short(scale.most));
  else {
    const [low, middle, high] = column.kind === "ratio" ? [short(Math.exp(-scale.far)), "1", short(Math.exp(scale.far))] : [short(-scale.far), "0", short(scale.far)];
    place.replaceChildren(low, ramp(tint("low", 1), tint("low", 0)), middle, ramp(tint("high", 0), tint("high", 1)), high);
  }
}

function pointAt(at) {
  if (at < 0 || !current.spans[at]) return;
  current.spans[current.here]?.classList.remove("here");
  current.here = at;
  current.spans[at].classList.add("here");
  const id = current.sample.response[at];
  const parts = [el("b", {}, `token ${at + 1}`), ` · id ${id} · `, el("code", {}, JSON.stringify(data.words[id] ?? ""))];
  for (const column of current.columns) {
    const value = column.values[at];
    parts.push(" · ", el("span", { class: "hint" }, `${column.name} `), column.kind === "mask" ? MASK[value] || String(value) : short(value));
  }
  byId("token-detail").replaceChildren(...parts);
}

function rowValues(sample) {
  const rows = sample.per_row.map(([key, value, meaning]) => el("tr", {}, el("td", { class: "k" }, key),
    el("td", { class: "w" }, Array.isArray(value) ? `[${value.map(short).join(", ")}]` : short(value), meaning ? ` (${meaning})` : "")));
  return table(["key", "value"], [], rows);
}
