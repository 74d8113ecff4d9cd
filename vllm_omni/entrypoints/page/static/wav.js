// WAV files of 16-bit samples: read while they arrive, and written.

const HEADER = 44;

/** Reads a stream of bytes; `rate` is known once the header has arrived. */
export class WavReader {
  constructor() {
    this.rate = 0;
    this.pieces = []; // Int16Array: the whole sound, for its file
    this.length = 0; // samples
    this.rest = new Uint8Array(0);
  }

  /** The samples of further bytes, between -1 and 1. */
  push(more) {
    const data = new Uint8Array(this.rest.length + more.length);
    data.set(this.rest);
    data.set(more, this.rest.length);
    let start = 0;
    if (!this.rate) {
      start = this.readHeader(data);
      if (!this.rate) {
        this.rest = data;
        return new Float32Array(0);
      }
    }
    const end = start + ((data.length - start) & ~1);
    this.rest = data.slice(end);
    const samples = new Int16Array(data.slice(start, end).buffer);
    this.pieces.push(samples);
    this.length += samples.length;
    return Float32Array.from(samples, (one) => one / 32768);
  }

  readHeader(data) {
    const view = new DataView(data.buffer);
    let at = 12; // behind "RIFF", its length, "WAVE"
    let rate = 0;
    while (at + 8 <= data.length) {
      const name = String.fromCharCode(...data.subarray(at, at + 4));
      const size = view.getUint32(at + 4, true);
      if (name === "data") {
        this.rate = rate;
        return at + 8;
      }
      if (name === "fmt " && at + 16 <= data.length) rate = view.getUint32(at + 12, true);
      at += 8 + size + (size & 1);
    }
    return 0;
  }

  get seconds() {
    return this.rate ? this.length / this.rate : 0;
  }

  file() {
    return wavFile(this.pieces, this.length, this.rate);
  }
}

/** A file of pieces of 16-bit samples, one channel. */
export function wavFile(pieces, length, rate) {
  const head = new DataView(new ArrayBuffer(HEADER));
  const text = (at, name) => [...name].forEach((one, index) => head.setUint8(at + index, one.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, HEADER - 8 + 2 * length, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true);
  head.setUint16(22, 1, true);
  head.setUint32(24, rate, true);
  head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  text(36, "data");
  head.setUint32(40, 2 * length, true);
  return new Blob([head, ...pieces], { type: "audio/wav" });
}

export function bytesOf(base64) {
  const text = atob(base64);
  const data = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) data[index] = text.charCodeAt(index);
  return data;
}
