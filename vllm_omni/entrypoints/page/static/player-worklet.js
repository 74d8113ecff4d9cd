// Plays samples from a ring buffer, on the audio thread. Silence only where the next piece has not arrived.

const REPORT_FRAMES = 2048;

class RingPlayer extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.ring = new Float32Array(processorOptions.capacity);
    this.enough = processorOptions.enough; // frames before it starts, and before it resumes after a gap
    this.read = this.buffered = 0;
    this.played = this.gaps = this.silent = 0; // silent: frames, in gaps
    this.waited = 0; // frames since it ran out; no gap unless more comes
    this.hasStarted = this.isPlaying = this.hasEnded = this.isStopped = false;
    this.sinceReport = 0;
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  receive(message) {
    if (message.samples) {
      const { samples } = message;
      const write = (this.read + this.buffered) % this.ring.length;
      const first = Math.min(samples.length, this.ring.length - write);
      this.ring.set(samples.subarray(0, first), write);
      this.ring.set(samples.subarray(first), 0);
      this.buffered += samples.length;
    }
    this.hasEnded ||= message.end === true;
    this.isStopped ||= message.stop === true;
  }

  process(inputs, [[output]]) {
    if (this.isStopped || (this.hasEnded && this.buffered === 0)) return this.finish();
    if (!this.isPlaying && (this.buffered >= this.enough || this.hasEnded)) {
      if (this.hasStarted) {
        this.gaps += 1;
        this.silent += this.waited;
      }
      this.isPlaying = this.hasStarted = true;
      this.waited = 0;
    }
    const wanted = this.isPlaying ? Math.min(output.length, this.buffered) : 0;
    const first = Math.min(wanted, this.ring.length - this.read);
    output.set(this.ring.subarray(this.read, this.read + first));
    output.set(this.ring.subarray(0, wanted - first), first);
    this.read = (this.read + wanted) % this.ring.length;
    this.buffered -= wanted;
    this.played += wanted;
    this.isPlaying &&= wanted === output.length;
    if (this.hasStarted) this.waited += output.length - wanted;
    this.sinceReport += output.length;
    if (this.sinceReport >= REPORT_FRAMES) this.report(false);
    return true;
  }

  finish() {
    this.isPlaying = false;
    this.report(true);
    return false;
  }

  report(isOver) {
    this.sinceReport = 0;
    const { played, gaps, silent, buffered, isPlaying } = this;
    this.port.postMessage({ played, gaps, silent, buffered, isPlaying, isOver });
  }
}

registerProcessor("ring-player", RingPlayer);
