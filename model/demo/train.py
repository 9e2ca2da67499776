"""Trains the demo model, from nothing or from a checkpoint, on pictures drawn as it goes.

    torchrun --nproc-per-node 4 -m model.demo.train --minutes 17 --out FOLDER --tokenizer FOLDER --fonts FOLDER

Time is the budget: learning rate, curriculum and helper weight follow the share of ``--minutes`` that has passed. Every
two minutes, at the end, and at SIGTERM, the checkpoint and the training state are written. ``--resume`` carries on from
the state, the clock included; where only the checkpoint is left, ``--init CHECKPOINT --from-share SHARE`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from model.checkpoint import empty_model, initialize_randomly, load_model
from model.config import ModelConfig
from model.demo import dense
from model.demo.architecture import config_json
from model.demo.dataset import Loader, Plan, Renderer
from model.demo.export import export_checkpoint
from model.demo.flat import FlatParameters, count
from model.demo.objective import Helpers, losses
from model.demo.rows import KINDS
from model.demo.schedule import WINDOW, Clock, helper_weight, learning_rate, schedule
from model.tokenizer import Tokenizer
from model.vl2 import DeepseekVL2

BETAS = (0.9, 0.97)
CLIP = 1.0
AVERAGE = 0.999
BALANCE = 0.01


def demo_config(tokenizer: Tokenizer, overrides: dict[str, dict[str, int]]) -> dict[str, object]:
    """``config.json``, with ``overrides`` of single sizes by section (for trials at toy sizes)."""
    config = config_json(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    for section, values in overrides.items():
        config[section].update(values)
    return config


def build_model(config: ModelConfig, device: torch.device, seed: int) -> DeepseekVL2:
    """Fresh weights in float32; projections back into the residual start smaller the more layers there are."""
    model = empty_model(config, device=device, dtype=torch.float32)
    initialize_randomly(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            depth = config.vision.layers if name.startswith("vision") else config.language.num_hidden_layers
            if name.endswith(("attn.proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight", "down_weight")):
                parameter.mul_((2 * depth) ** -0.5)
            elif name.endswith(("projector.layers.0.weight", "projector.layers.2.weight", "patch_embed.weight")):
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=None)
    return model


def load_initial(folder: Path, config: ModelConfig, device: torch.device) -> DeepseekVL2:
    """The weights of a checkpoint in float32, which may have been trained with other candidate resolutions.

    Raises ValueError if it has other sizes or another tokenizer's ids: anything else that differs from ``config``.
    """
    model = load_model(folder, device=device, dtype=torch.float32)
    if model.config.model_copy(update={"candidate_resolutions": config.candidate_resolutions}) != config:
        raise ValueError(f"{folder} is a checkpoint of another configuration than this training's")
    model.config = config
    return model.train()


@dataclass
class Run:
    """Everything a training run holds."""

    arguments: argparse.Namespace
    device: torch.device
    rank: int
    world: int
    tokenizer: Tokenizer
    config: dict[str, object]
    model: DeepseekVL2
    helpers: Helpers
    flat: FlatParameters
    clock: Clock
    step: int = 0

    def export(self, folder: Path, *, averaged: bool) -> None:
        """Writes the checkpoint in the published layout, bfloat16."""
        with self.flat.averaged() if averaged else contextlib.nullcontext():
            export_checkpoint(self.model, self.config, self.arguments.tokenizer, folder)

    def helper_weight(self, share: float) -> float:
        """Of the helper losses. A checkpoint comes without helper heads: new ones first learn to read the tower."""
        settled = 1.0 if self.arguments.init is None else min(1.0, (self.step + 1) / self.arguments.warmup) ** 2
        return helper_weight(share) * settled

    def save_state(self) -> None:
        """Saves what ``--resume`` needs, so that a run cut short at any time loses little."""
        path: Path = self.arguments.state
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({"step": self.step, "elapsed": self.clock.elapsed(), "flat": self.flat.state()}, partial)
        partial.replace(path)


def train(run: Run, loader: Loader, plan: Plan) -> None:
    """The loop: until the clock says that the time is over, or ``--steps`` steps are done."""
    arguments = run.arguments
    functions = dense.compiled() if arguments.compile else dense.eager()
    generator = torch.Generator(run.device).manual_seed(1000 * run.step + run.rank)
    pad_id = run.tokenizer.pad_token_id
    log = Log(run, plan, loader)
    saved = run.clock.elapsed()
    behind: list[torch.cuda.Event] = []
    while arguments.steps is None or run.step < arguments.steps:
        if run.step % WINDOW == 0 and run.clock.mark(run.step, run.device) >= 1.0:
            break
        share = run.clock.share(run.step)
        kind, batch = loader.next()
        found = losses(run.model, run.helpers, batch, functions, pad_id=pad_id, generator=generator)
        (found.answers + run.helper_weight(share) * found.helpers + BALANCE * found.balance).backward()
        rate = learning_rate(arguments.rate, arguments.warmup, share, run.step)
        run.step += 1
        average = min(AVERAGE, run.step / (run.step + 10))
        norm = run.flat.step(number=run.step, rate=rate, betas=BETAS, clip=CLIP, average=average)
        log.add(kind, found.answers.detach(), found.helpers.detach(), found.right, norm)
        if run.device.type == "cuda":  # keep the host no more than two steps ahead
            behind.append(torch.cuda.Event())
            behind[-1].record()
            if len(behind) > 2:
                behind.pop(0).synchronize()
        if run.step % arguments.log_every == 0:
            log.write(share, rate)
        if run.rank == 0 and run.clock.elapsed() - saved > arguments.save_seconds:
            saved = run.clock.elapsed()
            run.save_state()
            run.export(arguments.out, averaged=True)
    if run.rank == 0:
        log.write(1.0, 0.0)
        run.save_state()
        run.export(arguments.out, averaged=True)
        if arguments.out_last is not None:
            run.export(arguments.out_last, averaged=False)
        print(f"wrote {arguments.out} after {run.step} steps, {run.clock.elapsed():.0f} s", flush=True)


class Log:
    """Means of what happened since the last line, by kind; read from the device only when a line is written."""

    def __init__(self, run: Run, plan: Plan, loader: Loader) -> None:
        self._run, self._plan, self._loader = run, plan, loader
        self._items: list[tuple[str, Tensor]] = []
        self._since, self._starved = time.monotonic(), loader.starved

    def add(self, kind: str, *values: Tensor) -> None:
        self._items.append((kind, torch.stack([value.float() for value in values])))

    def write(self, share: float, rate: float) -> None:
        if self._run.rank or not self._items:
            self._items = []
            return
        rows = torch.stack([values for _, values in self._items]).tolist()
        seconds = time.monotonic() - self._since
        kinds = [kind for kind, _ in self._items]
        pictures = sum(self._plan.rows(KINDS[kind]) * KINDS[kind].pictures for kind in kinds) * self._run.world
        parts = []
        for kind in sorted(set(kinds)):
            mine = [row for row, other in zip(rows, kinds, strict=True) if other == kind]
            answer, helper, right, _ = (sum(column) / len(mine) for column in zip(*mine, strict=True))
            parts.append(f"{kind} {answer:.4f}/{helper:.3f} {100 * right:.2f}%")
        memory = torch.cuda.max_memory_allocated() / 2**30 if self._run.device.type == "cuda" else 0.0
        print(
            f"step {self._run.step} {self._run.clock.elapsed():.0f}s {100 * share:.1f}% rate {rate:.2e} "
            f"{len(rows) / seconds:.2f} steps/s {pictures / seconds:.0f} pictures/s "
            f"starved {self._loader.starved - self._starved:.1f}/{seconds:.1f}s "
            f"norm {sum(row[3] for row in rows) / len(rows):.2f} {memory:.0f}GiB | {' | '.join(parts)}",
            flush=True,
        )
        self._items = []
        self._since, self._starved = time.monotonic(), self._loader.starved


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint (averaged weights)")
    parser.add_argument("--out-last", type=Path, default=None, help="folder for the last weights, not averaged")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer's files")
    parser.add_argument("--fonts", type=Path, default=None, help="folder with the fonts (default: the system's)")
    parser.add_argument("--state", type=Path, default=Path("build/demo-state.pt"), help="file to resume from")
    parser.add_argument("--resume", action="store_true", help="carry on from --state if it is there")
    parser.add_argument("--init", type=Path, default=None, help="checkpoint folder to start from")
    parser.add_argument("--from-share", type=float, default=0.0, help="with --init: share of --minutes to start at")
    parser.add_argument("--minutes", type=float, default=17.0, help="training time, over all resumptions")
    parser.add_argument("--steps", type=int, default=None, help="stop after so many steps")
    parser.add_argument("--tiles", type=int, default=240, help="tiles a step and device; a multiple of 30")
    parser.add_argument("--workers", type=int, default=14, help="render processes a device")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="peak learning rate")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="of the layers' matrices")
    parser.add_argument("--warmup", type=int, default=250, help="steps of warm-up")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay of matrices")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--config", default="{}", help="JSON with other sizes by section of config.json, for trials")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.from_share and arguments.init is None:
        parser.error("--from-share needs --init")
    if not 0 <= arguments.from_share < 1:
        parser.error("--from-share is a share of the time, from 0 to less than 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan = Plan(arguments.tiles)
    started = time.monotonic()
    renderer = Renderer(arguments.tokenizer, arguments.fonts, plan, arguments.workers, ahead=3)
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(arguments.seed)

    tokenizer = Tokenizer.from_folder(arguments.tokenizer)
    config = demo_config(tokenizer, json.loads(arguments.config))
    if arguments.init is None:
        model = build_model(ModelConfig.model_validate(config), device, arguments.seed)
    else:
        model = load_initial(arguments.init, ModelConfig.model_validate(config), device)
    helpers = Helpers(model.config.vision.width).to(device)
    if arguments.compile:
        helpers.compile(dynamic=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    modules = {"model": model, "helpers": helpers}
    flat = FlatParameters(modules, dtype=dtype, decay=arguments.decay, muon=arguments.optimizer == "muon")
    flat.broadcast()
    seconds = arguments.minutes * 60
    clock = Clock(seconds, passed=arguments.from_share * seconds, _started=started)
    run = Run(arguments, device, rank, world, tokenizer, config, model, helpers, flat, clock)
    if arguments.resume and arguments.state.exists():
        state = torch.load(arguments.state, map_location="cpu", weights_only=True)
        flat.load_state(state["flat"])
        run.step, clock.passed = state["step"] // WINDOW * WINDOW, state["elapsed"]
    if rank == 0:
        print(
            f"{count(model.parameters()) / 1e6:.2f} M parameters, {world} x {device}, from step {run.step}", flush=True
        )
    signal.signal(signal.SIGTERM, lambda *_: setattr(clock, "stopped", True))
    clock.mark(run.step, device)
    loader = Loader(
        renderer,
        lambda step: schedule(clock, arguments.seed, step),
        seed=f"train {arguments.seed} {rank}" + (f" from {arguments.from_share}" if arguments.init else ""),
        first_step=run.step,
        device=device,
    )
    try:
        train(run, loader, plan)
    finally:
        loader.close()
        renderer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
