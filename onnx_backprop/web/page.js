// The page: shows what the worker tells and hands it what a visitor asks for.
import { Curve, draw } from './chart.js';
import { tryOwn } from './own.js';

const $ = (id) => document.getElementById(id);
const controls = ['run', 'rate', 'batch', 'save', 'anew'].map($);

let worker, site, running = false, lost = false, curve = new Curve(), held = [], savedAt = 0, drawn = false;
const asked = new Map();
let questions = 0;

const post = (what, about = {}) => worker.postMessage({ do: what, ...about });

/** What the worker answers to a question. */
const ask = (what, about = {}) => new Promise((resolve, reject) => {
  asked.set(++questions, { resolve, reject });
  post(what, { ...about, answer: questions });
});

const put = (id, text) => { $(id).textContent = text; };
const say = (sentence) => put('status', sentence);

function trouble(sentence) {
  put('trouble', sentence);
  $('trouble').hidden = !sentence;
}

function enable(on) {
  for (const control of controls) control.disabled = !on;
  if (site?.batchFixed) $('batch').disabled = true;
}

function unanswered() {
  for (const { reject } of asked.values()) reject(new Error('the worker has ended'));
  asked.clear();
}

/** Start a worker, which goes on from what is kept; resume: train at once if it did when it was kept. */
function launch(resume) {
  worker?.terminate();
  unanswered();
  lost = false;
  running = false;
  enable(false);
  const mine = worker = new Worker('worker.js', { type: 'module' }), name = `worker ${Date.now()} ${Math.random()}`;
  let watched = false;
  mine.onmessage = ({ data }) => {
    if (worker !== mine) return;
    if (data.answer !== undefined) {
      const { resolve, reject } = asked.get(data.answer);
      asked.delete(data.answer);
      return data.error === undefined ? resolve(data.value) : reject(new Error(data.error));
    }
    if (!watched && navigator.locks && ['waiting', 'loading'].includes(data.what)) {
      watched = true; // the worker holds this lock as long as it lives
      navigator.locks.request(name, () => worker === mine && ended('The browser has ended what trains here, often for want of memory.'));
    }
    hear[data.what]?.(data);
  };
  mine.onerror = (e) => worker === mine && ended(`What trains here has stopped${e.message ? ` (${e.message})` : ''}.`);
  post('start', { name, resume });
}

function ended(why) {
  lost = true;
  enable(false);
  unanswered();
  trouble(`${why} ${savedAt ? `Step ${savedAt} and all before it are kept.` : 'Nothing was learnt yet.'} Press “Go on”.`);
  say('Stopped.');
  show(false);
  $('run').disabled = false;
}

function show(isRunning) {
  running = isRunning;
  put('run', running ? 'Pause' : savedAt || curve.points.length ? 'Go on' : 'Start');
}

function redraw() {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => { drawn = false; draw($('chart'), curve.points, held); });
}

const number = (x) => x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4) ? Number(x.toPrecision(4)).toString() : x.toExponential(2);

const hear = {
  site({ site: about }) {
    site = about;
    put('title', site.title);
    document.title = `${site.title}: training in this browser`;
    $('batch').max = site.data.train;
  },
  waiting() { say('This training is open in another tab. It continues here when that tab is closed.'); },
  loading() { say('Loading the model, the data and the runtime…'); },
  ready({ steps, curve: points, held: measured, rate, batch, threads }) {
    curve = new Curve(points);
    put('loss', curve.points.length ? number(curve.points.at(-1)[1]) : '–');
    hear.evaluation({ held: measured });
    savedAt = steps;
    $('rate').value = rate;
    $('batch').value = batch;
    put('steps', steps);
    put('epoch', (steps * batch / site.data.train).toFixed(1));
    const where = threads === null ? 'the graphics processor' : threads === 1 ? '1 thread' : `${threads} threads`;
    say(`${steps ? `Going on from step ${steps}` : 'Ready'}, with ${site.data.train.toLocaleString()} rows to learn from, on ${where}.`);
    enable(true);
    show(false);
    tryOwn(site, ask);
  },
  running({ running: is, over }) {
    show(is);
    if (is) { trouble(''); say('Training.'); } else say(over ? 'Trained: the learning rate has come to 0.' : 'Paused.');
  },
  steps({ steps, losses, ms, epoch }) {
    for (const [step, loss] of losses) curve.add(step, loss);
    put('steps', steps.toLocaleString());
    put('epoch', epoch.toFixed(1));
    put('loss', number(losses.at(-1)[1]));
    put('time', `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`);
    redraw();
  },
  evaluation({ held: measured }) {
    held = measured;
    const [, loss, accuracy] = held.at(-1) ?? [];
    put('heldLoss', loss === undefined ? '–' : number(loss));
    $('accuracyBox').hidden = typeof accuracy !== 'number';
    if (typeof accuracy === 'number') put('accuracy', `${(100 * accuracy).toFixed(1)} %`);
    redraw();
  },
  saved({ steps }) { savedAt = steps; },
  trouble({ sentence, restart, dead }) {
    trouble(sentence);
    if (dead) { say('Not started.'); lost = true; put('run', 'Try again'); $('run').disabled = false; }
    if (restart) launch(false); // what ran out of memory may hold on to it
  },
};

$('run').onclick = () => {
  if (lost) { trouble(''); return launch(true); }
  post(running ? 'pause' : 'run');
};

for (const [id, from] of [['rate', (x) => x], ['batch', (x) => Math.round(x)]]) {
  $(id).onchange = async () => {
    try {
      await ask(id, { value: from($(id).valueAsNumber) });
      trouble('');
    } catch (e) { trouble(`${e.message}.`); }
  };
}

$('save').onclick = async () => {
  try {
    const bytes = await ask('export');
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([bytes], { type: 'application/octet-stream' }));
    link.download = 'trained.onnx';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  } catch (e) { trouble(`The model could not be written: ${e.message}.`); }
};

$('anew').onclick = () => { $('sure').returnValue = 'no'; $('sure').showModal(); };
$('sure').onclose = async () => {
  if ($('sure').returnValue !== 'yes') return;
  await ask('anew');
  put('time', '–');
  launch(false);
};

document.addEventListener('visibilitychange', () => { if (document.hidden && !lost) post('save'); });
new ResizeObserver(redraw).observe($('chart'));
launch(true);
