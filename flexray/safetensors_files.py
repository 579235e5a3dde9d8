"""A model's parameters in safetensors files of bounded size, as Hugging Face names them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

FILE_BYTES = 2 * 2**30
"""Of a file, unless one parameter alone is larger."""


class SafetensorsFiles:
    """Takes parameters one at a time; never holds more than one file's.

    A single file is called `STEM.safetensors`; several are numbered and have an index.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """`dtype`: what floating-point values are written in."""
        self.folder, self.dtype, self.values = folder, dtype, 0
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, value: torch.Tensor) -> None:
        """The next parameter; each name once."""
        value = (value.to(self.dtype) if value.is_floating_point() else value).contiguous()
        if self._held and self._held_bytes + value.nbytes > FILE_BYTES:
            self._flush()
        self._held[name] = value
        self._held_bytes += value.nbytes
        self._total_bytes += value.nbytes
        self.values += value.numel()

    def close(self, stem: str) -> None:
        """Writes what is held, and the index where there are several files."""
        self._flush()
        if len(self._files) == 1:
            self._files[0][0].rename(self.folder / f"{stem}.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, 1):
            final = f"{stem}-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        path = self.folder / f"{stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self._files)}"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # it is made for its owner alone
        self._files.append((path, list(self._held)))
        self._held, self._held_bytes = {}, 0
