// Starts the page: what the model is, then the chat, the pipeline, the timeline and the settings.

import { stats } from "./answer.js";
import { askJson } from "./api.js";
import { setUpChat } from "./chat.js";
import { byId } from "./dom.js";
import { setUpPipeline } from "./pipeline.js";
import { watch } from "./live.js";
import { showSettings } from "./settings.js";
import { setUpTimeline } from "./timeline.js";

const WIDE = matchMedia("(min-width: 1080px)"); // as in style.css

window.omni = { stats };

function setUpTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const visible = () => tabs.filter((tab) => !(WIDE.matches && tab.dataset.panel === "chat"));
  for (const tab of tabs) {
    tab.addEventListener("click", () => open(tab.dataset.panel));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const row = visible();
      const next = row[(row.indexOf(tab) + step + row.length) % row.length];
      open(next.dataset.panel);
      next.focus();
    });
  }
  WIDE.addEventListener("change", () => open(document.body.dataset.panel));
  open("chat");
}

/** Show a panel; beside the chat, where there is room for both. */
function open(panel) {
  const shown = WIDE.matches && panel === "chat" ? "pipeline" : panel;
  document.body.dataset.panel = shown;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isShown = tab.dataset.panel === shown;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
  }
  document.dispatchEvent(new CustomEvent("omni:panel", { detail: shown }));
}

function tasksOf(model, schema) {
  const made = new Set(model.graphs.flatMap(({ modalities }) => Object.values(modalities)));
  const has = (path) => schema.paths[path]?.post !== undefined;
  return {
    chat: model.replies && has("/v1/chat/completions"),
    speech: model.speaks && has("/v1/audio/speech"),
    image: made.has("image") && has("/v1/images/generations"),
    video: made.has("video") && has("/v1/videos"),
    sound: model.diffuses && made.has("audio") && has("/v1/audio/generate"),
  };
}

async function start() {
  const [model, schema] = [await askJson("omni/model"), await askJson("openapi.json")];
  model.voices = model.speaks ? (await askJson("v1/audio/voices")).voices : [];
  document.title = `${model.model} · vllm_omni`;
  byId("model").textContent = model.model;
  byId("model").title = model.model;
  const tasks = tasksOf(model, schema);
  showSettings(model, schema, tasks);
  setUpChat(model, tasks);
  setUpPipeline(model);
  setUpTimeline(model, open);
  setUpTabs();
  document.body.dataset.ready = "true";
  byId("text").focus();
  watch();
}

start().catch((error) => {
  byId("status").dataset.kind = "down";
  byId("status").textContent = error.message;
});
