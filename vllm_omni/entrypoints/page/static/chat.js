// The conversation: composes requests, and reads their answers.

import { Answer, setUpLog, show, stats } from "./answer.js";
import { accept, partOf, preview, setUpAttachments, takeAttachments } from "./attachments.js";
import { ask, events } from "./api.js";
import { byId, el, words } from "./dom.js";
import { generateImage, generateSound, generateVideo, speak } from "./media.js";
import { openContext } from "./player.js";
import { settingsOf, stageSettings } from "./settings.js";
import { bytesOf } from "./wav.js";

const TASKS = { chat: "Chat", speech: "Speech", image: "Image", video: "Video", sound: "Sound" };
const HINTS = {
  chat: "Message",
  speech: "A text to speak",
  image: "What the image shows",
  video: "What the video shows",
  sound: "What the sound is",
};
const SERVED_IN_CHATS = ["text", "audio", "image"];

let model = null;
let task = "chat";
let running = null; // the AbortController of the request that runs
const conversation = []; // messages

export function setUpChat(described, tasks) {
  model = described;
  const graphs = byId("graph");
  graphs.replaceChildren(...model.graphs.map(({ model: name }) => el("option", {}, name)));
  graphs.hidden = model.graphs.length === 1;
  graphs.addEventListener("change", showTask);
  const offered = Object.keys(TASKS).filter((name) => tasks[name]);
  [task] = offered;
  byId("tasks").replaceChildren(
    ...offered.map((name) =>
      el("label", {}, el("input", { type: "radio", name: "task", value: name, checked: name === task, change: () => setTask(name) }), el("span", {}, TASKS[name])),
    ),
  );
  byId("tasks").hidden = offered.length < 2;
  byId("voice").replaceChildren(...model.voices.map((name) => el("option", {}, name)));
  setUpLog();
  setUpAttachments(complain);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("text").addEventListener("input", grow);
  byId("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    conversation.length = 0;
    for (const one of byId("log").querySelectorAll("[src^='blob:']")) URL.revokeObjectURL(one.src);
    byId("log").replaceChildren();
    byId("text").focus();
  });
  showTask();
}

const graph = () => model.graphs.find(({ model: name }) => name === byId("graph").value) ?? model.graphs[0];

function setTask(name) {
  task = name;
  showTask();
}

/** Show what the task has: modalities, voices, kinds of files. */
function showTask() {
  const made = Object.entries(graph().modalities).filter(([name, kind]) => SERVED_IN_CHATS.includes(kind) && (kind !== "audio" || name === "audio"));
  const chosen = made.length === 1 || !("text" in graph().modalities) ? made.map(([name]) => name) : ["text", ...("audio" in graph().modalities ? ["audio"] : [])];
  byId("modalities").replaceChildren(
    ...made.map(([name]) => el("label", {}, el("input", { type: "checkbox", value: name, checked: chosen.includes(name) }), el("span", {}, words(name)))),
  );
  byId("modalities").hidden = task !== "chat" || made.length < 2;
  byId("voice").hidden = !model.voices.length || !["chat", "speech"].includes(task);
  const reads = { chat: model.reads, image: model.reads.filter((kind) => kind === "image"), video: model.reads.filter((kind) => kind === "image") };
  accept(reads[task] ?? []);
  byId("text").placeholder = HINTS[task];
}

function grow() {
  const text = byId("text");
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight, 180)}px`;
}

function complain(message) {
  stats.errors += 1;
  show(el("article", { class: "message" }, el("p", { class: "error", role: "alert" }, message)));
}

async function send() {
  const text = byId("text").value.trim();
  if (running !== null) return;
  const files = takeAttachments();
  if (!text && !files.length) return;
  byId("text").value = "";
  grow();
  if (model.sample_rate) openContext(model.sample_rate).catch(() => {}); // in the gesture; the player reports failures
  show(el("article", { class: "message user" }, ...files.map(preview), text ? el("p", { class: "text" }, text) : ""));
  running = new AbortController();
  setRunning(true);
  const answer = new Answer();
  try {
    const more = await answerTo(answer, text, files, running.signal);
    answer.end(more);
  } catch (error) {
    answer.fail(error);
  }
  running = null;
  setRunning(false);
}

function setRunning(isRunning) {
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

async function answerTo(answer, text, files, signal) {
  const about = { model: graph().model, voice: byId("voice").value || undefined, files };
  const maker = model.stages.find(({ name }) => name === graph().makers.image);
  about.prefills = model.prefills_speech;
  about.hasPreviews = maker?.kind === "diffusion" || model.draws;
  if (task === "speech") return speak(answer, text, about, signal);
  if (task === "image") return generateImage(answer, text, about, signal);
  if (task === "video") return generateVideo(answer, text, about, signal);
  if (task === "sound") return generateSound(answer, text, about, signal);
  return reply(answer, text, about, signal);
}

async function reply(answer, text, { model: name, voice, files }, signal) {
  const content = files.length ? [...files.map(partOf), ...(text ? [{ type: "text", text }] : [])] : text;
  const message = { role: "user", content };
  const { system, ...fields } = settingsOf("reply");
  const modalities = [...byId("modalities").querySelectorAll("input:checked")].map(({ value }) => value);
  const body = {
    ...fields,
    model: name,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation, message],
    modalities: modalities.length ? modalities : undefined,
    audio: modalities.includes("audio") ? { voice, format: "wav" } : undefined,
    sampling_params_list: stageSettings(),
    stream: true,
    stream_options: { include_usage: true },
  };
  let usage = null;
  let waiting = Promise.resolve(); // pieces of sound, in order; text must not wait for the sound to open
  try {
    for await (const event of events(await ask("v1/chat/completions", { body, signal }))) {
      answer.setId(event.id);
      usage = event.usage ?? usage;
      const delta = event.choices[0]?.delta;
      if (!delta) continue;
      answer.addText(delta.content ?? "");
      if (delta.audio?.transcript && !modalities.includes("text")) answer.addText(delta.audio.transcript);
      if (delta.audio?.data) {
        const data = bytesOf(delta.audio.data);
        waiting = waiting.then(() => answer.addSound(data));
      }
      for (const image of delta.images ?? []) answer.addPicture(image.image_url.url);
    }
    await waiting;
  } finally {
    waiting.catch(() => {}); // awaited above, unless the stream itself has failed
    if (answer.text) conversation.push(message, { role: "assistant", content: answer.text });
  }
  return usage && answer.text ? [`${usage.completion_tokens} ${usage.completion_tokens === 1 ? "token" : "tokens"}`] : [];
}
