"""All figures of recovery from killed ranks, measured on one machine with two cores.

    python benchmarks/recovery.py [PART ...] [--json FILE]

The parts are kills, closed, open, shards, layouts, experts, vendor, agreement, checkpoint, writing,
signals and soak. Two hours in all; nothing else may run meanwhile. On three hosts, which are
emulated by network namespaces of this machine and share its cores, and so as root:

    python benchmarks/recovery.py hosts host-losses host-joins
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from recovering import host_joins, host_losses, kills, layout_kills, signals, soak
from recovering.job import Launch
from shared.emulated_hosts import EmulatedHosts, why_not
from shared.launch import BENCHMARKS, add_to_path

HERE = Path(__file__).parent / "recovering"
VENDOR = Path(__file__).parents[1] / "tests" / "vendor"
VENDOR_WORLDS = (
    "vendor:0,vendor:1,vendor:2",
    "vendor:0,vendor:1,cpu",
    "vendor:0,vendor2:0",
    "vendor:0,vendor:1,vendor2:0",
)
MPIRUN = ["mpirun", "--with-ft", "ulfm", "--map-by", ":OVERSUBSCRIBE", "-np"]
SLOTS = [1, 2, 1]  # hosts are assigned to cores in turn, so each of two cores runs two ranks
ON_HOSTS = {"hosts", "host-losses", "host-joins"}
Result = dict[str, Any]


def run(*command: object) -> Result:
    """Run a command and return its last line of JSON."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: Result = json.loads(lines[-1])
    return result


def arguments_of(options: argparse.Namespace) -> list[str]:
    """Return the kaitian-train arguments of the disturbed jobs, with a short final evaluation."""
    given = [f"--model={options.model}", f"--global-batch-size={options.batch}"]
    return [*given, "--dataset=digits", "--val-split=0.05", "--balance=off"]


def run_kills(options: argparse.Namespace) -> Result:
    """Time from the kill of a rank to the next step of the others."""
    launch = Launch(options.ranks)
    result = kills.measure(launch, arguments_of(options), options.trials, options.seed)
    kills.show(result)
    return result


def run_closed(options: argparse.Namespace) -> Result:
    """The same for a script in the closed form; its final weights are compared, too."""
    return run_script("closed", options)


def run_open(options: argparse.Namespace) -> Result:
    """The same for a script in the open form; its final weights are compared, too."""
    return run_script("open", options)


def run_shards(options: argparse.Namespace) -> Result:
    """The same in layout shard with mirrors, with 152 MB of parameters."""
    return run_script("closed", options, "--layout=shard", "--width=2144")


def run_layouts(options: argparse.Namespace) -> Result:
    """Kills and stops at any moment in layouts shard, with and without mirrors, and pipeline."""
    script = str(HERE / "own_training.py"), "closed"
    result = layout_kills.measure(
        options.ranks, options.trials, options.seed, script, amid_steps=options.amid_steps
    )
    layout_kills.show(result)
    return result


def run_experts(options: argparse.Namespace) -> Result:
    """The same in layout experts with mirrors alone."""
    script = str(HERE / "own_training.py"), "closed"
    layouts = {"experts with mirrors": layout_kills.LAYOUTS["experts with mirrors"]}
    result = layout_kills.measure(
        options.ranks, options.trials, options.seed, script, layouts, options.amid_steps
    )
    layout_kills.show(result)
    return result


def run_vendor(options: argparse.Namespace) -> Result:
    """The same in worlds with a vendor's library, whose kernels wait for a dead rank forever."""
    add_to_path(VENDOR)
    found = {}
    for devices in VENDOR_WORLDS:
        print(f"-- {devices}", flush=True)
        options.ranks = devices.count(",") + 1
        # Between kinds, which would else meet in host memory where that is faster.
        arguments = [f"--devices={devices}", "--allreduce=leader"]
        found[devices] = run_script("closed", options, *arguments)
    return found


def run_script(form: str, options: argparse.Namespace, *arguments: str) -> Result:
    """Time from the kill of a rank to the next step of a script."""
    launch = Launch(options.ranks, script=(str(HERE / "own_training.py"), form))
    given = [f"--global-batch-size={options.batch}", *arguments]
    with tempfile.TemporaryDirectory(prefix="kaitian-undisturbed-") as folder:
        weights = kills.train_undisturbed(launch, given, Path(folder))
        is_same = partial(kills.has_weights, weights)
        result = kills.measure(launch, given, options.trials, options.seed, is_same)
    kills.show(result)
    return result


@contextmanager
def emulated_hosts() -> Iterator[EmulatedHosts]:
    """Return three hosts, two of them with a single rank."""
    with tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder:
        yield EmulatedHosts(Path(folder), SLOTS)


def run_hosts(options: argparse.Namespace) -> Result:
    """Time from the kill of a rank to the next step, on several emulated hosts."""
    with emulated_hosts() as hosts, hosts:
        launch = Launch(hosts.slots, hosts)
        result = kills.measure(launch, arguments_of(options), options.trials, options.seed)
    kills.show(result)
    return result


