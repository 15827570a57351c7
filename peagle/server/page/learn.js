// The panel of a server that learns: acceptance over time, versions, and what was learned from.

import { EMPTY, byId, createElement, showFacts, showText } from "./elements.js";
import { onStatus } from "./server.js";

const MAX_POINTS = 120;
const MAX_EVENTS = 5;
const CHART = { width: 600, height: 80, margin: 4 };

const points = []; // {length, version}: one for every status with drafts since the last one
let last = null;

const formatLength = (length) => (length == null ? EMPTY : length.toFixed(2));
const formatCount = (count) => count.toLocaleString("en");
const formatTime = (seconds) => new Date(seconds * 1000).toLocaleString();

function showStatus(status) {
  const { learn } = status;
  byId("learn").hidden = !learn;
  if (!learn) return;
  addPoint(status.engines?.[status.method], learn);
  showText(byId("learn-problem"), learn.failure ?? "");
  showFacts(byId("learn-facts"), [
    ["version in use", String(learn.current.number)],
    ["stored requests", formatCount(learn.store.documents)],
    ["stored tokens", formatCount(learn.store.tokens)],
    ["trainer", trainerText(learn.trainer)],
    ["accepted now", formatLength(points.at(-1)?.length)],
  ]);
  drawChart();
  byId("learn-versions").replaceChildren(...versionRows(learn));
  const events = learn.events.slice(-MAX_EVENTS).reverse();
  byId("learn-events").replaceChildren(
    ...events.map(({ time, kind, text }) =>
      createElement("li", `${formatTime(time)}: ${kind}. ${text}`)),
  );
}

function trainerText({ state, step, steps }) {
  return state === "training" ? `training, step ${step} of ${steps}` : state;
}

// The acceptance length between two statuses; counters that fell belong to another process.
function addPoint(engine, { current }) {
  if (!engine) return;
  const { drafts, accepted_tokens: accepted } = engine;
  if (last && drafts > last.drafts) {
    const length = 1 + (accepted - last.accepted) / (drafts - last.drafts);
    points.push({ length, version: current.number });
    if (points.length > MAX_POINTS) points.shift();
  }
  last = { drafts, accepted };
}

function versionRows({ versions, current, acceptance_lengths: lengths }) {
  const base = { number: 0, state: "the pair's own", acceptance_length: lengths["0"] };
  return [base, ...versions].reverse().map((version) => {
    const { held_back: held } = version;
    const cells = [
      version.number === current.number ? `${version.number}, in use` : String(version.number),
      version.state,
      version.documents ? `${formatCount(version.documents)} answers` : EMPTY,
      held ? `${formatLength(held.before)} → ${formatLength(held.after)}` : EMPTY,
      formatLength(version.acceptance_length),
    ];
    const row = document.createElement("tr");
    row.append(...cells.map((text) => createElement("td", text)));
    return row;
  });
}

// A line for the acceptance length, and a mark where another version began.
function drawChart() {
  const chart = byId("learn-chart");
  chart.toggleAttribute("hidden", points.length < 2);
  if (points.length < 2) return;
  const { width, height, margin } = CHART;
  const lengths = points.map(({ length }) => length);
  const top = Math.max(...lengths);
  const span = top - 1 || 1;
  const x = (i) => (i / (points.length - 1)) * width;
  const y = (length) => margin + ((top - length) / span) * (height - 2 * margin);
  const line = createShape("polyline", {
    points: lengths.map((length, i) => `${x(i).toFixed(1)},${y(length).toFixed(1)}`).join(" "),
  });
  const swaps = points.flatMap(({ version }, i) =>
    i && version !== points[i - 1].version
      ? [createShape("line", { x1: x(i), x2: x(i), y1: 0, y2: height })]
      : []);
  chart.replaceChildren(...swaps, line);
  const [first, newest] = [lengths[0], lengths.at(-1)].map(formatLength);
  chart.setAttribute("aria-label", `Acceptance length over time, from ${first} to ${newest}`);
}

function createShape(name, attributes) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
  return shape;
}

onStatus(showStatus);
