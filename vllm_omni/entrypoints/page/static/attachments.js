// Files of the next message: chosen, pasted, dropped, recorded, or taken with the camera.

import { byId, dataUrl, el } from "./dom.js";
import { Recorder, takePicture } from "./recorder.js";

let attached = []; // {kind, name, url}
let accepted = []; // kinds
let complain = () => {};

export function setUpAttachments(onError) {
  complain = onError;
  const chooser = byId("files");
  byId("attach").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    await addAll(chooser.files);
    chooser.value = "";
  });
  byId("text").addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      addAll(event.clipboardData.files);
    }
  });
  const composer = byId("composer");
  composer.addEventListener("dragover", (event) => event.preventDefault());
  composer.addEventListener("drop", (event) => {
    event.preventDefault();
    addAll(event.dataTransfer.files);
  });
  setUpMicrophone();
  byId("camera-button").addEventListener("click", async () => {
    try {
      const picture = await takePicture();
      if (picture) await add(picture, "camera.jpg");
    } catch (error) {
      complain(`camera: ${error.message}`);
    }
  });
}

function setUpMicrophone() {
  const button = byId("microphone");
  let recorder = null;
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      if (recorder === null) {
        recorder = await Recorder.start();
      } else {
        const file = await recorder.stop();
        recorder = null;
        await add(file, "recording.wav");
      }
    } catch (error) {
      recorder = null;
      complain(`microphone: ${error.message}`);
    }
    button.disabled = false;
    button.setAttribute("aria-pressed", String(recorder !== null));
    button.setAttribute("aria-label", recorder ? "Stop the recording" : "Record a sound");
    button.focus();
  });
}

/** Set which kinds of files the next message may have. */
export function accept(kinds) {
  accepted = kinds;
  byId("attach").hidden = !kinds.length;
  byId("files").accept = kinds.map((kind) => `${kind}/*`).join(",");
  const canRecord = navigator.mediaDevices !== undefined; // not on an http: page of another host
  byId("microphone").hidden = !canRecord || !kinds.includes("audio");
  byId("camera-button").hidden = !canRecord || !kinds.includes("image");
  attached = attached.filter(({ kind }) => kinds.includes(kind));
  show();
}

/** The files of the message that is sent now; there are none afterwards. */
export function takeAttachments() {
  const files = attached;
  attached = [];
  show();
  return files;
}

/** A part of a message in OpenAI's form; videos in vLLM's. */
export function partOf({ kind, url }) {
  if (kind === "image") return { type: "image_url", image_url: { url } };
  if (kind === "video") return { type: "video_url", video_url: { url } };
  const format = url.slice("data:audio/".length, url.indexOf(";"));
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
}

export function preview({ kind, name, url }) {
  if (kind === "image") return el("img", { src: url, alt: name });
  return el(kind, { src: url, controls: true, "aria-label": name });
}

async function addAll(files) {
  for (const file of files) await add(file, file.name);
}

async function add(blob, name) {
  const kind = blob.type.split("/")[0];
  if (!accepted.includes(kind)) {
    complain(`${name}: this model reads ${accepted.join(", ") || "text alone"}, and no ${kind || "such"} file`);
    return;
  }
  attached.push({ kind, name, url: await dataUrl(blob) });
  show();
}

function show() {
  const chips = attached.map((one) =>
    el(
      "span",
      { class: "chip" },
      one.kind === "image" ? el("img", { src: one.url, alt: "" }) : null,
      el("span", {}, one.name),
      el(
        "button",
        {
          type: "button",
          "aria-label": `Remove ${one.name}`,
          click: () => {
            attached = attached.filter((other) => other !== one);
            show();
            byId("text").focus();
          },
        },
        "×",
      ),
    ),
  );
  byId("attachments").replaceChildren(...chips);
}
