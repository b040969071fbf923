// Trains beside the page. Messages to here: {do, …}; from here: {what, …}, and {answer: number, …} to those with a number.
import { Diverged, Trainer } from './trainer.js';
import { Rows } from './rows.js';
import { Curve } from './chart.js';
import { factor, right } from './classes.js';
import * as store from './store.js';

const SAVE_EVERY = 2000, TELL_EVERY = 100; // milliseconds
const OUT_OF_MEMORY = /alloc|memory|OOM|out of bounds|SafeInt/i;

let site, rows, trainer, ort, curve, held, batch, rate, running = false, kept = true, savedAt = 0, keptAt = 0, good, stopped;

/** One after the other: a session runs once at a time, and what is read of the state is of one step. */
let last = Promise.resolve();
const inTurn = (act) => { last = last.then(act, act); return last; };

const tell = (what, about = {}) => postMessage({ what, ...about });
const trouble = (sentence, more) => tell('trouble', { sentence, ...more });
const read = async (file) => {
  const response = await fetch(file).catch(() => null);
  if (!response?.ok) throw new Error(`${file} could not be loaded (${response?.status ?? 'no answer'}). Is the folder complete?`);
  return response.arrayBuffer();
};
const json = async (file) => JSON.parse(new TextDecoder().decode(await read(file)));

/** Until this worker ends, nobody else trains this site in this browser; browsers give locks to secure pages only. */
async function alone() {
  const take = (options) => new Promise((resolve, reject) => navigator.locks.request(
    `onnx-backprop ${site.id}`, options, (lock) => { resolve(lock); return lock && new Promise(() => {}); }).catch(reject));
  if (await take({ ifAvailable: true })) return;
  tell('waiting');
  await take({});
}

async function start({ name, resume }) {
  site = await json('site.json');
  tell('site', { site });
  if (navigator.locks) {
    navigator.locks.request(name, () => new Promise(() => {})); // which the page gets when this worker is no more
    await alone();
  } else {
    kept = false;
    trouble('Over plain http the browser keeps no progress: a reload starts anew. Use https, or localhost.');
  }
  tell('loading');
  if (site.session && !navigator.gpu) {
    throw new Error('This page trains on WebGPU, which this browser does not have');
  }
  try {
    ort = await import(new URL(site.runtime, location.href));
  } catch (e) {
    throw new Error(`onnxruntime-web could not be loaded from ${site.runtime} (${e.message}). ` +
      'Without a network, write the site with --runtime.');
  }
  ort.env.logLevel = 'error';
  rows = new Rows(site.data, await read('data.bin'));
  trainer = await Trainer.create(ort, (file) => read(`model/${file}`), site.session ?? {});
  rate = site.learningRate;
  batch = site.batch;
  curve = new Curve();
  held = [];
  const record = await restore();
  if (!record) await save(); // so that there is something to go back to
  tell('ready', now());
  if (record?.running && resume) await run();
}

const now = () => ({
  steps: trainer.steps, curve, held, rate, batch, threads: site.session ? null : ort.env.wasm.numThreads,
});

/** Take what is kept, if anything is. */
async function restore(withRate = true) {
  if (!kept) return null;
  try {
    const record = await store.load(site.id);
    if (!record) return null;
    trainer.restore(record.state, record.steps);
    keptAt = record.steps;
    good = undefined;
    if (withRate) ({ rate } = record);
    ({ batch, held } = record);
    curve = new Curve(record.curve);
    return record;
  } catch (e) {
    kept = false; // what is there, whatever it is, is not overwritten
    trouble(`What this browser has kept cannot be read (${e.message}). This training starts anew and is not kept.`);
    return null;
  }
}

/** Keep the state, unless the last step has ruined it: its own loss was that of the weights before it. */
const save = () => inTurn(async () => {
  savedAt = performance.now();
  if (!kept || (good && !await trainer.evaluate(good).then(({ loss }) => Number.isFinite(loss), () => false))) return;
  try {
    const state = await trainer.state();
    const { steps } = trainer, { points, width, sum, count } = curve;
    await store.save(site.id, { state, steps, rate, batch, held, running, curve: { points, width, sum, count } });
    keptAt = steps;
    tell('saved', { steps });
  } catch (e) {
    trouble(`The browser keeps no progress (${e.message}). Download the model before you leave.`);
  }
});

