"""Says why a run hangs or has hung: which ranks did not reach which collective.

    farsight hang runs/my_run
    farsight hang runs/my_run --ask          first has the ranks that still run write their stacks and collectives

It reads what ranks write into the run folder by themselves once they have waited for half the time limit of a collective
(comm.train_timeout_seconds), on SIGUSR1, or when asked; a run that has started again since is read from what it set aside. Ends with
status 1 if ranks wait or no longer run. See docs/training/hangs.md.
"""

import json
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farsight.cli import command, new_parser
from farsight.errors import UserError
from farsight.files import write_text
from farsight.outputs import output_file
from farsight.training.hangs.read import (
    BEAT,
    PREVIOUS,
    SAID,
    Dump,
    Heartbeat,
    ask,
    find_hang,
    hang_sentence,
    is_silent,
    read_heartbeats,
    read_traces,
)
from farsight.units import duration


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("farsight hang", __doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument(
        "--ask", action="store_true", help="ask all ranks for their stacks and collectives, and wait for them"
    )
    parser.add_argument("--json", type=output_file, help="a file for the same as JSON")
    options = parser.parse_args(arguments)
    run: Path = options.run
    traces = _traces(run)
    if not (run / "heartbeat").is_dir():
        raise UserError(f"{run} has no heartbeats: name the folder of a run, such as runs/my_run.")
    if options.ask:
        _ask(run, traces)
    beats, dumps = read_traces(run, traces)
    if not dumps and not (traces / SAID).exists() and (before := traces / PREVIOUS).is_dir():
        print(f"nothing since the run's newest start; from the start before it, in {before}:")
        traces, (beats, dumps) = before, read_traces(before, before)

    times = [beat.time for beat in beats.values()] + [dump.time for dump in dumps.values()]
    with suppress(OSError, ValueError, KeyError):
        times = [json.loads((traces / SAID).read_text(encoding="utf-8"))["time"]]
    now = max(times, default=time.time())
    sentence = hang_sentence(beats, dumps, now)
    rows = [_row(rank, beats.get(rank), dumps.get(rank), traces, now) for rank in sorted({*beats, *dumps})]
    print(sentence or "no rank waits in a recorded collective, and all have written heartbeats")
    print()
    print(_table(rows))
    if options.json is not None:
        hang = find_hang(dumps)
        figures = {"time": now, "sentence": sentence, "hang": hang and asdict(hang), "ranks": rows}
        write_text(options.json, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    return int(sentence is not None)


def _traces(run: Path) -> Path:
    """The folder of the run's traces."""
    name = "comm_traces"
    with suppress(OSError, ValueError):
        name = (
            tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
            .get("comm", {})
            .get("save_traces_folder", name)
        )
    return run / name


def _ask(run: Path, traces: Path) -> None:
    """Asks, and waits until ranks that write heartbeats have had time to answer."""
    asked = time.time()
    traces.mkdir(exist_ok=True)
    ask(traces)
    live = [beat for beat in read_heartbeats(run).values() if not is_silent(beat, asked)]
    end = asked + 2 * max((beat.every for beat in live), default=0.0) + BEAT
    while time.time() < end:
        done = {path.name for path in traces.glob("rank-*.json") if path.stat().st_mtime >= asked}
        if {f"rank-{beat.rank}.json" for beat in live} <= done:
            break
        time.sleep(0.2)


def _row(rank: int, beat: Heartbeat | None, dump: Dump | None, traces: Path, now: float) -> dict[str, Any]:
    """A rank's place, step and waits. Times are seconds before `now`."""
    stacks = traces / f"stacks-{rank}.txt"
    row: dict[str, Any] = {"rank": rank}
    if beat is not None:
        row |= {"host": beat.host, "pid": beat.pid, "device": beat.device, "step": beat.step, "phase": beat.phase}
        row |= {"phase_seconds": now - beat.since, "heartbeat_seconds": now - beat.time, "silent": is_silent(beat, now)}
    waits = [] if dump is None else dump.waits_in()
    row["waits_in"] = [
        {"collective": str(c), "group": c.group, "seconds": now - c.created, "where": c.where} for c in waits
    ]
    row["stacks"] = str(stacks) if stacks.exists() and stacks.stat().st_size else None
    return row


def _table(rows: list[dict[str, Any]]) -> str:
    """A few lines for each rank."""
    lines = []
    for row in rows:
        lines.append(f"rank {row['rank']}")
        if "host" in row:
            lines[-1] += f"  {row['host']}, process {row['pid']}, {row['device']}"
            ago = duration(max(0.0, row["heartbeat_seconds"]))
            beat = f"silent for {ago}" if row["silent"] else f"heartbeat {ago} ago"
            lines.append(
                f"    step {row['step']}, {row['phase']} for {duration(max(0.0, row['phase_seconds']))}; {beat}"
            )
        for wait in row["waits_in"]:
            where = f", called in {wait['where']}" if wait["where"] else ""
            lines.append(f"    waits in {wait['collective']} for {duration(max(0.0, wait['seconds']))}{where}")
        if row["stacks"]:
            lines.append(f"    stacks: {row['stacks']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
