// Scores of classes at every position of an output: the class that is chosen, and how many are right.

/** Classes of about equal weight to the eye, the first one dark; more of them take the same hues lighter. */
export const PALETTE = ['#26323c', '#2f7fc4', '#d4641f', '#35945a', '#9464c8', '#cf4673', '#a3811a', '#1f9490'];

export const colour = (c) => {
  const hex = PALETTE[c % PALETTE.length], lighter = Math.floor(c / PALETTE.length);
  return [1, 3, 5].map((at) => {
    const x = parseInt(hex.slice(at, at + 2), 16);
    return Math.round(255 - (255 - x) * 0.6 ** lighter);
  });
};

/** The class with the highest score of every position, the first of equal ones, along axis 1, or the last one with -1. */
export function chosen({ data, dims }, axis) {
  const rest = dims.slice(1), classes = axis === -1 ? rest.at(-1) : rest[0];
  const positions = rest.reduce((a, b) => a * b, 1) / classes, found = new Int32Array(dims[0] * positions);
  for (let n = 0; n < dims[0]; n++) {
    for (let p = 0; p < positions; p++) {
      const at = axis === -1 ? (c) => (n * positions + p) * classes + c : (c) => (n * classes + c) * positions + p;
      let best = 0;
      for (let c = 1; c < classes; c++) if (data[at(c)] > data[at(best)]) best = c;
      found[n * positions + p] = best;
    }
  }
  return found;
}

/** How many positions have their label as the highest score, of how many that count; null where that is no such output. */
export function right(output, labels, { axis, ignored }) {
  if (axis === undefined || axis === null || output.dims.length < 2) return null;
  const found = chosen(output, axis);
  if (found.length !== labels.length) return null;
  let hits = 0, count = 0;
  for (let i = 0; i < found.length; i++) {
    const label = Number(labels[i]);
    if (label === ignored) continue;
    count++;
    hits += found[i] === label;
  }
  return { hits, count };
}

/** What a schedule makes of a learning rate in step t, from 0: 1, or less. about: {name, steps, warmup}. */
export function factor(about, t) {
  if (!about) return 1;
  const share = Math.min(1, t / about.steps), rise = about.warmup ? Math.min(1, (t + 1) / about.warmup) : 1;
  return rise * ({ linear: 1 - share, cosine: (1 + Math.cos(Math.PI * share)) / 2 }[about.name] ?? 1);
}
