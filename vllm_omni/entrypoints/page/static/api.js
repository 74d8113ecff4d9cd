// Requests to the server: with the key, if it asks for one, and errors with its message.

const KEY = "omni.key";

let asking = null; // the promise of a key, while the dialog is open

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** A route's address; the page may be served below a path. */
export const address = (path) => new URL(path, document.baseURI);

/** Ask a route; where it wants a key, ask the user first. */
export async function ask(path, { method, body, signal } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (!key && document.documentElement.dataset.key === "required") {
      await askKey(false);
      continue;
    }
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(address(path), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) === key) await askKey(Boolean(key));
      continue;
    }
    if (!response.ok) throw new ApiError(await message(response), response.status);
    return response;
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

async function message(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status} ${response.statusText}`;
  }
}

function askKey(isWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const form = document.getElementById("key-form");
    const field = document.getElementById("key");
    document.getElementById("key-wrong").hidden = !isWrong;
    field.value = "";
    dialog.showModal();
    const stay = (event) => event.preventDefault();
    dialog.addEventListener("cancel", stay); // without a key there is nothing to show
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        dialog.removeEventListener("cancel", stay);
        sessionStorage.setItem(KEY, field.value.trim());
        dialog.close();
        asking = null;
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}

/** The events of a stream, as the objects in their data; an error of the server ends it. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, event.error.code);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it has failed already
  }
}
