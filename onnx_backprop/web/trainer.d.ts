import type { InferenceSession, Tensor } from 'onnxruntime-common';

/** onnxruntime-web or onnxruntime-node. */
export interface Runtime {
  InferenceSession: { create(model: Uint8Array, options?: InferenceSession.SessionOptions): Promise<InferenceSession> };
  Tensor: typeof Tensor;
}

export type Numbers = Exclude<Tensor.DataTypeMap[Tensor.Type], string[]>;

/** Numbers in row-major order; an onnxruntime Tensor in memory is one. */
export interface Values { data: Numbers | readonly number[]; dims: readonly number[] }

export type Batch = Record<string, Values>;

/** Reads a file of a site's folder `model`, by its name. */
export type Read = (file: string) => Promise<Uint8Array | ArrayBuffer>;

/** training.json: what is known of the graph. */
export interface About {
  format: 1;
  loss: string;
  learningRate: { name: string; dtype: 'float32' | 'float64' };
  guard?: string; // of a step that `onnx-backprop compile` has written
  inputs: Record<string, { dtype: string; dims: (number | string | null)[] | null }>;
  outputs: string[];
  labels: { name: string; classes: number | null; ignored: number | null } | null;
  state: Record<string, { dtype: string; dims: number[]; new: string; at?: number; fill?: number; copy?: string }>;
}

export declare const ARRAYS: Record<string, { new (length: number): Numbers; BYTES_PER_ELEMENT: number }>;
export declare function length(dims: readonly number[]): number;
export declare function typed(dtype: string, data: ArrayLike<number | bigint>, name?: string): Numbers;

/** The loss is no finite number. */
export declare class Diverged extends Error {}

export declare class Trainer {
  static create(ort: Runtime, read: Read, options?: InferenceSession.SessionOptions): Promise<Trainer>;
  private constructor();
  readonly about: About;
  readonly steps: number;
  learningRate: number;
  step(batch: Batch): Promise<number>;
  evaluate(batch: Batch): Promise<{ loss: number; outputs: Record<string, Values> }>;
  predict(batch: Batch): Promise<Record<string, Values>>;
  export(): Promise<Uint8Array>;
  state(): Promise<Record<string, Numbers>>;
  restore(arrays: Record<string, Numbers>, steps: number): void;
  release(): Promise<void>;
}
