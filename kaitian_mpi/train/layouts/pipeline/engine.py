"""The engine of layout pipeline: a step of micro-batches through the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from kaitian_mpi.balance.pipeline import PipelinePlan
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import show_table, size_text
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler, random_bits
from kaitian_mpi.train.engine import Engine, set_learning_rates
from kaitian_mpi.train.evaluation import MAX_BATCH, Reader, evaluation_indices
from kaitian_mpi.train.layouts.divided_step import apply_step
from kaitian_mpi.train.layouts.peers import join_stages
from kaitian_mpi.train.layouts.pipeline.gradients import StageGradients
from kaitian_mpi.train.layouts.pipeline.measure import StagesPlan
from kaitian_mpi.train.layouts.pipeline.runner import Runner
from kaitian_mpi.train.layouts.pipeline.stages import Stages
from kaitian_mpi.train.step_times import StepClock


class GlobalSampler(LoadAdaptiveSampler):
    """Yields all samples of each global step, of which every rank picks its own."""

    def __init__(self, data: Any, by_rank: Sequence[int], _rank: int, **options: Any) -> None:
        self._by_rank = list(by_rank)  # what each reads first, for reports
        super().__init__(data, [sum(by_rank)], 0, **options)

    @property
    def batch_sizes(self) -> list[int]:
        return list(self._by_rank)


class PipelineEngine(Engine):
    """Computes consecutive layers, of micro-batches that go through those of all ranks."""

    computes_whole_model = False
    sampler_class = GlobalSampler
    gradients: StageGradients

    def _prepare(self) -> None:
        world = self.world
        stages = self.stages_plan.stages
        layers = self._stages.layers
        self._peers = join_stages(world, stages)
        self._runner = Runner(
            self._task,
            layers,
            self._computation,
            stages,
            world.rank,
            self.stages_plan.ahead,
            waits=self.step.waits,
            peers=self._peers,
            is_mixed=len(set(world.kinds)) > 1,
            begins=self._begins,
            ends=self._pace.catch_up,
        )

    def _make_gradients(self) -> StageGradients:
        targets: Any = self._stages.targets
        return StageGradients(targets, self._stages.owners, self.world.rank, self.step.waits)

    def close(self, together: bool = True) -> None:
        super().close(together)
        self._peers.close()

    @property
    def _stages(self) -> Stages:
        assert isinstance(self.state.partition, Stages)
        return self.state.partition

    @property
    def stages_plan(self) -> PipelinePlan:
        """The plan of the stages: their layers and ranks."""
        assert isinstance(self.plan, StagesPlan)
        return self.plan.pipeline

    def _begins(self, is_forward: bool) -> None:
        self._pace.catch_up()
        self.step.clock.enter(StepClock.FORWARD if is_forward else StepClock.BACKWARD)
        enter_phase("forward" if is_forward else "backward", step=self.state.progress.step + 1)

    def train(self, micro_batches: list[MicroBatch]) -> None:
        """Compute the next global batch; `micro_batches` are those that this rank reads."""
        step = self.step
        number = self.state.progress.step + 1
        runner = self._runner
        samples = sum(self.sampler.shares_at(self.state.progress.position))
        sizes = self._sizes(samples)
        rank_numbers = runner.rank_numbers(len(sizes))
        by_rank = self.stages_plan.first_samples(sizes, self.world.size)
        step.begin_with_samples(number, by_rank, sum(sizes[index] for index in rank_numbers))
        set_learning_rates(self._config, self.state, samples, len(self._setup.train))
        self.state.buffers.save()
        self._pace.go_to(number)
        step.start_clock()
        weights: dict[int, float] = {}
        if runner.is_last:
            for index, micro_batch in zip(rank_numbers, micro_batches, strict=True):
                weights[index] = self._task.weight_of(micro_batch.batch, micro_batch.samples)
        batches = {}
        if runner.reads_batches:
            placed = [self._computation.place(micro_batch.batch) for micro_batch in micro_batches]
            batches = dict(zip(rank_numbers, placed, strict=True))
        fractions = {index: weight / samples for index, weight in weights.items()}
        seeds = random_bits(self._config.seed, number, range(len(sizes))).tolist()
        losses = runner.train(len(sizes), batches, fractions, seeds)
        self.gradients.backward_done(losses, sum(weights.values()), samples)
        step.bucket_ready(True)

    def _sizes(self, samples: int) -> list[int]:
        """Return the samples of each micro-batch of a step."""
        return split_micro_batches(samples, self.stages_plan.micro_batch, self.sampler.min_batch)

    def split_indices(self, indices: list[int]) -> list[tuple[int, list[int]]]:
        sizes = self._sizes(len(indices))
        runs = [indices[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        runner = self._runner
        rank_numbers = runner.rank_numbers(len(sizes)) if runner.reads_batches else []
        return [(sizes[number], runs[number]) for number in rank_numbers]

    def apply(self, is_finite: bool) -> None:
        apply_step(self.gradients, self._task, self.state, is_finite, self.step.samples)

    def pool_statistics(self) -> None:
        """Give every rank the buffers of all stages."""
        enter_phase("the buffers of other stages", waits=True)
        self._stages.share_buffers(self.world)

    def results(self, observe: Callable[[float], None]) -> Iterator[tuple[Any, Any, int]]:
        """Yield the last stage's results for its micro-batches of the validation data."""
        data = self._setup.validation
        size = min(MAX_BATCH, self.stages_plan.micro_batch)
        batches = evaluation_indices(len(data), 0, [1], size)
        reader = Reader(data)
        on_host: Any = None

        def read(number: int) -> Any:
            nonlocal on_host
            on_host = reader.read(batches[number])
            return self._computation.place(on_host)

        function = self._task.metrics or self._task.loss
        for number, result in self._runner.evaluate(function, len(batches), read):  # type: ignore[arg-type]
            yield result, on_host, len(batches[number])


def show_plan(world: World, plan: PipelinePlan) -> None:
    """Print the stages, from world rank 0."""
    rows = [("stage", "layers", "ranks", "ms a micro-batch", "memory")]
    for number, stage in enumerate(plan.stages):
        ranks = ", ".join(str(world.infos[rank].world_rank) for rank in stage.ranks)
        seconds = ", ".join(f"{1e3 * sec:.1f}" for sec in stage.seconds)
        memory = ", ".join(size_text(plan.bytes_by_rank[rank]) for rank in stage.ranks)
        layers = f"{stage.begin + 1} to {stage.end}"
        rows.append((str(number + 1), layers, ranks, seconds, memory))
    used = {rank for stage in plan.stages for rank in stage.ranks}
    if unused := [info for rank, info in enumerate(world.infos) if rank not in used]:
        which = ", ".join(str(info.world_rank) for info in unused)
        rows.append(("none", "", which, "", ""))
    title = (
        f"layout pipeline: micro-batches of at most {plan.micro_batch} samples, predicted step "
        f"{1e3 * plan.step_sec:.1f} ms"
    )
    show_table(world, title, rows)
