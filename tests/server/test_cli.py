"""The commands as a person runs them: `python -m server ...` in a process of its own."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from server.cli import app
from server.engine.request import EngineConfig, EngineError
from server.serve import BackgroundServer
from server.service import engine_config
from server.settings import Settings
from tests.conftest import API_KEY, MODEL, PATIENCE_S, chat_body, colour, wait_until

ROOT = Path(__file__).resolve().parents[2]
CPU = ["--device", "cpu", "--dtype", "float32"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "server", *arguments]


def run(*arguments: str, stdin: str = "", key: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VL2_API_KEY": key} if key is not None else None
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240
    )


def invoke(*arguments: str) -> Result:
    """The same within this process, where torch is already there."""
    return CliRunner().invoke(app, arguments)


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    banner: str
    log: Path


@contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[Served]:
    """`vl2 serve` on a free port, once it says that it is ready."""
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command("serve", "--port", "0", *CPU, *arguments),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert all(lines), log.read_text()
            yield Served(process, lines[0].split()[-1], "".join(lines), log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def test_serve_from_banner_to_signal(tmp_path: Path) -> None:
    """Ready line, a refused second server on its port, a log without secrets, and an end that leaves nothing behind."""
    with serve(tmp_path, "--api-key", API_KEY) as served:
        assert MODEL in served.banner
        assert f"{served.url}/v1/caption" in served.banner and "curl -F image=@" in served.banner
        assert API_KEY not in served.banner
        port = served.url.rpartition(":")[2]
        second = run("serve", "--port", port)
        assert second.returncode == 2
        assert port in second.stderr and "in use" in second.stderr

        picture = colour(200, 100)
        headers = {"Authorization": f"Bearer {API_KEY}", "X-Request-ID": "an-id"}
        body = chat_body("sesame sesame", picture, max_tokens=2)
        with httpx.Client(base_url=served.url, headers=headers, timeout=120) as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert client.post("/v1/chat/completions", json={**body, "sesame": 1}).status_code == 400
            assert client.post("/v1/chat/completions", content=b'{"sesame').status_code == 415
            bad = chat_body("sesame", "data:image/png;base64," + base64.b64encode(b"sesame" * 50).decode())
            assert client.post("/v1/chat/completions", json=bad).status_code == 400
            assert client.get("/v1/models", headers={"Authorization": "Bearer wrong-sesame"}).status_code == 401

        children = psutil.Process(served.process.pid).children(recursive=True)
        assert children
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=60) == 0
        wait_until(lambda: not any(child.is_running() for child in children))
        log = served.log.read_text()
        assert "POST '/v1/chat/completions' 200" in log and "id=an-id" in log
        assert "Traceback" not in log
        for secret in ("sesame", API_KEY, picture[-100:], base64.b64encode(b"sesame" * 9).decode()):
            assert secret not in log


def test_keys_are_rotated_by_a_signal_and_logs_are_json(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old-key\n")
    with serve(tmp_path, "--api-key-file", str(keys), "--log-format", "json") as served:
        assert "Authorization" in served.banner

        def status(key: str) -> int:
            return httpx.get(f"{served.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status("old-key"), status("new-key")) == (200, 401)
        keys.write_text("new-key\n")
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: status("new-key") == 200)
        assert status("old-key") == 401
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=60) == 0
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]  # those of the engine, too
    assert {"server.engine.core", "server.accesslog", "server.auth"} <= {line["logger"] for line in lines}
    assert all(line["time"] and line["level"] and line["message"] for line in lines)
    assert "-key" not in served.log.read_text().replace("--api-key", "")


def test_a_dead_engine_shows_and_comes_back(tmp_path: Path) -> None:
    with serve(tmp_path) as served, httpx.Client(base_url=served.url, timeout=120) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/chat/completions", json=chat_body("x")).json()["choices"]
        body = chat_body("x", max_tokens=3000, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            for child in psutil.Process(served.process.pid).children(recursive=True):
                child.kill()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert client.get("/health").status_code == 503  # a model takes longer to load than this to ask
        assert client.post("/v1/chat/completions", json=chat_body("x")).status_code == 503
        wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/chat/completions", json=chat_body("x")).json()["choices"] == answer
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=60) == 0


def test_an_engine_that_is_given_up_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(settings: Settings) -> EngineConfig:
        return msgspec.structs.replace(engine_config(settings), max_crashes=1)

    monkeypatch.setattr("server.service.engine_config", config)
    with BackgroundServer(Settings(device="cpu", dtype="float32")) as server:
        engine = server.app.state.service.engine
        psutil.Process(engine.pid).kill()
        assert server.ended.wait(PATIENCE_S)
        assert "died 1 times in a row" in str(engine.failure)


def test_a_server_that_ended_because_of_its_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(settings: Settings) -> None:
        raise EngineError("the engine died")

    monkeypatch.setattr("server.serve.serve", failing)
    result = invoke("serve")
    assert result.exit_code == 1 and "error: the engine died" in result.stderr


def test_a_server_told_to_stop_ends_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    body = chat_body("x", max_tokens=100, ignore_eos=True, stream=True)
    patient = serve(tmp_path, "--shutdown-timeout", "240")
    with patient as served, httpx.Client(base_url=served.url, timeout=120) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").status_code == 200  # no reason to kill it
            refused = client.post("/v1/chat/completions", json=chat_body("x"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert served.process.poll() is None
            last = [line for line in lines if line][-1]
        assert last == "data: [DONE]"
        assert served.process.wait(timeout=60) == 0


def test_an_answer_that_outlasts_the_shutdown_is_told() -> None:
    body = chat_body("x", max_tokens=3000, ignore_eos=True, stream=True)
    with (
        BackgroundServer(Settings(device="cpu", dtype="float32", shutdown_timeout=0.2)) as server,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.stop()
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "aborted" and "the server stops" in error["message"]


def test_a_signal_while_loading_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("serve", "--port", "0", *CPU), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    parent = psutil.Process(process.pid)
    wait_until(lambda: bool(parent.children()))
    children = parent.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "is ready" not in out
    assert "Traceback" not in errors
    wait_until(lambda: not any(child.is_running() for child in children))


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--model", "no/such/model/here"], 1, "no/such/model/here"),
        (["--max-model-len", "1000000"], 1, ": max_model_len 1000000 is more than"),
        (["--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
    ],
    ids=str,
)
def test_what_cannot_be_served_ends_with_one_clear_message(arguments: list[str], code: int, reason: str) -> None:
    result = invoke("serve", "--port", "0", *CPU, *arguments)
    assert result.exit_code == code
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and reason in errors[0]
    assert result.stdout == ""


def test_the_engine_shows_no_stack_for_what_a_person_can_mend(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "model" / "demo" / "checkpoint", tmp_path, dirs_exist_ok=True)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    doctor = invoke("doctor", "--model", str(tmp_path))
    assert doctor.exit_code == 1 and "cannot be served: " in doctor.stdout
    assert invoke("doctor", "--model", str(tmp_path), "--load-format", "dummy").exit_code == 0
    for arguments in (["--model", str(tmp_path)], ["--max-model-len", "1000000"]):
        result = run("serve", "--port", "0", *CPU, *arguments)
        assert result.returncode == 1
        assert "error: cannot serve " in result.stderr
        assert all(noise not in result.stderr for noise in ("Traceback", "Error:", "leaked"))


def test_a_gpu_that_is_not_there_is_said_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, code in ((["serve", "--port", "0"], 1), (["bench", "offline"], 2)):
        result = invoke(*arguments, "--device", "cuda")
        assert result.exit_code == code
        [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: --device: cuda")
    result = invoke("doctor", "--device", "cuda")
    assert "device         cannot be used: --device: cuda" in result.stdout


def test_caption_and_chat_against_a_running_server(server_url: str, tmp_path: Path) -> None:
    pictures = []
    for name in ("red", "blue"):
        pictures.append(tmp_path / f"{name}.png")
        Image.new("RGB", (60, 60), name).save(pictures[-1])
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    files = [str(path) for path in (pictures[0], broken, pictures[1])]
    result = run("caption", *files, "--base-url", server_url, "--max-tokens", "4", key=API_KEY)
    assert result.returncode == 1  # one of them could not be read
    lines = result.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path) for path in pictures]
    assert all(line.partition(": ")[2] for line in lines)
    assert "broken.png" in result.stderr and "format" in result.stderr

    talk = f"/image {pictures[0]}\nWhat is this?\n/wrong\n/image {tmp_path}/none.png\nAnd now?\n/reset\n/quit\n"
    result = run("chat", "--base-url", server_url + "/v1", stdin=talk, key=API_KEY)
    assert result.returncode == 0
    assert result.stdout.count("> ") == 7
    assert "commands are" in result.stderr and "none.png" in result.stderr

    for arguments in (["caption", files[0]], ["chat"]):
        result = run(*arguments, "--base-url", server_url, key="wrong")
        assert result.returncode == 1 and "API key" in result.stderr


def test_caption_without_a_server(tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    Image.new("RGB", (60, 60), "red").save(picture)
    result = run("caption", str(picture), *CPU, "--max-tokens", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and str(picture) not in result.stdout
    assert result.stderr == ""


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for arguments in (["caption", __file__, "--base-url", address], ["chat", "--base-url", address]):
            result = run(*arguments)
            assert result.returncode == 1
            assert "error: " in result.stderr and "Traceback" not in result.stderr
    for url in ("http://[", "no-scheme"):
        chat = invoke("chat", "--base-url", url)
        assert chat.exit_code == 1 and "error: " in chat.stderr


def test_doctor() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    for word in ("python", "torch", "device", "memory", "layers", "context 4096"):
        assert word in result.stdout
    result = invoke("doctor", "--model", "no/such/model/here")
    assert result.exit_code == 1 and "cannot be served" in result.stdout


def test_bench_offline_needs_neither_weights_nor_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "processor_config.json"):
        shutil.copy(ROOT / "tests" / "goldens" / "mla-softmax" / "checkpoint" / name, tmp_path)
    bench = ["bench", "offline", "--model", str(tmp_path), "--load-format", "dummy", "--repeats", "1", *CPU]
    figures = tmp_path / "figures.json"
    sizes = ["--prompt-len", "5", "--output-len", "6", "--batch-size", "1,3", "--picture", "384x384"]
    result = invoke(*bench, *sizes, "--json", str(figures))
    assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    assert report["device"] and report["parameters"] > 0 and report["torch"] and report["peak_memory_mib"] > 0
    names = [row["work"] for row in report["rows"]]
    assert names[:3] == ["start to ready", "decode, batch 1", "decode, batch 3"]
    assert names[3].startswith("1 x ") and names[4].startswith("2 x ") and names[6:] == ["vision tower, 1 tiles"]
    assert names[5].startswith("picture 384x384, 2 tiles, 437 tokens")
    for row in report["rows"][1:]:
        assert row["failure"] is None and row["floor_ms"] > 0 and row["ms"] > 0 and row["rate"] > 0
        assert row["work"] in result.stdout


def test_bench_offline_tells_what_it_cannot_do() -> None:
    bench = ["bench", "offline", "--load-format", "dummy", *CPU]
    assert "among decode" in invoke(*bench, "--work", "decode,fly").stderr
    too_long = invoke(*bench, "--prompt-len", "1000000")
    assert too_long.exit_code == 2 and "1000000" in too_long.stderr
    no_gpu = invoke(*bench, "--work", "waiting", "--batch-size", "1")
    assert no_gpu.exit_code == 1 and "on a GPU only" in no_gpu.stdout
