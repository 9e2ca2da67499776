"""The command line: `vl2 serve`, `caption`, `chat`, `bench`, `doctor`. `python -m server` is the same.

Every command takes every setting as a flag; the flags are made from the fields of `Settings`.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from server.settings import ConfigurationError, Settings, flag_name, load_settings

app = typer.Typer(
    help="Serve DeepSeek-VL2 vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry of the console script."""
    app()


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command whose first parameter is `settings` one flag for each setting.

    Only flags that were given are passed on, so that the environment and the YAML file fill in the rest.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    flags = [_flag(name) for name in Settings.model_fields]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        try:
            settings = load_settings({name: value for name, value in given.items() if value is not None})
            command(settings, **values)
        except ConfigurationError as error:
            fail(str(error), code=2)

    wrapped.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *flags]}
    return wrapped


def fail(message: str, *, code: int = 1) -> typing.NoReturn:
    """Say on standard error why the command ends, and end it."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def _flag(name: str) -> inspect.Parameter:
    """The option of one setting. Its default is None, meaning "not given"; the help shows the setting's own."""
    field = Settings.model_fields[name]
    default = field.get_default()
    shown: Any = False if default in (None, (), False) else str(default)
    option = typer.Option(flag_name(name), help=field.description, show_default=shown, rich_help_panel="Settings")
    kind = _flag_type(field.annotation)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(annotation: Any) -> Any:
    """`int | None` -> `int`; a tuple's flag may be given several times."""
    if typing.get_origin(annotation) is tuple:
        return list[str]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        [kind] = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        return kind
    return annotation


BaseURL = Annotated[
    str | None, typer.Option("--base-url", help="A running server; without it the model is loaded for this command.")
]


@app.command()
@with_settings
def serve(settings: Settings) -> None:
    """Serve a model over HTTP. Settings also come from VL2_* variables and from --config FILE."""
    from server.engine.request import EngineError
    from server.errors import StartupError
    from server.serve import serve as run

    try:
        run(settings)
    except (StartupError, EngineError) as error:
        fail(str(error))


@app.command()
@with_settings
def caption(
    settings: Settings,
    files: Annotated[list[Path], typer.Argument(help="Pictures.", exists=True, dir_okay=False, readable=True)],
    base_url: BaseURL = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask about each picture.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
) -> None:
    """Print what is to be seen on each picture."""
    from server.terminal import caption_files

    if not caption_files(settings, files, base_url=base_url, prompt=prompt, max_tokens=max_tokens):
        raise typer.Exit(1)


@app.command()
@with_settings
def chat(
    settings: Settings,
    base_url: BaseURL = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.0,
) -> None:
    """Talk with the model. `/image FILE` adds a picture to the next message, `/reset` begins anew, `/quit` ends."""
    from server.terminal import chat_loop

    if not chat_loop(settings, base_url=base_url, temperature=temperature):
        raise typer.Exit(1)


@bench_app.command("offline")
@with_settings
def bench_offline(
    settings: Settings,
    work: Annotated[
        str,
        typer.Option(
            help="Which of decode, prefill, picture, vision, waiting: the last tells how long a GPU waits for the host."
        ),
    ] = "decode,prefill,picture,vision",
    batch_size: Annotated[
        str, typer.Option(help="Sequences of a decode step, a row for each: 1,8,32,128,256 on a GPU; to wait 1,64.")
    ] = "",
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens in the cache before decoding.")] = 256,
    output_len: Annotated[int, typer.Option(min=2, help="Decode steps.")] = 256,
    picture: Annotated[str, typer.Option(help="WIDTHxHEIGHT of the picture.")] = "1024x768",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the rest; the median is shown.")] = 3,
    json: Annotated[Path | None, typer.Option("--json", help="Also write all figures into this file.")] = None,
) -> None:
    """Run the engine in this process on random tokens and tiles, beside the least that the hardware allows.

    No tokenizer is needed, and with dummy weights no checkpoint but its config.json.
    """
    from server.bench import WORK, Plan, run

    chosen = tuple(work.split(","))
    if unknown := set(chosen) - set(WORK):
        fail(f"--work: no {', '.join(sorted(unknown))} among {', '.join(WORK)}", code=2)
    plan = Plan(
        work=chosen,
        batch_sizes=_numbers("--batch-size", batch_size) or None,
        prompt_len=prompt_len,
        output_len=output_len,
        picture_size=_size("--picture", picture),
        repeats=repeats,
    )
    if not run(settings, plan, json_file=json):
        raise typer.Exit(1)


