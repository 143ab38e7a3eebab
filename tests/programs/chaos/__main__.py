"""Kills, freezes and cuts off real processes, and audits all streams.

With `--mutant lost-fence`, all processes send scripts that are broken in one place, until the audit
finds the fault. `--mutant all` tries all mutants in `states/mutants.py`, one after the other. There
are three scenarios besides the fleet. In `swapping`, a worker has two models that take turns. In
`engines`, workers forward to inference servers. In `layers`, all workers run one model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from promptq.worker.shipped import MODEL_DIR
from tests.programs.chaos.audit.outcome import Outcome, mutant_table, report
from tests.programs.chaos.audit.records import FLEET, Queue
from tests.programs.chaos.driver import SCENARIOS, Run
from tests.programs.chaos.processes.earlier import LAST_RELEASE, check_out
from tests.programs.chaos.processes.server import ChaoticCluster
from tests.programs.chaos.schedule import MEAN_SECONDS_ON_A_CLUSTER, Fault
from tests.programs.states.mutants import CHAOS_MUTANTS

FAMILIES = {  # of tiny models, one for each kind of layer
    "attention": "qwen3",
    "windows": "gemma3_text",
    "experts": "qwen3_moe",
    "latent": "deepseek_v3",
    "delta-net": "qwen3_5_text",
    "mamba": "granitemoehybrid",
    "convolution": "lfm2",
}


def save_model_of(kind: str, folder: Path) -> Path:
    """Saves a model of the family `kind` with random weights, and the shipped model's tokenizer.
    Returns the directory."""
    from tests.worker.engine.tiny_models import save_model  # with torch and transformers

    directory = folder / f"model-{kind}"
    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 2048}
    save_model(directory, FAMILIES[kind], seed=1, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL_DIR / name, directory)
    return directory


ENGINES = ("stand-in", "vllm", "llama.cpp", "sglang")
SLOW_ENGINES = ("vllm", "sglang")
"""Servers that take 40 s to start, so faults are a fifth as frequent."""


def main() -> int:
    """Run the command. Returns the exit code: 1 at any violation; with mutants, 1 if the audit does
    not find one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests chaos", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="fleet")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="inference servers of the scenario engines",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of faults")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the faults and the requests"
    )
    parser.add_argument("--load", type=float, default=1.0, help="factor on the rate of requests")
    parser.add_argument("--keep", type=Path, help="keep logs and records in this new folder")
    parser.add_argument("--record", type=Path, help="file for a trace of all calls")
    parser.add_argument(
        "--layers",
        choices=FAMILIES,
        help="the scenario layers, with a tiny model of this kind in place of the shipped one",
    )
    parser.add_argument(
        "--queues", nargs="+", type=Queue, choices=FLEET, help="only these queues of the fleet"
    )
    parser.add_argument(
        "--beside-last-release", action="store_true", help="share the queues with the last release"
    )
    parser.add_argument(
        "--cluster",
        choices=["valkey", "redis-server"],
        help="run on a Redis Cluster that this program starts",
    )
    parser.add_argument(
        "--may-lose", action="store_true", help="primaries may die before everything is replicated"
    )
    parser.add_argument(
        "--mutant",
        choices=[*CHAOS_MUTANTS, "all"],
        help="broken scripts that the audit has to find",
    )
    options = parser.parse_args()
    if options.layers is not None:
        if options.scenario not in ("fleet", "layers"):
            parser.error("--layers: only for the scenario layers")
        options.scenario = "layers"
    if options.scenario != "fleet":
        for name in ("queues", "beside_last_release", "cluster"):
            if getattr(options, name):
                parser.error(f"--{name.replace('_', '-')}: only for the scenario fleet")
    if options.record:
        for name in ("mutant", "beside_last_release", "cluster"):
            if getattr(options, name):
                parser.error(f"--record: not with --{name.replace('_', '-')}")
        if not options.record.parent.is_dir():
            parser.error(f"--record: there is no folder {options.record.parent}")
    names = [""] if options.mutant is None else [options.mutant]
    if options.mutant == "all":
        names = list(CHAOS_MUTANTS)
    for folder in [options.keep / name for name in names] if options.keep else []:
        if folder.exists():
            parser.error(f"--keep: {folder} is there already; each run takes a new folder")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"chaos: seed {seed}", flush=True)
    if options.mutant:
        outcomes = {name: run(options, seed, name) for name in names}
        print(mutant_table(outcomes))
        return 0 if all(it.violations for it in outcomes.values()) else 1
    outcome = run(options, seed)
    print(report(outcome))
    return 1 if outcome.violations else 0


def run(options: argparse.Namespace, seed: int, mutant: str = "") -> Outcome:
    """Does one run. Returns its outcome. The folder of `--keep` gets a folder for each mutant."""
    with tempfile.TemporaryDirectory(prefix="promptq-chaos-") as temporary:
        folder = Path(temporary)
        if options.keep is not None:
            folder = options.keep / mutant
            folder.mkdir(parents=True, exist_ok=False)
        if mutant:
            print(f"mutant {mutant}", flush=True)
        with tempfile.TemporaryDirectory(prefix="promptq-earlier-") as checkout:
            earlier = None
            if options.beside_last_release:
                earlier = check_out(Path(checkout) / LAST_RELEASE, own_environment=True)
            queues, means = SCENARIOS[options.scenario]
            cluster = None
            engines = None
            if Queue.UPSTREAM in queues:
                from tests.programs.chaos.processes.engines import Engines  # with torch

                engines = Engines(options.engine, folder)
                if options.engine in SLOW_ENGINES:
                    means = {fault: 5 * mean for fault, mean in means.items()}
            if options.cluster:
                cluster = ChaoticCluster(options.cluster, may_lose=options.may_lose)
                means = dict(MEAN_SECONDS_ON_A_CLUSTER)
                if options.cluster == "redis-server":  # which cannot
                    del means[Fault.SLOT_MOVE_AT_ONCE]
            chaos = Run(
                *(seed, options.seconds, folder, options.load),
                queues=options.queues or queues,
                means=means,
                mutant=mutant,
                earlier=earlier,
                cluster=cluster,
                engines=engines,
                model=save_model_of(options.layers, folder) if options.layers else None,
                record=options.record,
            )
            return asyncio.run(chaos.run())


if __name__ == "__main__":
    sys.exit(main())
