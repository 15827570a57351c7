// What a lane recorded: its steps with their times, and the totals over them.

export const METHODS = ["p-eagle", "eagle3", "none"]; // in the order of display
export const NAMES = {
  "p-eagle": "P-EAGLE", eagle3: "EAGLE-3", ngram: "N-gram", none: "Plain decoding",
};
// A lead below this factor is no win: a single race has noise.
export const MIN_LEAD = 1.05;

// A step is what one chunk brought:
//   {t: seconds since the request was sent, texts: one per token, rest, accepted, drafted, k}
// The first `accepted` tokens were drafts; the one after them is the target's own. `rest` is text
// whose tokens are not known: of a pass that takes several chunks, only the first has the tokens.
export class Record {
  constructor(method) {
    this.method = method;
    this.steps = [];
    this.totals = new Totals();
    this.ended = null; // seconds at the last byte
    this.finishReason = ""; // the server's finish_reason
    this.cause = ""; // why the answer is incomplete
    this.problem = ""; // the cause, and how many tokens arrived before it
    this.stopped = false;
    this.locked = false; // an API key is missing
    this.traced = false; // the server sends the steps
    this.estimated = false; // the server sent no texts of single tokens
    this.counted = 0; // tokens so far, for servers that send usage instead of steps
  }

  add(t, chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = deltaReasoning(delta) + (delta.content ?? "");
    const trace = chunk.peagle;
    const added = (chunk.usage?.completion_tokens ?? 0) - this.counted;
    this.counted += Math.max(0, added);
    this.traced ||= Boolean(trace);
    const count = trace?.tokens ?? (text && !this.traced ? Math.max(1, added) : 0);
    if (!count && !text) return;
    const spelled = trace?.texts?.length ? trace.texts : null;
    if (!spelled && count > 1) this.estimated = true;
    const step = {
      t,
      texts: spelled ? alignTexts(spelled, text) : splitText(text, count),
      rest: count ? "" : text,
      accepted: trace?.accepted ?? 0,
      drafted: trace?.drafted ?? 0,
      k: trace?.k ?? null,
    };
    this.steps.push(step);
    this.totals.add(step);
  }

  get complete() {
    return this.ended !== null && !this.problem && !this.stopped;
  }

  get text() {
    return this.steps.map((step) => step.texts.join("") + step.rest).join("");
  }
}

// Sums over the first steps of a record. A replay adds the steps again, one by one.
export class Totals {
  constructor() {
    this.steps = 0;
    this.passes = 0; // steps with tokens
    this.tokens = 0;
    this.first = 0; // seconds of the first step
    this.last = 0; // seconds of the last step
    this.firstTokens = 0; // tokens of the first step
    this.verified = 0; // passes that verified drafts
    this.drafted = 0;
    this.accepted = 0;
    this.draftedAt = []; // by position
    this.acceptedAt = [];
    this.k = null;
  }

  add({ t, texts, accepted, drafted, k }) {
    if (!this.steps) {
      this.first = t;
      this.firstTokens = texts.length;
    }
    this.steps += 1;
    this.passes += texts.length ? 1 : 0;
    this.tokens += texts.length;
    this.last = t;
    this.k = k ?? this.k;
    this.verified += drafted > 0 ? 1 : 0;
    this.drafted += drafted;
    this.accepted += accepted;
    for (let i = 0; i < drafted; i++) {
      this.draftedAt[i] = (this.draftedAt[i] ?? 0) + 1;
      this.acceptedAt[i] = (this.acceptedAt[i] ?? 0) + (accepted > i ? 1 : 0);
    }
  }

  // Tokens per second after the first chunk, so that prefill and queue do not count.
  // `now`: the current time while the answer still grows.
  speed(now = this.last) {
    const seconds = Math.max(now, this.last) - this.first;
    const tokens = this.tokens - this.firstTokens;
    return seconds > 0 && tokens > 0 ? tokens / seconds : null;
  }

  get acceptanceLength() {
    return this.verified ? 1 + this.accepted / this.verified : null;
  }

  get acceptanceRates() {
    return this.draftedAt.map((drafted, i) => this.acceptedAt[i] / drafted);
  }
}

