// A lane and its row of the track: what is drawn of a record's first steps. Text is only ever set through textContent.

import { NAMES, Tally } from "./record.js";

const WHAT = {
  "p-eagle": "K drafts in one pass of the drafter",
  eagle3: "K drafts in K passes of the drafter",
  none: "one pass of the model for every token",
};
const seconds = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`);
const speed = (tps) => (tps === null ? "–" : tps.toFixed(tps < 100 ? 1 : 0));
const percent = (share) => `${Math.round(share * 100)} %`;

function make(id, method) {
  const node = document.getElementById(id).content.firstElementChild.cloneNode(true);
  node.classList.add(`m-${method}`);
  return node;
}

function element(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

export class Lane {
  constructor(method, track, lanes) {
    this.method = method;
    this.row = make("track-row", method);
    this.card = make("lane", method);
    this.row.querySelector(".name").textContent = NAMES[method];
    this.find("h3").textContent = NAMES[method];
    this.find(".what").textContent = WHAT[method];
    this.text = this.find(".text");
    this.text.setAttribute("aria-label", `Answer of ${NAMES[method]}`);
    track.append(this.row);
    lanes.append(this.card);
    this.server = null; // what /v1/peagle/status said last
    this.clear("ready");
  }

  find(selector) {
    return this.card.querySelector(selector);
  }

  show(visible) {
    this.row.hidden = this.card.hidden = !visible;
  }

  clear(state) {
    this.tally = new Tally();
    this.text.textContent = "";
    this.fail("");
    this.state(state);
    this.row.querySelector(".fill").style.width = "0";
    this.figures(null, null, null);
    this.positions();
  }

  // The fastest of a race wears a star.
  best(yes) {
    this.row.toggleAttribute("data-best", yes);
  }

  state(word) {
    this.find(".state").textContent = word;
    this.card.dataset.state = this.row.dataset.state = word.split(" ")[0];
  }

  fail(problem) {
    this.find(".problem").hidden = !problem;
    this.find(".problem").textContent = problem;
  }

  // Draw the steps up to second `now`; `of` tokens fill the rail, `plain` is plain decoding's speed.
  draw(record, now, of, plain) {
    const low = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    const added = document.createDocumentFragment();
    for (let i = this.tally.steps; i < record.steps.length && record.steps[i].t <= now; i++) {
      this.tally.add(record.steps[i]);
      added.append(...this.spans(record.steps[i]));
    }
    const running = record.ended === null || now < record.ended;
    if (added.childNodes.length) this.text.append(added);
    if (low) this.text.scrollTop = this.text.scrollHeight;
    this.row.querySelector(".fill").style.width = `${Math.min(100, (100 * this.tally.tokens) / Math.max(1, of))}%`;
    this.figures(this.tally.speed(running ? now : undefined), plain, this.tally.steps ? (running ? now : this.tally.last) : null);
    this.positions();
  }

  spans({ texts, accepted, drafted }) {
    return texts.map((text, i) => {
      const draft = i < accepted;
      const span = element("span", text, draft ? "token draft" : "token own");
      span.title = draft ? `draft ${i + 1} of ${drafted}, accepted` : drafted ? `the model's own, after ${accepted} of ${drafted} drafts` : "the model's own";
      return span;
    });
  }

  figures(tps, plain, time) {
    const over = tps && plain && this.method !== "none" ? `${(tps / plain).toFixed(2)}×` : "";
    this.find(".speed").textContent = this.row.querySelector(".speed").textContent = speed(tps);
    this.find(".ratio").textContent = over ? `${over} plain` : "";
    this.row.querySelector(".ratio").textContent = over;
    this.row.querySelector(".time").textContent = time === null ? "" : seconds(time);
    const { tokens, steps, acceptanceLength: length, drafted, accepted, first } = this.tally;
    const drafts = this.method !== "none";
    const facts = [
      ["tokens", tokens || "–"],
      ["passes", steps || "–"],
      ["first token", steps ? seconds(first) : "–"],
      drafts ? ["acceptance length", length ? length.toFixed(2) : "–"] : ["tokens a pass", steps ? (tokens / steps).toFixed(2) : "–"],
      ...(drafts ? [["drafts accepted", drafted ? percent(accepted / drafted) : "–"]] : []),
    ];
    this.list(facts);
    this.reason();
  }

  list(facts) {
    const list = this.find(".said");
    if (list.childElementCount !== facts.length)
      list.replaceChildren(...facts.map(([name]) => {
        const pair = document.createElement("div");
        pair.append(element("dt", name), element("dd", ""));
        return pair;
      }));
    facts.forEach(([name, value], i) => {
      const [dt, dd] = list.children[i].children;
      dt.textContent = name;
      dd.textContent = value;
    });
  }

  // Bars: the share of drafts accepted at each position, of this answer, or of all answers before there is one.
  positions() {
    const own = this.tally.shares;
    const shares = own.length ? own : this.method === "none" ? [] : (this.server?.accepted_per_position ?? []);
    this.find(".positions").hidden = !shares.length;
    this.find(".positions h4").textContent = own.length ? "accepted by position" : "accepted by position, all answers so far";
    const list = this.find(".positions ol");
    while (list.childElementCount > shares.length) list.lastElementChild.remove();
    shares.forEach((share, i) => {
      if (!list.children[i]) list.append(bar(i + 1));
      const item = list.children[i];
      item.style.setProperty("--share", share);
      item.title = `position ${i + 1}: ${percent(share)}`;
      item.querySelector(".hidden").textContent = `position ${i + 1}: ${percent(share)}`;
    });
  }

  reason() {
    const k = this.tally.k ?? this.server?.k;
    const why = this.server?.k_reason;
    this.find(".k").textContent = this.method === "none" || k === null || k === undefined ? "" : `K ${k}${why ? `: ${why}` : ""}`;
  }

  status(server) {
    this.server = server;
    const { running = 0, waiting = 0, kv_usage: kv = 0 } = server;
    this.find(".server").textContent = `Server: ${running} running, ${waiting} waiting, KV cache ${percent(kv)} used`;
    this.reason();
    if (!this.tally.steps) this.positions();
  }
}

function bar(position) {
  const item = document.createElement("li");
  const number = element("span", position);
  number.setAttribute("aria-hidden", "true");
  item.append(element("i", ""), number, element("span", "", "hidden"));
  return item;
}
