// Trains a graph that `onnx-backprop web` has written, in any onnxruntime for JavaScript, which is handed in:
// onnxruntime-web and onnxruntime-node alike.

export const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, int16: Int16Array, int32: Int32Array,
  int64: BigInt64Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
  bool: Uint8Array,
};

export const length = (dims) => dims.reduce((a, b) => a * b, 1);

/** The numbers of `data` as elements of a type; a TypeError where some would have to be rounded or have no place in it. */
export function typed(dtype, data, name = 'data') {
  const Wanted = ARRAYS[dtype];
  if (data instanceof Wanted) return data;
  const big = Wanted === BigInt64Array || Wanted === BigUint64Array;
  const result = new Wanted(data.length);
  const whole = !dtype.startsWith('float');
  for (let i = 0; i < data.length; i++) {
    if (whole && typeof data[i] === 'number' && !Number.isInteger(data[i])) {
      throw new TypeError(`'${name}' has type ${dtype}, got ${data[i]}. Give it whole numbers`);
    }
    result[i] = big ? BigInt(data[i]) : Number(data[i]);
    if (whole && result[i] != data[i]) throw new TypeError(`'${name}' has type ${dtype}, which has no ${data[i]}`);
  }
  return result;
}

/** The loss is no finite number. */
export class Diverged extends Error {}

export class Trainer {
  /**
   * A trainer whose state is the model's weights and the start of the optimizer.
   *
   * read(file) resolves to the bytes of a file of the site's folder `model`. options: those of onnxruntime's session;
   * with the provider "webgpu" the state stays in buffers of the GPU.
   */
  static async create(ort, read, options = {}) {
    const bytes = async (file) => new Uint8Array(await read(file));
    const about = JSON.parse(new TextDecoder().decode(await bytes('training.json')));
    if (about.format !== 1) throw new Error(`training.json has format ${about.format}, this Trainer reads 1`);
    const [graph, evaluation, forward] = await Promise.all(
      ['training.onnx', 'evaluation.onnx', 'forward.onnx'].map(bytes));
    const gpu = (options.executionProviders ?? []).some((p) => (p.name ?? p) === 'webgpu');
    const kept = Object.values(about.state).filter((s) => s.dtype === 'float32' && s.dims.length);
    const where = gpu ? Object.fromEntries(kept.map((s) => [s.new, 'gpu-buffer'])) : undefined;
    const placed = where ? { ...options, preferredOutputLocation: where } : options;
    const session = await ort.InferenceSession.create(graph, placed);
    return new Trainer(ort, about, session, { evaluation, forward, options });
  }

  #ort; #session; #parts; #state; #evaluation; #predictor; #rate = 1e-3;

  constructor(ort, about, session, parts) {
    this.about = about;
    this.steps = 0;
    this.#ort = ort;
    this.#session = session;
    this.#parts = parts;
    this.#state = this.#tensors(this.#start());
  }

