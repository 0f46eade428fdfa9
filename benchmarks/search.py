"""Compare variants of methods on a held-out part of the training data.

    python benchmarks/search.py cifar10 --ipc 10 --seeds 0,1,2 m3d m3d:momentum=0,lr=20
    python benchmarks/search.py digits --ipc 1 --net convnet2:width=16 --repeats 2 --epochs 20 random m3d:steps=20

A variant is a method and its options. One record per variant and seed is appended to ``--out``; those already there
are skipped, so a search that was stopped goes on. At the end a table: mean over seeds ± sd of seeds. With ``--final``,
for variants chosen before, all training data are condensed and the test data measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from speed import RESULTS

import m3d
from m3d.evaluation import make_protocol
from m3d.registry import parse_spec


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def known(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(options: argparse.Namespace, data: m3d.Dataset, variant: str, seed: int) -> list[dict[str, Any]]:
    """Condense once, evaluate under every precision asked for."""
    name, settings = parse_spec(variant)
    began = time.perf_counter()
    condensed = m3d.condense(data, options.ipc, name, net=options.net, seed=seed, **settings)
    seconds = time.perf_counter() - began
    records = []
    for precision in options.eval_precision:
        protocol = make_protocol(options.protocol, epochs=options.epochs)
        result = m3d.evaluate(
            condensed, data, net=options.net, protocol=protocol, repeats=options.repeats, split=options.split,
            precision=precision,
        )  # fmt: skip
        records.append(
            {"variant": variant, "condensation_seed": seed, "condense_seconds": round(seconds, 2), **result.as_record()}
        )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """One line per variant and evaluation precision."""
    groups: dict[tuple[str, str], list[float]] = {}
    for record in records:
        groups.setdefault((record["variant"], record["precision"]), []).append(record["accuracy"])
    lines = []
    for (variant, precision), values in sorted(groups.items(), key=lambda item: -statistics.fmean(item[1])):
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        each = " ".join(f"{v:.2f}" for v in values)
        lines.append(f"{statistics.fmean(values):6.2f} ± {spread:.2f}  {variant} (evaluated in {precision}): {each}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("variants", nargs="+", help="METHOD or METHOD:option=value,option=value")
    parser.add_argument("--ipc", type=int, default=10)
    parser.add_argument("--net", default="convnet3")
    parser.add_argument("--seeds", type=_numbers, default=[0], help="0,1,2")
    parser.add_argument("--val-fraction", type=float, default=0.1)
    parser.add_argument("--final", action="store_true", help="measure a choice made before on the test data")
    parser.add_argument("--protocol", default="paper")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--eval-precision", type=_words, default=["auto"], help="bf16,tf32")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "search.jsonl")
    options = parser.parse_args()
    options.split = "test" if options.final else "val"
    data = m3d.load_data(options.data, val_fraction=0.0 if options.final else options.val_fraction)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["variant"], r["condensation_seed"]) for r in known(options.out)}
    began = time.perf_counter()
    for seed in options.seeds:
        for variant in options.variants:
            if (variant, seed) in done or time.perf_counter() - began > options.time_limit:
                continue
            for record in measure(options, data, variant, seed):
                print(f"{record['accuracy']:.2f} ± {record['sd']:.2f}  seed {seed}  {variant}  {record['precision']}  "
                      f"{record['condense_seconds']} s + {record['seconds']} s", flush=True)  # fmt: skip
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    print(table(known(options.out)))


if __name__ == "__main__":
    main()
