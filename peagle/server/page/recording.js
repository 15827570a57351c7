// Records the answer of one lane. A problem is shown in its lane; the other lanes go on.

import { RequestError, streamChat } from "./api.js";

// Milliseconds between redraws: drawing must not slow down what is measured.
const REDRAW_INTERVAL = 120;
const WARM_UP_REQUEST = {
  messages: [{ role: "user", content: "Count to 50." }],
  max_tokens: 48,
  temperature: 0,
  stream: true,
};
const warmEngines = new Set(); // the `peagle` fields that were requested before

export function buildRequest({ prompt, temperature, tokens, k }) {
  return {
    messages: [{ role: "user", content: prompt }],
    max_tokens: tokens,
    temperature,
    seed: Math.floor(Math.random() * 2 ** 31), // one seed for all lanes: the same answer
    stream: true,
    stream_options: { include_usage: true },
    peagle: { k, trace: true },
  };
}

// The field `peagle` for one lane. Plain decoding has no K.
function laneOptions(method, body) {
  return { ...(method === "none" ? { trace: true } : body.peagle), method };
}

// The server builds an engine at its first request, and its first steps are slow. A short request
// that is not recorded comes first.
export async function warmUp(record, lane, body, key, signal) {
  const peagle = laneOptions(record.method, body);
  const engine = JSON.stringify(peagle);
  if (warmEngines.has(engine) || signal.aborted) return;
  lane.setState("warms up");
  try {
    for await (const _ of streamChat({ ...WARM_UP_REQUEST, peagle }, key, signal));
    warmEngines.add(engine);
    lane.setState("waits");
  } catch (error) {
    if (!signal.aborted) markFailed(record, lane, error);
  }
}

// `plainSpeed()`: the speed of plain decoding so far.
export async function recordAnswer(record, lane, body, key, signal, plainSpeed) {
  if (signal.aborted) return markStopped(record, lane);
  if (record.problem) return; // the warm-up failed
  lane.setState("runs");
  const sent = performance.now();
  const now = () => (performance.now() - sent) / 1000;
  const draw = () => lane.draw(record, now(), body.max_tokens, plainSpeed());
  const timer = setInterval(draw, REDRAW_INTERVAL);
  const request = { ...body, peagle: laneOptions(record.method, body) };
  try {
    for await (const chunk of streamChat(request, key, signal)) {
      record.add(now(), chunk);
      record.finishReason = chunk.choices?.[0]?.finish_reason ?? record.finishReason;
    }
    record.ended = now();
    lane.setState(record.finishReason === "length" ? "done at the limit" : "done");
  } catch (error) {
    record.ended = now();
    if (signal.aborted) markStopped(record, lane);
    else markFailed(record, lane, error);
  } finally {
    clearInterval(timer);
    draw();
  }
}

function markStopped(record, lane) {
  record.stopped = true;
  record.ended ??= 0;
  lane.setState("stopped");
}

function markFailed(record, lane, error) {
  const expected = error instanceof RequestError;
  if (!expected) console.error(error);
  record.ended ??= 0;
  record.locked = error.status === 401 || error.status === 403;
  record.cause = expected ? error.message : "The page failed: see the browser's console.";
  const tokens = record.totals.tokens;
  record.problem = tokens ? `${record.cause} ${tokens} tokens had arrived.` : record.cause;
  lane.setState("failed");
  lane.showProblem(record.problem);
  warmEngines.clear(); // the engines may have failed
}
