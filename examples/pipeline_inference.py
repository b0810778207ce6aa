"""Inference with a model split into stages, one per rank, so that no device has to hold all of it.

    mpirun -np 3 python examples/pipeline_inference.py
    mpirun -np 2 python examples/pipeline_inference.py --layers 6,2 --emulate-kinds gpu,mlu

A device with more memory can take more layers. The last rank also runs the whole model and compares
the outputs.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import kaitian_mpi


def main() -> None:
    """Run the stages; the last rank, which gets the result, prints speed and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", default="", help="layers per rank, such as 6,2; default 2 each")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch in flight")
    parser.add_argument("--batches", type=int, default=10, help="batches to time")
    parser.add_argument("--emulate-kinds", default="", help="such as gpu,gpu,mlu")
    options = parser.parse_args()

    world = kaitian_mpi.init(emulate_kinds=options.emulate_kinds)
    sizes = [int(size) for size in options.layers.split(",") if size] or [2] * world.size
    if len(sizes) != world.size or min(sizes) < 1:
        parser.error(f"--layers {sizes}: give 1 or more for each of the {world.size} ranks")

    torch.manual_seed(0)  # the same weights on every rank; a large model would load its own part
    layers = [
        nn.TransformerEncoderLayer(options.width, nhead=4, batch_first=True)
        for _ in range(sum(sizes))
    ]
    whole = nn.Sequential(*layers).eval()
    first = sum(sizes[: world.rank])
    part = whole[first : first + sizes[world.rank]].to(world.device)
    stage = PipelineStage(part, world.rank, world.size, world.device)
    schedule = ScheduleGPipe(stage, options.micro_batches)

    inputs = torch.randn(options.batch_size, 16, options.width)
    given = [inputs.to(world.device)] if stage.is_first else []
    with torch.no_grad():
        output = schedule.step(*given)  # the first batch also sets the shapes of the stages
        dist.barrier()
        started_at = time.perf_counter()
        for _ in range(options.batches):
            output = schedule.step(*given)
        world.synchronize()
        seconds = time.perf_counter() - started_at
        if stage.is_last:
            difference = (output - whole.to(world.device)(inputs.to(world.device))).abs().max()
            print(f"stages of {sizes} layers on {', '.join(world.kinds)}")
            print(f"{options.batches * options.batch_size / seconds:.0f} samples/s")
            print(f"largest difference from the whole model: {difference.item():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
