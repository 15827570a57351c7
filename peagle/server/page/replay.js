// Replays recorded answers side by side: all lanes start at once, each at its recorded speed.

const SPEEDS = [1, 0.5, 0.2, 0.1, 0.05, 0.02];
const MIN_DURATION = 1.5; // seconds: shorter replays are slowed down, and the page says so

const duration = (records) => Math.max(...records.map((record) => record.totals.last));

export const maxTokens = (records) =>
  Math.max(1, ...records.map((record) => record.totals.tokens));

export const plainSpeed = (records) =>
  records.find((record) => record.method === "none")?.totals.speed() ?? null;

export function suitableSpeed(records) {
  return SPEEDS.find((speed) => duration(records) / speed >= MIN_DURATION) ?? SPEEDS.at(-1);
}

// Resolves at the end of the slowest lane, or when aborted. `replaySpeed()` may change meanwhile.
export function play(records, lanes, signal, replaySpeed) {
  const end = duration(records);
  const tokens = maxTokens(records);
  const plain = records.find((record) => record.method === "none");
  let clock = 0;
  let previous = performance.now();
  return new Promise((resolve) => {
    const drawFrame = (now) => {
      clock += (Math.max(0, now - previous) / 1000) * replaySpeed();
      previous = now;
      if (signal.aborted || clock > end) return resolve();
      const speed = plain
        ? lanes.get("none").totals.speed(Math.min(clock, plain.totals.last))
        : null;
      for (const record of records) {
        const lane = lanes.get(record.method);
        lane.draw(record, clock, tokens, speed);
        const finished = clock >= record.totals.last;
        if (finished && lane.card.dataset.state === "replays") lane.setState("done");
      }
      requestAnimationFrame(drawFrame);
    };
    requestAnimationFrame(drawFrame);
  });
}
