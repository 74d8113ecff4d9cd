// Forms for the parameters of each stage and of each kind of request; an empty field is left to the server.

import { byId, el, words } from "./dom.js";

const KEPT = "omni.settings";
const FIRST = ["temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty"];
const REPLY = ["deadline_s", "priority"];
const OF_PAGE = "prompt input model stream stream_format response_format output_format partial_images progress voice " +
  "background quality style moderation user safety_identifier input_fidelity return_url output_compression";
const KINDS = { ar: "autoregressive" };
const TYPES = ["integer", "number", "boolean", "string"];

const given = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}"); // group -> name -> value

/** Build the forms: of the stages, and of the routes by their schema. */
export function showSettings(model, schema, tasks) {
  const groups = [];
  if (tasks.chat) {
    const system = { name: "system", type: "string", description: "System message of the conversation.", isLong: true };
    groups.push(["reply", "Reply", [system, ...fieldsOf(schema, "/v1/chat/completions", REPLY)]]);
  }
  for (const [task, path, title] of [
    ["speech", "/v1/audio/speech", "Text to speech"],
    ["image", "/v1/images/generations", "Images"],
    ["video", "/v1/videos", "Videos"],
    ["sound", "/v1/audio/generate", "Sounds"],
  ]) {
    if (tasks[task]) groups.push([task, title, fieldsOf(schema, path)]);
  }
  if (tasks.chat || tasks.speech) {
    for (const stage of model.stages) {
      if (stage.parameters.length) groups.push([`stage ${stage.name}`, stage.name, stage.parameters, stage.kind]);
    }
  }
  byId("settings").replaceChildren(...groups.map(([key, title, fields, kind]) => group(key, title, fields, kind)));
  byId("settings-reset").addEventListener("click", () => {
    for (const key of Object.keys(given)) delete given[key];
    keep();
    byId("settings").querySelectorAll("input, select, textarea").forEach((field) => (field.value = ""));
    byId("settings").querySelectorAll(".count").forEach((count) => (count.textContent = ""));
  });
}

/** What the user has set of a kind of request. */
export const settingsOf = (task) => ({ ...given[task] });

/** The parameters of stages but one, as requests have them; undefined: none is set. */
export function stageSettings(but = null) {
  const stages = Object.entries(given).filter(
    ([key, values]) => key.startsWith("stage ") && key !== `stage ${but}` && Object.keys(values).length,
  );
  if (!stages.length) return undefined;
  return Object.fromEntries(stages.map(([key, values]) => [key.slice("stage ".length), { ...values }]));
}

function fieldsOf(schema, path, names = null) {
  const content = schema.paths[path].post.requestBody.content["application/json"].schema;
  const { properties } = resolve(schema, content);
  const hidden = OF_PAGE.split(" ");
  return Object.entries(properties)
    .filter(([name]) => (names ? names.includes(name) : !hidden.includes(name)))
    .map(([name, one]) => ({ name, ...one, ...(one.anyOf ?? []).find(({ type }) => TYPES.includes(type)) }))
    .filter(({ type }) => TYPES.includes(type));
}

function resolve(schema, one) {
  return one.$ref ? schema.components.schemas[one.$ref.split("/").pop()] : one;
}

function group(key, title, fields, kind) {
  const count = el("span", { class: "count" });
  const note = () => {
    const number = Object.keys(given[key] ?? {}).length;
    count.textContent = number ? `${number} set` : "";
  };
  note();
  const head = el("summary", {}, el("span", { class: "group-title" }, title), kind ? el("span", { class: "muted" }, KINDS[kind] ?? kind) : null, count);
  const first = kind ? fields.filter(({ name }) => FIRST.includes(name)) : fields;
  const shown = first.length ? first : fields;
  const more = fields.filter((one) => !shown.includes(one));
  shown.sort((one, other) => FIRST.indexOf(one.name) - FIRST.indexOf(other.name));
  const grid = (list) => el("div", { class: "fields" }, ...list.map((one) => field(key, one, note)));
  const rest = more.length ? el("details", { class: "more" }, el("summary", {}, "More"), grid(more)) : null;
  return el("details", { class: "group", open: true, "data-group": key }, head, grid(shown), rest);
}

function field(key, about, note) {
  const value = given[key]?.[about.name];
  const standard = about.default === null || about.default === undefined || Array.isArray(about.default) ? "default" : String(about.default);
  let input;
  if (about.type === "boolean" || about.enum) {
    const options = about.enum ?? ["true", "false"];
    input = el("select", {}, el("option", { value: "" }, standard), ...options.map((one) => el("option", { value: one }, one)));
  } else if (about.isLong) {
    input = el("textarea", { rows: 2 });
  } else {
    const isNumber = about.type !== "string";
    input = el("input", {
      type: isNumber ? "number" : "text",
      step: isNumber ? (about.type === "integer" ? 1 : "any") : null,
      min: about.minimum,
      max: isNumber && about.maximum < 2 ** 53 ? about.maximum : null,
      placeholder: standard,
    });
    if (about.minimum < -(2 ** 53)) input.removeAttribute("min");
  }
  input.value = value ?? "";
  input.addEventListener("change", () => {
    given[key] ??= {};
    if (input.value === "") delete given[key][about.name];
    else if (input.checkValidity()) given[key][about.name] = read(input.value, about);
    note();
    keep();
  });
  const label = el("span", {}, words(about.name));
  return el("label", { class: about.isLong ? "wide" : null, title: about.description ?? about.name }, label, input);
}

function read(text, { type }) {
  if (type === "boolean") return text === "true";
  return type === "string" ? text : Number(text);
}

function keep() {
  sessionStorage.setItem(KEPT, JSON.stringify(given));
}
