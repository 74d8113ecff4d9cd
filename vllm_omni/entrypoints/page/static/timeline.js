// Where the time of a request went: its spans, when text and sound first came, and the gaps in what was played.

import { heard } from "./answer.js";
import { askJson } from "./api.js";
import { byId, el, seconds, svg } from "./dom.js";
import { onState } from "./live.js";

const ROW = 24;
const AXIS = 22;
const SHOWN = 40; // requests in the list

let model = null;
let requests = [];
let selected = null; // its id
let follows = true; // the latest request, until the user selects another
let shown = null; // the trace in the drawing

export function setUpTimeline(described, open) {
  model = described;
  document.addEventListener("omni:trace", async ({ detail }) => {
    open("timeline");
    await refresh();
    select(detail);
  });
  document.addEventListener("omni:panel", ({ detail }) => detail === "timeline" && refresh());
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === width) return; // the drawing itself has changed the height
    width = contentRect.width;
    if (shown) draw();
  }).observe(byId("trace"));
  let count = 0;
  onState(() => {
    if (document.body.dataset.panel === "timeline" && count++ % 2 === 0) refresh();
  });
}

async function refresh() {
  const latest = (await askJson("traces")).requests.slice(0, SHOWN);
  if (latest[0]?.id === requests[0]?.id && latest.length === requests.length) return;
  requests = latest;
  list();
  if (follows && requests.length) select(requests[0].id, true);
}

function list() {
  const focused = document.activeElement?.dataset?.id;
  byId("no-requests").hidden = requests.length > 0;
  byId("requests").replaceChildren(
    ...requests.map((one) => {
      const date = new Date(1000 * one.began_at);
      return el(
        "li",
        {},
        el(
          "button",
          { type: "button", "aria-pressed": String(one.id === selected), "data-id": one.id, title: one.error ?? one.id, click: () => select(one.id) },
          el("span", {}, date.toLocaleTimeString([], { hour12: false })),
          el("span", { class: "muted" }, one.id.slice(-6)),
          el("span", { class: one.error ? "failed" : "number" }, one.error ? "failed" : seconds(one.seconds)),
        ),
      );
    }),
  );
  if (focused) byId("requests").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

async function select(id, isFollowing = false) {
  follows = isFollowing;
  selected = id;
  for (const button of byId("requests").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.id === id));
  }
  try {
    shown = read(await askJson(`traces/${encodeURIComponent(id)}`));
  } catch (error) {
    byId("span").textContent = error.message;
    return;
  }
  draw();
  describe(shown.spans.find(({ kind }) => kind === "request"));
}

/** Chrome's trace as spans, seconds from the request's start, and marks. */
function read({ traceEvents, otherData }) {
  const tracks = new Map(traceEvents.filter(({ ph }) => ph === "M").map(({ tid, args }) => [tid, args.name]));
  const whole = traceEvents.find(({ cat }) => cat === "request");
  const start = whole.ts / 1e6;
  const spans = traceEvents
    .filter(({ ph }) => ph === "X")
    .map(({ name, cat, tid, ts, dur, args }) => ({ name, kind: cat, track: tracks.get(tid), from: ts / 1e6 - start, length: dur / 1e6, args }));
  const graph = model.graphs.find(({ model: name }) => name === whole.args.graph) ?? model.graphs[0];
  const marks = [];
  for (const [modality, kind] of Object.entries(graph.modalities)) {
    const outputs = spans
      .filter(({ kind: one, name, args }) => one === "stage" && name === graph.makers[modality] && args.first_output_ms !== undefined)
      .map(({ from, args }) => from + args.first_output_ms / 1000);
    if (outputs.length) marks.push({ name: `first ${modality}`, kind, at: Math.min(...outputs) });
  }
  const played = (heard.get(otherData.request_id) ?? []).map((piece) => ({ ...piece, at: piece.at - start }));
  if (played.length) spans.push(...playback(played));
  return { id: otherData.request_id, spans, marks, seconds: Math.max(...spans.map(({ from, length }) => from + length)) };
}

