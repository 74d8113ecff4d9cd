// Sends the microphone's samples to the page.

class Recorder extends AudioWorkletProcessor {
  process([[input]]) {
    if (input) this.port.postMessage(input.slice());
    return true;
  }
}

registerProcessor("recorder", Recorder);
