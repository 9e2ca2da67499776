"""One typed Settings: command line flags = VL2_* environment variables = YAML keys.

Precedence: flags, then the environment, then the YAML file named by `config`, then the defaults below.
The command line (`server/cli.py`) makes one flag of each field, so a field added here is a flag, a variable and a key.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from limits import parse_many
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from server.fetch import FetchPolicy

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "model" / "demo" / "checkpoint"
DEFAULT_MODEL_NAME = "vl2-demo"
_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


class ConfigurationError(ValueError):
    """A setting is unknown or has a value that cannot be used; the message names it."""


class Settings(BaseSettings):
    """Everything that a person can set. The descriptions are the help texts of the flags."""

    model_config = SettingsConfigDict(
        env_prefix="VL2_", extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True
    )

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Checkpoint folder or Hugging Face hub id; the embedded demo when left out.",
    )
    config: Path | None = Field(default=None, description="YAML file with any of these settings as its keys.")
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name that clients give as `model`; by default the hub id or folder name.",
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all interfaces."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto: a GPU if any."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Number format of weights and cache; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="auto reads the weights; dummy makes seeded random ones from config.json alone."
    )
    attention_backend: Literal["auto", "flash-attn", "triton", "torch"] = Field(
        default="auto", description="Attention over prompts; auto: Triton where it serves, else flash-attn, else torch."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus answer in tokens; by default what the model was made for."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Most sequences that run at once.")
    kv_cache_tokens: int | None = Field(
        default=None, ge=64, description="Size of the KV cache in tokens; by default from --gpu-memory-utilization."
    )
    gpu_memory_utilization: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="Share of the GPU's memory for weights, activations and KV cache together.",
    )
    prefill_chunk_tokens: int = Field(default=2048, ge=1, description="Most prompt tokens computed in one step.")
    vision_tile_budget: int = Field(default=16, ge=1, description="Most image tiles encoded in one step.")
    no_prefix_caching: bool = Field(
        default=False, description="Compute every prompt anew, whatever it has in common with earlier ones."
    )
    deterministic: bool = Field(
        default=False,
        description="Answers that do not depend on what else runs, to the bit: slower on a GPU, always so on a CPU.",
    )
    vision_cache_bytes: int = Field(
        default=1 << 30, ge=0, description="Device memory for features of pictures, those of running requests included."
    )
    max_queued_requests: int = Field(
        default=256, ge=0, description="Most requests that wait beside --max-num-seqs running ones; others get a 429."
    )
    shutdown_timeout: float = Field(
        default=30.0, ge=0, description="Seconds that running requests have to end after SIGTERM or Ctrl-C."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**63 - 1,
        description="Seed of dummy weights; a request without a seed of its own draws one.",
    )
    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(), description="Key that clients must send as a bearer token; may be given several times. None: open."
    )
    api_key_file: Path | None = Field(
        default=None, description="File with further keys, one a line; read again on SIGHUP."
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Origin whose web pages may call this server; may be given several times. *: any."
    )
    rate_limit: str | None = Field(
        default=None,
        description="Most requests of one key, or of one address, such as 60/minute or 5/second;1000/hour.",
    )
    max_requests_per_client: int | None = Field(
        default=None, ge=1, description="Most requests of one key, or of one address, that run at once."
    )
    read_timeout: float = Field(
        default=30.0, gt=0, description="Seconds that a request's head, or its body beyond 16 KiB/s, may take."
    )
    max_header_bytes: int = Field(default=32 << 10, ge=1024, description="Largest request headers in bytes.")
    otlp_endpoint: str | None = Field(
        default=None, min_length=1, description="Send OpenTelemetry traces to this URL (needs the extra `otel`)."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Log lines as text or as JSON objects.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity logged."
    )
    max_body_bytes: int = Field(default=32 << 20, ge=1024, description="Largest request body in bytes.")
    max_image_pixels: int = Field(default=64_000_000, ge=1, description="Largest image in pixels (width times height).")
    max_images: int = Field(default=16, ge=0, description="Most images in one request.")
    no_media_urls: bool = Field(default=False, description="Fetch no images from URLs at all.")
    allowed_media_domains: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Host that image URLs may name, .example.com for that and all below it; may be given several "
        "times. None: any public one.",
    )
    allow_private_media: bool = Field(
        default=False, description="Fetch images from private and loopback addresses, too: for closed networks."
    )
    allowed_media_ports: Annotated[tuple[int, ...], NoDecode] = Field(
        default=(80, 443), description="Port that image URLs may name; may be given several times."
    )
    allowed_media_path: Path | None = Field(
        default=None, description="Folder below which image URLs may name files of the server; none by default."
    )

    @field_validator("api_key", "allowed_origins", "allowed_media_domains", "allowed_media_ports", mode="before")
    @classmethod
    def _several_values(cls, value: Any) -> Any:
        """Every string may hold several values, parted by commas: the only way to give several in one variable."""
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            return value
        parted: list[Any] = []
        for item in items:
            parted += [part.strip() for part in item.split(",")] if isinstance(item, str) else [item]
        return tuple(parted)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's `yes` and `true` are no settings but for flags; pydantic would take them for the number 1."""
        assert info.field_name is not None
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in items) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("must not be true or false")
        return value

    @field_validator("api_key")
    @classmethod
    def _no_empty_key(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value() for key in value):
            raise ValueError("an API key is empty")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://example.org or https://localhost:3000")
        return value

    @field_validator("rate_limit")
    @classmethod
    def _rates_only(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_many(value)
            except ValueError as error:
                raise ValueError(f"{value!r} is not a rate such as 60/minute or 5/second;1000/hour") from error
        return value

    @field_validator("allowed_media_domains")
    @classmethod
    def _domains_are_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return FetchPolicy(allowed_domains=value).allowed_domains

    @field_validator("allowed_media_ports")
    @classmethod
    def _ports_exist(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(FetchPolicy(allowed_ports=frozenset(value)).allowed_ports))

    @field_validator("allowed_media_path")
    @classmethod
    def _path_is_a_folder(cls, value: Path | None) -> Path | None:
        return FetchPolicy(allowed_path=value).allowed_path

    @property
    def fetch_policy(self) -> FetchPolicy:
        """What images may be fetched; each of its values has been judged above."""
        return FetchPolicy(
            allowed_domains=self.allowed_media_domains,
            allow_private=self.allow_private_media,
            allow_urls=not self.no_media_urls,
            allowed_path=self.allowed_media_path,
            allowed_ports=frozenset(self.allowed_media_ports),
            max_bytes=self.max_body_bytes,
        )

    @property
    def model_source(self) -> str:
        """Folder or hub id of the checkpoint to serve."""
        return self.model if self.model is not None else str(DEFAULT_MODEL)

    @property
    def model_name(self) -> str:
        """The name that clients give as `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.model is None:
            return DEFAULT_MODEL_NAME
        folder = Path(self.model)
        return folder.resolve().name if folder.is_dir() else self.model

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        path = init_settings().get("config") or env_settings().get("config")
        if path is not None:
            sources.append(InitSettingsSource(settings_cls, init_kwargs=_read_yaml(Path(path), settings_cls)))
        return tuple(sources)


def load_settings(flags: dict[str, Any]) -> Settings:
    """Settings from flags (those that were given), the environment and the YAML file.

    Raises ConfigurationError whose message names each setting at fault and where it can be set.
    """
    try:
        return Settings(**flags)
    except ValidationError as error:
        lines = [_describe(problem["loc"], problem["msg"]) for problem in error.errors(include_url=False)]
        raise ConfigurationError("\n".join(lines)) from error
    except SettingsError as error:
        raise ConfigurationError(str(error)) from error


def quiet(settings: Settings) -> Settings:
    """For commands whose output is their answer: only warnings are logged, unless a level was chosen."""
    if "log_level" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"log_level": "warning"})


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device that `auto` means on this machine. Raises ConfigurationError for a GPU that torch cannot use."""
    if device == "cpu":
        return device
    import torch  # seconds to import, and only this question needs it

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise ConfigurationError("--device: cuda, but torch finds no GPU that it can use here; `vl2 doctor` says more")
    return "cpu"


def flag_name(field: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field.replace("_", "-")


def _describe(location: tuple[int | str, ...], message: str) -> str:
    field = str(location[0])
    return f"{flag_name(field)} (VL2_{field.upper()}, YAML key {field}): {message}"


def _read_yaml(path: Path, settings_cls: type[BaseSettings]) -> dict[str, Any]:
    """The settings in a YAML file. Raises ConfigurationError on a file or key that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config: {path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config: {path} must hold `setting: value` lines")
    known = [field for field in settings_cls.model_fields if field != "config"]
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are: {', '.join(known)}"
            raise ConfigurationError(f"--config: {path} has an unknown key {str(key)!r}{hint}")
    return {str(key): value for key, value in content.items() if value is not None}
