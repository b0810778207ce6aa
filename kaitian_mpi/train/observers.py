"""What follows each step: figures and results, skipped steps, unequal weights, milestones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0, result_line, warn_rank_0
from kaitian_mpi.observe.reading import Figures, Reading
from kaitian_mpi.runtime import startup_clock
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.evaluation import Evaluation
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.step import Step, StepObserver, StepReports, StepTimes


class BadSteps(StepObserver):
    """Records skipped steps, whose gradient is not finite; too many in a row end the run."""

    def __init__(self, run: Run, world: World, sampler: LoadAdaptiveSampler) -> None:
        self._run, self._world, self._sampler = run, world, sampler

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Count a step that is skipped."""
        run, progress = self._run, self._run.state.progress
        if step.is_finite:
            progress.consecutive_bad_steps = 0
            return
        progress.bad_steps += 1
        progress.consecutive_bad_steps += 1
        samples = self._sampler.indices(progress.position - step.samples, step.samples)
        line = {"step": step.number, "epoch": progress.epoch, "samples": samples}
        run.setup.folder.append("bad_steps.jsonl", line)
        text = (
            f"step {step.number} is skipped: its gradient is not finite (bad_steps.jsonl lists its "
            "samples)"
        )
        warn_rank_0(self._world, text)
        run.sinks.event("bad_step", step.number, text)
        limit = run.config.max_bad_steps
        if limit and progress.consecutive_bad_steps >= limit:
            raise AgreedError(
                f"the gradients of {limit} steps in a row were not finite, the last at step "
                f"{step.number}; lower --lr, look at the samples in bad_steps.jsonl, or raise "
                "--max-bad-steps"
            )


class WeightCheck(StepObserver):
    """Repairs weights that differ between the ranks, every `--check-every` steps."""

    def __init__(self, run: Run, world: World) -> None:
        self._run, self._world = run, world

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Compare, if that is due after this step."""
        every = self._run.config.check_every
        if step.number % every == 0:
            from kaitian_mpi.train.divergence import repair_divergence

            repair_divergence(self._world, self._run.state, self._run.sinks)


class Milestones(StepObserver):
    """Reports, once each, the end of the start-up and of a recovery."""

    def __init__(self, run: Run, world: World) -> None:
        self._run, self._world, self._has_reported_start = run, world, False

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Report what has ended with this step."""
        run = self._run
        if not self._has_reported_start:
            self._report_start()
        losses = run.membership.losses
        recovered = [loss for loss in losses if loss.recovery_sec and not loss.is_logged]
        for loss in recovered:
            loss.is_logged = True
            after = f"{loss.recovery_sec:.2f} s after the loss was noticed"
            text = f"step {step.number} is done, {after}"
            print_rank_0(self._world, text)
            ranks = [info.world_rank for info in loss.lost]
            run.sinks.event("recovery", step.number, text, ranks, recovery_sec=loss.recovery_sec)
        if recovered:
            run.write_summary()

    def _report_start(self) -> None:
        self._has_reported_start = True
        seconds = startup_clock.finish()
        if seconds is not None:  # at the job's first step
            print_rank_0(self._world, startup_clock.describe(seconds))
            self._run.summary = replace(self._run.summary, startup_sec=seconds)