async function evaluate(batches) {
  const { labels } = trainer.about;
  let loss = 0, hits = 0, count = 0, seen = 0;
  for (const feeds of batches) {
    const n = Object.values(feeds)[0].dims[0], found = await trainer.evaluate(feeds);
    loss += n * found.loss;
    const hit = labels && right(Object.values(found.outputs)[0], feeds[labels.name].data, labels);
    if (hit) { hits += hit.hits; count += hit.count; }
    seen += n;
  }
  if (!seen) return null;
  return { loss: loss / seen, accuracy: count ? hits / count : null, rows: seen };
}

async function measure() {
  const found = await inTurn(() => evaluate(rows.heldOut(batch, site.batchFixed)));
  if (!found) return;
  held.push([trainer.steps, found.loss, found.accuracy]);
  if (held.length > 400) held = held.filter((_, i) => i % 2 === 0); // the last among them
  tell('evaluation', { held });
}

/** Resolves after the messages that have arrived; a timer would wait. */
const messages = () => new Promise((resolve) => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); resolve(); };
  port2.postMessage(0);
});

/** Whether the learning rate has fallen to 0. */
const over = () => ['linear', 'cosine'].includes(site.schedule?.name) && trainer.steps >= site.schedule.steps;

async function run() {
  if (running) return;
  running = true;
  let finished;
  stopped = new Promise((resolve) => { finished = resolve; });
  tell('running', { running });
  let told = 0, losses = [], times = [];
  const flush = () => {
    if (!losses.length) return;
    tell('steps', { steps: trainer.steps, losses, ms: times.reduce((a, b) => a + b) / times.length, epoch: trainer.steps * batch / rows.train });
    losses = []; times = []; told = performance.now();
  };
  try {
    while (running && !over()) {
      const feeds = rows.shuffled(trainer.steps, batch), before = performance.now();
      trainer.learningRate = rate * factor(site.schedule, trainer.steps);
      const loss = await inTurn(() => trainer.step(feeds)), now = performance.now();
      good = feeds;
      times.push(now - before);
      losses.push([trainer.steps, loss]);
      curve.add(trainer.steps, loss);
      if (now - told > TELL_EVERY) flush();
      if (trainer.steps % Math.max(1, Math.floor(rows.train / batch)) === 0) { flush(); await measure(); }
      if (now - savedAt > SAVE_EVERY) await save();
      await messages();
    }
    flush();
    if (running) { running = false; await save(); }
  } catch (e) {
    flush();
    running = false;
    await failed(e);
  }
  finished();
  tell('running', { running, over: over() });
}

/** A sentence for whatever stopped a step; the state is that of the last one that succeeded, and is kept.
 *  Where the loss is no number the weights have been ruined before: the training goes back to what is kept. */
async function failed(error) {
  const said = error?.message ?? String(error), memory = typeof error === 'number' || OUT_OF_MEMORY.test(said);
  if (error instanceof Diverged && kept) {
    await inTurn(() => restore(false));
    tell('ready', now());
    return trouble(`The training has stopped: ${said}. It is back at step ${trainer.steps}, which was kept.`);
  }
  await save();
  const where = kept ? `Step ${keptAt} is kept.` : `The training stands at step ${trainer.steps}.`;
  if (!memory) return trouble(`The training has stopped: ${said}. ${where}`);
  trouble(`This browser has not enough memory for a step of ${batch} rows. ${where} Take fewer rows a step.`, { restart: kept });
}

const DO = {
  start,
  run,
  async pause() { running = false; await stopped; await save(); },
  save,
  rate({ value }) {
    trainer.learningRate = value; // which refuses what is none
    rate = value;
  },
  batch({ value }) {
    if (!(Number.isInteger(value) && value >= 1 && value <= rows.train)) throw new RangeError(`rows a step: expected 1 … ${rows.train}, got ${value}`);
    batch = value;
  },
  async anew() {
    running = false;
    await stopped;
    if (kept) await store.forget(site.id);
    kept = false; // until the next worker
  },
  export: () => inTurn(() => trainer.export()),
  predict: ({ feeds }) => inTurn(() => trainer.predict(feeds)),
  measure: ({ feeds }) => inTurn(() => evaluate([feeds])),
};

onmessage = async ({ data }) => {
  try {
    const value = await DO[data.do](data);
    if (data.answer !== undefined) postMessage({ answer: data.answer, value });
  } catch (e) {
    if (data.answer !== undefined) postMessage({ answer: data.answer, error: e.message ?? String(e) });
    else trouble(`${e.message ?? e}`, { dead: data.do === 'start' });
  }
};
