import type { Batch } from './trainer.js';

export declare class Rows {
  constructor(
    about: { rows: number; train: number; arrays: Record<string, { dtype: string; dims: number[]; at: number }> },
    buffer: ArrayBuffer,
  );
  readonly rows: number;
  readonly train: number;
  batch(numbers: number[]): Batch;
  shuffled(step: number, size: number, seed?: number): Batch;
  heldOut(size: number, whole?: boolean): Generator<Batch>;
}
