// The pipeline's graph with the load of each stage, and a table of the engines.

import { bytes, byId, el, number, seconds, svg } from "./dom.js";
import { place } from "./layout.js";
import { onState } from "./live.js";

const WINDOW_S = 10; // over which rates and latencies are calculated
const HISTORY = 60; // seconds in the small drawings
const BOX = { width: 164, head: 30, line: 17, replica: 16 };
const NARROW = 640; // of the panel: below it, ranks go down

let model = null;
let boxes = new Map(); // stage or function -> the elements of its boxes
let latest = null;
const samples = new Map(); // engine -> its latest states, with their time
const history = new Map(); // engine -> speeds

export function setUpPipeline(described) {
  model = described;
  byId("graph").addEventListener("change", draw);
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === width) return; // the drawing itself has changed the height
    width = contentRect.width;
    draw();
  }).observe(byId("drawing"));
  onState(update);
}

const unit = (stage) => (stage?.generates_tokens ? "tok/s" : "runs/s");

// ---- numbers ----

function update(state) {
  for (const engine of state.engines) {
    const kept = samples.get(engine.name) ?? [];
    if (kept.length && kept.at(-1).num_ended > engine.num_ended) kept.length = 0;
    kept.push({ ...engine, time: state.time });
    while (kept.length > 2 && state.time - kept[1].time > WINDOW_S) kept.shift();
    samples.set(engine.name, kept);
    const [before, now] = [kept.at(-2) ?? kept[0], kept.at(-1)];
    const speeds = history.get(engine.name) ?? [];
    speeds.push(rate(before, now) ?? 0);
    if (speeds.length > HISTORY) speeds.shift();
    history.set(engine.name, speeds);
  }
  latest = state;
  showBoxes();
  showTable();
}

function rate(before, now) {
  const field = now.num_tokens === null ? "num_ended" : "num_tokens";
  if (now[field] === null || now.time <= before.time) return null;
  return (now[field] - before[field]) / (now.time - before.time);
}

/** Load, speed and latency of some engines together. */
function summary(engines) {
  const sum = (values) => (values.some((value) => value === null) ? null : values.reduce((one, other) => one + other, 0));
  const windows = engines.map(({ name }) => samples.get(name)).filter(Boolean);
  const ended = sum(windows.map((kept) => kept.at(-1).num_ended - kept[0].num_ended));
  const spent = sum(windows.map((kept) => kept.at(-1).latency_s - kept[0].latency_s));
  const all = sum(engines.map((one) => one.num_ended));
  const waiting = sum(engines.map((one) => one.num_waiting));
  const open = sum(engines.map((one) => one.num_requests));
  return {
    running: Math.max(0, open - (waiting ?? 0)),
    waiting,
    speed: sum(windows.map((kept) => rate(kept[0], kept.at(-1)))),
    latency: ended ? spent / ended : all ? sum(engines.map((one) => one.latency_s)) / all : null,
    memory: sum(engines.map((one) => one.resident_bytes)),
    state: worst(engines),
  };
}

function worst(engines) {
  const order = ["failed", "restarting", "drained", "running"];
  return order.find((state) => engines.some((one) => one.state === state)) ?? "running";
}

// ---- the drawing ----

