"""Format the report as a table (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.launch.env.rank_report import Facts

RANK_COLUMNS = ("rank", "local_rank", "host", "pid", "cores", "threads", "device", "backend")


def format_report(report: Facts) -> str:
    """Format the whole report."""
    job, ranks = report["job"], report["ranks"]
    why = _assignments(job["why"]) or "no launcher's variables are set"
    lines = [
        f"launcher    {job['launcher']} ({why})",
        f"ranks       {job['ranks']} on {job['hosts']} host{'s' * (job['hosts'] != 1)}",
        f"backends    {', '.join(job['available'])}",
        f"variables   {_assignments(job['set']) or 'none set'}",
        *(f"versions    {seen}" for seen in _by_rank(ranks, "versions")),
        *(f"interfaces  {seen}" for seen in _by_rank(ranks, "interfaces")),
        *(f"layers      {seen}" for seen in _by_rank(ranks, "layers")),
        *(f"gpus        {seen}" for seen in _by_rank(ranks, "gpus")),
        *(f"WARNING     {seen}" for seen in _by_rank(ranks, "warnings") if seen != "none"),
        "",
        *_columns([RANK_COLUMNS, *([rank[name] for name in RANK_COLUMNS] for rank in ranks)]),
        "",
        *_columns([("collective", "ms", "result"), *_tests(report["tests"])]),
    ]
    return "\n".join(lines) + "\n"


def _by_rank(ranks: Sequence[Facts], name: str) -> Iterable[str]:
    """The ranks' values; one line if all are the same."""
    seen: dict[str, list[int]] = {}
    for rank in ranks:
        seen.setdefault(_format_value(rank[name]), []).append(rank["rank"])
    if len(seen) == 1:
        return list(seen)
    return [f"{value} (rank {', '.join(map(str, holders))})" for value, holders in seen.items()]


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return "; ".join(map(_format_value, value)) or "none"
    return str(value)


def _assignments(values: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _tests(tests: Sequence[Sequence[tuple[str, str, float]]]) -> list[tuple[str, str, str]]:
    """One row for each collective: the slowest rank's time, and the errors of all ranks."""
    rows = []
    for outcomes in zip(*tests, strict=False):
        wrong = [f"rank {k}: {said}" for k, (_, said, _) in enumerate(outcomes) if said != "ok"]
        slowest = max(milliseconds for _, _, milliseconds in outcomes)
        rows.append((outcomes[0][0], f"{slowest:.2f}", "; ".join(wrong) or "ok"))
    return rows


def _columns(rows: Sequence[Sequence[object]]) -> list[str]:
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(f"{entry!s:{width}}" for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
