"""Settings: one set of names, one order of precedence, clear errors; and the command line made from them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from server.cli import app, with_settings
from server.fetch import FetchPolicy
from server.settings import DEFAULT_MODEL, ConfigurationError, Settings, flag_name, load_settings

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (["serve"], ["caption"], ["chat"], ["bench", "offline"], ["doctor"])


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def keys(settings: Settings) -> list[str]:
    return [key.get_secret_value() for key in settings.api_key]


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = yaml_file(tmp_path, "port: 1\nseed: 1\nmax_images: 1\n")
    assert load_settings({}).port == 8000
    settings = load_settings({"config": path})
    assert (settings.port, settings.seed, settings.max_images) == (1, 1, 1)
    monkeypatch.setenv("VL2_PORT", "2")
    monkeypatch.setenv("VL2_SEED", "2")
    settings = load_settings({"config": path, "port": 3})
    assert (settings.port, settings.seed, settings.max_images) == (3, 2, 1)
    monkeypatch.setenv("VL2_CONFIG", str(path))
    assert load_settings({}).max_images == 1


def test_commas_part_values_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("api_key: 'k1, k2'", "api_key: ['k1,k2']", "api_key: [k1, k2]"):
        assert keys(load_settings({"config": yaml_file(tmp_path, text)})) == ["k1", "k2"]
    assert keys(load_settings({"api_key": ["k1,k2", "k3"]})) == ["k1", "k2", "k3"]
    assert load_settings({"allowed_media_ports": ["80,81"]}).allowed_media_ports == (80, 81)
    with pytest.raises(ConfigurationError, match="empty"):
        load_settings({"api_key": ["k1,"]})
    monkeypatch.setenv("VL2_API_KEY", "k1,k2")
    assert keys(load_settings({})) == ["k1", "k2"]


@pytest.mark.parametrize("text", ["port: yes", "shutdown_timeout: true", "seed: no", "allowed_media_ports: [true, 80]"])
def test_true_and_false_are_no_numbers(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=flag_name(text.partition(":")[0])):
        load_settings({"config": yaml_file(tmp_path, text)})
    assert load_settings({"config": yaml_file(tmp_path, "no_media_urls: yes")}).no_media_urls


@pytest.mark.parametrize("name", ["port", "max_model_len", "device", "gpu_memory_utilization", "api_key"])
def test_every_source_names_the_setting_at_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = "" if name == "api_key" else "nonsense"
    with pytest.raises(ConfigurationError, match=flag_name(name)):
        load_settings({name: bad})
    with pytest.raises(ConfigurationError, match=flag_name(name)):
        load_settings({"config": yaml_file(tmp_path, f"{name}: '{bad}'")})
    monkeypatch.setenv(f"VL2_{name.upper()}", bad)
    with pytest.raises(ConfigurationError, match=f"VL2_{name.upper()}"):
        load_settings({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-len: 5", "did you mean 'max_model_len'"),
        ("prot: 1", "did you mean 'port'"),
        ("zzz: 1", "known are: model"),
        ("config: other.yaml", "unknown key 'config'"),
        ("- 1", "setting: value"),
        ("a: [", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_settings({"config": yaml_file(tmp_path, text)})


def test_yaml_file_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_settings({"config": tmp_path / "none.yaml"})
    assert load_settings({"config": yaml_file(tmp_path, "")}) == Settings(config=tmp_path / "settings.yaml")


def test_shipped_configs_are_valid() -> None:
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_settings({"config": path}).config == path


def test_several_api_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys(load_settings({"api_key": ["a", "b"]})) == ["a", "b"]
    assert keys(load_settings({"config": yaml_file(tmp_path, "api_key: [a, b]")})) == ["a", "b"]
    assert keys(load_settings({"config": yaml_file(tmp_path, "api_key: a")})) == ["a"]
    monkeypatch.setenv("VL2_API_KEY", "a, b")
    assert keys(load_settings({})) == ["a", "b"]


def test_rules_for_fetching_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().fetch_policy == FetchPolicy()
    text = "allowed_media_domains: [A.example.com, .b.org]\nallowed_media_ports: [8080]\nmax_body_bytes: 5000\n"
    settings = load_settings(
        {
            "config": yaml_file(tmp_path, text + "allow_private_media: true\nno_media_urls: true\n"),
            "allowed_media_path": str(tmp_path),
        }
    )
    assert settings.fetch_policy == FetchPolicy(
        allowed_domains=("a.example.com", ".b.org"),
        allowed_ports=frozenset({8080}),
        allow_private=True,
        allow_urls=False,
        allowed_path=tmp_path,
        max_bytes=5000,
    )
    monkeypatch.setenv("VL2_ALLOWED_MEDIA_PORTS", "80, 8080")
    monkeypatch.setenv("VL2_ALLOWED_MEDIA_DOMAINS", "a.com,b.com")
    policy = load_settings({}).fetch_policy
    assert (policy.allowed_ports, policy.allowed_domains) == (frozenset({80, 8080}), ("a.com", "b.com"))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("allowed_media_domains", "https://example.com"),
        ("allowed_media_domains", "*.example.com"),
        ("allowed_media_ports", "0"),
        ("allowed_media_ports", "http"),
        ("allowed_media_path", "/no/such/folder"),
    ],
)
def test_rules_for_fetching_images_that_cannot_be_meant(name: str, bad: str) -> None:
    with pytest.raises(ConfigurationError, match=flag_name(name)):
        load_settings({name: bad})


def test_keys_do_not_show() -> None:
    settings = load_settings({"api_key": ["sesame"]})
    assert "sesame" not in repr(settings) + str(settings)


def test_names_of_models(tmp_path: Path) -> None:
    assert Settings().model_name == "vl2-demo"
    assert Settings().model_source == str(DEFAULT_MODEL)
    assert Settings(model="deepseek-ai/deepseek-vl2-small").model_name == "deepseek-ai/deepseek-vl2-small"
    folder = tmp_path / "mine"
    folder.mkdir()
    assert Settings(model=str(folder)).model_name == "mine"
    assert Settings(model=str(folder), served_model_name="x").model_name == "x"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_flags_are_the_settings(path: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    flags = {
        option
        for parameter in command.params
        for option in parameter.opts
        if getattr(parameter, "rich_help_panel", None) == "Settings"
    }
    assert flags == {flag_name(field) for field in Settings.model_fields}


def test_every_kind_of_flag_arrives() -> None:
    seen: list[Settings] = []
    probe = typer.Typer()

    @probe.command()
    @with_settings
    def show(settings: Settings) -> None:
        seen.append(settings)

    arguments = [
        "--port",
        "1",
        "--device",
        "cpu",
        "--gpu-memory-utilization",
        "0.5",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--allowed-media-ports",
        "81",
        "--no-media-urls",
    ]
    result = CliRunner().invoke(probe, [*arguments, "--model", "m", "--max-model-len", "64"])
    assert result.exit_code == 0, result.output
    [settings] = seen
    assert (settings.port, settings.device, settings.gpu_memory_utilization) == (1, "cpu", 0.5)
    assert (settings.allowed_media_ports, settings.no_media_urls) == ((81,), True)
    assert (settings.model, settings.max_model_len, keys(settings)) == ("m", 64, ["a", "b"])


@pytest.mark.parametrize(
    "arguments",
    [["--port", "99999"], ["--device", "tpu"], ["--no-such-flag"], ["--config", "/does/not/exist.yaml"]],
    ids=str,
)
def test_wrong_settings_exit_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert arguments[0].lstrip("-") in result.output + result.stderr


def test_the_console_script_is_this_command_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["vl2"] == "server.cli:main"
