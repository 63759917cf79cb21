"""The models other than the served one that jobs may finetune: those that the settings list, looked at when the engine
starts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from core.config import Settings
from core.errors import HarliError, Invalid
from core.finetune import base_folder, streamed
from core.finetune.base_folder import BaseFolder
from core.link.messages import BaseModel
from core.serving import model_folder

SETTING = "HARLI_FINETUNE__BASE_MODELS"


class Bases:
    """The listed folders by name. One that cannot be used stays, with the reason: a job that names it is told.

    served: the served model's name; dtype: that weights are converted to; most_bytes: the most memory of the device
    that a job can have, None where that is not known.
    """

    def __init__(self, settings: Settings, *, served: str, dtype: torch.dtype, most_bytes: int | None) -> None:
        self.window_layers = settings.finetune.window_layers
        self._most_bytes = most_bytes
        self._folders: dict[str, BaseFolder] = {}
        self._refused: dict[str, tuple[str, str]] = {}  # folder and reason, by name
        for path in settings.finetune.base_models:
            folder = path.expanduser().absolute()
            try:
                if folder.name in (served, *self._folders):
                    raise Invalid(
                        "base_name",
                        f"{folder.name} is the name of the served model or of another base; rename the folder {folder}",
                        "base_model",
                    )
                model_folder.check(folder, SETTING)
                found = base_folder.read(folder, dtype)
                if most_bytes is not None:
                    streamed.check_room(found, self.window_layers, most_bytes)
            except HarliError as error:
                self._refused.setdefault(folder.name, (str(folder), error.message))
            else:
                self._folders[found.name] = found

    def __iter__(self) -> Iterator[BaseFolder]:
        """Those that can be used."""
        return iter(list(self._folders.values()))

    def refuse(self, name: str, why: str) -> None:
        """One of them cannot be used after all."""
        self._refused[name] = str(self._folders.pop(name).path), why

    def check_bytes(self, folder: BaseFolder, needed: int) -> None:
        """Raise `Invalid` when a job cannot have the memory that captured tasklets of the base turned out to need."""
        if self._most_bytes is not None and needed > self._most_bytes:
            raise Invalid(
                "window_too_large",
                f"captured tasklets of {folder.name} take {needed / 2**20:.0f} MiB with the window of its layers, and "
                f"a job can have {self._most_bytes / 2**20:.0f} MiB; lower HARLI_FINETUNE__WINDOW_LAYERS or "
                "finetune.micro_batch_tokens, or start the engine with a larger engine.max_total_tokens",
                "base_model",
            )

    def get(self, name: str) -> BaseFolder:
        """The base of that name; raises `Invalid` with the reason when it cannot be had."""
        if name in self._folders:
            return self._folders[name]
        _, why = self._refused.get(name, ("", f"it is not among the models that {SETTING} lists"))
        raise Invalid("base_model", f"base model {name} cannot be finetuned: {why}", "base_model")

    def told(self) -> tuple[BaseModel, ...]:
        """For the control plane."""
        usable = [
            BaseModel(
                name=folder.name,
                path=str(folder.path),
                parameters=folder.parameters,
                layers=folder.layers,
                window_layers=min(self.window_layers, folder.layers),
                window_bytes=folder.window_bytes(min(self.window_layers, folder.layers)),
                host_bytes=folder.host_bytes,
            )
            for folder in self
        ]
        refused = [
            BaseModel(name=name, path=path, refused=why)
            for name, (path, why) in self._refused.items()
            if name not in self._folders
        ]
        return (*usable, *refused)
