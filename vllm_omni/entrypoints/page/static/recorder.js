// The microphone and the camera.

import { address } from "./api.js";
import { byId } from "./dom.js";
import { wavFile } from "./wav.js";

/** Records one channel until `stop`, which returns a WAV file. */
export class Recorder {
  static async start() {
    const recorder = new Recorder();
    recorder.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    recorder.context = new AudioContext();
    recorder.pieces = [];
    await recorder.context.audioWorklet.addModule(address("omni/static/recorder-worklet.js"));
    const source = recorder.context.createMediaStreamSource(recorder.stream);
    const node = new AudioWorkletNode(recorder.context, "recorder", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    node.port.onmessage = ({ data }) => recorder.pieces.push(data);
    source.connect(node);
    return recorder;
  }

  async stop() {
    this.stream.getTracks().forEach((track) => track.stop());
    const { sampleRate } = this.context;
    await this.context.close();
    const pieces = this.pieces.map((piece) =>
      Int16Array.from(piece, (one) => Math.max(-1, Math.min(1, one)) * 32767),
    );
    const length = pieces.reduce((sum, piece) => sum + piece.length, 0);
    return wavFile(pieces, length, sampleRate);
  }
}

/** Shows the camera, and returns the picture that the user takes; null: none. */
export async function takePicture() {
  const stream = await navigator.mediaDevices.getUserMedia({ video: true });
  const dialog = byId("camera-dialog");
  const video = byId("camera");
  video.srcObject = stream;
  dialog.returnValue = "";
  dialog.showModal();
  try {
    await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
    if (dialog.returnValue !== "take" || !video.videoWidth) return null;
    const canvas = document.createElement("canvas");
    canvas.width = video.videoWidth;
    canvas.height = video.videoHeight;
    canvas.getContext("2d").drawImage(video, 0, 0);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
  } finally {
    stream.getTracks().forEach((track) => track.stop());
    video.srcObject = null;
  }
}
