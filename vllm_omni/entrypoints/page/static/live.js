// The state of the server, asked for once a second while the page can be seen.

import { askJson } from "./api.js";
import { byId } from "./dom.js";

const INTERVAL_MS = 1000;

const readers = [];

export const clock = {
  offset: 0, // of the server's clock to this one, seconds
  now: () => Date.now() / 1000 + clock.offset,
};

/** Call a function with each state. */
export const onState = (reader) => readers.push(reader);

export async function watch() {
  for (;;) {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    try {
      const asked = Date.now() / 1000;
      const state = await askJson("omni/state", { signal: AbortSignal.timeout(10 * INTERVAL_MS) });
      clock.offset = state.time - (asked + Date.now() / 1000) / 2;
      show(state);
      readers.forEach((reader) => reader(state));
    } catch (error) {
      status("down", `no answer: ${error.message}`);
    }
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
  }
}

function show({ engines, functions, num_open_calls }) {
  const down = [...engines, ...functions].filter((one) => !["running", "drained"].includes(one.state));
  if (down.length) status("down", `${down[0].name}: ${down[0].state}`);
  else if (num_open_calls) status("busy", `${num_open_calls} ${num_open_calls === 1 ? "request" : "requests"}`);
  else status("idle", "idle");
}

function status(kind, text) {
  const element = byId("status");
  element.dataset.kind = kind;
  if (element.textContent !== text) element.textContent = text;
}
