// Plays a sound while it arrives.

import { address } from "./api.js";

const CAPACITY_S = 30; // of the ring buffer; what does not fit waits here
const ENOUGH_S = 0.15; // buffered before it starts, and again after a gap

let context = null;
let loading = null; // a promise: the context has loaded its module

/** The context for sounds of this rate. Call it first in a user's gesture, without which browsers keep it silent. */
export async function openContext(rate) {
  if (context?.sampleRate !== rate) {
    context?.close();
    context = new AudioContext({ sampleRate: rate });
    loading = context.audioWorklet.addModule(address("omni/static/player-worklet.js"));
  }
  const opened = context;
  await loading;
  await opened.resume();
  return opened;
}

/** One sound. `onReport` gets what the audio thread counts: frames played, gaps, silent frames, frames buffered. */
export class Player {
  constructor(onReport = () => {}) {
    this.onReport = onReport;
    this.node = null;
    this.waiting = []; // pieces that do not fit into the ring buffer
    this.room = 0;
    this.hasEnded = false;
    this.report = { played: 0, gaps: 0, silent: 0, buffered: 0, isPlaying: false, isOver: false };
    this.over = new Promise((resolve) => (this.setOver = resolve));
  }

  async open(rate) {
    const audio = await openContext(rate);
    const capacity = CAPACITY_S * rate;
    this.rate = rate;
    this.room = capacity;
    this.node = new AudioWorkletNode(audio, "ring-player", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { capacity, enough: Math.round(ENOUGH_S * rate) },
    });
    this.node.port.onmessage = ({ data }) => {
      this.room = capacity - data.buffered - this.sent(data);
      this.report = data;
      this.onReport({ ...data, rate, time: audio.currentTime });
      if (data.isOver) this.close();
      else this.feed();
    };
    this.numSent = 0;
    this.node.connect(audio.destination);
    this.feed();
  }

  /** Frames that were sent, and that the audio thread had not received when it reported. */
  sent({ played, buffered }) {
    return this.numSent - played - buffered;
  }

  push(samples) {
    if (samples.length) this.waiting.push(samples);
    this.feed();
  }

  feed() {
    if (this.node === null) return;
    while (this.waiting.length && this.room > 0) {
      const [samples] = this.waiting;
      const piece = samples.slice(0, this.room);
      if (piece.length === samples.length) this.waiting.shift();
      else this.waiting[0] = samples.subarray(piece.length);
      this.room -= piece.length;
      this.numSent += piece.length;
      this.node.port.postMessage({ samples: piece }, [piece.buffer]);
    }
    if (this.hasEnded && !this.waiting.length) this.node.port.postMessage({ end: true });
  }

  end() {
    this.hasEnded = true;
    if (this.node === null) this.setOver();
    else this.feed();
  }

  stop() {
    this.waiting = [];
    if (this.node === null) this.setOver();
    else this.node.port.postMessage({ stop: true });
  }

  close() {
    this.node?.disconnect();
    this.node = null;
    this.setOver();
  }
}
