// A lane and its row of the track.

import {
  EMPTY,
  cloneTemplate,
  createElement,
  formatPercent,
  formatSeconds,
  formatSpeed,
  showFacts,
  showText,
  tokenSpans,
} from "./elements.js";
import { NAMES, Totals } from "./record.js";

const DESCRIPTIONS = {
  "p-eagle": "K drafts in one pass of the drafter",
  eagle3: "K drafts in K passes of the drafter",
  none: "one pass of the model for every token",
};
const SCROLL_MARGIN = 40; // pixels from the end within which the text follows the answer

export class Lane {
  constructor(method, track, lanes) {
    this.method = method;
    this.row = cloneTemplate("track-row", method);
    this.card = cloneTemplate("lane", method);
    this.row.querySelector(".name").textContent = NAMES[method];
    this.find("h3").textContent = NAMES[method];
    this.find(".description").textContent = DESCRIPTIONS[method];
    this.text = this.find(".text");
    this.text.setAttribute("aria-label", `Answer of ${NAMES[method]}`);
    track.append(this.row);
    lanes.append(this.card);
    this.engine = null; // the engine's part of the last /v1/peagle/status
    this.clear("ready");
  }

  find(selector) {
    return this.card.querySelector(selector);
  }

  setVisible(visible) {
    this.row.hidden = !visible;
    this.card.hidden = !visible;
  }

  clear(state) {
    this.totals = new Totals();
    this.text.textContent = "";
    this.showProblem("");
    this.setState(state);
    this.row.querySelector(".fill").style.width = "0";
    this.showFigures(null, null, null);
    this.showPositions();
  }

  // The fastest lane of a race has a star.
  setFastest(fastest) {
    this.row.toggleAttribute("data-fastest", fastest);
  }

  setState(state) {
    this.find(".state").textContent = state;
    const keyword = state.split(" ")[0];
    this.card.dataset.state = keyword;
    this.row.dataset.state = keyword;
  }

  showProblem(problem) {
    showText(this.find(".problem"), problem);
  }

  // Draws the steps up to second `now`. The rail is full at `maxTokens`.
  draw(record, now, maxTokens, plainSpeed) {
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    const follow = scrollHeight - scrollTop - clientHeight < SCROLL_MARGIN;
    const added = document.createDocumentFragment();
    for (let i = this.totals.steps; i < record.steps.length && record.steps[i].t <= now; i++) {
      this.totals.add(record.steps[i]);
      added.append(...tokenSpans(record.steps[i]));
    }
    const running = record.ended === null || now < record.ended;
    if (added.childNodes.length) this.text.append(added);
    if (follow) this.text.scrollTop = this.text.scrollHeight;
    const progress = (100 * this.totals.tokens) / Math.max(1, maxTokens);
    this.row.querySelector(".fill").style.width = `${Math.min(100, progress)}%`;
    const time = this.totals.steps ? (running ? now : this.totals.last) : null;
    this.showFigures(this.totals.speed(running ? now : undefined), plainSpeed, time);
    this.showPositions();
  }

  showFigures(speed, plainSpeed, time) {
    const comparable = speed && plainSpeed && this.method !== "none";
    const ratio = comparable ? `${(speed / plainSpeed).toFixed(2)}×` : "";
    this.find(".speed").textContent = formatSpeed(speed);
    this.row.querySelector(".speed").textContent = formatSpeed(speed);
    this.find(".ratio").textContent = ratio ? `${ratio} plain` : "";
    this.row.querySelector(".ratio").textContent = ratio;
    this.row.querySelector(".time").textContent = time === null ? "" : formatSeconds(time);
    showFacts(this.find(".facts"), this.facts());
    this.showK();
  }

  facts() {
    const { tokens, steps, passes, acceptanceLength, drafted, accepted, first } = this.totals;
    const facts = [
      ["tokens", tokens || EMPTY],
      ["passes", passes || EMPTY],
      ["first token", steps ? formatSeconds(first) : EMPTY],
    ];
    if (this.method === "none") {
      facts.push(["tokens per pass", passes ? (tokens / passes).toFixed(2) : EMPTY]);
    } else {
      facts.push(
        ["acceptance length", acceptanceLength ? acceptanceLength.toFixed(2) : EMPTY],
        ["drafts accepted", drafted ? formatPercent(accepted / drafted) : EMPTY],
      );
    }
    return facts;
  }

  // One bar per draft position: the acceptance rate of this answer, or of all answers so far.
  showPositions() {
    const own = this.totals.acceptanceRates;
    let rates = own;
    if (!own.length && this.method !== "none") rates = this.engine?.accepted_per_position ?? [];
    this.find(".positions").hidden = !rates.length;
    this.find(".positions h4").textContent = own.length
      ? "accepted by position"
      : "accepted by position, all answers so far";
    const list = this.find(".positions ol");
    while (list.childElementCount > rates.length) list.lastElementChild.remove();
    rates.forEach((rate, i) => {
      if (!list.children[i]) list.append(createBar(i + 1));
      const item = list.children[i];
      const label = `position ${i + 1}: ${formatPercent(rate)}`;
      item.style.setProperty("--share", rate);
      item.title = label;
      item.querySelector(".visually-hidden").textContent = label;
    });
  }

  // K, and why the server chose it.
  showK() {
    const k = this.totals.k ?? this.engine?.k ?? null;
    const reason = this.engine?.k_reason;
    const unknown = this.method === "none" || k === null;
    this.find(".k").textContent = unknown ? "" : `K ${k}${reason ? `: ${reason}` : ""}`;
  }

  showStatus(engine) {
    this.engine = engine;
    const { running = 0, waiting = 0, kv_usage: kvUsage = 0 } = engine;
    this.find(".server").textContent = `Server: ${running} running, ${waiting} waiting, `
      + `KV cache ${formatPercent(kvUsage)} used`;
    this.showK();
    if (!this.totals.steps) this.showPositions();
  }
}

function createBar(position) {
  const item = document.createElement("li");
  const number = createElement("span", position);
  number.setAttribute("aria-hidden", "true");
  item.append(createElement("i", ""), number, createElement("span", "", "visually-hidden"));
  return item;
}
