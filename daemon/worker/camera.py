"""The camera of a pipeline: JPEG frames, and their conversion to a model's input.

torchvision is imported only when needed, because that takes a second.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchd.daemon.errors import Unsupported, UsageError

FRAME_HEIGHT, FRAME_WIDTH, QUALITY = 480, 640, 90
FRAMES = 64
JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Camera:
    """JPEG frames, each uint8 (bytes,), and their conversion to a model's input `shape` (3, height, width).

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
        """Return the whole picture, resized to the model's input."""
        from torchvision.transforms.v2 import functional  # noqa: PLC0415 - see above

        resized: Tensor = functional.resize(picture, list(self.shape[1:]), antialias=True)
        return resized

    def normalise(self, picture: Tensor) -> Tensor:
        """Return the picture as float32."""
        pixels = picture.float() / 255
        if self.normalisation is None:
            return pixels
        mean, deviation = (
            torch.tensor(statistic, device=pixels.device)[:, None, None] for statistic in self.normalisation
        )
        return (pixels - mean) / deviation

    def images(self) -> Tensor:
        """Return the frames as the model's inputs, float32 (frames, *shape) in host memory."""
        return torch.stack([self.normalise(self.resize(self.decode(frame))).cpu() for frame in self.frames])


def open_camera(
    data: str | None,
    shape: tuple[int, ...],
    normalisation: tuple[Sequence[float], Sequence[float]] | None,
    count: int,
    device: torch.device,
    seed: int,
) -> Camera:
    """Return a camera for the JPEG files in `data` or, without a folder, for randomly drawn 640 x 480 frames.

    Raises Unsupported without torchvision or for a model that does not take pictures, UsageError for data without
    JPEGs.
    """
    if len(shape) != 3 or shape[0] != 3:
        raise Unsupported(f"a pipeline feeds 3-channel images, but the model takes {'x'.join(map(str, shape))}")
    try:
        from torchvision.io import decode_jpeg, encode_jpeg  # noqa: F401, PLC0415 - see above
    except ImportError as error:
        raise Unsupported(f"a pipeline decodes with torchvision: pip install torchvision ({error})") from error
    warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)  # issued for each frame from 0.29 on
    if data and data.startswith("imagefolder:"):
        frames, source = _of_folder(Path(data.partition(":")[2]), count), data
    elif data in (None, "demo"):
        frames, source = _drawn(count, seed), f"synthetic frames of {FRAME_WIDTH} x {FRAME_HEIGHT}, seed {seed}"
    else:
        raise UsageError(
            f"--data {data}: a pipeline reads JPEG files; give imagefolder:DIR, or omit --data for synthetic frames"
        )
    camera = Camera(frames, f"{len(frames)} JPEG: {source}", shape, normalisation, torch.device("cpu"))
    return _on_gpu(camera, device) if device.type == "cuda" else camera


def _on_gpu(camera: Camera, device: torch.device) -> Camera:
    """Return the camera with nvJPEG if this torchvision has it, else unchanged."""
    on_gpu = Camera(camera.frames, f"{camera.source}, decoded by nvJPEG", camera.shape, camera.normalisation, device)
    try:
        on_gpu.decode(camera.frames[0])
    except RuntimeError:  # this torchvision was built without it
        return camera
    return on_gpu


def _of_folder(folder: Path, count: int) -> list[Tensor]:
    """Return the contents of JPEG files, selected evenly from a folder; raise UsageError if it has none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in JPEG)
    if not paths:
        raise UsageError(f"--data imagefolder:{folder}: contains no JPEG files (*.jpg) for the pipeline to decode")
    sample_size = min(count, len(paths))
    chosen = [paths[i * len(paths) // sample_size] for i in range(sample_size)]
    return [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in chosen]


def _drawn(count: int, seed: int) -> list[Tensor]:
    """Return frames with soft random shapes; noise would make larger files than a decoder gets in practice."""
    from torchvision import io  # noqa: PLC0415 - see above

    draw = torch.Generator().manual_seed(seed)
    size = (FRAME_HEIGHT, FRAME_WIDTH)
    shapes = torch.rand((count, 3, 12, 16), generator=draw)
    soft = [torch.nn.functional.interpolate(shape[None], size, mode="bicubic")[0].clamp(0, 1) for shape in shapes]
    return [io.encode_jpeg((255 * picture).to(torch.uint8), quality=QUALITY) for picture in soft]