/** The pieces of speech as this page got and played them: a piece that comes after the end of what came before leaves a gap. */
function playback(pieces) {
  const track = "played here";
  const spans = [];
  let end = null;
  for (const [index, piece] of pieces.entries()) {
    if (end !== null && piece.at > end) {
      spans.push({ name: "gap", kind: "gap", track, from: end, length: piece.at - end, args: {} });
    }
    const from = Math.max(piece.at, end ?? piece.at);
    spans.push({ name: `piece ${index + 1}`, kind: "played", track, from, length: piece.seconds, args: { arrived_s: Number(piece.at.toFixed(3)) } });
    end = from + piece.seconds;
  }
  return spans;
}

function draw() {
  const holder = byId("trace");
  const width = holder.clientWidth;
  if (!width) return;
  const isNarrow = width < 560;
  const left = isNarrow ? 4 : 190;
  const tracks = inOrder([...new Set(shown.spans.map(({ track }) => track))]);
  const row = isNarrow ? ROW + 15 : ROW;
  const height = AXIS + tracks.length * row + 6;
  const scale = (width - left - 14) / shown.seconds;
  const x = (at) => left + at * scale;
  const parts = [];
  const step = niceStep(shown.seconds / Math.max(2, Math.floor((width - left) / 90)));
  for (let at = 0; at <= shown.seconds; at += step) {
    parts.push(svg("line", { class: "tick", x1: x(at), x2: x(at), y1: AXIS - 4, y2: height }));
    parts.push(svg("text", { class: "axis", x: x(at), y: 12 }, at === 0 ? "0" : seconds(at)));
  }
  const names = tracks.map((track, index) => {
    const top = AXIS + index * row;
    const label = isNarrow ? { x: left, y: top + 11 } : { x: 4, y: top + 16 };
    return svg("text", { class: "track", ...label }, svg("title", {}, track), shorten(track, isNarrow ? 60 : 29));
  });
  const order = { part: 1 };
  for (const span of [...shown.spans].sort((one, other) => (order[one.kind] ?? 0) - (order[other.kind] ?? 0))) {
    const top = AXIS + tracks.indexOf(span.track) * row + (isNarrow ? 15 : 0);
    const isPart = span.kind === "part";
    const bar = svg("rect", {
      class: `span ${span.kind} ${span.args.error ? "failed" : ""} ${isPart ? span.name.split(" ").pop() : ""}`,
      x: x(span.from),
      y: top + (isPart ? 13 : 4),
      width: Math.max(1.5, span.length * scale),
      height: isPart ? 4 : 15,
      rx: isPart ? 1 : 3,
      tabindex: isPart ? -1 : 0,
      role: "img",
      "aria-label": `${span.name}: ${seconds(span.length)}, from ${seconds(span.from)}`,
      focus: () => describe(span),
      mouseenter: () => describe(span),
      click: () => describe(span),
    });
    parts.push(bar);
  }
  for (const mark of shown.marks) {
    parts.push(svg("line", { class: `mark ${mark.kind}`, x1: x(mark.at), x2: x(mark.at), y1: AXIS - 6, y2: height }));
  }
  holder.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Timeline of the request" }, ...parts, ...names));
  const gaps = shown.spans.filter(({ kind }) => kind === "gap");
  const facts = shown.marks.map((mark) => el("li", { class: mark.kind }, `${mark.name} after ${seconds(mark.at)}`));
  if (shown.spans.some(({ kind }) => kind === "played")) {
    const lost = gaps.reduce((sum, { length }) => sum + length, 0);
    facts.push(el("li", { class: "gaps" }, gaps.length ? `${gaps.length} ${gaps.length === 1 ? "gap" : "gaps"} in playback, ${seconds(lost)}` : "no gap in playback"));
  }
  byId("marks").replaceChildren(...facts);
}

/** As they begin, with the replicas of a stage one below the other. */
function inOrder(tracks) {
  const stage = (track) => track.split(/[/ ]/)[0];
  const first = (track) => tracks.findIndex((one) => (track.includes("->") ? one === track : stage(one) === stage(track) && !one.includes("->")));
  return [...tracks].sort((one, other) => first(one) - first(other) || one.localeCompare(other));
}

function describe(span) {
  const facts = Object.entries(span.args).map(([name, value]) => [name.replaceAll("_", " "), String(value)]);
  const rows = [["from", seconds(span.from)], ["takes", seconds(span.length)], ...facts];
  byId("span").replaceChildren(
    el("strong", {}, span.kind === "request" ? "Request" : span.name),
    el("dl", {}, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
  );
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
}

const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
