"""What a compiled kernel does before it waits for the kernel in front of it (kernels/lang.py has the rule)."""

import re
from collections.abc import Sequence

LAUNCH, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
PARAMETERS = {"weight", "bias", "norm_weight", "frequencies"}
"""Arrays that no kernel writes in a step."""
_TOO_EARLY = re.compile(r"\b(st\.global|st\.async|red\.|atom\.|cp\.async|cp\.reduce|bra\b|ret\b|exit\b)")
_REGISTER = re.compile(r"%[a-z]+\d+")


def check(ptx: str, arguments: Sequence[str], early: set[str] = PARAMETERS) -> None:
    """Raises ValueError for a kernel that does anything before the wait but read `early` arguments.

    arguments: names of the kernel's arguments in PTX, in order.
    """
    before, wait, _ = re.sub("//.*", "", ptx).partition(WAIT)
    if not wait or LAUNCH not in ptx:
        raise ValueError("never waits, or never lets the next kernel start")
    if found := _TOO_EARLY.search(before):
        raise ValueError(f"{found[0].strip()} stands before the wait")
    if wrong := _read(before, arguments) - early:
        raise ValueError(f"reads {', '.join(sorted(wrong))} before the wait")


def waits_first(ptx: str) -> bool:
    """Whether the kernel lets the next one start only after its own wait."""
    return ptx.index(WAIT) < ptx.index(LAUNCH)


def _read(ptx: str, arguments: Sequence[str]) -> set[str]:
    """The arguments that straight-line code loads from: those that the loads' addresses were computed from."""
    sources: dict[str, set[str]] = {}
    found: set[str] = set()
    for line in ptx.split(";"):
        if parameter := re.search(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)", line):
            register, index = parameter.groups()
            sources[register] = {arguments[int(index)]} if "64" in line else set()
        elif load := re.search(r"ld\.global\S*\s+(.*),\s*\[([^]]*)\]", line, re.DOTALL):
            address = _REGISTER.search(load[2])
            if address is None or not sources.get(address[0]):
                raise ValueError(f"cannot tell what this reads: {line.strip()}")
            found |= sources[address[0]]
            sources |= {register: set() for register in _REGISTER.findall(load[1])}
        else:
            target, *operands = _REGISTER.findall(line) or [""]
            sources[target] = set().union(*(sources.get(operand, set()) for operand in operands))
    return found
