// The server, as the page sees it: streamed chunks, status, and errors in words a person can act on.

export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function call(path, key, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", headers: { ...options.headers, ...headers(key) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached.");
  }
  if (!response.ok) throw new Refused(await words(response), response.status);
  return response;
}

async function words(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch {
    // not JSON: the status has to do
  }
  const status = response.status;
  if (status === 401 || status === 403) return "The server wants an API key: enter it in the settings.";
  if (status === 429 || status === 503) {
    const wait = Number(response.headers.get("Retry-After"));
    return `Not now, ${said.split(":")[0] || "the server is busy"}: try again ${wait > 0 ? `in ${wait} s` : "in a moment"}.`;
  }
  return said ? sentence(said) : `The server answered ${status}.`;
}

const sentence = (said) => said[0].toUpperCase() + said.slice(1).replace(/\.?$/, ".");

export async function json(path, key, signal) {
  return (await call(path, key, { signal })).json();
}

// Chunks of one answer as they come. Ends only when the answer did; a stream that breaks off is an error.
export async function* chat(body, key, signal) {
  const options = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal };
  const response = await call("v1/chat/completions", key, options);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new Refused("The stream is not readable.");
    }
    if (chunk.error) throw new Refused(sentence(chunk.error.message ?? "the server gave the answer up"));
    yield chunk;
  }
  throw new Refused("The stream broke off.");
}

// The data of server-sent events, whatever the pieces they arrive in.
async function* events(stream) {
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
    throw new Refused("The stream broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
