// One answer in the conversation: text, speech that plays while it arrives, pictures, and how long they took.

import { byId, el, seconds } from "./dom.js";
import { clock } from "./live.js";
import { Player } from "./player.js";
import { WavReader } from "./wav.js";

/** What this page has counted, for its tests and for the curious. */
export const stats = { answers: 0, errors: 0, textPieces: 0, audio: { played: 0, gaps: 0, silent: 0, buffered: 0, time: 0, pieces: 0 } };

/** Request -> the pieces of its speech: when each arrived, by the server's clock, and its seconds. */
export const heard = new Map();

export class Answer {
  constructor() {
    this.startedAt = performance.now();
    this.id = null;
    this.text = "";
    this.firstText = this.firstAudio = null;
    this.reader = null; // of its sound
    this.pieces = [];
    this.textElement = el("p", { class: "text" });
    this.media = el("div", { class: "media" });
    this.foot = el("footer", {}, el("span", { class: "waiting" }, "waiting"));
    this.element = el("article", { class: "message assistant", "aria-busy": "true" }, this.textElement, this.media, this.foot);
    show(this.element);
  }

  since() {
    return (performance.now() - this.startedAt) / 1000;
  }

  setId(id) {
    if (this.id === null && id) {
      this.id = id;
      heard.set(id, this.pieces);
    }
  }

  addText(text) {
    if (!text) return;
    this.firstText ??= this.since();
    this.text += text;
    this.textElement.textContent = this.text;
    stats.textPieces += 1;
    this.note("writing");
    follow();
  }

  /** Add bytes of a WAV file, and play them. */
  async addSound(data) {
    this.reader ??= new WavReader();
    const samples = this.reader.push(data);
    if (!this.reader.rate) return;
    if (!this.player) {
      this.player = new Player((report) => Object.assign(stats.audio, report));
      this.player.push(samples);
      await this.player.open(this.reader.rate);
    } else {
      this.player.push(samples);
    }
    if (!samples.length) return;
    this.firstAudio ??= this.since();
    stats.audio.pieces += 1;
    this.pieces.push({ at: clock.now(), seconds: samples.length / this.reader.rate });
    this.note("speaking");
  }

  addPicture(url, name = "generated image") {
    const image = el("img", { src: url, alt: name });
    this.media.append(el("a", { href: url, download: "image.png", "aria-label": "Save the image" }, image));
    image.addEventListener("load", follow, { once: true });
  }

  addMedium(kind, blob, name) {
    const url = URL.createObjectURL(blob);
    const save = el("a", { href: url, download: name, class: "save" }, "Save");
    this.media.append(el("div", { class: "medium" }, el(kind, { src: url, controls: true, "aria-label": name }), save));
    follow();
  }

  /** Show how far it is, between 0 and 1; null: unknown. */
  progress(value, said) {
    this.bar ??= this.media.appendChild(el("progress", { max: 1, "aria-label": "Progress" }));
    if (value === null) this.bar.removeAttribute("value");
    else this.bar.value = value;
    this.note(said);
    follow();
  }

  /** Show a picture that is not complete. */
  sketch(url) {
    this.sketched ??= this.media.insertBefore(el("img", { class: "sketch", alt: "preview" }), this.bar ?? null);
    this.sketched.src = url;
    follow();
  }

  clearProgress() {
    this.bar?.remove();
    this.sketched?.remove();
    this.bar = this.sketched = null;
  }

  note(doing) {
    const parts = [doing, ...this.times()];
    this.foot.replaceChildren(...parts.map((part, index) => el("span", { class: index || !doing ? null : "waiting" }, part)).slice(doing ? 0 : 1));
  }

  times() {
    const parts = [];
    if (this.firstText !== null) parts.push(`first text ${seconds(this.firstText)}`);
    if (this.firstAudio !== null) parts.push(`first audio ${seconds(this.firstAudio)}`);
    if (this.reader?.seconds) parts.push(`${seconds(this.reader.seconds)} of speech`);
    return parts;
  }

  end(more = []) {
    this.player?.end();
    this.clearProgress();
    if (this.reader?.length) this.addMedium("audio", this.reader.file(), "answer.wav");
    this.close([...this.times(), ...more, `total ${seconds(this.since())}`]);
    stats.answers += 1;
  }

  fail(error) {
    this.player?.stop();
    this.clearProgress();
    const isStopped = error.name === "AbortError";
    if (!isStopped) {
      stats.errors += 1;
      this.element.append(el("p", { class: "error", role: "alert" }, error.message));
    } else if (this.reader?.length) {
      this.addMedium("audio", this.reader.file(), "answer.wav");
    }
    this.close([isStopped ? "stopped" : "failed", ...this.times()]);
  }

  close(parts) {
    this.element.setAttribute("aria-busy", "false");
    const trace = this.id
      ? el("button", { type: "button", class: "link", click: () => document.dispatchEvent(new CustomEvent("omni:trace", { detail: this.id })) }, "Timeline")
      : null;
    this.foot.replaceChildren(...parts.map((part) => el("span", {}, part)), trace ?? "");
    follow();
  }
}

export function show(element) {
  byId("empty")?.remove();
  byId("log").append(element);
  isFollowing = true;
  follow();
}

let isFollowing = true; // until the user scrolls up

export function setUpLog() {
  const log = byId("log");
  log.addEventListener("scroll", () => {
    isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  });
}

function follow() {
  const log = byId("log");
  if (isFollowing) log.scrollTop = log.scrollHeight;
}