  /** What the next step multiplies its update by. */
  get learningRate() { return this.#rate; }

  set learningRate(rate) {
    if (!(Number.isFinite(rate) && rate >= 0)) throw new RangeError(`learningRate: expected 0 or more, got ${rate}`);
    this.#rate = rate;
  }

  /**
   * One step on a batch, {input: {data, dims}}; resolves to its loss.
   *
   * A step that fails, or whose loss is no finite number, leaves the state as it was.
   */
  async step(batch) {
    const { about } = this;
    const rate = new this.#ort.Tensor(about.learningRate.dtype, ARRAYS[about.learningRate.dtype].of(this.#rate), []);
    const feeds = { ...this.#fed(batch), ...this.#state, [about.learningRate.name]: rate };
    if (about.guard) feeds[about.guard] = new this.#ort.Tensor('float32', Float32Array.of(1), []); // of compile's training.onnx
    const out = await this.#session.run(feeds, [about.loss, ...Object.values(about.state).map((s) => s.new)]);
    const loss = Number(out[about.loss].data[0]);
    const diverged = !Number.isFinite(loss);
    for (const [name, { new: renewed }] of Object.entries(about.state)) {
      const unused = diverged ? out[renewed] : this.#state[name];
      if (unused.location !== 'cpu') unused.dispose();
      if (!diverged) this.#state[name] = out[renewed];
    }
    if (diverged) {
      throw new Diverged(`the loss of step ${this.steps + 1} is ${loss}: its weights were not taken. ` +
        `Lower the learning rate, which is ${this.#rate}`);
    }
    this.steps++;
    return loss;
  }

  /** The loss of a batch and the outputs of the model, in inference mode: {loss, outputs: {name: {data, dims}}}. */
  async evaluate(batch) {
    const { about } = this;
    this.#evaluation ??= this.#ort.InferenceSession.create(this.#parts.evaluation, this.#parts.options);
    const session = await this.#evaluation;
    const feeds = { ...this.#fed(batch), ...this.#state };
    const known = new Set(session.inputNames);
    const out = await session.run(Object.fromEntries(Object.entries(feeds).filter(([name]) => known.has(name))));
    return { loss: Number(out[about.loss].data[0]), outputs: plain(out, about.outputs) };
  }

  /** The outputs of the model as `export` gives it, for its data inputs: {name: {data, dims}}. */
  async predict(batch) {
    if (this.#predictor?.steps !== this.steps) {
      await this.#predictor?.session.release();
      this.#predictor = undefined;
      const session = await this.#ort.InferenceSession.create(await this.export(), this.#parts.options);
      this.#predictor = { steps: this.steps, session };
    }
    const { session } = this.#predictor;
    const out = await session.run(this.#fed(batch, session.inputNames));
    return plain(out, session.outputNames);
  }

  /** The bytes of the trained model: the .onnx that came, its weights overwritten where they lie in the file. */
  async export() {
    const bytes = this.#parts.forward.slice();
    const arrays = await this.state();
    for (const [name, { at }] of Object.entries(this.about.state)) {
      if (at !== undefined) bytes.set(new Uint8Array(arrays[name].buffer), at);
    }
    return bytes;
  }

  /** A copy of everything that a step renews, {name: typed array}. */
  async state() {
    const arrays = {};
    for (const [name, tensor] of Object.entries(this.#state)) arrays[name] = (await tensor.getData()).slice();
    return arrays;
  }

  /** Go on from what `state` gave after so many steps; an Error for the state of another graph, which changes nothing. */
  restore(arrays, steps) {
    for (const [name, { dtype, dims }] of Object.entries(this.about.state)) {
      const array = arrays[name];
      if (!(array instanceof ARRAYS[dtype]) || array.length !== length(dims)) {
        throw new Error(`the state is of another graph: '${name}' is expected as ${dtype}[${dims}]`);
      }
    }
    const old = this.#state;
    this.#state = this.#tensors(arrays);
    for (const tensor of Object.values(old)) if (tensor.location !== 'cpu') tensor.dispose();
    this.steps = steps;
    this.#predictor = undefined;
  }

  /** Give back what the sessions hold. */
  async release() {
    for (const tensor of Object.values(this.#state)) if (tensor.location !== 'cpu') tensor.dispose();
    await Promise.all([this.#session, (await this.#evaluation), this.#predictor?.session].map((s) => s?.release()));
  }

  #tensors(arrays) {
    return Object.fromEntries(Object.entries(this.about.state).map(
      ([name, { dtype, dims }]) => [name, new this.#ort.Tensor(dtype, arrays[name].slice(), dims)]));
  }

  #start() {
    const arrays = {};
    for (const [name, { dtype, dims, at, fill }] of Object.entries(this.about.state)) {
      const Typed = ARRAYS[dtype], n = length(dims);
      if (at !== undefined) arrays[name] = new Typed(this.#parts.forward.slice(at, at + n * Typed.BYTES_PER_ELEMENT).buffer);
      else if (fill !== undefined) arrays[name] = new Typed(n).fill(dtype.includes('int64') ? BigInt(fill) : fill);
    }
    for (const [name, { copy }] of Object.entries(this.about.state)) if (copy) arrays[name] = arrays[copy].slice();
    return arrays;
  }

  /** A batch as tensors, checked: names, types, shapes in which equal symbols are equal lengths, classes. */
  #fed(batch, names = Object.keys(this.about.inputs)) {
    const { inputs, labels } = this.about;
    const unknown = Object.keys(batch).find((name) => !names.includes(name));
    const missing = names.filter((name) => !(name in batch));
    if (unknown !== undefined) throw new Error(`expected ${names.join(', ')}, got '${unknown}'. Leave it out`);
    if (missing.length) throw new Error(`expected ${names.join(', ')}; '${missing.join("', '")}' missing`);
    const symbols = {};
    return Object.fromEntries(names.map((name) => {
      const { dtype, dims: wanted } = inputs[name], { data, dims } = batch[name];
      const said = `'${name}': expected the shape [${wanted?.map((d) => d ?? '?') ?? '…'}], got [${dims}]`;
      if (length(dims) !== data.length) throw new RangeError(`${said} of ${data.length} numbers`);
      if (wanted && dims.length !== wanted.length) throw new RangeError(said);
      wanted?.forEach((dim, axis) => {
        if (typeof dim === 'string') dim = symbols[dim] ??= dims[axis];
        if (dim !== null && dim !== dims[axis]) throw new RangeError(`${said}, axis ${axis} being ${dim} long`);
      });
      if (!length(dims)) throw new RangeError(`${said}: there are no rows`);
      const array = typed(dtype, data, name);
      if (labels?.name === name && labels.classes !== null) checkLabels(array, labels);
      return [name, new this.#ort.Tensor(dtype, array, dims)];
    }));
  }
}

function checkLabels(array, { name, classes, ignored }) {
  array.forEach((label, i) => {
    if ((label < 0 || label >= classes) && !(ignored !== null && Number(label) === ignored)) {
      throw new RangeError(`'${name}': expected classes 0 … ${classes - 1}, got ${label} at ${i}. Number the classes from 0`);
    }
  });
}

const plain = (out, names) =>
  Object.fromEntries(names.map((name) => [name, { data: out[name].data, dims: [...out[name].dims] }]));
