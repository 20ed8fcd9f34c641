// The pipeline: stages as boxes, keys on the edges. The layout is computed when the page is written.

function drawGraph() {
  const graph = data.graph;
  const place = byId("graph");
  if (!graph) {
    place.append(el("p", { class: "empty" }, "This version cannot read the pipeline of the run; see plan.txt in the run folder."));
    return;
  }
  const root = svg("svg", { width: graph.w, height: graph.h, viewBox: `0 0 ${graph.w} ${graph.h}`, role: "group", "aria-label": "Pipeline" });
  root.append(svg("defs", {}, svg("marker", {
    id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto",
  }, svg("path", { d: "M0 0.5L8 4L0 7.5z" }))));
  for (const edge of graph.edges) root.append(drawEdge(edge));
  for (const node of graph.nodes) root.append(drawNode(node));
  place.append(root);
}

const nameOf = ([key, local]) => (key === local ? key : `${key}, read as ${local}`);

function drawEdge(edge) {
  const onEdge = data.anomalies.filter((a) => edge.keys.some(([key, local]) => a.key === key || a.key === local)
    && (a.stage === edge.from || a.stage === edge.to));
  const label = edge.keys.length ? `${edge.from} to ${edge.to}: ${edge.keys.map(nameOf).join(", ")}`
    : `${edge.to} changes weights that ${edge.from} reads, so it waits for ${edge.from}`;
  const group = svg("g", {
    class: `edge${edge.keys.length ? "" : " waits"}${marks(onEdge)}`, tabindex: edge.keys.length ? 0 : undefined, role: "button", "aria-label": label,
  }, svg("title", {}, [label, ...onEdge.map(sayAnomaly)].join("\n")), svg("path", { class: "reach", d: edge.path }), svg("path", { d: edge.path, "marker-end": "url(#arrow)" }));
  const [x, y] = edge.label;
  const height = edge.lines.length * 13;
  if (edge.lines.length) group.append(svg("rect", { x: x - edge.w / 2, y: y - height / 2, width: edge.w, height }));
  edge.lines.forEach((line, at) => group.append(
    svg("text", { x, y: y - height / 2 + 10 + at * 13, "text-anchor": "middle" }, line),
  ));
  // The curves of the keys belong to the stage that wrote them.
  if (edge.keys.length) press(group, () => showCurves(edge.from, edge.keys.length === 1 ? edge.keys[0][0] : ""));
  return group;
}

function drawNode(node) {
  const own = data.anomalies.filter((a) => a.stage === node.name || node.metrics.includes(a.key));
  const device = node.lines.some((line) => line.startsWith("on ") && !line.startsWith("on host"));
  const label = [node.name, ...node.lines, ...own.map(sayAnomaly)].join("\n");
  const group = svg("g", { class: `node${device ? " device" : ""}${marks(own)}`, tabindex: 0, role: "button", "aria-label": label },
    svg("title", {}, label),
    svg("rect", { x: node.x, y: node.y, width: node.w, height: node.h, rx: 5 }),
    svg("text", { class: "name", x: node.x + 10, y: node.y + 18 }, node.name));
  node.lines.forEach((line, at) => group.append(svg("text", { x: node.x + 10, y: node.y + 33 + at * 14 }, line)));
  press(group, () => showCurves(node.name, ""));
  return group;
}

const sayAnomaly = (a) => `step ${a.step}, ${a.rule}: ${a.what}`;

function marks(anomalies) {
  if (!anomalies.length) return "";
  return severer(anomalies) === "stop" ? " marked stops" : " marked";
}

function press(node, act) {
  node.addEventListener("click", act);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
}
