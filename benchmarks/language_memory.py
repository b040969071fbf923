"""`python -m benchmarks.language_memory`: peak memory and time of training a decoder, beside torch and peft.

A decoder of random weights, SmolLM2's shape by default (135 M parameters), is exported with its weights in a file
beside it; with `--int4`, onnxruntime-genai's builder writes it. Contenders are processes of their own that take turns,
step by step: float32, AdamW, LoRA of `--rank` beside q and v (beside the packed q, k and v of an int4 file), and all
weights. Seconds of the clock and of the processor are the medians of some steps behind an untimed one. Where other jobs
use the machine, read the processor's, on `--threads 1`: a thread that waits for another one waits busily. Needs torch,
transformers and peft beside this project, onnxscript for the export; `--ours PYTHON` runs our side elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {
    "smollm2": {"layers": 30, "width": 576, "hidden": 1536, "heads": 9, "keys": 3, "vocabulary": 49_152},
    "qwen2.5": {"layers": 24, "width": 896, "hidden": 4864, "heads": 14, "keys": 2, "vocabulary": 151_936},
}
CONTENDERS = ("ours", "eager", "compiled")


def decoder(arguments: argparse.Namespace) -> Any:
    """The model of transformers."""
    torch, transformers = map(import_module, ("torch", "transformers"))
    torch.manual_seed(0)
    shape = SHAPES[arguments.shape]
    family = "Qwen2" if arguments.shape.startswith("qwen") else "Llama"
    config = getattr(transformers, f"{family}Config")(
        hidden_size=shape["width"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=arguments.layers or shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["keys"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batch(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and those behind each."""
    rows, tokens = map(int, arguments.case.split("x"))
    ids = np.random.default_rng(0).integers(0, SHAPES[arguments.shape]["vocabulary"], (rows, tokens + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def export(arguments: argparse.Namespace) -> None:
    """Write the decoder."""
    torch: Any = import_module("torch")
    model = decoder(arguments).eval()
    if arguments.int4:
        from tests.language_models.make_models import write_tokenizer

        folder = arguments.path.parent
        model.save_pretrained(folder / "hf")
        write_tokenizer(folder / "hf")
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        command += ["-i", folder / "hf", "-m", folder / "hf", "-o", folder, "-c", folder / "cache"]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
        return

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    ids = torch.from_numpy(batch(arguments)[0])
    with torch.no_grad():
        program = torch.onnx.export(Logits(), (ids,), dynamo=True, input_names=["input_ids"], output_names=["logits"])
    program.save(str(arguments.path), external_data=True)


def ours(arguments: argparse.Namespace) -> Callable[[], float]:
    """Convert and train; rank 0: all weights."""
    import onnxruntime

    import onnx_backprop as ob
    from onnx_backprop.ort_ops import default_options

    ids, labels = batch(arguments)
    options: dict[str, Any] = {"loss": ob.losses.NextToken(shift=False), "optimizer": "adamw"}
    if arguments.rank:
        targets = ["*qkv_proj*"] if arguments.int4 else ["*q_proj*", "*v_proj*"]
        adapted = ob.lora(arguments.path, targets, rank=arguments.rank)
        graph = ob.training_graph(adapted.model, trainable=adapted.trainable, **options)
    else:
        graph = ob.training_graph(arguments.path, **options)
    settings: onnxruntime.SessionOptions = default_options(python_operators=False, lean=True, threads=arguments.threads)
    trainer = ob.Trainer(graph, learning_rate=1e-4, session_options=settings)
    return lambda: trainer.step(input_ids=ids, labels=labels)


def with_torch(arguments: argparse.Namespace) -> Callable[[], float]:
    """The same in torch and peft."""
    torch: Any = import_module("torch")
    torch.set_num_threads(arguments.threads)
    model = decoder(arguments)
    if arguments.rank:
        peft: Any = import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=arguments.rank, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    ids, labels = map(torch.from_numpy, batch(arguments))
    run = torch.compile(model) if arguments.part == "compiled" else model

    def step() -> float:
        optimizer.zero_grad()
        logits = run(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def serve(arguments: argparse.Namespace) -> None:
    """Answer every line of standard input with what a step took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    step: Callable[[], float] | None = None
    for _ in sys.stdin:
        if step is None:
            step = ours(arguments) if arguments.part == "ours" else with_torch(arguments)
        begin = time.perf_counter(), time.process_time()
        loss = step()
        numbers = {"step s": time.perf_counter() - begin[0], "processor s": time.process_time() - begin[1]}
        answers.write(json.dumps({**numbers, "loss": loss, "peak MB": peak()}) + "\n")
        answers.flush()


def peak() -> float:
    """The largest resident set so far, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(arguments: argparse.Namespace, case: str, rank: int, path: Path) -> None:
    """Let contenders take turns, and print what they took."""
    command = ["-m", "benchmarks.language_memory", f"--path={path}", f"--case={case}", f"--rank={rank}"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("shape", "layers", "threads")]
    command += ["--int4"] if arguments.int4 else []
    started = {
        part: subprocess.Popen(
            [arguments.ours if part == "ours" else sys.executable, *command, f"--part={part}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in arguments.contenders
    }
    turns: dict[str, list[dict[str, float]]] = {part: [] for part in started}
    for _ in range(arguments.steps + 1):
        for part, process in started.items():
            assert process.stdin is not None
            assert process.stdout is not None
            time.sleep(0.1)  # threads of the one before wait busily for some 40 ms
            process.stdin.write("step\n")
            process.stdin.flush()
            turns[part].append(json.loads(process.stdout.readline()))
    for process in started.values():
        process.communicate()
    measured: dict[str, dict[str, float]] = {}
    what = f"{case} {f'LoRA of rank {rank}' if rank else 'all weights'}"
    for part, numbers in turns.items():
        measured[part] = {name: float(np.median([turn[name] for turn in numbers[1:]])) for name in numbers[0]}
        measured[part] |= {"loss": numbers[-1]["loss"], "peak MB": numbers[-1]["peak MB"]}
        print(f"{what} {part:9}", ", ".join(f"{name} {value:,.5g}" for name, value in measured[part].items()))
    for part in measured.keys() & {"eager", "compiled"} if "ours" in measured else ():
        ratios = {name: measured[part][name] / measured["ours"][name] for name in ("step s", "processor s", "peak MB")}
        print(
            f"{what} {ratios['step s']:.2f} times the speed of torch, {part}, by the processor's time "
            f"{ratios['processor s']:.2f}, {1 / ratios['peak MB']:.2f} of its peak",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1x128"], metavar="ROWSxTOKENS")
    parser.add_argument("--contenders", nargs="+", default=["ours", "eager"], choices=CONTENDERS)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--int4", action="store_true", help="our side trains the builder's int4 file, LoRA alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", help="of LoRA, 0: all weights; default --rank and 0")
    parser.add_argument("--layers", type=int, default=0, help="default: those of the shape")
    parser.add_argument("--folder", type=Path, help="where files are kept, and taken from if they are there")
    parser.add_argument("--ours", default=sys.executable, metavar="PYTHON")
    for hidden in ("--part", "--case"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "export":
        export(arguments)
    elif arguments.part:
        serve(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for case in arguments.cases:
                kind = f"{arguments.shape}_{arguments.layers}_{'int4' if arguments.int4 else case}"
                path = (arguments.folder or Path(folder)) / kind / "model.onnx"
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    command = ["-m", "benchmarks.language_memory", "--part=export", f"--path={path}", f"--case={case}"]
                    command += [f"--shape={arguments.shape}", f"--layers={arguments.layers}"]
                    command += ["--int4"] if arguments.int4 else []
                    subprocess.run([sys.executable, *command], check=True)
                for rank in arguments.ranks or (arguments.rank, *([] if arguments.int4 else [0])):
                    compare(arguments, case, rank, path)


if __name__ == "__main__":
    main()