function draw() {
  const holder = byId("drawing");
  const width = holder.clientWidth;
  if (!width) return;
  const graph = model.graphs.find(({ model: name }) => name === byId("graph").value) ?? model.graphs[0];
  const cells = cellsOf(graph);
  const edges = graph.edges.map((edge) => ({
    ...edge,
    source: edge.source ?? `in ${edge.source_field}`,
    target: edge.target ?? `out ${edge.target_field}`,
  }));
  const size = place(cells, edges, width < NARROW);
  boxes = new Map();
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${size.width} ${size.height}`, width: Math.min(width, size.width), role: "group", "aria-label": "The pipeline's graph" },
    svg("defs", {}, svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0,0 L8,4 L0,8 z" }))),
    ...edges.map(drawEdge),
    ...cells.map(drawCell),
  );
  holder.replaceChildren(picture);
  showBoxes();
}

function cellsOf(graph) {
  const nodes = graph.nodes.map((node) => {
    const stage = model.stages.find(({ name }) => name === node.role);
    const replicas = (stage?.replicas.length ?? 0) > 1 ? stage.replicas : [];
    const lines = stage ? 3 : 1;
    return { id: node.name, node, stage, replicas, width: Math.max(BOX.width, 44 + 8.4 * titleOf(node).length), height: BOX.head + lines * BOX.line + replicas.length * BOX.replica + (replicas.length ? 14 : 8) };
  });
  const end = (id, name) => ({ id, label: name, isEnd: true, width: Math.max(56, 18 + 7 * name.length), height: 28 });
  const outputs = graph.edges.filter(({ target }) => target === null).map((edge) => edge.target_field);
  return [...graph.inputs.map((name) => end(`in ${name}`, name)), ...nodes, ...[...new Set(outputs)].map((name) => end(`out ${name}`, name))];
}

function drawEdge(edge) {
  const kinds = ["edge", edge.streamed ? "streamed" : "", edge.back ? "back" : ""].join(" ");
  const line = svg("path", { class: kinds, d: edge.path, "marker-end": "url(#tip)" }, svg("title", {}, edge.label || `${edge.source} to ${edge.target}`));
  line.dataset.source = edge.source;
  return line;
}

function drawCell(cell) {
  const { x, y, width, height } = cell;
  if (cell.isEnd) {
    const label = svg("text", { x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, cell.label);
    return svg("g", { class: "end" }, svg("rect", { x, y, width, height, rx: 14 }), label);
  }
  const text = (at, line, kind = "") => svg("text", { x: x + at, y: y + line, class: kind });
  const dot = svg("circle", { cx: x + 16, cy: y + 18, r: 4 });
  const name = text(27, 22, "name");
  name.textContent = titleOf(cell.node);
  const lines = (cell.stage ? [0, 1, 2] : [0]).map((index) => text(12, BOX.head + 13 + index * BOX.line, "value"));
  const first = BOX.head + lines.length * BOX.line + 18;
  const rows = cell.replicas.map((one, index) => {
    const label = text(12, first + index * BOX.replica, "replica");
    label.textContent = one.slice(cell.node.role.length + 1);
    const value = svg("text", { x: x + width - 12, y: y + first + index * BOX.replica, class: "replica", "text-anchor": "end" });
    return { name: one, label, value };
  });
  const rule = rows.length ? svg("line", { x1: x + 10, x2: x + width - 10, y1: y + first - 13, y2: y + first - 13 }) : null;
  const box = svg(
    "g",
    { class: "node", tabindex: 0, role: "img" },
    svg("rect", { x, y, width, height, rx: 8 }),
    dot,
    name,
    ...lines,
    rule,
    ...rows.flatMap(({ label, value }) => [label, value]),
  );
  const known = boxes.get(cell.node.role) ?? [];
  boxes.set(cell.node.role, [...known, { box, lines, rows, id: cell.id, stage: cell.stage }]);
  return box;
}

/** The stage, unless a graph has several of its interfaces. */
function titleOf({ name, role }) {
  const isOnly = model.graphs.every(({ nodes }) => nodes.filter((one) => one.role === role).length <= 1);
  return isOnly ? role : name;
}

function showBoxes() {
  if (latest === null) return;
  for (const [role, drawn] of boxes) {
    const engines = latest.engines.filter(({ stage }) => stage === role);
    const code = latest.functions.find(({ name }) => name === role);
    const load = engines.length ? summary(engines) : { state: code?.state ?? "running", running: 0 };
    const lines = engines.length
      ? [
          `${load.running} running, ${number(load.waiting)} queued`,
          `${number(load.speed)} ${unit(drawn[0].stage)} · ${seconds(load.latency)}`,
          bytes(load.memory),
        ]
      : [code ? `${code.num_runs} runs, ${code.num_failed} failed` : "calls a graph"];
    for (const one of drawn) {
      one.box.dataset.state = load.state;
      one.box.dataset.busy = String(load.running > 0);
      one.box.setAttribute("aria-label", `${role}: ${load.state}, ${lines.join(", ")}`);
      lines.forEach((line, index) => (one.lines[index].textContent = line));
      for (const row of one.rows) {
        const engine = engines.find(({ name }) => name === row.name);
        if (!engine) continue;
        const own = summary([engine]);
        row.value.textContent = engine.state === "running" ? `${own.running} running, ${number(own.waiting)} queued` : engine.state;
      }
      for (const line of byId("drawing").querySelectorAll("path.edge")) {
        if (line.dataset.source === one.id) line.classList.toggle("busy", load.running > 0);
      }
    }
  }
}

// ---- the table ----

function showTable() {
  const rows = latest.engines.map((engine) => {
    const stage = model.stages.find(({ name }) => name === engine.stage);
    const load = summary([engine]);
    const cells = [
      el(
        "th",
        { scope: "row", title: engine.reason },
        el("span", { class: "dot", "data-state": engine.state, role: "img", "aria-label": engine.state }),
        engine.name,
        engine.state === "running" ? null : el("span", { class: "state" }, engine.state),
      ),
      el("td", { class: "number" }, String(load.running)),
      el("td", { class: "number" }, number(load.waiting)),
      el("td", { class: "number" }, `${number(load.speed)} `, el("span", { class: "muted" }, unit(stage))),
      el("td", { class: "spark" }, spark(history.get(engine.name) ?? [])),
      el("td", { class: "number" }, seconds(load.latency)),
      el("td", { class: "number" }, bytes(load.memory)),
      el("td", { class: "number" }, String(engine.num_restarts)),
    ];
    return el("tr", {}, ...cells);
  });
  byId("engines").replaceChildren(...rows);
}

function spark(values) {
  const [width, height] = [72, 18];
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${(width * (HISTORY - values.length + index + 1)) / HISTORY},${height - 1 - (height - 3) * (value / most)}`);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }));
}
