// Elements and figures that both views show. Text is only ever set through textContent.

export const EMPTY = "–";

export const byId = (id) => document.getElementById(id);
export const formatSeconds = (s) =>
  s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
export const formatSpeed = (speed) => (speed === null ? EMPTY : speed.toFixed(speed < 100 ? 1 : 0));
export const formatPercent = (fraction) => `${Math.round(fraction * 100)} %`;

export function cloneTemplate(id, method = "") {
  const node = byId(id).content.firstElementChild.cloneNode(true);
  if (method) node.classList.add(`m-${method}`);
  return node;
}

export function createElement(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

// Says a text to screen readers.
export function announce(text) {
  byId("announcer").textContent = text;
}

export function showText(node, text) {
  node.hidden = !text;
  // An unchanged text must not be read out again.
  if (node.textContent !== text) node.textContent = text;
}

// Shift+Enter is a new line. An Enter that ends the composition of a character does not count.
export function submitOnEnter(field) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    field.form.requestSubmit();
  });
}

// One element per token of a step: the first `accepted` ones were drafts. A rest has no mark.
export function tokenSpans({ texts, rest, accepted, drafted }) {
  const spans = texts.map((text, i) => {
    const isDraft = i < accepted;
    const span = createElement("span", text, isDraft ? "token draft" : "token own");
    if (isDraft) span.title = `draft ${i + 1} of ${drafted}, accepted`;
    else if (drafted) span.title = `the model's own, after ${accepted} of ${drafted} drafts`;
    else span.title = "the model's own";
    return span;
  });
  return rest ? [...spans, createElement("span", rest)] : spans;
}

// Fills a <dl> with pairs of name and value.
export function showFacts(list, facts) {
  if (list.childElementCount !== facts.length) {
    list.replaceChildren(...facts.map(() => {
      const entry = document.createElement("div");
      entry.append(createElement("dt", ""), createElement("dd", ""));
      return entry;
    }));
  }
  facts.forEach(([name, value], i) => {
    const [dt, dd] = list.children[i].children;
    dt.textContent = name;
    dd.textContent = value;
  });
}
