"use strict";
// Helpers for every part of the page. Texts of a run are inserted as text, never as markup.

const failures = [];
function failed(what) {
  failures.push(String(what));
  document.documentElement.dataset.errors = failures.join(" | ");
}
window.addEventListener("error", (event) => failed(event.message));
window.addEventListener("unhandledrejection", (event) => failed(event.reason));
document.addEventListener("securitypolicyviolation", (event) => failed(event.violatedDirective + " " + event.blockedURI));

const parsed = new Map();
/** A JSON document of the page, parsed on first use. */
function block(name) {
  if (!parsed.has(name)) {
    const script = document.getElementById(name);
    parsed.set(name, script ? JSON.parse(script.textContent) : null);
  }
  return parsed.get(name);
}
const data = block("data");

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  return dress(made, attributes, children);
}
function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  return dress(made, attributes, children);
}
function dress(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A number with four significant digits. */
function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("e+", "e");
}

const plural = (n, one, many = one + "s") => `${n} ${n === 1 ? one : many}`;

/** A colour of the style sheet in the current colour scheme. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

/** Position of the entry of an ascending list that is nearest to `value`; -1 for an empty list. */
function nearest(list, value) {
  let low = 0;
  let high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && value - list[low - 1] <= list[low] - value) low -= 1;
  return list.length ? low : -1;
}

/** The selected step; the listeners run when it changes. */
const state = { step: null, listeners: [] };
function chooseStep(step, scroll) {
  state.step = step;
  for (const listener of state.listeners) listener();
  remember();
  if (scroll) byId("steps").scrollIntoView();
}
function remember() {
  if (location.protocol.startsWith("http")) sessionStorage.setItem("step", String(state.step));
}

/** The anomalies of a curve: those of its key, or of the metric. */
function anomaliesOf(curve) {
  const names = [curve.key, curve.name];
  return data.anomalies.filter((a) => names.includes(a.key) && (!curve.stage || a.stage === curve.stage));
}
const severer = (anomalies) => (anomalies.some((a) => a.severity === "stop") ? "stop" : "warn");