class Metrics(StepObserver):
    """Sums this rank's losses and times, and gathers those of all ranks every few steps.

    From each reading all ranks derive the step of the next one, so that the steps in between need
    no communication. After each epoch it records the results.
    """

    def __init__(
        self, run: Run, loop: Loop, balancing: Balancing, logged: dict[str, float]
    ) -> None:
        self._run, self._loop, self._world = run, loop, loop.world
        self._balancing, self._logged = balancing, logged
        self._compute_sec = [0.0] * self._world.size
        self._wait_sec = [0.0] * self._world.size
        self._all_steps = 0  # in these sums; both restart at 0 after a recovery
        self._batch_sizes: list[int] = []
        self._next_reading = 0
        self._reset()

    def _reset(self) -> None:
        # Summed on the losses' device, so that a step does not wait for it.
        self._loss_sum = torch.zeros((), device=self._world.device)
        self._times, self._data_sec = StepTimes(), 0.0
        self._samples = self._steps = 0
        self._since = time.perf_counter()

    def epoch_begins(self) -> None:
        """Exclude the time since the last reading, which was not spent training."""
        self._since = time.perf_counter()

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        """Add a step, and read if that is due."""
        self._loss_sum = self._loss_sum + step.mean_loss * step.samples
        self._times = self._times.plus(step.times)
        self._data_sec += step.data_sec
        self._samples += step.samples
        self._steps += 1
        self._batch_sizes = step.batch_sizes
        if step.number >= self._next_reading:
            self.epoch_ends()

    def epoch_ends(self) -> None:
        """Gather the ranks' sums, and give them to the sinks."""
        if self._steps == 0:
            return
        progress, sinks = self._run.state.progress, self._run.sinks
        loss = self._loss_sum.item() / self._samples  # the same on all ranks
        times = self._times.plus(self._loop.clock.take(wait=True))
        own = {
            "compute": times.computed,
            "wait": times.waited,
            "data": self._data_sec,
            "forward": times.forward,
            "backward": times.backward,
            "optimizer": times.optimizer,
        }
        elapsed_sec = time.perf_counter() - self._since
        sleeping_barrier(self._world.comm)
        gathered = gather_values(self._world.comm, (own, elapsed_sec))
        sums, elapsed = [each for each, _ in gathered], max(sec for _, sec in gathered)
        self._all_steps += self._steps
        for rank, each in enumerate(sums):
            self._compute_sec[rank] += each["compute"]
            self._wait_sec[rank] += each["wait"]
        progress.training_sec += elapsed
        if sinks:
            sinks.on_reading(self._reading(loss, sums, elapsed))
        steps_between = round(self._run.config.log_interval * self._steps / elapsed)
        self._next_reading = progress.step + max(1, steps_between)
        self._logged.clear()
        self._reset()

    def _reading(self, loss: float, sums: list[dict[str, float]], elapsed: float) -> Reading:
        progress, step_sec = self._run.state.progress, elapsed / self._steps
        phases = {
            f"{name}_time_sec": [each[name] / self._steps for each in sums] for name in sums[0]
        }
        return Reading(
            step=progress.step,
            total_steps=progress.total_steps,
            epoch=progress.epoch,
            epochs=self._run.config.epochs,
            epoch_fraction=min(1.0, progress.position / len(self._run.setup.train)),
            steps=self._steps,
            time=time.time(),
            loss=loss,
            learning_rate=progress.learning_rate,
            samples_per_sec=self._samples / elapsed,
            step_time_sec=step_sec,
            seconds_left=(progress.total_steps - progress.step) * step_sec,
            ranks=[info.world_rank for info in self._world.infos],
            batch_sizes=self._batch_sizes,
            logged=dict(self._logged),
            **phases,
        )

    def evaluated(self, result: Evaluation, epoch: int) -> None:
        """Record the results of an epoch."""
        run, progress = self._run, self._run.state.progress
        where = (progress.epoch, progress.position, progress.step)
        print_rank_0(self._world, result_line(*where, result.means))
        if result.means:
            run.sinks.on_evaluation(_figures(run, epoch, result.means))
        run.setup.folder.save_model(run.state.weights())
        steps = max(1, self._all_steps)
        run.write_summary(
            relay=self._world.relay.describe() if run.summary.relay else None,
            steps=progress.step,
            epochs=progress.epoch,
            bad_steps=progress.bad_steps,
            batch_sizes=self._loop.sampler.batch_sizes,
            plans=self._balancing.plans,
            slow_ranks=self._balancing.slow_ranks(),
            samples_per_sec=progress.samples / progress.training_sec,
            step_time_sec=progress.training_sec / progress.step,
            compute_time_sec=[seconds / steps for seconds in self._compute_sec],
            wait_time_sec=[seconds / steps for seconds in self._wait_sec],
            training_time_sec=progress.training_sec,
            validation=dict(result.means) or None,
            val_loss=result.means.get("loss"),
            val_accuracy=result.means.get("accuracy"),
        )

    def close(self, together: bool) -> None:
        """Give the sinks what no reading has taken; keep the costs estimated on these ranks."""
        run, costs = self._run, self._balancing.costs()
        if self._logged:
            run.sinks.on_logged(_figures(run, run.state.progress.epoch, self._logged))
            self._logged.clear()
        if costs is not None:
            places = [info.place for info in self._world.infos]
            run.costs = dict(zip(places, costs, strict=True))


def _figures(run: Run, epoch: int, values: Mapping[str, float]) -> Figures:
    step = run.state.progress.step
    return Figures(step=step, epoch=epoch, time=time.time(), values=dict(values))
