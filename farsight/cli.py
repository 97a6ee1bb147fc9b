"""Parsers, argument types and error handling shared by all command-line tools.

Bad input ends a tool with one sentence and status 2. Any other error is a fault in Farsight: the tool ends with status 1 and a
line that asks for a report, and writes the traceback to a file.
"""

import argparse
import difflib
import functools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from farsight.errors import UserError
from farsight.extras import how_to_install
from farsight.library_warnings import silence_expected_warnings
from farsight.process import EXIT_CTRL_C, EXIT_INPUT, EXIT_UNEXPECTED
from farsight.ranges import Range
from farsight.remote import local, url_of

P = ParamSpec("P")
T = TypeVar("T")

OUT_OF_MEMORY = "The device ran out of memory: use shorter sequences or fewer at a time (--chunk 256 and --rows, if the tool has them)."

_ROOT = Path(__file__).parent.parent


def command(main: Callable[P, T]) -> Callable[P, T]:
    """Decorates a tool's `main`: prints errors as one sentence on stderr and turns them into `SystemExit` with a status."""

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        silence_expected_warnings()
        try:
            result = main(*args, **kwargs)
            sys.stdout.flush()  # so that a closed pipe raises here and not at exit
            return result
        except KeyboardInterrupt:
            refuse("stopped by Ctrl-C", EXIT_CTRL_C)
        except BrokenPipeError:
            # The reader of our output (`head`, say) has closed the pipe. Python would complain again as it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(EXIT_UNEXPECTED) from None
        except Exception as error:
            sentence = explain(error)
            if sentence is None:
                refuse(report_unexpected(error), EXIT_UNEXPECTED, error)
            refuse(sentence, EXIT_INPUT, error)

    return guarded


def refuse(sentence: str, status: int = EXIT_INPUT, cause: BaseException | None = None) -> NoReturn:
    """Prints a sentence to stderr and ends the tool with a status.

    Raises:
        SystemExit: always; `cause` is set as its cause.
    """
    print(sentence, file=sys.stderr, flush=True)
    stop = SystemExit(sentence)
    stop.code = status
    raise stop from cause


def explain(error: BaseException) -> str | None:
    """Returns the sentence that explains an error to the user, or None if the error is a bug in Farsight."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return how_to_install(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    if type(error).__name__ == "OutOfMemoryError":
        return OUT_OF_MEMORY
    # Our own code raises ValueError for bad settings, and asserts what only a bug can break.
    if type(error) is ValueError and _raised_here(error):
        return str(error)
    return None


def _raised_here(error: BaseException) -> bool:
    """Whether the error comes from a `raise` in our own code and not from a library."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).is_relative_to(_ROOT) and "site-packages" not in last.filename
    return ours and (last.line or "").startswith("raise ")


def report_unexpected(error: BaseException, folder: Path | None = None) -> str:
    """Writes the traceback to a file and returns the line that says so.

    Args:
        folder: folder for the file; the working directory by default. If it can't be written, the traceback is returned too.
    """
    rank = os.environ.get("RANK")
    name = f"farsight-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    path = (folder or Path()) / name
    text = "".join(traceback.format_exception(error))
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"
    who = f"rank {rank}: " if rank not in (None, "0") else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{' '.join(sys.argv)}\n\n{text}", encoding="utf-8")
    except OSError:
        return (
            f"{text}\n{who}unexpected {what}. This is a fault in Farsight: please report it with the traceback above."
        )
    return (
        f"{who}unexpected {what}. This is a fault in Farsight: please report it with {path}, which has the traceback."
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose error about unknown options suggests those that it has, and which fetches models last."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # After all options are checked: a mistyped one should not have to wait for a download.
        options = super().parse_args(args, namespace)
        for name, value in vars(options).items():
            if isinstance(value, list):
                setattr(options, name, [local(one) if isinstance(one, _Place) else one for one in value])
            elif isinstance(value, _Place):
                setattr(options, name, local(value))
        return options

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            # Without the dashes, which all names have in common.
            known = [option[2:] for option in _options_of(self) if option.startswith("--")]
            unknown = [word[2:].partition("=")[0] for word in message.split() if word.startswith("--")]
            near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1, cutoff=0.5)]
            message += f" (did you mean {' and '.join(f'--{name}' for name in near)}?)" if near else ""
        super().error(message)


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """The option strings of a parser and of its subcommands."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            options += [option for command in action.choices.values() for option in _options_of(command)]
    return options


def new_parser(prog: str, text: str | None, allow_abbrev: bool = True) -> argparse.ArgumentParser:
    """A parser of `prog`'s command line, whose --help shows `text` with its line breaks."""
    raw = argparse.RawDescriptionHelpFormatter
    return _Parser(prog=prog, description=text, formatter_class=raw, allow_abbrev=allow_abbrev)


# ── Numbers ───────────────────────────────────────────────────────────────────────────────────────────


def refuse_name(parser: argparse.ArgumentParser, rest: Sequence[str], other: str, own: str) -> None:
    """Refuses, in the arguments that the parser left over, the name by which other commands know its option `own`."""
    if any(argument.partition("=")[0] == other for argument in rest):
        parser.error(f"there is no option {other} here: use {own}")


def bounded(
    kind: type[int] | type[float],
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Callable[[str], int | float]:
    """An argparse type for finite numbers in a range.

    Args:
        kind: the number's type.
        least, most: inclusive bounds.
        above, below: exclusive bounds.
    """
    span = Range(least=least, most=most, above=above, below=below)

    def parse(text: str) -> int | float:
        try:
            # People write large counts as 2e9.
            written_out = kind is float or text.lstrip("+-").isdigit() or not float(text).is_integer()
            value = kind(text) if written_out else int(float(text))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number") from None
        if problem := span.problem(value):
            raise argparse.ArgumentTypeError(f"{text} {problem}")
        return value

    return parse


positive = bounded(int, least=1)
"""An argparse type for whole numbers of 1 or more."""
natural = bounded(int, least=0)
"""An argparse type for whole numbers of 0 or more."""
above_zero = bounded(float, above=0)
"""An argparse type for numbers above 0."""


class _Place(str):
    """A place such as hf://ORG/NAME, of which the parser makes a local folder in the end."""


def model_path(text: str) -> Path | str:
    """An argparse type for the path of a model, adapter or checkpoint, or its place, such as hf://ORG/NAME.

    The options have a local folder for each, of which `farsight.remote.shown` gives the place.
    """
    try:
        return Path(text) if url_of(text) is None else _Place(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device(text: str) -> str:
    """An argparse type for the name of a device that this machine has."""
    import torch

    try:
        asked = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a device; write cpu, cuda, or cuda:1 for the second GPU"
        ) from None
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here is not None else 0
    if asked.type != "cpu" and (here is None or asked.type != here.type or (asked.index or 0) >= count):
        there = f"{count} of type {here.type}" if here is not None else "no accelerator"
        raise argparse.ArgumentTypeError(f"{text}: torch {torch.__version__} finds {there} on this machine; use cpu")
    return text


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds --device."""
    parser.add_argument("--device", type=device, help="default: the accelerator if there is one, else cpu")
