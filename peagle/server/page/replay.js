// What was recorded, drawn again side by side: all lanes begin at once, each at its own recorded speed.

const PACES = [1, 0.5, 0.2, 0.1, 0.05, 0.02];
const LONG_ENOUGH = 1.5; // seconds: a replay that would be over sooner is slowed down, and says so

const length = (records) => Math.max(...records.map((one) => one.tally.last));
export const longest = (records) => Math.max(1, ...records.map((one) => one.tally.tokens));
export const plainSpeed = (records) => records.find((one) => one.method === "none")?.tally.speed() ?? null;

export function fittingPace(records) {
  return PACES.find((pace) => length(records) / pace >= LONG_ENOUGH) ?? PACES.at(-1);
}

// Resolves at the end of the slowest lane, or when it is aborted; `pace()` may change on the way.
export function play(records, lanes, signal, pace) {
  const end = length(records), most = longest(records);
  const reference = records.find((one) => one.method === "none");
  let clock = 0, before = performance.now();
  return new Promise((resolve) => {
    const frame = (now) => {
      clock += (Math.max(0, now - before) / 1000) * pace();
      before = now;
      if (signal.aborted || clock > end) return resolve();
      const plain = reference ? lanes.get("none").tally.speed(Math.min(clock, reference.tally.last)) : null;
      for (const one of records) {
        const lane = lanes.get(one.method);
        lane.draw(one, clock, most, plain);
        if (clock >= one.tally.last && lane.card.dataset.state === "replays") lane.state("done");
      }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
}