@bench_app.command("serve")
@with_settings
def bench_serve(
    settings: Settings,
    base_url: BaseURL = None,
    scenario: Annotated[
        Literal["load", "idle", "arrivals"],
        typer.Option(
            help="load: clients that ask without a pause; idle: one client, each picture asked about twice; "
            "arrivals: a running answer while many pictures come at once."
        ),
    ] = "load",
    clients: Annotated[
        str, typer.Option(help="How many ask at once, a run for each: 1,16,64 by default; for arrivals 16 pictures.")
    ] = "",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests a run; for idle its pictures, for arrivals its rounds. Default: some."),
    ] = None,
    pictures: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of each request's picture; none: text.")] = None,
    picture_format: Annotated[Literal["jpeg", "png"], typer.Option(help="Their files.")] = "jpeg",
    shared_pictures: Annotated[
        int | None, typer.Option(min=1, help="So many pictures for all clients; by default each is new.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Asked about a picture by one client in a row.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="About how long the text of a question is.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answers, end of sentence ignored.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each run that do not count.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request is given up.")] = 600.0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write all figures into this file.")] = None,
) -> None:
    """Measure any server of the OpenAI API under load, from its clients' side.

    What is asked is new in every run, so that no cache knows it; with --seed it is the same again.
    """
    from server.bench_serve import measure
    from server.errors import StartupError
    from server.load.questions import Form
    from server.load.scenarios import BenchError, Plan

    form = Form(
        model="",  # the server says
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        temperature=temperature,
        seed=settings.seed if "seed" in settings.model_fields_set else secrets.randbits(31),
        ignore_eos=True,
    )
    plan = Plan(
        form=form,
        clients=_numbers("--clients", clients),
        requests=requests,
        picture_size=None if pictures is None else _size("--pictures", pictures),
        picture_format=picture_format,
        shared_pictures=shared_pictures,
        questions=questions,
        warmup=warmup,
        timeout_s=timeout,
    )
    try:
        measure(settings, plan, scenario=scenario, base_url=base_url, json_file=json)
    except (StartupError, BenchError) as error:
        fail(str(error))


@bench_app.command("soak")
@with_settings
def bench_soak(
    settings: Settings,
    base_url: BaseURL = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long requests are sent.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    soak_seed: Annotated[int, typer.Option(help="Of what is sent.")] = 0,
) -> None:
    """Send mixed, broken and abandoned requests for a while, then check that nothing is lost or left behind."""
    from server.errors import StartupError
    from server.soak import soak

    try:
        well = soak(settings, base_url=base_url, minutes=minutes, seed=soak_seed, concurrency=concurrency)
    except StartupError as error:
        fail(str(error))
    if not well:
        raise typer.Exit(1)


def _size(option: str, text: str) -> tuple[int, int]:
    """(width, height) out of `800x600`."""
    size = text.split("x")
    if len(size) != 2 or not all(part.isdecimal() and int(part) for part in size):
        fail(f"{option}: {text!r} is not WIDTHxHEIGHT, as in 800x600", code=2)
    return int(size[0]), int(size[1])


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Positive numbers parted by commas, none in an empty text."""
    parts = text.split(",") if text else []
    if not all(part.isdecimal() and int(part) for part in parts):
        fail(f"{option}: {text!r} is not a list of numbers, as in 1,16,64", code=2)
    return tuple(map(int, parts))


@app.command()
@with_settings
def doctor(settings: Settings) -> None:
    """Print the facts that matter when something does not run: Python, torch, device, memory, model."""
    from server.doctor import report

    if not report(settings):
        raise typer.Exit(1)
