"""Reads the heartbeats and recorded collectives of a run's ranks, and says in a sentence why they hang.

Uses only the standard library. All functions take the run folder, or what was read from it.
"""

import io
import json
import pickle
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from farsight.errors import DataError
from farsight.files import write_text
from farsight.units import duration

HEARTBEATS = "heartbeat"
"""The folder of heartbeats, inside the run folder."""
PREVIOUS = "previous"
"""The folder, inside that of the traces, with what the start before this one left."""
ASK = "ask"
"""A file among the traces that asks all ranks for theirs when it changes."""
SAID = "hang.json"
"""A file among the traces with the sentence about the hang that ended the run, and its time."""
BEAT = 5.0
"""Seconds between heartbeats; fewer where the time limit of collectives is short."""
SILENT_BEATS = 3
"""A rank is silent once it has missed this many heartbeats."""
WAITS_SECONDS = 5.0
"""A collective that is younger when it is recorded is merely on its way."""
KEPT = 2000
"""Collectives that a dump keeps beside the unfinished ones."""
LAST_PHASE = "ending"
"""The phase of ranks that end together. Rank 0 may take longer, since it closes files and trackers."""
NAMED = 8
"""Ranks that a sentence describes one by one."""


@dataclass(frozen=True)
class Heartbeat:
    """A rank's last note about itself. Times are in Unix seconds."""

    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    step: int
    phase: str
    since: float
    """When that phase of that step began."""
    time: float
    """When the rank wrote this; a thread does, also while training waits."""
    every: float
    """Seconds between heartbeats."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered."""

    group: str
    number: int
    """Position among the collectives of its group, the same on all of its ranks."""
    name: str
    dtypes: tuple[str, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    created: float = 0.0
    """Unix seconds at which the host entered it."""
    timeout: float = 0.0
    """Its time limit in seconds."""
    done: bool = False
    where: str = ""
    """The line of code that called it."""
    point_to_point: bool = False

    @property
    def shape(self) -> str:
        """Such as "float32, 3 × 4 elements"."""
        sizes = ", ".join(" × ".join(map(str, size)) or "1" for size in self.sizes[:2])
        many = f" and {len(self.sizes) - 2} more" if len(self.sizes) > 2 else ""
        return f"{', '.join(sorted({*self.dtypes}))}, {sizes} elements{many}" if self.sizes else "no tensors"

    def __str__(self) -> str:
        number = "" if self.point_to_point else f" #{self.number}"
        return f"{self.name}{number} ({self.shape})"


@dataclass(frozen=True)
class Group:
    """A process group."""

    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Dump:
    """The collectives that a rank has recorded, oldest first."""

    rank: int
    time: float
    collectives: tuple[Collective, ...]
    groups: dict[str, Group] = field(default_factory=dict)

    def write(self, traces: Path) -> None:
        """Writes the newest collectives, and all that are unfinished, to `rank-N.json` among the traces."""
        old, new = self.collectives[:-KEPT], self.collectives[-KEPT:]
        kept = replace(self, collectives=(*(c for c in old if not c.done), *new))
        write_text(traces / f"rank-{self.rank}.json", json.dumps(asdict(kept)))

    @classmethod
    def read(cls, text: str) -> "Dump":
        """The dump of a file's text."""
        given = json.loads(text)
        collectives = tuple(
            Collective(**{**c, "dtypes": tuple(c["dtypes"]), "sizes": tuple(map(tuple, c["sizes"]))})
            for c in given["collectives"]
        )
        groups = {name: Group(g["description"], tuple(g["ranks"])) for name, g in given["groups"].items()}
        return cls(given["rank"], given["time"], collectives, groups)

    def waits_in(self) -> list[Collective]:
        """The oldest unfinished collective of each group, oldest first."""
        first: dict[str, Collective] = {}
        for collective in sorted(self.collectives, key=lambda c: c.created):
            if not collective.done:
                first.setdefault(collective.group, collective)
        return [*first.values()]

    def entered(self, group: str, number: int) -> list[Collective]:
        """The collectives of that number that the rank has entered: none, one, or several that were launched as one."""
        return [c for c in self.collectives if not c.point_to_point and (c.group, c.number) == (group, number)]


@dataclass(frozen=True)
class Hang:
    """The collective that ranks wait in, and who is missing."""

    collective: Collective
    group: Group
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks that did not enter it."""
    differing: dict[int, Collective] = field(default_factory=dict)
    """Another collective that ranks have entered as the same number."""


def ask(traces: Path) -> None:
    """Asks all ranks that run to write their stacks and collectives."""
    (traces / ASK).write_text(f"{time.time()}\n", encoding="utf-8")


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


def read_traces(run: Path, traces: Path) -> tuple[dict[int, Heartbeat], dict[int, Dump]]:
    """The last heartbeats and the newest dumps, by rank. Dumps of ranks that have got on since are left out: ranks also record when
    they wait for a long evaluation or save.

    Raises:
        DataError: as `read_dumps`.
    """
    beats, dumps = read_heartbeats(run), read_dumps(traces)
    stood = {rank: dump for rank, dump in dumps.items() if rank not in beats or beats[rank].since <= dump.time}
    return beats, stood


def read_heartbeats(run: Path) -> dict[int, Heartbeat]:
    """The last heartbeats by rank; incomplete files are left out."""
    found = {}
    for path in (run / HEARTBEATS).glob("rank-*.json"):
        try:
            beat = Heartbeat(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # being written, or not ours
            continue
        found[beat.rank] = beat
    return dict(sorted(found.items()))


class _PlainUnpickler(pickle.Unpickler):
    """Reads only what pickle has opcodes for: numbers, text, lists, tuples and dictionaries."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")


