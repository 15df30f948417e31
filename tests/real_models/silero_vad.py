"""The 16 kHz voice detector of ``silero-vad`` 6.2.3: convolutions over a spectrogram, an LSTM over frames of 32 ms.

The package runs it frame by frame with an LSTM cell, in TorchScript. Here an ``nn.LSTM`` reads all frames of a recording at
once with the same weights. (Its safetensors file holds another training of the same network.)
"""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn

from real_models import fetch

RATE, FRAME, CONTEXT = 16000, 512, 64  # Hz, samples; a frame is read with the last 64 samples before it


class Silero(nn.Module):
    """A recording in, the logit of speech at every frame out."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.encoder = nn.Sequential(
            *(nn.Conv1d(129, 128, 3, padding=1), nn.ReLU(), nn.Conv1d(128, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv1d(64, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(64, 128, 3, padding=1), nn.ReLU()),
        )
        self.rnn = nn.LSTM(128, 128, batch_first=True)
        self.head = nn.Linear(128, 1)

    def forward(self, audio: Tensor) -> Tensor:
        """(batch, samples) -> (batch, frame), samples a multiple of 512"""
        frames = nn.functional.pad(audio, (CONTEXT, 0)).unfold(1, CONTEXT + FRAME, FRAME)
        features = self.encoder(self.spectrum(frames.flatten(0, 1))).squeeze(-1)
        states, _ = self.rnn(features.unflatten(0, frames.shape[:2]))
        return self.head(states.relu())[..., 0]

    def spectrum(self, frames: Tensor) -> Tensor:
        """Magnitudes of each frame's four windows. (frame, samples) -> (frame, 129, 4)"""
        padded = nn.functional.pad(frames[:, None], (0, 64), "reflect")
        real, imaginary = self.stft(padded).chunk(2, 1)
        return (real**2 + imaginary**2).sqrt()


def load() -> Silero:
    """The trained network."""
    arrays = torchscript().state_dict()
    state = {"stft.weight": arrays["_model.stft.forward_basis_buffer"]}
    for part in ("weight", "bias"):
        for i in range(4):
            state[f"encoder.{2 * i}.{part}"] = arrays[f"_model.encoder.{i}.reparam_conv.{part}"]
        state[f"head.{part}"] = arrays[f"_model.decoder.decoder.2.{part}"]
        for which in ("ih", "hh"):
            state[f"rnn.{part}_{which}_l0"] = arrays[f"_model.decoder.rnn.{part}_{which}"]
    state["head.weight"] = state["head.weight"][..., 0]
    model = Silero()
    model.load_state_dict(state)
    return model.eval()


def torchscript() -> torch.jit.ScriptModule:
    """The package's own model, which reads a frame a call and keeps its state."""
    return torch.jit.load(io.BytesIO(fetch.read(fetch.SILERO_VAD, "data/silero_vad.jit"))).eval()


def voiced(seconds: float, seed: int) -> Tensor:
    """Vowels in syllables: harmonics of a gliding pitch through three moving resonances, four syllables a second. (samples,)"""
    draw = torch.Generator().manual_seed(seed)
    t = torch.arange(int(seconds * RATE) // FRAME * FRAME) / RATE
    uniform = lambda low, high: low + (high - low) * float(torch.rand((), generator=draw))  # noqa: E731
    pitch = uniform(100, 220) * (1 + 0.15 * torch.sin(2 * torch.pi * uniform(0.5, 2) * t + uniform(0, 6)))
    phase = 2 * torch.pi * (pitch / RATE).cumsum(0)
    formants = [
        uniform(low, high) * (1 + 0.25 * torch.sin(2 * torch.pi * uniform(1.5, 3) * t + uniform(0, 6)))
        for low, high in ((350, 750), (1000, 2000), (2300, 2900))
    ]
    wave = torch.zeros_like(t)
    for k in range(1, 30):
        gain = sum(1 / (1 + ((k * pitch - f) / 90) ** 2) / (n + 1) for n, f in enumerate(formants))
        wave += gain * torch.sin(k * phase) * (k * pitch < 7000)
    syllables = torch.sin(torch.pi * uniform(3, 4.5) * t + uniform(0, 3)) ** 2
    wave = wave * syllables
    return 0.2 * wave / wave.abs().max()


def noise(seconds: float, seed: int) -> Tensor:
    """White noise as loud as the vowels. (samples,)"""
    draw = torch.Generator().manual_seed(seed)
    return 0.06 * torch.randn(int(seconds * RATE) // FRAME * FRAME, generator=draw)
