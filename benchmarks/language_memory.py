"""`python -m benchmarks.language_memory`: peak memory and time of training a decoder, beside torch and peft.

A Llama of random weights, SmolLM2's shape by default (135 M parameters), is exported with its weights in a file beside
it. Then each contender runs in a process of its own, one after the other: float32, AdamW, LoRA of `--rank` beside q and
v, and all weights. Seconds of the clock and of the processor are the medians of some steps behind an untimed one. Needs
torch, transformers and peft beside this project; `--ours PYTHON` runs our side elsewhere.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 5
SHAPE = {"layers": 30, "width": 576, "hidden": 1536, "heads": 9, "keys": 3, "vocabulary": 49_152}


def decoder(shape: dict[str, int]) -> Any:
    """The model of transformers."""
    torch, transformers = map(import_module, ("torch", "transformers"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=shape["width"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["keys"],
        vocab_size=shape["vocabulary"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def batch(shape: dict[str, int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and those behind each."""
    ids = np.random.default_rng(0).integers(0, shape["vocabulary"], (shape["batch"], tokens + 1))
    return ids[:, :-1], ids[:, 1:]


def export(path: Path, shape: dict[str, int], tokens: int, _rank: int) -> dict[str, float]:
    """Write the decoder."""
    torch: Any = import_module("torch")

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder(shape).eval()

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    ids = torch.from_numpy(batch(shape, tokens)[0])
    with torch.no_grad():
        program = torch.onnx.export(Logits(), (ids,), dynamo=True, input_names=["input_ids"], output_names=["logits"])
    program.save(str(path), external_data=True)
    return {}


def ours(path: Path, shape: dict[str, int], tokens: int, rank: int) -> dict[str, float]:
    """Convert and train; rank 0: all weights."""
    import onnx_backprop as ob

    ids, labels = batch(shape, tokens)
    begin = time.process_time()
    options: dict[str, Any] = {"loss": ob.losses.NextToken(shift=False), "optimizer": "adamw"}
    if rank:
        adapted = ob.lora(path, ["*q_proj*", "*v_proj*"], rank=rank)
        graph = ob.training_graph(adapted.model, trainable=adapted.trainable, **options)
    else:
        graph = ob.training_graph(path, **options)
    converted = {"conversion s": time.process_time() - begin, "conversion MB": peak()}
    trainer = ob.Trainer(graph, learning_rate=1e-4)
    return converted | timed(lambda: trainer.step(input_ids=ids, labels=labels))


def torch_and_peft(_path: Path, shape: dict[str, int], tokens: int, rank: int) -> dict[str, float]:
    """The same in torch."""
    torch: Any = import_module("torch")
    model = decoder(shape)
    if rank:
        peft: Any = import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    ids, labels = map(torch.from_numpy, batch(shape, tokens))

    def step() -> float:
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        return float(loss)

    return timed(step)


def timed(step: Any) -> dict[str, float]:
    """Seconds of a step, the medians; the last loss; the peak so far."""
    step()
    seconds, loss = [], 0.0
    for _ in range(STEPS):
        begin = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    clock, processor = np.median(seconds, axis=0)
    return {"step s": float(clock), "processor s": float(processor), "loss": loss, "peak MB": peak()}


def peak() -> float:
    """The largest resident set so far, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


PARTS = {"export": export, "ours": ours, "torch": torch_and_peft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--ours", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = SHAPE | {"layers": arguments.layers, "batch": arguments.batch}
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments.path, shape, arguments.tokens, arguments.rank)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"

        def run(part: str, rank: int) -> dict[str, float]:
            python = arguments.ours if part == "ours" else sys.executable
            command = [python, "-m", "benchmarks.language_memory", "--part", part, "--path", str(path)]
            command += [f"--{name}={value}" for name, value in (("tokens", arguments.tokens), ("rank", rank))]
            command += [f"--layers={arguments.layers}", f"--batch={arguments.batch}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            return json.loads(done.stdout.splitlines()[-1])

        run("export", 0)
        for what, rank in ((f"LoRA of rank {arguments.rank}", arguments.rank), ("all weights", 0)):
            found = {part: run(part, rank) for part in ("ours", "torch")}
            for part, numbers in found.items():
                print(f"{what:16} {part:6}", ", ".join(f"{name} {value:,.2f}" for name, value in numbers.items()))
            times, memory = (found["torch"][key] / found["ours"][key] for key in ("step s", "peak MB"))
            print(f"{what:16} {times:.2f} times torch's speed, {1 / memory:.2f} of its peak")


if __name__ == "__main__":
    main()
