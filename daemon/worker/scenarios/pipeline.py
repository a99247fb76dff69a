"""The pipeline: times each stage of a deployed model's work, from a camera's JPEG frame to the top classes."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.camera import Camera
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.steps import AuditSample, Step, now
from benchd.daemon.worker.structures import Batch, cast, first_scores

BEST = 5


class Pipeline(Scenario):
    """Runs the stages of a batch of frames one after another."""

    is_inference = False

    def step(self, run: Run, loaded: LoadedModel) -> Step:
        """Return the step that begins with the frames."""
        if run.camera is None:
            raise ValueError("a pipeline needs a camera")
        return PipelineStages(loaded, run.camera, run.job.case.batch_size, len(run.pool), run.known)


SCENARIO = Pipeline()


class PipelineStages:
    """From JPEG frames on the host to the top five classes on the host; each stage ends before the next begins."""

    parts: tuple[str, ...] = ("total", "decode", "resize", "normalise", "copy", "model", "post")
    runs: int = 1

    def __init__(
        self, loaded: LoadedModel, source: Camera, batch_size: int, count: int, known: Sequence[int] = ()
    ) -> None:
        self._loaded, self._camera = loaded, source
        frames = [source.frames[number % len(source.frames)] for number in range(count * batch_size)]
        self._batches = [frames[start : start + batch_size] for start in range(0, len(frames), batch_size)]
        self.sample = AuditSample(known)

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of the total and of each stage."""
        place = self.sample.place(index % len(self._batches))
        camera, device = self._camera, self._loaded.device
        times = [now(device)]
        pictures = [camera.decode(frame) for frame in self._batches[place]]
        times.append(now(device))
        pictures = [camera.resize(picture) for picture in pictures]
        times.append(now(device))
        images: Batch = torch.stack([camera.normalise(picture) for picture in pictures])
        times.append(now(device))
        images = cast(images, self._loaded.dtype).to(device)
        times.append(now(device))
        output = self._loaded.run(images)
        times.append(now(device))
        scores = first_scores(output).softmax(-1)
        scores.topk(min(BEST, scores.shape[-1])).indices.cpu()
        times.append(now(device))
        self.sample.keep(place, output.cpu())
        return (times[-1] - times[0], *(after - before for before, after in pairwise(times)))
