"""Run folders as the product writes them, made by hand for the tests of the report."""

import json

KINDS = ("gpu", "gpu", "mlu", "mlu")
START = 1_700_000_000.0


def write_json(path, content):
    path.write_text(json.dumps(content))


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def at(step, **more):
    """Return a line about a step, of which each takes 100 ms."""
    return {"step": step, "epoch": step // 50, "time": START + 1 + 0.1 * step} | more


def reading(step, ranks=(0, 1, 2, 3), **changes):
    """Return a line of metrics.jsonl."""
    parts = {"compute": 0.08, "wait": 0.01, "data": 0.005}
    parts |= {"forward": 0.03, "backward": 0.04, "optimizer": 0.01}
    times = {f"{name}_time_sec": [seconds] * len(ranks) for name, seconds in parts.items()}
    line = at(step, loss=2.0 / (1 + 0.1 * step), learning_rate=0.05, samples_per_sec=640.0)
    line |= {"step_time_sec": 0.1, "ranks": list(ranks), "batch_sizes": [16] * len(ranks)}
    return line | times | changes


def event(kind, step, text, ranks=(), **details):
    return at(step, kind=kind, text=text, ranks=list(ranks), details=details)


def make_run(folder, *, host="node-a", emulated=True):
    """Write the folder of a run in which rank 1 became slow and rank 3 was lost."""
    folder.mkdir(parents=True)
    device = {"device": "cpu", "library": "", "device_name": "a CPU", "emulated": emulated}
    places = enumerate(zip((host, host, "node-b", "node-b"), KINDS, strict=True))
    ranks = [{"world_rank": n, "host": name, "kind": kind, **device} for n, (name, kind) in places]
    groups = [
        {"kind": kind, "ranks": [n, n + 1], "leader": n} for kind, n in (("gpu", 0), ("mlu", 2))
    ]
    write_json(folder / "topology.json", {"ranks": ranks, "groups": groups})
    config = {"model": "cnn", "dataset": "digits", "epochs": 4, "balance": "adaptive"}
    write_json(folder / "config.json", config | {"emulate_kinds": "gpu,mlu" if emulated else ""})
    costs = {"seconds_by_batch": {"16": 0.08}}
    benchmark = {"ranks": [{"rank": n, "device_kind": k, **costs} for n, k in enumerate(KINDS)]}
    benchmark |= {"allreduce_sec": {"flat": 0.0042, "leader": 0.0031, "striped": 0.0025}}
    write_json(folder / "benchmark.json", benchmark | {"emulated": emulated})
    lines = [
        reading(step, (0, 1, 2, 3)[: 4 - (step > 100)]) for step in range(5, 201, 5) if step != 100
    ]
    for step in (50, 100, 150, 200):
        lines.append(at(step, validation={"loss": 1 - step / 250, "accuracy": step / 250}))
    write_lines(folder / "metrics.jsonl", sorted(lines, key=lambda line: line["step"]))
    plans = (
        (0, [16, 16, 16, 16], "the benchmark"),
        (60, [24, 8, 16, 16], "rank 1 (node-a, cpu, gpu) takes 2.00x as long as planned"),
        (100, [30, 12, 22], "rank 3 (node-b, cpu, mlu) was lost"),
    )
    lines = [at(n, batch_sizes=b, ranks=[*range(len(b))], reason=why) for n, b, why in plans]
    write_lines(folder / "plan.jsonl", lines)
    events = [
        event("start", 0, "training starts"),
        event("slow", 52, "rank 1 has been slow since step 50 (compute)", [1]),
        event("plan", 60, "new plan", batch_sizes=[24, 8, 16, 16]),
        event("loss", 100, "rank 3 (node-b, cpu, mlu) was lost at step 100", [3]),
        event("recovery", 101, "step 101 is done, 0.21 s after the loss", [0, 1, 2]),
        event("checkpoint", 150, "checkpoint at step 150"),
        event("slow_end", 180, "rank 1 recovered", [1]),
        event("finish", 200, "finished"),
    ]
    write_lines(folder / "events.jsonl", events)
    summary = {"finished": True, "emulated": emulated, "allreduce": "striped", "world_size": 3}
    summary |= {"ranks": [0, 1, 2], "steps": 200, "epochs": 4, "samples_per_sec": 640.0}
    summary |= {"training_time_sec": 20.0, "step_time_sec": 0.1, "parity": True}
    write_json(folder / "summary.json", summary | {"validation": {"loss": 0.2, "accuracy": 0.8}})
    return folder