def plain_unpickle(content: bytes) -> Any:
    """Reads a pickle of plain values.

    Raises:
        pickle.UnpicklingError: it holds anything else; no code of it is run.
    """
    return _PlainUnpickler(io.BytesIO(content)).load()


def read_dumps(traces: Path) -> dict[int, Dump]:
    """The newest dump of each rank: `rank-N.json`, or `rank_N`, which NCCL writes by itself.

    Raises:
        DataError: a file is damaged, or holds what no recorder writes.
    """
    found: dict[int, Dump] = {}
    for path in sorted(traces.glob("rank[-_]*")):
        name = re.fullmatch(r"rank-(\d+)\.json|rank_(\d+)", path.name)
        if name is None:
            continue
        rank = int(name[1] or name[2])
        try:
            if name[1]:
                dump = Dump.read(path.read_text(encoding="utf-8"))
            else:
                dump = dump_of(rank, path.stat().st_mtime, plain_unpickle(path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                f"{path} is not a dump of the flight recorder: {error}. Remove it to read the others."
            ) from error
        if rank not in found or dump.time > found[rank].time:
            found[rank] = dump
    return dict(sorted(found.items()))


def dump_of(rank: int, when: float, recorder: Mapping[str, Any], groups: Mapping[str, Group] | None = None) -> Dump:
    """A dump from what torch's recorder returns.

    Args:
        when: when it was returned, in Unix seconds.
        groups: by name, where the recorder has none: gloo's.
    """
    groups = groups or {
        name: Group(config.get("desc") or "", tuple(json.loads(config["ranks"])))
        for name, config in recorder.get("pg_config", {}).items()
    }
    return Dump(rank, when, tuple(map(_collective, recorder.get("entries", ()))), dict(groups))


def _collective(entry: Mapping[str, Any]) -> Collective:
    kind, sizes = ("input", entry["input_sizes"]) if entry["input_sizes"] else ("output", entry["output_sizes"])
    return Collective(
        group=str(entry["process_group"][0]),
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        dtypes=tuple(_DTYPES.get(name, str(name).lower()) for name in entry[f"{kind}_dtypes"]),
        sizes=tuple(tuple(map(int, size)) for size in sizes),
        created=entry["time_created_ns"] / 1e9,
        timeout=entry["timeout_ms"] / 1e3,
        done=bool(entry["retired"]) or entry["state"] == "completed",
        where=_where(entry.get("frames", ())),
        point_to_point=bool(entry.get("is_p2p")),
    )


_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8", "Char": "int8",
    "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
}  # fmt: skip


