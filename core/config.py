"""All settings. Sources, strongest first: arguments, environment (``HARLI_*``, nested by ``__``), ``harli.toml``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def _default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME", "~/.local/share")).expanduser() / "harli"


class EngineSettings(BaseModel):
    """What the SGLang engine is started with; None lets Harli choose by device."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: Path | None = Field(None, description="Hugging Face folder of the served model; None: the bundled SmolLM2.")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention_backend: str | None = None
    max_total_tokens: int | None = Field(None, ge=256, description="KV cache size in tokens.")
    max_running_requests: int = Field(16, ge=1)
    mem_fraction_static: float | None = Field(None, gt=0, lt=1)
    max_lora_rank: int = Field(16, ge=1, description="Largest adapter rank that the engine can serve.")
    max_loras_per_batch: int = Field(4, ge=1)
    threads: int | None = Field(None, ge=1, description="CPU threads of the scheduler process; None: all cores.")
    captured: bool = Field(
        True,
        description="On a GPU: finetune as CUDA graphs, next to decode and behind its steps. False: eagerly between "
        "two steps, without SGLang's overlap scheduler; slower, and any LoRA job goes.",
    )
    partitions: int = Field(6, ge=0, le=16, description="SM splits made at the start; each takes 2 to 4 s to capture.")
    elastic_kv: bool | None = Field(
        None,
        description="The KV cache shares one arena of memory with finetuning and grows and shrinks beside running "
        "requests; None: on a CPU.",
    )
    arguments: dict[str, Any] = Field(
        {}, description="More arguments of SGLang's server, by its names; they win over those that Harli chooses."
    )
    start_timeout_s: float = Field(600.0, gt=0)


class FinetuneSettings(BaseModel):
    """Defaults and limits of finetuning in the engine's process."""

    policy: Literal["solo", "tasklet_slices", "hybrid", "harli", "static"] | None = Field(
        None, description="None: hybrid where captured tasklets run on a GPU, tasklet_slices elsewhere."
    )
    margin: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of a latency target that is never planned with; None: 0.05 where captured tasklets run on a "
        "GPU, 0.15 elsewhere.",
    )
    micro_batch_tokens: int = Field(256, ge=32, description="Default tokens of a packed micro-batch.")
    base_models: list[Path] = Field(
        [],
        description="Hugging Face folders of models other than the served one that jobs may finetune, each by its "
        "folder's name; their layers are streamed from host memory.",
    )
    window_layers: int = Field(4, ge=1, description="Layers of such a model that are on the device at a time.")


class RetentionSettings(BaseModel):
    """Which old versions go by themselves: those beyond the newest of a name that are older than `days`, unless they
    are served, named by an alias or needed by a job. None: all are kept."""

    adapter_versions: int | None = Field(None, ge=1)
    dataset_versions: int | None = Field(None, ge=1)
    days: float = Field(30.0, ge=0)


class Settings(BaseSettings):
    """Everything that can be set, with its default."""

    model_config = SettingsConfigDict(
        env_prefix="HARLI_", env_nested_delimiter="__", toml_file="harli.toml", extra="forbid"
    )

    data_dir: Path = Field(default_factory=_default_data_dir)
    database_url: str | None = Field(None, description="SQLAlchemy URL; None: SQLite in the data directory.")
    host: str = "127.0.0.1"
    api_port: int = Field(8600, ge=1, le=65535)
    engine_port: int = Field(8601, ge=1, le=65535)
    console_port: int = Field(8602, ge=1, le=65535)
    link_url: str | None = Field(None, description="ZeroMQ address of the engine link; None: a socket in the data dir.")
    max_upload_mib: int = Field(1024, ge=1)
    webhooks_to_private_addresses: bool = Field(
        False, description="Let webhooks go to this machine and private networks, and unencrypted."
    )
    job_retention_days: int | None = Field(
        None, ge=1, description="Forget jobs, with their figures, so long after their end; None: never."
    )
    token: SecretStr | None = Field(
        None, description="API token that client, CLI and console show; None: the local admin's in the data directory."
    )
    requests_per_s: float = Field(
        200.0, gt=0, description="Requests a second of one token at an API process; for a moment, twice as many."
    )
    engine: EngineSettings = EngineSettings()
    finetune: FinetuneSettings = FinetuneSettings()
    retention: RetentionSettings = RetentionSettings()

    @property
    def api_url(self) -> str:
        return f"http://{self.host}:{self.api_port}"

    @property
    def engine_url(self) -> str:
        return f"http://{self.host}:{self.engine_port}"

    @property
    def console_url(self) -> str:
        return f"http://{self.host}:{self.console_port}"

    @property
    def model_folder(self) -> Path:
        """The served model's folder; that of the bundled model is made at the first start."""
        return (self.engine.model or self.data_dir / "models" / BUNDLED_MODEL).expanduser().absolute()

    @property
    def token_file(self) -> Path:
        """The local admin's token, made when the API starts on the data directory for the first time."""
        return self.data_dir.expanduser() / "admin-token"

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine reach the ports."""
        return self.host in LOOPBACK

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'harli.db'}"

    @property
    def resolved_link_url(self) -> str:
        """A Unix socket path is limited to 107 bytes, so a long data directory falls back to a loopback port."""
        if self.link_url:
            return self.link_url
        path = self.data_dir / "run" / "link.sock"
        return f"ipc://{path}" if len(os.fsencode(path)) < 100 else f"tcp://127.0.0.1:{self.api_port + 1000}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)
