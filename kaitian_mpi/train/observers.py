"""Observers of steps: metrics and results, events, and repairs of weights."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.console import print_rank_0, result_line, warn_rank_0
from kaitian_mpi.observe.reading import Figures, Reading
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.data.sampler import steps_per_epoch
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.progress import TimeLeft
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.state import weights
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepReports, StepTimes


class Events(StepObserver):
    """Reports skipped steps and the ends of the start-up and of recoveries; compares weights."""

    def __init__(self, run: Run, loop: Loop) -> None:
        self._run = run
        self._loop = loop
        self._world = loop.world

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        run = self._run
        if step.is_finite:
            run.state.progress.consecutive_bad_steps = 0
        else:
            self._report_skipped(step)
        self._report_recovered(step)
        every = run.config.check_every
        if run.layout.compares_weights and every and step.number % every == 0:
            from kaitian_mpi.train.divergence import repair_divergence

            repair_divergence(self._world, run.state, run.sinks)

    def _report_skipped(self, step: Step) -> None:
        """Record a step whose gradient is not finite; too many in a row end the run."""
        run = self._run
        progress = run.state.progress
        progress.bad_steps += 1
        progress.consecutive_bad_steps += 1
        first = progress.position - step.samples
        samples = self._loop.sampler.indices(first, step.samples)
        line = {"step": step.number, "epoch": progress.epoch, "samples": samples}
        run.setup.folder.append("bad_steps.jsonl", line)
        text = (
            f"step {step.number} skipped: its gradient has NaN or Inf (bad_steps.jsonl lists its "
            "samples)"
        )
        warn_rank_0(self._world, text)
        run.sinks.event("bad_step", step.number, text)
        limit = run.config.max_bad_steps
        if limit and progress.consecutive_bad_steps >= limit:
            raise AgreedError(
                f"the gradients of {limit} steps in a row were not finite, the last at step "
                f"{step.number}; lower the learning rate, look at the samples in bad_steps.jsonl, "
                "or raise --max-bad-steps"
            )

    def _report_recovered(self, step: Step) -> None:
        """Report how long the recovery took, after the first step that follows a loss."""
        losses = self._run.membership.losses
        recovered = [loss for loss in losses if loss.recovery_sec and not loss.is_logged]
        for loss in recovered:
            loss.is_logged = True
            seconds = loss.recovery_sec
            text = f"step {step.number} is done, {seconds:.2f} s after the loss was noticed"
            print_rank_0(self._world, text)
            ranks = [info.world_rank for info in loss.lost]
            self._run.sinks.event("recovery", step.number, text, ranks, recovery_sec=seconds)
        if recovered:
            self._run.write_summary()


class SinceReading:
    """A rank's steps, times and losses since the last reading. Not collective."""

    def __init__(self, device: torch.device) -> None:
        # Summed on the losses' device, so that a step does not wait for it.
        self._loss_sum = torch.zeros((), device=device)
        self._loss_samples = 0
        self.times = StepTimes()
        self.data_sec = 0.0
        self.samples = 0
        self.steps = 0
        self.batch_sizes: list[int] = []
        self.began = time.perf_counter()

    def add(self, step: Step) -> None:
        """Add a step that all ranks have done."""
        if step.is_finite:  # a step that is skipped does not spoil the mean of the others
            self._loss_sum = self._loss_sum + step.mean_loss * step.samples
            self._loss_samples += step.samples
        self.times = self.times.plus(step.times)
        self.data_sec += step.data_sec
        self.samples += step.samples
        self.steps += 1
        self.batch_sizes = step.batch_sizes

    def loss(self) -> float:
        """Return the mean over all samples, the same on all ranks; it waits for the device."""
        return self._loss_sum.item() / self._loss_samples if self._loss_samples else math.nan


