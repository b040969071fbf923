// Curves of the loss: what is kept of thousands of steps, and their picture.

const MOST = 600; // points of a curve; beyond, neighbours are averaged
const HEIGHT = 260, LEFT = 48, BOTTOM = 28, TOP = 22;

/** Means of equally many steps, at most MOST of them: points are [the last step, the mean loss]. */
export class Curve {
  constructor({ points = [], width = 1, sum = 0, count = 0 } = {}) {
    Object.assign(this, { points, width, sum, count });
  }

  add(step, loss) {
    this.sum += loss;
    if (++this.count < this.width) return;
    this.points.push([step, this.sum / this.count]);
    this.sum = this.count = 0;
    if (this.points.length < MOST) return;
    this.points = this.points.flatMap((p, i, all) => i % 2 ? [[p[0], (p[1] + all[i - 1][1]) / 2]] : []);
    this.width *= 2;
  }
}

/** An exponentially weighted mean of the points, over about a thirtieth of them. */
function smoothed(points) {
  const keep = 1 - 1 / Math.max(1, points.length / 30);
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    sum = keep * sum + y;
    weight = keep * weight + 1;
    return [x, sum / weight];
  });
}

const rounded = (x) => Number(x.toPrecision(2)).toString();

/** About five round numbers between two others, for an axis. */
function ticks(low, high) {
  const rough = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => (first + i) * step);
}

/** Draw the loss and the held-out loss into an element; the scale is logarithmic where they span a factor of 20. */
export function draw(element, losses, held) {
  const width = Math.max(280, element.clientWidth || 600), all = [...losses, ...held];
  if (!all.length) {
    element.innerHTML = `<svg viewBox="0 0 ${width} ${HEIGHT}"><text x="50%" y="50%" text-anchor="middle">The loss appears here.</text></svg>`;
    return;
  }
  const right = Math.max(1, ...all.map(([x]) => x)), values = all.map(([, y]) => y);
  const least = Math.min(...values), most = Math.max(...values), log = least > 0 && most > 20 * least;
  const scale = log ? Math.log10 : (y) => y;
  const low = log ? scale(least) : Math.min(0, least), high = Math.max(scale(most), low + 1e-9);
  const x = (step) => LEFT + (step / right) * (width - LEFT - 8);
  const y = (loss) => TOP + (1 - (scale(loss) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const path = (points) => points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(' ');
  const marks = log ? ticks(low, high).map((t) => 10 ** t) : ticks(low, high);
  const rows = marks.map((v) => `<line class="grid" x1="${LEFT}" x2="${width - 8}" y1="${y(v)}" y2="${y(v)}"/>` +
    `<text x="${LEFT - 6}" y="${y(v) + 4}" text-anchor="end">${rounded(v)}</text>`).join('');
  const columns = ticks(0, right).filter((v) => Number.isInteger(v)).map((v, i) =>
    `<text x="${x(v)}" y="${HEIGHT - 8}" text-anchor="${i ? (x(v) > width - 30 ? 'end' : 'middle') : 'start'}">${i ? v : 'step 0'}</text>`).join('');
  const keys = `<text style="fill:var(--curve)" x="${LEFT}" y="12">loss</text>` +
    (held.length ? `<text style="fill:var(--held)" x="${LEFT + 44}" y="12">held-out loss</text>` : '');
  const mean = smoothed(losses), said = mean.length ? `Loss, ${rounded(mean[0][1])} at first, ${rounded(mean.at(-1)[1])} now` : 'Loss';
  element.innerHTML = `<svg viewBox="0 0 ${width} ${HEIGHT}" role="img" aria-label="${said}">${rows}${columns}` +
    `<polyline points="${path(losses)}"/><polyline class="curve" points="${path(mean)}"/>` +
    `<polyline class="held" points="${path(held)}"/>${keys}</svg>`;
}
