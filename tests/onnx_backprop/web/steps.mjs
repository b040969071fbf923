// node steps.mjs TRAINER.js PACKAGE FOLDER STEPS: trains on batch after batch of FOLDER's rows; writes results.json and trained.onnx there.
// PACKAGE: the module of onnxruntime-web or onnxruntime-node to import.
import { readFile, writeFile } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const [trainerFile, runtime, folder, count] = process.argv.slice(2);
const ort = await import(pathToFileURL(runtime));
ort.env.wasm.numThreads = 1;
const { Trainer } = await import(pathToFileURL(trainerFile));
const { Rows } = await import(pathToFileURL(resolve(dirname(trainerFile), 'rows.js')));
const site = JSON.parse(await readFile(`${folder}/site.json`));
const rows = new Rows(site.data, new Uint8Array(await readFile(`${folder}/data.bin`)).buffer);
const trainer = await Trainer.create(ort, (file) => readFile(`${folder}/model/${file}`));
trainer.learningRate = site.learningRate;
const losses = [], times = [];
for (let step = 0; step < Number(count); step++) {
  const first = (step * site.batch) % site.data.train;
  const batch = rows.batch(Array.from({ length: site.batch }, (_, i) => first + i));
  const start = performance.now();
  losses.push(await trainer.step(batch));
  times.push(performance.now() - start);
}
const held = rows.batch(Array.from({ length: site.batch }, (_, i) => i));
const { loss: evaluation, outputs } = await trainer.evaluate(held);
await writeFile(`${folder}/trained.onnx`, await trainer.export());
const names = Object.keys(held).filter((name) => name !== site.target);
const fed = Object.fromEntries(names.map((name) => [name, held[name]]));
let predicted = outputs, refused = null;
try { predicted = await trainer.predict(fed); } catch (e) { refused = e.message; }
const [name] = trainer.about.outputs;
const numbers = [...predicted[name].data].map(Number);
await writeFile(`${folder}/results.json`, JSON.stringify({ losses, times, evaluation, predicted: numbers, refused }));
