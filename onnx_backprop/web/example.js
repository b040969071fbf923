// Trains what `onnx-backprop web` has written: node example.js SITE/
import { readFile, writeFile } from 'node:fs/promises';
import * as ort from 'onnxruntime-node';
import { Trainer } from 'onnx-backprop';
import { Rows } from 'onnx-backprop/rows';

const site = JSON.parse(await readFile(`${process.argv[2]}/site.json`));
const rows = new Rows(site.data, new Uint8Array(await readFile(`${process.argv[2]}/data.bin`)).buffer);
const trainer = await Trainer.create(ort, (file) => readFile(`${process.argv[2]}/model/${file}`));
for (let step = 0; step < 200; step++) console.log(step, await trainer.step(rows.shuffled(step, site.batch)));
await writeFile('trained.onnx', await trainer.export());
