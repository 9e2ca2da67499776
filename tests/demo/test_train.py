"""Training at toy size: the loss falls, and a run that was cut goes on from what it left."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import load_model
from model.config import ModelConfig
from model.demo.architecture import processor_config_json
from model.demo.export import ExportError, export_checkpoint, replace_folder
from model.demo.fonts import Fonts
from model.demo.schedule import FINAL_MIX, WINDOW, Clock, helper_weight, learning_rate, schedule
from model.demo.train import build_model, demo_config, load_initial
from model.tokenizer import Tokenizer

TOY = {
    "vision_config": {"layers": 1, "width": 32, "heads": 1},
    "projector_config": {"input_dim": 32, "n_embed": 32},
    "language_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
    },
}
ROOT = Path(__file__).parents[2]


def _train(fonts: Fonts, folder: Path, tokenizer: Path, *more: str) -> list[float]:
    """Runs the command in a process of its own, which forks; the answer loss of each step."""
    command = [sys.executable, "-m", "model.demo.train", "--device", "cpu", "--no-compile", "--tiles", "10"]
    command += ["--tokenizer", str(tokenizer), "--out", str(folder / "out"), "--state", str(folder / "state.pt")]
    command += ["--workers", "1", "--log-every", "1", "--warmup", "1", "--minutes", "100", "--rate", "1e-2"]
    command += ["--config", json.dumps(TOY), "--fonts", str(fonts.folder), *more]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return [float(loss) for loss in re.findall(r"\| single ([\d.]+)/", found.stdout)]


def test_training_lowers_the_loss_and_goes_on(fonts: Fonts, tokenizer_folder: Path, tmp_path: Path) -> None:
    losses = _train(fonts, tmp_path, tokenizer_folder, "--steps", "3")
    assert len(losses) == 3
    assert losses[2] < losses[0] - 0.1
    out = tmp_path / "out"
    assert load_model(out, device=torch.device("cpu"), dtype=torch.float32).config.vision.width == 32

    # From the checkpoint alone, at a later share of the schedule.
    (tmp_path / "state.pt").unlink()
    later = _train(fonts, tmp_path, tokenizer_folder, "--steps", "1", "--init", str(out), "--from-share", "0.1")
    assert later[0] < losses[0] - 0.1
    first = load_file(tmp_path / "out.previous" / "model-00001-of-00001.safetensors")
    second = load_file(out / "model-00001-of-00001.safetensors")
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["elapsed"] > 600


def test_initial_checkpoint_of_other_sizes_is_refused(tokenizer: Tokenizer) -> None:
    config = ModelConfig.model_validate(demo_config(tokenizer, TOY))
    shipped = ROOT / "model" / "demo" / "checkpoint"
    with pytest.raises(ValueError, match="another configuration"):
        load_initial(shipped, config, torch.device("cpu"))


def test_initial_checkpoint_may_have_other_candidate_resolutions(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The weights are taken over, with the training's own candidates; its tokenizer's control tokens are the same."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    config = ModelConfig.model_validate(demo_config(tokenizer, TOY))
    saved = demo_config(tokenizer, TOY) | {"candidate_resolutions": [[384, 384]]}
    model = build_model(ModelConfig.model_validate(saved), torch.device("cpu"), 3)
    export_checkpoint(model, saved, tokenizer_folder, tmp_path / "one")
    processor = processor_config_json() | {"candidate_resolutions": [[384, 384]]}
    (tmp_path / "one" / "processor_config.json").write_text(json.dumps(processor))
    loaded = load_initial(tmp_path / "one", config, torch.device("cpu"))
    assert loaded.config == config
    torch.testing.assert_close(loaded.image_newline, model.image_newline.bfloat16().float())
    other = config.model_copy(update={"image_token": "<picture>"})
    with pytest.raises(ValueError, match="another configuration"):
        load_initial(tmp_path / "one", other, torch.device("cpu"))


def test_a_folder_is_replaced_in_one_piece(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def write(text: str, target: Path) -> None:
        for name in ("config.json", "model-1.safetensors"):
            (target / name).write_text(text)

    replace_folder(folder, lambda target: write("one", target))
    inside = (folder / "config.json").open()
    replace_folder(folder, lambda target: write("two", target))
    assert inside.read() == "one"
    inside.close()
    assert {path.read_text() for path in folder.iterdir()} == {"two"}
    assert {path.read_text() for path in (tmp_path / "checkpoint.previous").iterdir()} == {"one"}

    def fail(target: Path) -> None:
        (target / "config.json").write_text("three")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        replace_folder(folder, fail)
    assert {path.read_text() for path in folder.iterdir()} == {"two"}
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"notes\.txt"):
        replace_folder(folder, lambda target: write("four", target))
    assert (folder / "notes.txt").read_text() == "mine"


def _clock(share: float) -> Clock:
    clock = Clock(100.0, passed=100.0 * share)
    for window in range(3):
        clock.mark(window * WINDOW, torch.device("cpu"))
    return clock


def test_lessons_come_in_order() -> None:
    assert schedule(_clock(0.01), 1, 2 * WINDOW) == ("single", True)
    assert schedule(_clock(0.15), 1, 2 * WINDOW) == ("single", False)
    late = _clock(0.9)
    kinds = {schedule(late, 1, step)[0] for step in range(2 * WINDOW)}
    assert kinds <= set(FINAL_MIX) and len(kinds) > 1
    assert sum(FINAL_MIX.values()) == pytest.approx(1)


def test_a_stopped_clock_ends_training() -> None:
    clock = _clock(0.3)
    assert clock.mark(3 * WINDOW, torch.device("cpu")) < 1
    clock.stopped = True
    assert clock.mark(4 * WINDOW, torch.device("cpu")) >= 1


def test_rates() -> None:
    assert learning_rate(1.0, 10, 0.0, 0) == pytest.approx(0.1)
    assert learning_rate(1.0, 10, 0.0, 10) == pytest.approx(1.0)
    assert learning_rate(1.0, 10, 1.0, 1000) == pytest.approx(0.02)
    assert [helper_weight(share) for share in (0.0, 0.5, 0.7, 1.0)] == pytest.approx([1, 1, 0.55, 0.1])
