// node classes.mjs CLASSES.JS CASES.JSON: what each function makes of each case, as JSON.
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const { chosen, colour, factor, right } = await import(pathToFileURL(process.argv[2]));
const { outputs, schedules } = JSON.parse(readFileSync(process.argv[3]));
console.log(JSON.stringify({
  outputs: outputs.map(({ data, dims, axis, labels, ignored }) => ({
    chosen: [...chosen({ data, dims }, axis)], right: right({ data, dims }, labels, { axis, ignored }),
  })),
  factors: schedules.map(({ about, steps }) => steps.map((t) => factor(about, t))),
  colours: Array.from({ length: 24 }, (_, c) => colour(c)),
  nothing: [right({ data: [1], dims: [1, 1] }, [0], { axis: null }), right({ data: [1, 2], dims: [1, 2] }, [0, 1], { axis: 1 })],
}));
