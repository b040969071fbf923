// The rows of a site's data.bin, and batches of them in an order that is a function of a seed and the step.
import { ARRAYS, length } from './trainer.js';

/** Numbers in 0 … 1 from a seed (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014, in 32 bits). */
function random(seed) {
  return () => {
    seed = (seed + 0x9e3779b9) | 0;
    let z = seed ^ (seed >>> 16);
    z = Math.imul(z, 0x21f0aaad);
    z ^= z >>> 15;
    z = Math.imul(z, 0x735a2d97);
    return ((z ^ (z >>> 15)) >>> 0) / 2 ** 32;
  };
}

export class Rows {
  /** about: {rows, train, arrays: {name: {dtype, dims, at}}} of site.json; the rows behind the first `train` are held out. */
  constructor(about, buffer) {
    this.train = about.train;
    this.rows = about.rows;
    this.arrays = Object.fromEntries(Object.entries(about.arrays).map(([name, { dtype, dims, at }]) =>
      [name, { dims: dims.slice(1), data: new ARRAYS[dtype](buffer, at, length(dims)) }]));
  }

  /** The rows of these numbers, as `Trainer` takes them. */
  batch(numbers) {
    return Object.fromEntries(Object.entries(this.arrays).map(([name, { dims, data }]) => {
      const n = length(dims), rows = new data.constructor(n * numbers.length);
      numbers.forEach((row, i) => rows.set(data.subarray(row * n, row * n + n), i * n));
      return [name, { data: rows, dims: [numbers.length, ...dims] }];
    }));
  }

  /** What step number `step` reads: every epoch is a permutation of the rows to train on; a last part of one is left out. */
  shuffled(step, size, seed = 0) {
    const steps = Math.max(1, Math.floor(this.train / size)), epoch = Math.floor(step / steps), first = (step % steps) * size;
    if (this.epoch !== epoch) {
      const draw = random(seed * 1000003 + epoch);
      this.order = Array.from({ length: this.train }, (_, i) => i);
      for (let i = this.train - 1; i > 0; i--) {
        const j = Math.floor(draw() * (i + 1));
        [this.order[i], this.order[j]] = [this.order[j], this.order[i]];
      }
      this.epoch = epoch;
    }
    return this.batch(this.order.slice(first, first + size));
  }

  /** The held-out rows, in batches; whole: without a last smaller one. */
  *heldOut(size, whole = false) {
    for (let first = this.train; first + (whole ? size : 1) <= this.rows; first += size) {
      yield this.batch(Array.from({ length: Math.min(size, this.rows - first) }, (_, i) => first + i));
    }
  }
}
