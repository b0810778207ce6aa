"""Run folders as the product writes them, made by hand for the tests of the report."""

import json

KINDS = ("gpu", "gpu", "mlu", "mlu")
START = 1_700_000_000.0


def write_json(path, content):
    path.write_text(json.dumps(content))


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reading(step, ranks=(0, 1, 2, 3), **changes):
    """Return a line of metrics.jsonl; the step takes 100 ms."""
    count = len(ranks)
    return {
        "step": step,
        "epoch": step // 50,
        "time": START + 1 + 0.1 * step,
        "loss": 2.0 / (1 + 0.1 * step),
        "learning_rate": 0.05,
        "samples_per_sec": 640.0,
        "step_time_sec": 0.1,
        "ranks": list(ranks),
        "batch_sizes": [16] * count,
        "compute_time_sec": [0.08] * count,
        "wait_time_sec": [0.01] * count,
        "data_time_sec": [0.005] * count,
        "forward_time_sec": [0.03] * count,
        "backward_time_sec": [0.04] * count,
        "optimizer_time_sec": [0.01] * count,
    } | changes


def evaluation(step, accuracy):
    time = START + 1 + 0.1 * step
    values = {"loss": 1 - accuracy, "accuracy": accuracy}
    return {"step": step, "epoch": step // 50, "time": time, "validation": values}


def event(kind, step, text, ranks=(), **details):
    return {
        "step": step,
        "time": START + 1 + 0.1 * step,
        "kind": kind,
        "text": text,
        "ranks": list(ranks),
        "details": details,
    }


def make_run(folder, *, host="node-a", emulated=True):
    """Write the folder of a run in which rank 1 became slow and rank 3 was lost."""
    folder.mkdir(parents=True)
    names = [host, host, "node-b", "node-b"]
    ranks = [
        {"world_rank": rank, "host": names[rank], "kind": kind, "device": "cpu", "library": "",
         "device_name": "a CPU", "emulated": emulated}
        for rank, kind in enumerate(KINDS)
    ]  # fmt: skip
    groups = [
        {"kind": "gpu", "ranks": [0, 1], "leader": 0},
        {"kind": "mlu", "ranks": [2, 3], "leader": 2},
    ]
    write_json(folder / "topology.json", {"ranks": ranks, "groups": groups})
    config = {"model": "cnn", "dataset": "digits", "epochs": 4, "balance": "adaptive"}
    write_json(folder / "config.json", config | {"emulate_kinds": "gpu,mlu" if emulated else ""})
    write_json(
        folder / "benchmark.json",
        {
            "ranks": [{"rank": r, "device_kind": k, "seconds_by_batch": {"16": 0.08}}
                      for r, k in enumerate(KINDS)],
            "emulated": emulated,
            "allreduce_sec": {"flat": 0.0042, "leader": 0.0031, "striped": 0.0025},
        },
    )  # fmt: skip
    survivors = (0, 1, 2)
    lines = [reading(step) for step in range(5, 100, 5)]
    lines += [reading(step, survivors) for step in range(105, 201, 5)]
    lines += [evaluation(step, step / 250) for step in (50, 100, 150, 200)]
    write_lines(folder / "metrics.jsonl", sorted(lines, key=lambda line: line["step"]))
    plans = [
        {"step": 0, "time": START + 1, "batch_sizes": [16, 16, 16, 16], "ranks": [0, 1, 2, 3],
         "reason": "the benchmark"},
        {"step": 60, "time": START + 7, "batch_sizes": [24, 8, 16, 16], "ranks": [0, 1, 2, 3],
         "reason": "rank 1 (node-a, cpu, gpu) takes 2.00x as long as planned"},
        {"step": 100, "time": START + 11, "batch_sizes": [30, 12, 22], "ranks": [0, 1, 2],
         "reason": "rank 3 (node-b, cpu, mlu) was lost"},
    ]  # fmt: skip
    write_lines(folder / "plan.jsonl", plans)
    write_lines(
        folder / "events.jsonl",
        [
            event("start", 0, "training starts"),
            event("slow", 52, "rank 1 has been slow since step 50 (compute)", [1]),
            event("plan", 60, "new plan", batch_sizes=[24, 8, 16, 16]),
            event("loss", 100, "rank 3 (node-b, cpu, mlu) was lost at step 100", [3]),
            event("recovery", 101, "step 101 is done, 0.21 s after the loss", [0, 1, 2]),
            event("checkpoint", 150, "checkpoint at step 150"),
            event("slow_end", 180, "rank 1 recovered", [1]),
            event("finish", 200, "finished"),
        ],
    )
    summary = {"finished": True, "emulated": emulated, "allreduce": "striped", "world_size": 3}
    summary |= {"ranks": [0, 1, 2], "steps": 200, "epochs": 4, "samples_per_sec": 640.0}
    summary |= {"training_time_sec": 20.0, "step_time_sec": 0.1, "parity": True}
    write_json(folder / "summary.json", summary | {"validation": {"loss": 0.2, "accuracy": 0.8}})
    return folder
