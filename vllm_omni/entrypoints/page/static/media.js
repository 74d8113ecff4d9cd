// Requests for one medium: speech of a text, images with previews, videos as jobs, sounds.

import { ask, ApiError, askJson, events } from "./api.js";
import { settingsOf, stageSettings } from "./settings.js";

const POLL_MS = 700;
const PREVIEWS = 3;

export async function speak(answer, text, { voice, model, prefills }, signal) {
  const body = {
    ...settingsOf("speech"),
    input: text,
    model,
    voice,
    response_format: "wav",
    stream_format: "audio",
    sampling_params_list: stageSettings(prefills),
  };
  const reader = (await ask("v1/audio/speech", { body, signal })).body.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    await answer.addSound(value);
  }
}

export async function generateImage(answer, prompt, { model, files, hasPreviews }, signal) {
  const body = { ...settingsOf("image"), prompt, model, stream: true };
  if (hasPreviews) Object.assign(body, { progress: true, partial_images: PREVIEWS });
  if (files.length) body.image = files.map(({ url }) => url);
  answer.progress(null, "waiting");
  const response = await ask(`v1/images/${files.length ? "edits" : "generations"}`, { body, signal });
  for await (const event of events(response)) {
    const kind = event.type.split(".")[1];
    const url = `data:image/${event.output_format ?? "png"};base64,${event.b64_json}`;
    if (kind === "progress") {
      answer.progress(event.num_steps ? event.step / event.num_steps : null, `step ${event.step} of ${event.num_steps || "?"}`);
    } else if (kind === "partial_image") {
      answer.sketch(url);
    } else if (kind === "completed") {
      answer.addPicture(url, prompt);
    }
  }
}

export async function generateVideo(answer, prompt, { model, files }, signal) {
  const body = { ...settingsOf("video"), prompt, model };
  if (files.length) body.input_reference = { image_url: files[0].url };
  answer.progress(null, "queued");
  let job = await askJson("v1/videos", { body, signal });
  try {
    while (!["completed", "failed"].includes(job.status)) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      job = await askJson(`v1/videos/${job.id}`, { signal });
      answer.progress(job.status === "queued" ? null : job.progress / 100, job.status === "queued" ? "queued" : `${job.progress} %`);
    }
  } catch (error) {
    if (error.name === "AbortError") await ask(`v1/videos/${job.id}`, { method: "DELETE" });
    throw error;
  }
  if (job.status === "failed") throw new ApiError(job.error.message, job.error.code);
  const file = await (await ask(`v1/videos/${job.id}/content`, { signal })).blob();
  answer.addMedium("video", file, `video.${file.type.split("/")[1] ?? "mp4"}`);
}

export async function generateSound(answer, text, { model }, signal) {
  answer.progress(null, "waiting");
  const body = { ...settingsOf("sound"), input: text, model };
  const file = await (await ask("v1/audio/generate", { body, signal })).blob();
  answer.addMedium("audio", file, "sound.wav");
}
