// node refusals.mjs TRAINER.js PACKAGE FOLDER: what the Trainer says to wrong batches, as JSON; that nothing is lost.
import { readFile } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const [trainerFile, runtime, folder] = process.argv.slice(2);
const ort = await import(pathToFileURL(runtime));
ort.env.wasm.numThreads = 1;
const { Trainer } = await import(pathToFileURL(trainerFile));
const { Rows } = await import(pathToFileURL(resolve(dirname(trainerFile), 'rows.js')));
const site = JSON.parse(await readFile(`${folder}/site.json`));
const rows = new Rows(site.data, new Uint8Array(await readFile(`${folder}/data.bin`)).buffer);
const trainer = await Trainer.create(ort, (file) => readFile(`${folder}/model/${file}`));
const batch = rows.shuffled(0, 8), { image, labels } = batch;
await trainer.step(batch);
const before = await trainer.state(), said = {};
const refused = async (name, wrong) => { said[name] = await trainer.step(wrong).then(() => 'accepted', (e) => e.message); };
await refused('label', { image, labels: { data: Array(8).fill(10), dims: [8] } });
await refused('negative', { image, labels: { data: Array(8).fill(-1), dims: [8] } });
await refused('half', { image, labels: { data: Array(8).fill(0.5), dims: [8] } });
await refused('rows', { image, labels: { data: [1, 2, 3], dims: [3] } });
await refused('channels', { image: { data: image.data, dims: [8, 2, 8, 4] }, labels });
await refused('name', { ...batch, picture: image });
await refused('missing', { image });
await refused('diverged', { image: { data: new Float32Array(8 * 64).fill(NaN), dims: image.dims }, labels });
try { trainer.learningRate = NaN; } catch (e) { said.rate = e.message; }
try { trainer.restore({ ...before, 'Conv_1.weight': new Float32Array(3) }, 7); } catch (e) { said.state = e.message; }
const after = await trainer.state();
said.unchanged = trainer.steps === 1 && Object.keys(before).every((k) => before[k].every((v, i) => v === after[k][i]));
const next = rows.shuffled(1, 8);
said['gone on'] = [await trainer.step(next), await trainer.step(batch)];
trainer.restore(before, 1);
said.resumed = [await trainer.step(next), await trainer.step(batch)];
console.log(JSON.stringify(said));
