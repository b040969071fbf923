// Trains what `onnx-backprop compile` has written, in Node with koffi (npm install koffi), which calls onnxruntime's C
// interface: onnxruntime-node itself takes no libraries of custom operators.
//   node train.mjs ONNXRUNTIME FOLDER LIBRARY BATCHES STEPS RATE [THREADS]
// ONNXRUNTIME: its shared library, as onnxruntime-node has it. LIBRARY: of FOLDER, or - for standard operators. BATCHES holds
// the bytes of one batch after the other, each the inputs of the graph in their order. Prints the losses of the steps, then
// the last batch's in inference mode. Goes on from FOLDER/checkpoint.safetensors, and writes it and FOLDER/trained.onnx.
import { existsSync, openSync, readFileSync, readSync, renameSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import koffi from 'koffi';

const TYPES = { float32: [1, 'F32', 4], float64: [11, 'F64', 8], int64: [7, 'I64', 8], int32: [6, 'I32', 4], bool: [9, 'BOOL', 1] };
const PATH = process.platform === 'win32' ? 'str16' : 'str';
let table, allocator;  // of onnxruntime: addresses of functions, by their documented positions

const prototypes = {}, prototype = (types) => prototypes[types] ??= koffi.proto('uint64_t', types.split(' '));
function call(position, types, ...given) {
  const status = koffi.call(table[position], prototype(types), ...given);
  if (status) throw new Error(koffi.decode(koffi.call(table[2], prototype('uint64_t'), status), 'char', -1));
}
function made(position, types, ...given) {  // what a function makes, by its last argument
  const out = new BigUint64Array(1);
  call(position, `${types} void*`.trim(), ...given, out);
  return out[0];
}
function open(library) {
  const base = koffi.load(library).func('uint64_t OrtGetApiBase()')();
  const api = koffi.call(koffi.decode(base, 'uint64_t'), prototype('uint32_t'), 18);
  if (!api) throw new Error('onnxruntime is older than 1.18');
  table = koffi.decode(api, koffi.array('uint64_t', 150));
  allocator = made(78, '');
  return made(3, 'int str', 3, 'training');
}

class Tensor {  // memory of onnxruntime
  constructor(dtype, dims) {
    Object.assign(this, { dtype, dims, size: dims.reduce((a, b) => a * b, TYPES[dtype][2]) });
    const shape = BigInt64Array.from(dims, BigInt);
    this.value = made(48, 'uint64_t void* uint64_t int', allocator, shape, dims.length, TYPES[dtype][0]);
    this.bytes = new Uint8Array(koffi.view(made(51, 'uint64_t', this.value), this.size)).fill(0);
    this.view = new DataView(this.bytes.buffer);
  }
  get number() { return this.view.getFloat32(0, true); }
  set number(value) { this.view.setFloat32(0, value, true); }
}

class Session {
  constructor(env, file, options) {
    this.session = made(7, `uint64_t ${PATH} uint64_t`, env, file, options);
    this.inputs = new Set(Array.from({ length: Number(made(30, 'uint64_t', this.session)) }, (_, n) =>
      koffi.decode(made(36, 'uint64_t uint64_t uint64_t', this.session, n, allocator), 'char', -1)));
  }
  bound(inputs, outputs) {  // a binding of tensors by names
    const binding = made(134, 'uint64_t', this.session);
    const bind = (position) => ([name, { value }]) => call(position, 'uint64_t str uint64_t', binding, name, value);
    Object.entries(inputs).filter(([name]) => this.inputs.has(name)).forEach(bind(136));
    Object.entries(outputs).forEach(bind(137));
    return binding;
  }
  run(binding) { call(133, 'uint64_t uint64_t uint64_t', this.session, 0, binding); }
}

export class Trainer {
  steps = 0;
  constructor(onnxruntime, folder, library, threads = 0) {
    const env = open(onnxruntime), options = made(10, ''), standard = library === '-';
    call(24, 'uint64_t int', options, threads), call(17, 'uint64_t', options);  // no memory patterns
    if (!standard) made(29, 'uint64_t str', options, library);
    this.about = JSON.parse(readFileSync(path.join(folder, 'training.json')));
    this.forward = readFileSync(path.join(folder, 'forward.onnx'));
    this.session = new Session(env, path.join(folder, standard ? 'standard.onnx' : 'training.onnx'), options);
    this.evaluation = new Session(env, path.join(folder, 'evaluation.onnx'), options);
    const { inputs, feeds, state, learningRate, in_place, guard, loss } = this.about;
    this.batch = Object.fromEntries(Object.entries(feeds).map(([name, dims]) => [name, new Tensor(inputs[name].dtype, dims)]));
    this.loss = new Tensor('float32', []);
    this.others = { [learningRate.name]: new Tensor('float32', []), [guard || 'guard']: new Tensor('float32', []) };
    const first = {}, second = {};
    for (const [name, { dtype, dims, at, fill }] of Object.entries(state)) {
      first[name] = new Tensor(dtype, dims);
      if (at !== undefined) first[name].bytes.set(this.forward.subarray(at, at + first[name].size));
      else if (fill && dtype !== 'float32') throw new Error(`'${name}' starts with ${fill} in ${dtype}, which is not handled here`);
      else if (fill) new Float32Array(first[name].bytes.buffer).fill(fill);
      // a step overwrites some tensors, and writes the others into the other set
      second[name] = !standard && in_place.includes(name) ? first[name] : new Tensor(dtype, dims);
    }
    for (const [name, { copy }] of Object.entries(state)) if (copy) first[name].bytes.set(first[copy].bytes);
    this.sets = [first, second];
    const written = (set) => Object.fromEntries(Object.entries(set).map(([name, tensor]) => [state[name].new, tensor]));
    this.bindings = [[first, second], [second, first]].map(([read, other]) =>
      this.session.bound({ ...this.batch, ...this.others, ...read }, { [loss]: this.loss, ...written(other) }));
  }
  get state() { return this.sets[this.steps % 2]; }
  step() {  // on the batch; its loss before the update. One that is no finite number leaves the state as it was
    const [rate, guard] = Object.values(this.others);
    [rate.number, guard.number] = [this.rate, 1];
    this.session.run(this.bindings[this.steps % 2]);
    if (!Number.isFinite(this.loss.number)) throw new Error(`the loss is ${this.loss.number}. Lower the learning rate`);
    this.steps++;
    return this.loss.number;
  }
  evaluate() {  // the loss of the batch in inference mode
    this.evaluation.run(this.evaluation.bound({ ...this.batch, ...this.state }, { [this.about.loss]: this.loss }));
    return this.loss.number;
  }
  export(file) {  // the model that came, its weights overwritten where they lie in the file
    const bytes = Buffer.from(this.forward);
    for (const [name, { at }] of Object.entries(this.about.state)) if (at !== undefined) bytes.set(this.state[name].bytes, at);
    replace(file, bytes);
  }
  save(file) {  // a checkpoint as safetensors, which `Trainer.load` of Python reads too
    const about = { format: 1, epoch: 0, batch: 0, schedule: null, steps: this.steps, learning_rate: this.rate };
    const header = { __metadata__: { onnx_backprop: JSON.stringify(about) } };
    let end = 0;
    for (const [name, { dtype, dims, size }] of Object.entries(this.state))
      header[name] = { dtype: TYPES[dtype][1], shape: dims, data_offsets: [end, end += size] };
    const text = Buffer.from(JSON.stringify(header)), length = Buffer.alloc(8);
    length.writeBigUInt64LE(BigInt(text.length));
    replace(file, Buffer.concat([length, text, ...Object.values(this.state).map((tensor) => tensor.bytes)]));
  }
  load(file) {  // go on from what `save` has written for the same graph
    const bytes = readFileSync(file), start = 8 + Number(bytes.readBigUInt64LE());
    const header = JSON.parse(bytes.subarray(8, start));
    for (const [name, { dtype, dims }] of Object.entries(this.state)) {
      const wanted = `${TYPES[dtype][1]} ${dims}`, found = `${header[name]?.dtype} ${header[name]?.shape}`;
      if (found !== wanted) throw new Error(`the checkpoint is of another graph: '${name}' is to be ${wanted}, it has ${found}`);
    }
    this.steps = JSON.parse(header.__metadata__.onnx_backprop).steps;
    for (const [name, { bytes: to, size }] of Object.entries(this.state)) {
      const at = start + header[name].data_offsets[0];
      if (bytes.copy(to, 0, at, at + size) < size) throw new Error(`${file} ends before '${name}'`);
    }
  }
}

function replace(file, bytes) {  // whole or not at all
  writeFileSync(`${file}.new`, bytes);
  renameSync(`${file}.new`, file);
}

const [onnxruntime, folder, library, batches, steps, rate, threads] = process.argv.slice(2);
const trainer = Object.assign(new Trainer(onnxruntime, folder, library, Number(threads ?? 0)), { rate: Number(rate) });
const checkpoint = path.join(folder, 'checkpoint.safetensors');
if (existsSync(checkpoint)) trainer.load(checkpoint);
const data = openSync(batches);
for (let n = 0; n < Number(steps); n++) {
  for (const { bytes } of Object.values(trainer.batch))
    if (readSync(data, bytes) < bytes.length) throw new Error('BATCHES ends before the last step');
  console.log(trainer.step());
}
console.log(`evaluation ${trainer.evaluate()}`);
trainer.save(checkpoint), trainer.export(path.join(folder, 'trained.onnx'));