def _where(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line outside of torch."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{'/'.join(Path(frame['filename']).parts[-2:])}:{frame['line']}, {frame['name']}"
    return ""


# ── Diagnosis ─────────────────────────────────────────────────────────────────────────────────────────


def find_hang(dumps: Mapping[int, Dump]) -> Hang | None:
    """The collective that holds up all others: the oldest whose missing ranks do not themselves wait in another one.

    Ranks that left no dump since then count as missing.

    Returns:
        None if no rank has waited for long.
    """
    waits = [(c, rank) for rank, dump in dumps.items() for c in dump.waits_in()]
    if not any(dumps[rank].time - c.created >= min(c.timeout / 4, WAITS_SECONDS) for c, rank in waits):
        return None
    # No hang lasts longer than the time limit, so a dump that is much older is from one that has passed.
    oldest = max(dump.time for dump in dumps.values()) - min(c.timeout for c, _ in waits)
    dumps = {rank: dump for rank, dump in dumps.items() if dump.time >= oldest}
    waits = [(c, rank) for c, rank in waits if rank in dumps]
    held = {rank for _, rank in waits}
    hangs = [_hang(c, rank, dumps) for c, rank in sorted(waits, key=lambda wait: wait[0].created)]
    # The root of a chain of waits comes first; a circle has none.
    return min(hangs, key=lambda h: (not h.differing, not {*h.missing} - held, len({*h.missing} & held), not h.missing))


def _hang(collective: Collective, rank: int, dumps: Mapping[int, Dump]) -> Hang:
    group = dumps[rank].groups.get(collective.group) or Group("", tuple(sorted(dumps)))
    if collective.point_to_point:
        peer = re.search(r"\d+(?:->|<-)(\d+)", collective.name)
        there = group.ranks[int(peer[1]) :][:1] if peer else ()
        return Hang(collective, group, (rank,), there)
    entered = {
        other: dumps[other].entered(collective.group, collective.number) for other in group.ranks if other in dumps
    }
    missing = tuple(other for other in group.ranks if not entered.get(other))
    differing = {other: c[0] for other, c in entered.items() if c and all(_differ(one, collective) for one in c)}
    waiting = tuple(other for other, c in entered.items() if other not in differing and any(not one.done for one in c))
    return Hang(collective, group, waiting, missing, differing)


_SAME_SIZES = re.compile(
    r"all_?reduce|broadcast|barrier|_?all_?gather(_into_tensor|_base)?|_?reduce_scatter(_tensor|_base)?"
)


def _differ(one: Collective, other: Collective) -> bool:
    if one.name != other.name:
        return True
    alike = (one.dtypes, one.sizes) == (other.dtypes, other.sizes)
    return not alike and _SAME_SIZES.fullmatch(one.name) is not None


# ── Sentences ─────────────────────────────────────────────────────────────────────────────────────────


def describe(hang: Hang, dumps: Mapping[int, Dump], beats: Mapping[int, Heartbeat], now: float) -> str:
    """One sentence: which ranks did not reach which collective, that which others wait in.

    Args:
        now: the time at which the run hung, in Unix seconds.
    """
    collective = hang.collective
    named = f"{collective}{_in_group(hang.group, beats)}"
    waited = f"{duration(max(0.0, now - collective.created))}"
    if hang.differing:
        others = "; ".join(
            f"{ranks_text(ranks)} entered {text}"
            for text, ranks in _gathered((str(c), rank) for rank, c in hang.differing.items())
        )
        return f"ranks are in different collectives: {_who(hang.waiting, beats)} entered {named}, but {others}"
    if not hang.missing:
        return (
            f"{_who(hang.waiting, beats)} entered {named} {waited} ago, and it does not end though no rank is missing: "
            "look for a broken link or a failed GPU"
        )
    missing = list_of(
        [_one(rank, beats, dumps, now) for rank in hang.missing]
        if len(hang.missing) <= NAMED
        else [ranks_text(hang.missing)]
    )
    verb = "has" if len(hang.waiting) == 1 else "have"
    return f"{missing} did not reach {named}, in which {_who(hang.waiting, beats)} {verb} waited for {waited}"


def describe_silent(beats: Mapping[int, Heartbeat], now: float) -> str | None:
    """One sentence on ranks that no longer write heartbeats, for collectives that are not recorded; None if all write, or none."""
    silent = [rank for rank, beat in beats.items() if is_silent(beat, now) and beat.phase != LAST_PHASE]
    if not silent or len(silent) == len(beats):
        return None
    who = list_of([_one(rank, beats, {}, now) for rank in silent] if len(silent) <= NAMED else [ranks_text(silent)])
    others = _who({*beats} - {*silent}, beats)
    return f"{who} no longer {'runs' if len(silent) == 1 else 'run'}, and {others} waited for it in a collective that is not recorded"


def is_silent(beat: Heartbeat, now: float) -> bool:
    """Whether a rank has missed several heartbeats."""
    return now - beat.time > SILENT_BEATS * beat.every + 1


def hang_sentence(beats: Mapping[int, Heartbeat], dumps: Mapping[int, Dump], now: float) -> str | None:
    """The sentence about a hang at a time in Unix seconds; None if heartbeats and dumps tell of none."""
    hang = find_hang(dumps)
    return describe_silent(beats, now) if hang is None else describe(hang, dumps, beats, now)


def _one(rank: int, beats: Mapping[int, Heartbeat], dumps: Mapping[int, Dump], now: float) -> str:
    """A rank with its place, step, and what it does."""
    beat = beats.get(rank)
    if beat is None:
        return f"rank {rank} (no heartbeat)"
    if is_silent(beat, now):
        return (
            f"rank {rank} ({beat.host}, {beat.device}, silent for {duration(now - beat.time)} since step {beat.step})"
        )
    if rank in dumps and (waits := dumps[rank].waits_in()):
        doing = f"waiting in {waits[0]} of group {waits[0].group}"
    else:
        doing = f"{beat.phase} for {duration(max(0.0, now - beat.since))}"
    return f"rank {rank} ({beat.host}, {beat.device}, step {beat.step}, {doing})"


def _who(ranks: Iterable[int], beats: Mapping[int, Heartbeat]) -> str:
    """The ranks, and the step that they are in, if it is the same."""
    ranks = sorted(ranks)
    steps = {beats[rank].step for rank in ranks if rank in beats}
    return ranks_text(ranks) + (f" (step {steps.pop()})" if len(steps) == 1 else "")


def _in_group(group: Group, beats: Mapping[int, Heartbeat]) -> str:
    everyone = not beats or len(group.ranks) == next(iter(beats.values())).world_size
    if everyone or group.description == "default_pg":
        return ""
    named = "" if group.description in ("", "undefined") else f" {group.description}"
    return f" of group{named} ({ranks_text(group.ranks)})"


def _gathered(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for text, rank in pairs:
        found.setdefault(text, []).append(rank)
    return [*found.items()]


def ranks_text(ranks: Iterable[int]) -> str:
    """Such as "ranks 0, 2–7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(a) if a == b else f"{a}{'–' if b > a + 1 else ', '}{b}" for a, b in spans]
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if one else 's'} {', '.join(texts)}"


def list_of(items: list[str]) -> str:
    """Such as "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
