// A visitor's own pictures, or tables of numbers, through the model as it stands.
import { chosen, colour } from './classes.js';

const $ = (id) => document.getElementById(id);
const MOST = 20; // results that are shown

/** Offer it where the model's input is a picture or a row of numbers. */
export function tryOwn(site, ask) {
  const { own } = site;
  if (!own) return;
  $('own').hidden = false;
  const image = own.kind === 'image';
  $('ownHint').textContent = image ? 'Choose pictures, or drop them here. Their middle is scaled to what the model reads.'
    : `Choose a CSV file, or drop it here: rows of ${own.dims[0]} numbers, and the right answer behind them if you have it.`;
  $('files').accept = image ? 'image/*' : '.csv,.tsv,.txt,text/csv';
  $('invertBox').hidden = !image;
  const take = async (files) => {
    for (const file of [...files].slice(0, MOST)) {
      try {
        await (image ? picture(file, site, ask) : table(file, site, ask));
      } catch (e) { result(null, `${file.name}: ${e.message}`); }
    }
  };
  $('files').onchange = async () => { await take($('files').files); $('files').value = ''; };
  const drop = $('drop');
  drop.ondragover = (e) => { e.preventDefault(); drop.classList.add('over'); };
  drop.ondragleave = () => drop.classList.remove('over');
  drop.ondrop = (e) => { e.preventDefault(); drop.classList.remove('over'); take(e.dataTransfer.files); };
}

function result(canvases, text) {
  const item = document.createElement('li'), words = document.createElement('p');
  words.textContent = text;
  item.append(...(canvases ?? []), words);
  $('results').prepend(item);
  while ($('results').children.length > MOST) $('results').lastChild.remove();
}

function blank(width, height, name) {
  const canvas = Object.assign(document.createElement('canvas'), { width, height, role: 'img', ariaLabel: name });
  return [canvas, canvas.getContext('2d', { willReadFrequently: true })];
}

/** Rows for a batch of a fixed length: the last one again and again. */
function filled(rows, site) {
  const n = site.batchFixed ? site.batch : rows.length;
  if (rows.length > n) throw new Error(`the model takes ${n} rows at a time, these are ${rows.length}`);
  return Array.from({ length: n }, (_, i) => rows[Math.min(i, rows.length - 1)]);
}

function batch(rows, site) {
  const all = filled(rows, site), [low, high] = site.own.range;
  const whole = !site.data.arrays[site.own.name].dtype.startsWith('float');
  const data = all.flatMap((row) => [...row]).map((x) => whole ? Math.round(Math.min(high, Math.max(low, x))) : x);
  return { [site.own.name]: { data, dims: [all.length, ...site.own.dims] } };
}