def run_host_losses(options: argparse.Namespace) -> Result:
    """Recovery from the loss of a host or of its network link."""
    with emulated_hosts() as hosts:
        launch = Launch(hosts.slots, hosts)
        result = host_losses.measure(launch, arguments_of(options), options.trials, options.seed)
    host_losses.show(result)
    return result


def run_host_joins(options: argparse.Namespace) -> Result:
    """Time without a step where a host is added to a running job's hosts file."""
    with emulated_hosts() as hosts:
        launch = Launch(hosts.slots, hosts)
        # With the benchmark of the new rank.
        arguments = [*arguments_of(options), "--balance=adaptive"]
        result = host_joins.measure(launch, arguments, options.trials)
    host_joins.show(result)
    return result


def run_agreement(options: argparse.Namespace) -> Result:
    """Cost per step of being able to recover."""
    script = HERE / "agreement.py"
    sizes = ["--model", options.model, "--batch", options.batch]
    result = run(*MPIRUN, options.ranks, sys.executable, script, *sizes)
    low, middle, high = result["ready_over_plain"]
    print(
        f"step {1e3 * result['step_sec']:.0f} ms, of which the agreement takes "
        f"{result['agree_us']:.0f} us on the last rank to arrive ({result['agree_wait_us']:.0f} us "
        f"on the median rank) and the copy of the buffers {result['copy_us']:.0f} us: "
        f"{result['percent']:.2f}% of the step (target: 1%)\n"
        f"agreement alone, in a loop: {result['agree_alone_us']:.0f} us\n"
        f"steps with both / without: {middle:.4f} ({low:.4f} to {high:.4f}), standard error "
        f"{result['ready_over_plain_stderr']:.4f}, {result['pairs']} pairs"
    )
    return result


def run_checkpoint(options: argparse.Namespace) -> Result:
    """How long a checkpoint blocks training."""
    sizes = ["--model", options.model, "--batch", options.batch]
    result = run("mpirun", "-np", 2, sys.executable, HERE / "checkpoint.py", *sizes)
    for rank, times in enumerate(result["save_ms"]):
        print(f"rank {rank}: ms in each save: {' '.join(f'{ms:.1f}' for ms in times)}")
    print(
        f"a checkpoint of {result['megabytes']:.1f} MB blocks training: median "
        f"{result['median_ms']:.1f} ms, worst {result['worst_ms']:.1f} ms (target: 20 ms)\n"
        f"it is on disk after {result['written_sec']:.2f} s; the next step takes "
        f"{result['next_over_normal']:.3f} times a normal step of "
        f"{1e3 * result['step_sec']:.0f} ms"
    )
    return result


def run_writing(options: argparse.Namespace) -> Result:
    """Kills while a checkpoint is written."""
    result = run(sys.executable, HERE / "writing.py", "--kills", options.kills)
    print(
        f"{result['good']} of {result['kills']} kills left a checkpoint that loads: {result['new']}"
        f" the one being written, {result['old']} the one before (target: all; a write takes "
        f"{1e3 * result['write_sec']:.0f} ms)"
    )
    return result


def run_signals(options: argparse.Namespace) -> Result:
    """What is saved when mpirun gets SIGTERM."""
    add_to_path(HERE)
    result = signals.measure(options.trials, options.seed)
    signals.show(result)
    return result


def run_soak(options: argparse.Namespace) -> Result:
    """Many kills in one run, and their effect on the model."""
    result = soak.measure(Launch(options.ranks), options.seed)
    soak.show(result)
    return result


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "kills": run_kills,
    "closed": run_closed,
    "open": run_open,
    "shards": run_shards,
    "layouts": run_layouts,
    "experts": run_experts,
    "vendor": run_vendor,
    "agreement": run_agreement,
    "checkpoint": run_checkpoint,
    "writing": run_writing,
    "signals": run_signals,
    "soak": run_soak,
    "hosts": run_hosts,
    "host-losses": run_host_losses,
    "host-joins": run_host_joins,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; default: all on one host")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=32, help="global batch")
    parser.add_argument("--trials", type=int, default=20, help="jobs, each with one kill")
    parser.add_argument("--kills", type=int, default=100, help="kills while writing")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the choice of ranks and times"
    )
    parser.add_argument(
        "--amid-steps", action="store_true", help="layouts, experts: kill amid steps alone"
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if ON_HOSTS & set(options.parts) and (reason := why_not()):
        parser.error(f"emulated hosts: {reason}")
    return options


def main() -> None:
    """Run the chosen parts."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that jobs are ended
    add_to_path(BENCHMARKS)
    found: Result = {"cores": len(os.sched_getaffinity(0))}
    for name in options.parts or [part for part in PARTS if part not in ON_HOSTS]:
        print(f"== {name}: {PARTS[name].__doc__}", flush=True)
        found[name] = PARTS[name](options)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