class Metrics(StepObserver):
    """Sums this rank's losses and times, and gathers those of all ranks every few steps.

    At each such reading all ranks compute the step of the next one, so that the steps in between
    need no communication. After each epoch it records the results.
    """

    def __init__(
        self, run: Run, loop: Loop, balancing: Balancing, logged: dict[str, float]
    ) -> None:
        self._run = run
        self._loop = loop
        self._world = loop.world
        self._balancing = balancing
        self._logged = logged
        self._compute_sec = [0.0] * self._world.size
        self._wait_sec = [0.0] * self._world.size
        self._all_steps = 0  # in the two sums above; all restart at 0 after a recovery
        self._time_left = TimeLeft()
        self._epoch_ended: float | None = None
        self._next_reading = 0
        self._sums = SinceReading(self._world.device)

    def epoch_begins(self) -> None:
        """Exclude the time since the last reading, which was not spent training."""
        self._sums.began = time.perf_counter()
        if self._epoch_ended is not None:
            self._time_left.evaluation_done(self._sums.began - self._epoch_ended)
            self._epoch_ended = None

    def step_done(self, step: Step, reports: StepReports | None) -> None:
        self._sums.add(step)
        if step.number >= self._next_reading:
            self._read()

    def epoch_ends(self) -> None:
        """Read once more if there were steps since the last reading."""
        if self._sums.steps > 0:
            self._read()
        self._epoch_ended = time.perf_counter()

    def _read(self) -> None:
        """Gather the ranks' sums, and give them to the sinks."""
        progress = self._run.state.progress
        sums = self._sums
        loss = sums.loss()
        times = sums.times.plus(self._loop.engine.step.clock.take(wait=True))
        rank_sec = {
            "compute": times.computed,
            "wait": times.waited,
            "data": sums.data_sec,
            "forward": times.forward,
            "backward": times.backward,
            "optimizer": times.optimizer,
        }
        rank_elapsed_sec = time.perf_counter() - sums.began
        sleeping_barrier(self._world.comm)
        gathered = gather_values(self._world.comm, (rank_sec, rank_elapsed_sec))
        all_sec = [phase_sec for phase_sec, _ in gathered]
        elapsed_sec = max(seconds for _, seconds in gathered)
        self._all_steps += sums.steps
        for rank, phase_sec in enumerate(all_sec):
            self._compute_sec[rank] += phase_sec["compute"]
            self._wait_sec[rank] += phase_sec["wait"]
        progress.training_sec += elapsed_sec
        progress.timed_steps += sums.steps
        progress.timed_samples += sums.samples
        self._time_left.steps_done(sums.steps, elapsed_sec)
        if self._run.sinks:
            self._run.sinks.on_reading(self._reading(loss, all_sec, elapsed_sec))
        steps_between = round(self._run.config.log_interval * sums.steps / elapsed_sec)
        self._next_reading = progress.step + max(1, steps_between)
        self._logged.clear()
        self._sums = SinceReading(self._world.device)

    def _reading(self, loss: float, all_sec: list[dict[str, float]], elapsed_sec: float) -> Reading:
        """Return the reading for the sinks; `all_sec` are each rank's seconds by phase."""
        progress = self._run.state.progress
        sums = self._sums
        phases = {
            f"{name}_time_sec": [phase_sec[name] / sums.steps for phase_sec in all_sec]
            for name in all_sec[0]
        }
        return Reading(
            step=progress.step,
            total_steps=progress.total_steps,
            epoch=progress.epoch,
            epochs=self._run.config.epochs,
            epoch_fraction=min(1.0, progress.position / len(self._run.setup.train)),
            steps=sums.steps,
            time=time.time(),
            loss=loss,
            learning_rate=progress.learning_rate,
            samples_per_sec=sums.samples / elapsed_sec,
            step_time_sec=elapsed_sec / sums.steps,
            seconds_left=self._seconds_left(all_sec, elapsed_sec),
            ranks=[info.world_rank for info in self._world.infos],
            batch_sizes=sums.batch_sizes,
            logged=dict(self._logged),
            **phases,
        )

    def _seconds_left(self, all_sec: list[dict[str, float]], elapsed_sec: float) -> float | None:
        progress = self._run.state.progress
        validation = self._run.setup.validation
        evaluation_sec = 0.0
        computed_sec = sum(phase_sec["compute"] for phase_sec in all_sec)
        if validation is not None and computed_sec:
            # An evaluation takes about one forward of each sample.
            forward = sum(phase_sec["forward"] for phase_sec in all_sec) / computed_sec
            sample_sec = elapsed_sec / self._sums.samples
            evaluation_sec = len(validation) * sample_sec * forward
        steps_left = progress.total_steps - progress.step
        evaluations_left = _evaluations_left(self._loop, len(self._run.setup.train))
        return self._time_left.estimate(steps_left, evaluations_left, evaluation_sec)

    def evaluated(self, means: Mapping[str, float], epoch: int) -> None:
        run = self._run
        progress = run.state.progress
        line = result_line(progress.epoch, progress.position, progress.step, means)
        print_rank_0(self._world, line)
        if means:
            run.sinks.on_evaluation(_figures(run, epoch, means))
        with run.saving(self._world) as on_piece:
            model, fault = run.state.collect_model(self._world, run.setup.path, on_piece)
            if fault is not None:
                run.setup.folder.log_unsaved_model(fault)
            elif run.owns_files:
                run.setup.folder.save_model(weights(model))
            del model  # its tensors may be mapped files, whose memory must not be counted
        memory = run.describe_memory(self._world, with_peak=True)
        steps = max(1, self._all_steps)
        run.write_summary(
            relay=self._world.communication.describe() if run.summary.relay else None,
            **run.layout.describe(self._loop.engine),
            steps=progress.step,
            epochs=progress.epoch,
            bad_steps=progress.bad_steps,
            batch_sizes=self._loop.sampler.batch_sizes,
            plans=self._balancing.plans,
            slow_ranks=self._balancing.slow_ranks(),
            samples_per_sec=progress.samples_per_sec,
            step_time_sec=progress.step_time_sec,
            compute_time_sec=[seconds / steps for seconds in self._compute_sec],
            wait_time_sec=[seconds / steps for seconds in self._wait_sec],
            training_time_sec=progress.training_sec,
            memory=memory,
            validation=dict(means) or None,
            val_loss=means.get("loss"),
            val_accuracy=means.get("accuracy"),
        )

    def close(self, together: bool) -> None:
        """Give the sinks the logged values that no reading had; keep these ranks' estimated costs.

        Not collective.
        """
        run = self._run
        costs = self._balancing.costs()
        # After a loss another rank may write the files, and its next reading has its own values.
        if self._logged and (together or run.sinks):
            run.sinks.on_logged(_figures(run, run.state.progress.epoch, self._logged))
            self._logged.clear()
        if costs is not None:
            places = [info.place for info in self._world.infos]
            run.costs = dict(zip(places, costs, strict=True))


def _evaluations_left(loop: Loop, samples: int) -> int:
    """Return the number of epochs that are yet to end, the current one included."""
    global_batch = sum(loop.sampler.batch_sizes)
    steps = steps_per_epoch(samples, global_batch, loop.sampler.min_batch)
    later_steps = loop.progress.total_steps - loop.progress.step - loop.steps_in_epoch
    return 1 + math.ceil(later_steps / steps)


def _figures(run: Run, epoch: int, values: Mapping[str, float]) -> Figures:
    step = run.state.progress.step
    return Figures(step=step, epoch=epoch, time=time.time(), values=dict(values))
