// An answer on the page: thinking, text, calls and figures, drawn while it arrives.

import {
  EMPTY,
  cloneTemplate,
  formatPercent,
  formatSeconds,
  formatSpeed,
  showFacts,
  showText,
  tokenSpans,
} from "../elements.js";
import { NAMES } from "../record.js";
import { CallView } from "./call_view.js";

const STATES = {
  waits: "waits for the first token",
  runs: "answers",
  done: "",
  stopped: "stopped",
  failed: "failed",
};

export class AnswerView {
  constructor(answer, log) {
    this.answer = answer;
    this.node = cloneTemplate("answer", answer.method);
    this.calls = [];
    this.drawn = { reasoning: 0, content: 0 }; // parts
    this.folded = false; // the thinking, once
    this.thinking = this.find(".thinking");
    // Who opens or closes the thinking by hand wants it to stay so.
    this.thinking.firstElementChild.addEventListener("click", () => {
      this.folded = true;
    });
    this.find("h2").textContent = NAMES[answer.method] ?? answer.method;
    log.append(this.node);
    this.draw(0);
  }

  find(selector) {
    return this.node.querySelector(selector);
  }

  // `now`: seconds since the request was sent.
  draw(now) {
    const { answer } = this;
    this.append("reasoning", this.find(".thoughts"));
    this.append("content", this.find(".words"));
    this.drawThinking();
    answer.calls.forEach((call, i) => this.drawCall(call, i));
    this.node.dataset.state = answer.state;
    this.find(".state").textContent = STATES[answer.state];
    showText(this.find(".problem"), answer.problem);
    showText(this.find(".note"), this.note());
    showFacts(this.find(".facts"), this.facts(now));
  }

  append(name, node) {
    const parts = this.answer[name];
    for (; this.drawn[name] < parts.length; this.drawn[name]++) {
      node.append(...tokenSpans(parts[this.drawn[name]]));
    }
  }

  // Open while the thinking arrives, folded when something follows it.
  drawThinking() {
    const { answer } = this;
    const over = !["waits", "runs"].includes(answer.state) || answer.text.trim()
      || answer.calls.length;
    this.thinking.hidden = !answer.reasoning.length;
    if (this.folded) return;
    this.thinking.open = !over;
    this.folded = Boolean(over);
  }

  drawCall(call, i) {
    if (!this.calls[i]) {
      this.calls[i] = new CallView();
      this.find(".calls").append(this.calls[i].node);
    }
    this.calls[i].draw(call);
  }

  note() {
    const { answer } = this;
    if (answer.finishReason === "length") return "Cut off at the limit of tokens.";
    if (answer.state === "done" && !answer.text && !answer.calls.length) return "An empty answer.";
    return "";
  }

  facts(now) {
    const { record, usage, state } = this.answer;
    const { totals } = record;
    const tokens = usage?.completion_tokens ?? totals.tokens;
    const facts = [
      ["tokens/s", formatSpeed(totals.speed(state === "runs" ? now : undefined))],
      ["tokens", tokens || EMPTY],
      ["first token", totals.steps ? formatSeconds(totals.first) : EMPTY],
    ];
    if (totals.drafted) {
      facts.splice(1, 0, ["acceptance length", totals.acceptanceLength.toFixed(2)],
        ["drafts accepted", formatPercent(totals.accepted / totals.drafted)]);
    }
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? null;
    const note = cached === null ? "" : `, ${cached} cached`;
    if (usage) facts.push(["prompt tokens", `${usage.prompt_tokens}${note}`]);
    return facts;
  }

  // Fields for the results of the calls. `onResults(texts)`: all of them are typed.
  askResults(onResults) {
    const form = this.find(".results");
    const calls = this.answer.finishedCalls;
    const views = this.calls.slice(0, calls.length);
    views.forEach((view, i) => view.askResult(calls[i], calls.length > 1 ? i + 1 : 0));
    form.querySelector("button").hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const missing = views.find((view) => !view.result.trim());
      if (missing) missing.field.focus();
      else onResults(views.map((view) => view.result));
    });
  }

  closeResults() {
    for (const view of this.calls) view.close();
    this.find(".results button").hidden = true;
  }

  // An answer that is not part of the conversation. `onEdit` is null where nothing can be edited.
  offerRetry(onResend, onEdit) {
    this.find(".retry").hidden = false;
    this.find(".edit").hidden = !onEdit;
    this.find(".resend").addEventListener("click", onResend);
    if (onEdit) this.find(".edit").addEventListener("click", onEdit);
  }
}
