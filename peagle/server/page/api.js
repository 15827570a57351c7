// The server's API: streamed chunks, JSON, and errors in words that tell the user what to do.

export class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(path, key, options = {}) {
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const headers = { ...options.headers, ...authorization };
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server cannot be reached.");
  }
  if (!response.ok) throw new RequestError(await errorMessage(response), response.status);
  return response;
}

async function errorMessage(response) {
  let message = "";
  try {
    message = (await response.json()).error?.message ?? "";
  } catch {
    // The body is not JSON: only the status is known.
  }
  const status = response.status;
  if (status === 401 || status === 403) {
    return "The server requires an API key: enter it in the settings.";
  }
  if (status === 429 || status === 503) {
    const reason = message.split(":")[0] || "the server is busy";
    const seconds = Number(response.headers.get("Retry-After"));
    return `Not now, ${reason}: try again ${seconds > 0 ? `in ${seconds} s` : "in a moment"}.`;
  }
  return message ? asSentence(message) : `The server answered ${status}.`;
}

const asSentence = (text) => text[0].toUpperCase() + text.slice(1).replace(/\.?$/, ".");

export async function fetchJson(path, key, signal) {
  return (await send(path, key, { signal })).json();
}

// Yields the chunks of one answer as they arrive. A stream without [DONE] is an error.
export async function* streamChat(body, key, signal) {
  const response = await send("v1/chat/completions", key, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
    signal,
  });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new RequestError("The stream is not readable.");
    }
    if (chunk.error) {
      throw new RequestError(asSentence(chunk.error.message ?? "the server aborted the answer"));
    }
    yield chunk;
  }
  throw new RequestError("The stream broke off.");
}

// Yields the data of server-sent events, however the network splits them.
async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The stream broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
