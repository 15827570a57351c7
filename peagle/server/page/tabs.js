// The tabs of the views. Arrow keys move between them; the address holds the selected one.

import { readParams, saveParams } from "./address.js";
import { byId } from "./elements.js";

const VIEWS = ["race", "chat"]; // the first is the default

export const activeView = () => VIEWS.find((view) => !byId(`${view}-view`).hidden);

export function showView(selected) {
  for (const view of VIEWS) {
    const tab = byId(`${view}-tab`);
    tab.setAttribute("aria-selected", String(view === selected));
    tab.tabIndex = view === selected ? 0 : -1;
    byId(`${view}-view`).hidden = view !== selected;
  }
}

function selectView(view) {
  showView(view);
  saveParams({ view: view === VIEWS[0] ? null : view });
}

function onKey(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const view = VIEWS.at((VIEWS.indexOf(activeView()) + step) % VIEWS.length);
  selectView(view);
  byId(`${view}-tab`).focus();
}

function restoreView() {
  const view = readParams().get("view");
  showView(VIEWS.includes(view) ? view : VIEWS[0]);
}

export function startTabs() {
  for (const view of VIEWS) {
    byId(`${view}-tab`).addEventListener("click", () => selectView(view));
    byId(`${view}-tab`).addEventListener("keydown", onKey);
  }
  addEventListener("hashchange", restoreView);
  restoreView();
}
