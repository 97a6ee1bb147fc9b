"""Formats numbers for people to read."""

GIB = 1024**3


def count(number: float, billions: str = "B") -> str:
    """A large number in short, such as 8.03B; `billions` is the letter for 1e9."""
    for size, letter in ((1e12, "T"), (1e9, billions), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:,.0f}"


def gib(size: float, places: int = 2) -> str:
    """A size in bytes, written in GiB."""
    return f"{size / GIB:.{places}f}"


def shown_seconds(seconds: float) -> str:
    """The time of a step, given in seconds: "1.5 s", "150.0 ms"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def duration(seconds: float) -> str:
    """The time of a run, given in seconds: "45 s", "11 min", "1 h 12 min", "2.5 days"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if seconds < 172800 else f"{seconds / 86400:.1f} days"