async function picture(file, site, ask) {
  const [channels, height, width] = site.own.dims, [low, high] = site.own.range;
  const bitmap = await createImageBitmap(file).catch(() => { throw new Error('the browser cannot read this picture'); });
  const [canvas, context] = blank(width, height, `${file.name} as the model reads it`);
  context.imageSmoothingQuality = 'high';
  const scale = Math.max(width / bitmap.width, height / bitmap.height), w = width / scale, h = height / scale;
  context.drawImage(bitmap, (bitmap.width - w) / 2, (bitmap.height - h) / 2, w, h, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height), numbers = [];
  for (let i = 0; i < pixels.data.length; i += 4) {
    const opaque = pixels.data[i + 3] / 255, rgb = [0, 1, 2].map((c) => (pixels.data[i + c] * opaque) + 255 * (1 - opaque));
    const seen = channels === 3 ? rgb : Array(3).fill(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]);
    for (let c = 0; c < 3; c++) pixels.data[i + c] = $('invert').checked ? 255 - seen[c] : seen[c];
    pixels.data[i + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
  for (let c = 0; c < channels; c++) {
    const least = low[c] ?? low, most = high[c] ?? high;
    for (let i = c; i < pixels.data.length; i += 4) numbers.push(least + (pixels.data[i] / 255) * (most - least));
  }
  const [first] = Object.values(await ask('predict', { feeds: batch([numbers], site) }));
  if (first.dims.length !== 4) return result([canvas], `${file.name}: ${spoken(first, 0, site)}`);
  if (site.classes) return result([canvas, ...classMap(first, site)], `${file.name}: the class at every place`);
  result([canvas, output(first, site)], `${file.name}: what the model makes of it`);
}

/** The classes of the first image as a map of colours, and a legend of those that are there, with their share. */
function classMap({ data, dims }, { classes: { axis }, names }) {
  const [height, width] = axis === -1 ? dims.slice(1, 3) : dims.slice(2), size = height * width;
  const map = chosen({ data, dims }, axis).subarray(0, size), counts = new Map();
  const [canvas, context] = blank(width, height, 'The class at every place');
  const pixels = context.createImageData(width, height);
  map.forEach((c, i) => {
    pixels.data.set([...colour(c), 255], 4 * i);
    counts.set(c, (counts.get(c) ?? 0) + 1);
  });
  context.putImageData(pixels, 0, 0);
  const legend = Object.assign(document.createElement('ul'), { className: 'legend' });
  for (const [c, count] of [...counts].sort((a, b) => b[1] - a[1])) {
    const entry = document.createElement('li'), patch = document.createElement('i');
    patch.style.background = `rgb(${colour(c)})`;
    entry.append(patch, `${names?.[c] ?? `class ${c}`}, ${(100 * count / size).toFixed(1)} %`);
    legend.append(entry);
  }
  return [canvas, legend];
}

/** An output (N, C, H, W) as a picture: probabilities from black to white, else from the least number to the largest. */
function output({ data, dims: [, channels, height, width] }, site) {
  const size = height * width, likely = site.loss === 'bce_with_logits';
  const values = Array.from(data.slice(0, channels * size), (v) => likely ? 1 / (1 + Math.exp(-v)) : Number(v));
  const low = likely ? 0 : values.reduce((a, b) => Math.min(a, b)), high = likely ? 1 : values.reduce((a, b) => Math.max(a, b));
  const [canvas, context] = blank(width, height, 'The output of the model');
  const pixels = context.createImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) {
      pixels.data[4 * i + c] = 255 * (values[(channels >= 3 ? c : 0) * size + i] - low) / (high - low || 1);
    }
    pixels.data[4 * i + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Row i of an output in words: the likeliest classes, or its numbers. */
function spoken({ data, dims }, i, site) {
  const n = data.length / dims[0], row = Array.from(data.slice(i * n, (i + 1) * n), Number);
  if (site.loss !== 'softmax_cross_entropy' || dims.length !== 2) return row.slice(0, 8).map((x) => x.toPrecision(4)).join(', ');
  const top = Math.max(...row), powers = row.map((x) => Math.exp(x - top)), sum = powers.reduce((a, b) => a + b);
  const order = row.map((_, c) => c).sort((a, b) => row[b] - row[a]).slice(0, 3);
  return order.map((c, k) => `${site.names?.[c] ?? (k ? c : `class ${c}`)} (${(100 * powers[c] / sum).toFixed(1)} %)`).join(', ');
}

/** The numbers of a CSV, row by row; a first line that holds none is a header. */
export function parse(text) {
  const lines = text.split(/\r?\n/).map((line) => line.trim()).filter(Boolean).map((line) => line.split(/[,;\t]/));
  const isNumber = (cell) => cell.trim() !== '' && Number.isFinite(Number(cell));
  const body = lines.length && lines[0].some((cell) => !isNumber(cell)) ? lines.slice(1) : lines;
  if (!body.length) throw new Error('there are no rows of numbers in it');
  return body.map((cells, i) => cells.map((cell) => {
    if (!isNumber(cell)) throw new Error(`row ${i + 1}: expected a number, got “${cell.slice(0, 30)}”`);
    return Number(cell);
  }));
}

async function table(file, site, ask) {
  const rows = parse(await file.text()), [width] = site.own.dims, target = site.data.arrays[site.target];
  const answers = target ? (target.dims.length === 1 ? 1 : target.dims.length === 2 ? target.dims[1] : 0) : 0;
  const wrong = rows.findIndex((row) => row.length !== rows[0].length || ![width, width + answers].includes(row.length));
  if (wrong >= 0) {
    throw new Error(`row ${wrong + 1} has ${rows[wrong].length} numbers; expected ${width}${answers ? `, or ${width + answers} with the right answer` : ''}`);
  }
  const feeds = batch(rows.map((row) => row.slice(0, width)), site);
  if (rows[0].length > width) {
    const right = filled(rows.map((row) => row.slice(width)), site);
    const dims = target.dims.length === 1 ? [right.length] : [right.length, answers];
    const found = await ask('measure', { feeds: { ...feeds, [site.target]: { data: right.flat(), dims } } });
    const accuracy = found.accuracy === null ? '' : `, ${(100 * found.accuracy).toFixed(1)} % right`;
    return result(null, `${file.name}: ${rows.length} rows, loss ${found.loss.toPrecision(4)}${accuracy}`);
  }
  const [first] = Object.values(await ask('predict', { feeds }));
  const shown = rows.slice(0, 5).map((_, i) => `row ${i + 1}: ${spoken(first, i, site)}`);
  result(null, `${file.name}: ${shown.join(' · ')}${rows.length > 5 ? ` · ${rows.length - 5} more` : ''}`);
}
