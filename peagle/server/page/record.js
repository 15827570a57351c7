// What a lane did: its steps with their times, and what can be counted from the first of them.

export const METHODS = ["p-eagle", "eagle3", "none"]; // as they are shown
export const NAMES = { "p-eagle": "P-EAGLE", eagle3: "EAGLE-3", none: "Plain decoding" };
export const LEVEL = 1.05; // closer than this is no victory: one race has no spread

// A step is what one chunk brought: {t: seconds since the request was sent, texts: one a token, accepted, drafted, k}.
// The first `accepted` of its tokens were drafts, the one after them is the target's own.
export class Record {
  constructor(method) {
    this.method = method;
    this.steps = [];
    this.tally = new Tally();
    this.ended = null; // seconds, when the last byte was there
    this.reason = ""; // the server's finish_reason
    this.problem = this.cause = ""; // why there is no whole answer; without how much of it there is
    this.stopped = false;
    this.locked = false; // a key is missing
    this.estimated = false; // the server gave no texts of single tokens
    this.counted = 0; // tokens so far, where a server that gives no steps counts along
  }

  add(t, chunk) {
    const text = chunk.choices?.[0]?.delta?.content ?? "";
    const said = chunk.peagle;
    const grown = (chunk.usage?.completion_tokens ?? 0) - this.counted;
    this.counted += Math.max(0, grown);
    const count = said?.tokens ?? (text ? Math.max(1, grown) : 0);
    if (!count && !text) return;
    if (!said?.texts?.length && count > 1) this.estimated = true;
    const texts = said?.texts?.length ? fit(said.texts, text) : split(text, Math.max(1, count));
    const step = { t, texts, accepted: said?.accepted ?? 0, drafted: said?.drafted ?? 0, k: said?.k ?? null };
    this.steps.push(step);
    this.tally.add(step);
  }

  get whole() {
    return this.ended !== null && !this.problem && !this.stopped;
  }

  get text() {
    return this.steps.map((step) => step.texts.join("")).join("");
  }
}

// Sums over the first steps of a record; a replay grows one again from nothing.
export class Tally {
  constructor() {
    this.steps = this.tokens = this.first = this.last = this.leading = 0;
    this.passes = this.drafted = this.accepted = 0; // passes that verified drafts
    this.draftedAt = [];
    this.acceptedAt = [];
    this.k = null;
  }

  add({ t, texts, accepted, drafted, k }) {
    if (!this.steps) {
      this.first = t;
      this.leading = texts.length;
    }
    this.steps += 1;
    this.tokens += texts.length;
    this.last = t;
    this.k = k ?? this.k;
    this.passes += drafted > 0 ? 1 : 0;
    this.drafted += drafted;
    this.accepted += accepted;
    for (let i = 0; i < drafted; i++) {
      this.draftedAt[i] = (this.draftedAt[i] ?? 0) + 1;
      this.acceptedAt[i] = (this.acceptedAt[i] ?? 0) + (accepted > i ? 1 : 0);
    }
  }

  // Tokens a second after the first chunk, so that prefill and queue do not count; `now` while more may come.
  speed(now = this.last) {
    const seconds = Math.max(now, this.last) - this.first;
    return seconds > 0 && this.tokens > this.leading ? (this.tokens - this.leading) / seconds : null;
  }

  get acceptanceLength() {
    return this.passes ? 1 + this.accepted / this.passes : null;
  }

  get shares() {
    return this.draftedAt.map((of, i) => this.acceptedAt[i] / of);
  }
}

// What of `text` each token brought. Tokens may spell what is not shown (an end), or half a character:
// fit(["Caf", "\ufffd", "\ufffd", " au", "<end>"], "Café au") is ["Caf", "", "é", " au", ""].
export function fit(spelled, text) {
  const texts = [];
  let rest = text;
  for (const one of spelled) {
    const at = one ? rest.indexOf(one) : -1;
    const skipped = at > 0 ? rest.slice(0, at) : "";
    if (skipped && texts.length) texts[texts.length - 1] += skipped;
    texts.push(at < 0 ? "" : texts.length ? one : skipped + one);
    if (at >= 0) rest = rest.slice(at + one.length);
  }
  texts[texts.length - 1] += rest;
  return texts;
}

// A text as `count` pieces, cut where words begin: for servers that do not say where tokens end.
export function split(text, count) {
  const words = text.match(/\s*(?:[\p{L}\p{M}\p{N}_]+|[^\s\p{L}\p{M}\p{N}_])|\s+/gu) ?? [text];
  const at = (j) => Math.floor((j * words.length) / count);
  return Array.from({ length: count }, (_, j) => words.slice(at(j), at(j + 1)).join(""));
}

const ratio = (a, b) => `${(a / b).toFixed(2)}×`;
const tokens = (n) => `${n} token${n === 1 ? "" : "s"}`;

// The result in a sentence or two: are the answers one and the same, who won, by how much.
export function verdict(records) {
  const whole = records.filter((record) => record.whole && record.tally.tokens);
  if (!whole.length) return "";
  const broken = records.length > whole.length ? " (of the lanes that finished)" : "";
  return [alike(whole), `${winner(whole)}${broken}.`].filter(Boolean).join(" ");
}

function alike(whole) {
  if (whole.length < 2) return "";
  const [first, ...rest] = whole.map((record) => record.text);
  const parting = Math.min(...rest.map((text) => parts(first, text)));
  return parting === Infinity ? "✓ Identical answers." : `The answers part after ${parting} character${parting === 1 ? "" : "s"}: near ties may flip unless the server runs with --exact.`;
}

function parts(a, b) {
  if (a === b) return Infinity;
  let i = 0;
  while (i < a.length && a[i] === b[i]) i++;
  return i;
}

// Whole answers with a speed, the fastest first.
function ranking(records) {
  return records
    .filter((record) => record.whole && record.tally.speed())
    .map(({ method, tally }) => ({ method, tally, speed: tally.speed() }))
    .sort((a, b) => b.speed - a.speed);
}

// The method that was clearly the fastest, or none.
export function best(records) {
  const [first, second] = ranking(records);
  return second && first.speed >= second.speed * LEVEL ? first.method : null;
}

function winner(whole) {
  const ranked = ranking(whole);
  if (!ranked.length) return "Too short an answer to tell a speed";
  const [fastest, ...others] = ranked;
  const pace = `${fastest.speed.toFixed(fastest.speed < 100 ? 1 : 0)} tokens/s`;
  if (!others.length) return `${NAMES[fastest.method]}: ${tokens(fastest.tally.tokens)} at ${pace}`;
  const over = others.map((lane) => `${ratio(fastest.speed, lane.speed)} ${lane.method === "none" ? "plain decoding" : NAMES[lane.method]}`);
  if (fastest.speed < others[0].speed * LEVEL)
    return `${NAMES[fastest.method]} and ${NAMES[others[0].method]} are level at ${pace}${others[1] ? `, ${over[1]}` : ""}`;
  return `${NAMES[fastest.method]} won: ${pace}, ${over.join(" and ")}`;
}
