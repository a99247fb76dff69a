"""The pipeline: what a deployed model does from a camera's JPEG frame to its best classes, each stage timed.

torchvision is imported here only when it is needed: it takes a second.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.worker.backends import Loaded
from benchd.daemon.worker.steps import Sample, now
from benchd.daemon.worker.structures import Batch, cast, first_scores

FRAME_HEIGHT, FRAME_WIDTH, QUALITY = 480, 640, 90
FRAMES = 64
BEST = 5
JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Camera:
    """JPEG frames, each uint8 (bytes,), and the way to a model's input `shape` (3, height, width).

    Frames are decoded, resized and normalised on `device`; `normalisation` is the mean and deviation of each channel,
    None for pixels in [0, 1].
    """

    frames: Sequence[Tensor]
    source: str
    shape: tuple[int, ...]
    normalisation: tuple[Sequence[float], Sequence[float]] | None
    device: torch.device

    def decode(self, frame: Tensor) -> Tensor:
        """Return the pixels of a frame, uint8 (3, height, width)."""
        from torchvision import io  # noqa: PLC0415 - see above

        picture: Tensor = io.decode_jpeg(frame, mode=io.ImageReadMode.RGB, device=self.device)
        return picture

    def resize(self, picture: Tensor) -> Tensor:
        """Return the whole picture at the size of the model's input."""
        from torchvision.transforms.v2 import functional  # noqa: PLC0415 - see above

        resized: Tensor = functional.resize(picture, list(self.shape[1:]), antialias=True)
        return resized

    def normalise(self, picture: Tensor) -> Tensor:
        """Return the picture as float32."""
        pixels = picture.float() / 255
        if self.normalisation is None:
            return pixels
        mean, deviation = (torch.tensor(one, device=pixels.device)[:, None, None] for one in self.normalisation)
        return (pixels - mean) / deviation

    def images(self) -> Tensor:
        """Return the model's inputs that come from the frames, float32 (frames, *shape) in host memory."""
        return torch.stack([self.normalise(self.resize(self.decode(frame))).cpu() for frame in self.frames])


def camera(
    data: str | None,
    shape: tuple[int, ...],
    normalisation: tuple[Sequence[float], Sequence[float]] | None,
    count: int,
    device: torch.device,
    seed: int,
) -> Camera:
    """Return the JPEG files of `data` or, without a folder, drawn frames of 640 x 480.

    Raises Unsupported without torchvision or for a model that reads no pictures, UsageError for data without JPEGs.
    """
    if len(shape) != 3 or shape[0] != 3:
        raise Unsupported(f"a pipeline feeds pictures of 3 channels, but the model reads {'x'.join(map(str, shape))}")
    try:
        from torchvision.io import decode_jpeg, encode_jpeg  # noqa: F401, PLC0415 - see above
    except ImportError as error:
        raise Unsupported(f"a pipeline decodes with torchvision: pip install torchvision ({error})") from error
    warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)  # for each frame, from 0.29 on
    if data and data.startswith("imagefolder:"):
        frames, source = _of_folder(Path(data.partition(":")[2]), count), data
    elif data in (None, "demo"):
        frames, source = _drawn(count, seed), f"drawn frames of {FRAME_WIDTH} x {FRAME_HEIGHT}, seed {seed}"
    else:
        raise UsageError(
            f"--data {data}: a pipeline reads JPEG files; give imagefolder:DIR, or omit it for drawn frames"
        )
    found = Camera(frames, f"{len(frames)} JPEG: {source}", shape, normalisation, torch.device("cpu"))
    return _on_gpu(found, device) if device.type == "cuda" else found


def _on_gpu(found: Camera, device: torch.device) -> Camera:
    """Return the camera with nvJPEG if this torchvision has it."""
    on_gpu = Camera(found.frames, f"{found.source}, decoded by nvJPEG", found.shape, found.normalisation, device)
    try:
        on_gpu.decode(found.frames[0])
    except RuntimeError:  # built without it
        return found
    return on_gpu


def _of_folder(folder: Path, count: int) -> list[Tensor]:
    """Return the bytes of files spread evenly over a folder's JPEG files."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in JPEG)
    if not paths:
        raise UsageError(f"--data imagefolder:{folder}: no JPEG files (*.jpg) in it, which a pipeline decodes")
    taken = min(count, len(paths))
    chosen = [paths[i * len(paths) // taken] for i in range(taken)]
    return [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in chosen]


def _drawn(count: int, seed: int) -> list[Tensor]:
    """Return frames of soft random shapes: noise would be the largest files that a decoder ever gets."""
    from torchvision import io  # noqa: PLC0415 - see above

    draw = torch.Generator().manual_seed(seed)
    size = (FRAME_HEIGHT, FRAME_WIDTH)
    shapes = torch.rand((count, 3, 12, 16), generator=draw)
    soft = [torch.nn.functional.interpolate(one[None], size, mode="bicubic")[0].clamp(0, 1) for one in shapes]
    return [io.encode_jpeg((255 * one).to(torch.uint8), quality=QUALITY) for one in soft]


class Pipeline:
    """From JPEG frames on the host to the five best classes on the host; every stage ends before the next begins."""

    parts: tuple[str, ...] = ("total", "decode", "resize", "normalise", "copy", "model", "post")
    runs: int = 1

    def __init__(self, loaded: Loaded, source: Camera, batch_size: int, count: int, known: Sequence[int] = ()) -> None:
        self._loaded, self._camera = loaded, source
        frames = [source.frames[number % len(source.frames)] for number in range(count * batch_size)]
        self._batches = [frames[start : start + batch_size] for start in range(0, len(frames), batch_size)]
        self.sample = Sample(known)

    def __call__(self, index: int) -> tuple[int, ...]:
        """Return the nanoseconds of the whole and of each stage."""
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