// Assigns the characters of `text` to its tokens. A token may be hidden (an end token) or hold part
// of a character:
//   alignTexts(["Caf", "\ufffd", "\ufffd", " au", "<end>"], "Café au")
//   is ["Caf", "", "é", " au", ""].
export function alignTexts(spelled, text) {
  const texts = [];
  let rest = text;
  for (const token of spelled) {
    const start = token ? rest.indexOf(token) : -1;
    const skipped = start > 0 ? rest.slice(0, start) : "";
    if (skipped && texts.length) texts[texts.length - 1] += skipped;
    texts.push(start < 0 ? "" : texts.length ? token : skipped + token);
    if (start >= 0) rest = rest.slice(start + token.length);
  }
  texts[texts.length - 1] += rest;
  return texts;
}

// The same, or null where part of the text is of none of these tokens: a server that parses its
// answers holds text back and gives it with a later step. Spaces between words do not count: some
// tokenizers add them when they decode.
export function exactTexts(spelled, text) {
  if (!spelled?.length) return null;
  const texts = alignTexts(spelled, text);
  const isExact = (shown, i) => {
    const rest = shown.trim();
    return !rest || rest === spelled[i].trim() || spelled[i].includes("\ufffd");
  };
  return texts.every(isExact) ? texts : null;
}

// The thinking part of a chunk. Servers have two names for it.
export const deltaReasoning = (delta) => delta.reasoning_content ?? delta.reasoning ?? "";

// Splits a text at words into `count` pieces, for servers that do not send the tokens' texts.
export function splitText(text, count) {
  const words = text.match(/\s*(?:[\p{L}\p{M}\p{N}_]+|[^\s\p{L}\p{M}\p{N}_])|\s+/gu) ?? [text];
  const boundary = (i) => Math.floor((i * words.length) / count);
  return Array.from({ length: count }, (_, i) =>
    words.slice(boundary(i), boundary(i + 1)).join(""));
}

const formatRatio = (a, b) => `${(a / b).toFixed(2)}×`;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// The result in one or two sentences: whether the answers are identical, and which lane won.
export function verdict(records) {
  const complete = records.filter((record) => record.complete && record.totals.tokens);
  if (!complete.length) return "";
  const limited = records.length > complete.length ? " (of the lanes that finished)" : "";
  return [agreement(complete), `${winner(complete)}${limited}.`].filter(Boolean).join(" ");
}

function agreement(records) {
  if (records.length < 2) return "";
  const [first, ...others] = records.map((record) => record.text);
  const common = Math.min(...others.map((text) => commonPrefix(first, text)));
  if (common === Infinity) return "✓ Identical answers.";
  return `The answers differ after ${plural(common, "character")}: near ties may flip unless the`
    + " server runs with --exact.";
}

// The length of the common prefix; Infinity: the texts are equal.
function commonPrefix(a, b) {
  if (a === b) return Infinity;
  let i = 0;
  while (i < a.length && a[i] === b[i]) i++;
  return i;
}

// Complete records with a speed, fastest first.
function rank(records) {
  return records
    .filter((record) => record.complete && record.totals.speed())
    .map(({ method, totals }) => ({ method, totals, speed: totals.speed() }))
    .sort((a, b) => b.speed - a.speed);
}

// The method that was clearly the fastest, or null.
export function fastestMethod(records) {
  const [first, second] = rank(records);
  return second && first.speed >= second.speed * MIN_LEAD ? first.method : null;
}

function winner(records) {
  const ranked = rank(records);
  if (!ranked.length) return "The answer is too short to measure a speed";
  const [fastest, ...others] = ranked;
  const name = NAMES[fastest.method];
  const speed = `${fastest.speed.toFixed(fastest.speed < 100 ? 1 : 0)} tokens/s`;
  if (!others.length) return `${name}: ${plural(fastest.totals.tokens, "token")} at ${speed}`;
  const leads = others.map((other) => {
    const otherName = other.method === "none" ? "plain decoding" : NAMES[other.method];
    return `${formatRatio(fastest.speed, other.speed)} ${otherName}`;
  });
  if (fastest.speed < others[0].speed * MIN_LEAD) {
    const third = others[1] ? `, ${leads[1]}` : "";
    return `${name} and ${NAMES[others[0].method]} are level at ${speed}${third}`;
  }
  return `${name} won: ${speed}, ${leads.join(" and ")}`;
}
