// One lane's answer, from the request to its last chunk. Whatever goes wrong is said in the lane; the others go on.

import { Refused, chat } from "./api.js";

const FRAME = 120; // milliseconds between drawings while a lane records: the page must not slow what it measures
const WARM = { messages: [{ role: "user", content: "Count to 50." }], max_tokens: 48, temperature: 0, stream: true };
const warm = new Set(); // what engines have been asked for before

export function request({ prompt, temperature, tokens, k }) {
  return {
    messages: [{ role: "user", content: prompt }],
    max_tokens: tokens,
    temperature,
    seed: Math.floor(Math.random() * 2 ** 31), // one seed for all lanes: the same dice, so the same answer
    stream: true,
    stream_options: { include_usage: true },
    peagle: { k, trace: true },
  };
}

// Plain decoding has no K.
const ask = (one, body) => ({ ...(one.method === "none" ? { trace: true } : body.peagle), method: one.method });

// An engine is made when it is first asked for, and its first steps are slow: a few tokens that do not count.
export async function warmUp(one, lane, body, key, signal) {
  const peagle = ask(one, body), name = JSON.stringify(peagle);
  if (warm.has(name) || signal.aborted) return;
  lane.state("warms up");
  try {
    for await (const _ of chat({ ...WARM, peagle }, key, signal));
    warm.add(name);
    lane.state("waits");
  } catch (error) {
    if (!signal.aborted) broken(one, lane, error);
  }
}

// `plain()` is plain decoding's speed so far.
export async function record(one, lane, body, key, signal, plain) {
  if (signal.aborted) return stopped(one, lane);
  if (one.problem) return; // it did not even warm up
  lane.state("runs");
  const sent = performance.now();
  const now = () => (performance.now() - sent) / 1000;
  const draw = () => lane.draw(one, now(), body.max_tokens, plain());
  const timer = setInterval(draw, FRAME);
  try {
    for await (const chunk of chat({ ...body, peagle: ask(one, body) }, key, signal)) {
      one.add(now(), chunk);
      one.reason = chunk.choices?.[0]?.finish_reason ?? one.reason;
    }
    one.ended = now();
    lane.state(one.reason === "length" ? "done at the limit" : "done");
  } catch (error) {
    one.ended = now();
    if (signal.aborted) stopped(one, lane);
    else broken(one, lane, error);
  } finally {
    clearInterval(timer);
    draw();
  }
}

function stopped(one, lane) {
  one.stopped = true;
  one.ended ??= 0;
  lane.state("stopped");
}

function broken(one, lane, error) {
  if (!(error instanceof Refused)) console.error(error);
  one.ended ??= 0;
  one.locked = error.status === 401 || error.status === 403;
  one.cause = error instanceof Refused ? error.message : "The page failed: see the browser's console.";
  one.problem = one.tally.tokens ? `${one.cause} ${one.tally.tokens} tokens had come.` : one.cause;
  lane.state("failed");
  lane.fail(one.problem);
  warm.clear(); // engines may have died
}
