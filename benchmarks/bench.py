"""Run all benchmarks and write RESULTS.md, RESULTS.zh.md, one PNG, and the figures as JSON.

make bench
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from machine import machine, shown

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ENVIRONMENTS = {"peers": ".venv-peers", "ppo": ".venv-unedited"}
"""Those of benchmarks that need other packages."""
Row = Iterable[object]


def table(head: Row, rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(list(head)), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def collectives(result: dict[str, Any]) -> str:
    """all_reduce by size."""
    rows = [
        (
            f"{int(numel):,}",
            f"{row['microseconds']['instep']:.0f}",
            *(shown(row[ratio]) for ratio in ("gloo / instep", "instep / copy", "resident / copy")),
        )
        for numel, row in result["sizes"].items()
    ]
    head = ("float32", "instep, us", "Gloo / instep", "instep / copy", "resident bucket / copy")
    return table(head, rows)


def hosts(result: dict[str, Any]) -> str:
    """all_reduce over several hosts."""
    rows = [
        (
            " + ".join(map(str, shape["ranks"])),
            shape["rate"] or "",
            f"{int(numel):,}",
            f"{row['microseconds']['instep']:.0f}",
            shown(row["gloo / instep"]),
            shown(row["bf16 / instep"]),
            shown(row["instep / cable"]) if shape["rate"] and int(numel) >= 1 << 20 else "",
        )
        for shape in result["shapes"]
        for numel, row in shape["sizes"].items()
    ]
    titles = ("ranks", "cables", "float32", "instep, us", "Gloo / instep", "bf16 / float32")
    return table((*titles, "over the cable's limit"), rows)


def step(result: dict[str, Any]) -> str:
    """Steps that take turns in the same two processes; none keeps memory as instep does."""
    rows = [
        (
            *(model, name, f"{row['median_ms']:.2f}"),
            *(shown(row[key]) if key in row else "" for key in ("over_none", "over_ddp")),
        )
        for model, strategies in result["models"].items()
        for name, row in strategies.items()
    ]
    return table(("model", "strategy", "ms", "over none", "over DDP"), rows)


def peers(result: dict[str, Any]) -> str:
    """Steps, each strategy in processes of its own."""
    rows = [
        (model, name, f"{row['median_ms']:.2f}", shown(row["over_none"]))
        for model, measured in result["models"].items()
        for name, row in measured["rows"].items()
    ]
    return table(("model", "contender", "ms", "over none"), rows)


def compressed(result: dict[str, Any]) -> str:
    """examples/digits.py with compressed gradients; medians over the seeds."""
    keys = ("bytes_per_step", "accuracy", "first_gradient_off", "parameters_off")
    rows = [
        (kind, *(f"{statistics.median(run[key] for run in runs):.6g}" for key in keys))
        for kind, runs in result["rows"].items()
    ]
    return table(("kind", "bytes a step", "accuracy", "first gradient", "parameters"), rows)


def epoch(result: dict[str, Any]) -> str:
    """An epoch on several ranks over one rank's."""
    rows = [(name, shown(result[f"{name}_over_one_rank"])) for name in ("instep", "none")]
    return table(("ResNet-18", f"{result['ranks']} ranks over one"), rows)


def scaling(result: dict[str, Any]) -> str:
    """From 1 rank to 64."""
    rows = [
        (
            *(row["ranks"], row["backend"], f"{row['step_ms']:.2f}"),
            *(f"{row['memory_mib']:.0f}", f"{row['meeting_s']:.2f}"),
        )
        for row in result["rows"]
    ]
    return table(("ranks", "backend", "step, ms", "memory of a rank, MiB", "meeting, s"), rows)


def unedited(result: dict[str, Any]) -> str:
    """An unedited ResNet-18: its second epoch on several ranks over one, and what outputs cost."""
    epochs = [(name, shown(ratio)) for name, ratio in result["epoch_over_one_rank"].items()]
    outputs = [
        (size, *map("{:.2f}".format, row.values())) for size, row in result["outputs"].items()
    ]
    head = ("output", "loss of own rows, ms", "gathered, ms", "rows kept, ms")
    return (
        table(("epoch", f"{result['ranks']} ranks over one"), epochs)
        + "\n\n"
        + table(head, outputs)
    )


def loading(result: dict[str, Any]) -> str:
    """Samples that cost time to load."""
    ratio = shown(result["instep_over_one_rank"])
    return f"{result['ms']:.0f} ms a sample, {result['ranks']} ranks over one: {ratio}"


def checkpoints(result: dict[str, Any]) -> str:
    """The share of the time that saving takes, at one checkpoint in 50 steps."""
    keys = ("pause_percent", "pause_and_write_percent", "wall_percent")
    rows = [
        (model, f"{row['bytes'] / 1e6:.0f}", *(shown(row[key]) for key in keys))
        for model, row in result["models"].items()
    ]
    head = ("model", "MB", "pause, %", "pause and the thread that writes, %", "wall, %")
    return table(head, rows)


def sharded_optimizer(result: dict[str, Any]) -> str:
    """Steps with `instep.shard(optimizer)`, and without it, over no communication."""
    rows = [
        (
            model,
            *(
                shown(row[strategy]["over_none"])
                for strategy in ("replicated", "own_copies", "sharded")
            ),
            f"{row['sharded']['state_share']:.2f}",
        )
        for model, row in result["models"].items()
    ]
    return table(
        ("", "undivided", "divided", "divided, one copy for the host", "state of a rank"), rows
    )


def batch_norm(result: dict[str, Any]) -> str:
    """Batch normalisation with the statistics of all ranks' rows, by PyTorch's kernels and by those
    in C, over PyTorch's own with a rank's rows: forward and backward of a layer, one thread."""
    rows = [
        (
            *(shape, f"{row['own rows']['microseconds']:.0f}"),
            *(shown(row[kind]["over own rows"]) for kind in ("torch", "C")),
        )
        for shape, row in result["shapes"].items()
    ]
    return table(("shape", "own rows, us", "PyTorch's kernels", "in C"), rows)


def host_copy(result: dict[str, Any]) -> str:
    """One copy of parameters and Adam's state for all ranks of a host, over one for each rank: an
    unedited training of 17 million parameters, ranks of one thread."""
    rows = [
        (
            *(ranks, f"{row['off_ms']:.0f}", f"{row['on_ms']:.0f}", shown(row["step"])),
            *(f"{row['off_mib']:.0f}", f"{row['on_mib']:.0f}", shown(row["memory"])),
        )
        for ranks, row in result["ranks"].items()
    ]
    head = ("ranks", "each its own, ms", "one copy, ms", "ratio")
    return table((*head, "each its own, MiB", "one copy, MiB", "ratio"), rows)


def restarts(result: dict[str, Any]) -> str:
    """From the death of one of two ranks until the job trains again."""
    rows = [
        (f"{name} standby processes", shown(row["seconds"]), f"{max(row['all']):.2f}")
        for name, row in result["rows"].items()
    ]
    return table(("", "seconds", "longest"), rows)


def bitwise(result: dict[str, Any]) -> str:
    """With --bitwise 8: the sha256 of parameters, buffers and optimizer states after training on 1,
    2, 4 and 8 ranks, and the cost of a step over one without."""
    bits = [
        (name, row["steps"], "yes" if row["identical"] else "NO", f"`{row['sha256']['1'][:16]}`")
        for name, row in result["bits"].items()
    ]
    costs = [(name, *map(shown, row.values())) for name, row in result["cost"].items()]
    head = ("", "on 2 ranks", "on 1 rank, over plain Python")
    digests = table(("training", "steps", "identical", "sha256"), bits)
    return f"{digests}\n\n{table(head, costs)}"


def startup(result: dict[str, Any]) -> str:
    """Two ranks that start, meet and end."""
    rows = [
        (name, f"{row['seconds']['median']:.2f}", shown(row["over_bare"]))
        for name, row in result["rows"].items()
    ]
    return table(("", "seconds", "over bare processes"), rows)


def imagenet(result: dict[str, Any]) -> str:
    """An epoch of examples/imagenet by each way, as its slowest rank sees it."""
    rows = [
        (way, f"{row['seconds']:.2f}", shown(row["over_ddp"]), f"{row['waited']:.1%}")
        for way, row in result["ways"].items()
    ]
    head = (f"{result['ranks']} ranks, {' '.join(result['flags'])}", "seconds", "over DDP")
    return table((*head, "waited for data"), rows)


def same_cores(result: dict[str, Any]) -> str:
    """Plain `python` with all cores against unedited `instep run` with a rank for each core: the
    step of the latter over that of the former. Shares alone: as many processes at once, each with
    one thread and its share of the batch, which do not communicate, but each make the whole step
    of the optimizer. The first steps, in which instep measures, are not timed; alone: in how many
    runs rank 0 went on alone. The last row: of all rows."""
    rows = [
        (
            *(model, optimizer, f"{row['plain_ms']:.2f}", f"{row['instep_ms']:.2f}"),
            shown(row["instep_over_plain"]),
            row["alone"],
            shown(row["shares_over_plain"]) if row.get("shares_over_plain") else "",
        )
        for model, optimizers in result["models"].items()
        for optimizer, row in optimizers.items()
    ]
    rows.append(("all", "", "", "", shown(result["all"]), "", ""))
    head = (
        "model",
        "optimizer",
        "plain, ms",
        "instep, ms",
        "instep / plain",
        "alone",
        "shares alone / plain",
    )
    return table(head, rows)


def ppo(result: dict[str, Any]) -> str:
    """PPO of Stable-Baselines3 and of CleanRL, unedited on ranks of one thread: frames per second
    over those of plain `python` with one thread, from the first frame on."""
    rows = [
        (name, *(f"{row[way]:.0f}" for way in ("plain", "instep")), shown(row["instep_over_plain"]))
        for name, row in result["scripts"].items()
    ]
    return table(("script", "plain, frames/s", "instep, frames/s", "instep / plain"), rows)


def scale(result: dict[str, Any]) -> str:
    """Simulated members: seconds of an exchange, and bytes where they are counted, with the code
    before docs/design/scale.md and with this one."""
    rows = []
    for size, parts in result["sizes"].items():
        before = result.get("before", {}).get(size, {})
        flat, old = (
            each.get("hub", {}) | {name: row for name, row in each.items() if name != "hub"}
            for each in (parts, before)
        )
        rows += [(size, name, of_scale(old.get(name)), of_scale(row)) for name, row in flat.items()]
    return table(("members", "exchange", "before", "now"), rows)


def of_scale(row: dict[str, Any] | None) -> str:
    """One exchange, in a cell."""
    if row is None:
        return ""
    texts = []
    for key, value in row.items():
        if key in ("seconds", "join_s", "collective_s", "connect_s", "result_s", "started_s"):
            name = "" if key == "seconds" else f" ({key.removesuffix('_s').replace('_', ' ')})"
            texts.append("did not end" if value is None else f"{value:.2f} s{name}")
        elif key in ("to_hub_bytes", "from_hub_bytes", "bytes", "to_coordinator_bytes"):
            texts.append(f"{value / 1e6:.2f} MB {key.removesuffix('_bytes').replace('_', ' ')}")
        elif key in ("closed", "lost", "failed", "result_failed") and value:
            texts.append(value if isinstance(value, str) else f"{value} lost")
        elif key == "hub_seconds" and value is not None:
            texts.append(f"hub {value:.2f} s")
    return ", ".join(texts)


def failures(result: dict[str, Any]) -> str:
    """What becomes of two ranks when rank 1 fails: seconds until nothing is left, and the exit code
    (goes on: rank 0 needs rank 1 no more; waits: until INSTEP_TIMEOUT, as nobody can see it). Open
    MPI's mpirun itself takes 1.1 s of these after a first failure, and 2.1 s after an exit 0."""
    texts = {(c["busy"], c["launcher"], c["fails"]): c["says"] for c in result["cells"]}
    each = [list(dict.fromkeys(key[part] for key in texts)) for part in range(3)]
    rows = [
        (busy, launcher, *(texts.get((busy, launcher, way), "waits") for way in each[2]))
        for busy, launcher in product(each[0], each[1])
    ]
    return table(("rank 0 is in or at", "launcher", *each[2]), rows)


def gpu(result: dict[str, Any]) -> str:
    """ResNet-50 in bfloat16 on a GPU: a step of one rank."""
    rows = [
        (name, f"{row['median_ms']:.2f}", shown(row["over_plain"]))
        for name, row in result["rows"].items()
        if "over_plain" in row
    ]
    return table(("", "ms", "over plain PyTorch"), rows)


BENCHMARKS: dict[str, Callable[[dict[str, Any]], str]] = {
    function.__name__: function
    for function in (
        collectives,
        hosts,
        step,
        peers,
        compressed,
        epoch,
        unedited,
        loading,
        checkpoints,
        restarts,
        sharded_optimizer,
        host_copy,
        batch_norm,
        bitwise,
        startup,
        failures,
        scaling,
        scale,
        same_cores,
        ppo,
        imagenet,
        gpu,
    )
}


def run(name: str, more: list[str]) -> None:
    """Run one benchmark, if this machine can."""
    folder = ENVIRONMENTS.get(name)
    python = str(HERE.parent / folder / "bin" / "python") if folder else sys.executable
    if not Path(python).exists():
        return
    if name == "hosts" and os.getuid() != 0:
        return
    if name == "gpu" and machine()["gpu"] is None:
        return
    print(f"\n=== {name}", flush=True)
    program = ["-m", "tests.failures"] if name == "failures" else [str(HERE / f"{name}.py")]
    if name == "imagenet":
        program += ["--plot", str(HERE.parent / "docs" / "images"), "--rounds", "3"]
    command = [python, *program, "--json", str(RESULTS / f"{name}.json"), *more]
    subprocess.run(command, check=True, cwd=HERE.parent)


BEGIN = """\
# Measured

([中文](RESULTS.zh.md)) By `make bench`: medians, and quartiles of the ratios within one run."""
BEGIN_IN_CHINESE = """\
# 性能测试

（[English](RESULTS.md)）由 `make bench` 测得：中位数，以及同一次运行之内各比值的四分位数。
表格由程序写出，是英文。"""
IN_CHINESE = {
    "collectives": "各种大小的 all_reduce。",
    "scale": "模拟的成员：一次交换的秒数，以及数过的字节数；修改之前的代码与现在的代码。",
    "ppo": "Stable-Baselines3 和 CleanRL 的 PPO，不改动，每个 rank 一个线程："
    "从第一帧起，每秒帧数与单线程的 `python` 之比。",
    "same_cores": "不改动的 `instep run`（每个核一个 rank）与使用全部核的 `python` 的一步之比；"
    "shares alone：同样多的进程同时运行，各用一个线程、各算自己那份数据，互不通信，"
    "但各自做完整的优化器一步。最初的步（instep 在其中测量）不计时；"
    "alone：在几次运行中 rank 0 独自继续。",
    "hosts": "多台主机上的 all_reduce。",
    "step": "各种策略在同样的两个进程中轮流运行的一步；none 也像 instep 那样保留内存。",
    "peers": "一步的时间，每种策略各用自己的进程。",
    "compressed": "examples/digits.py 使用压缩的梯度；数值是各随机种子的中位数。",
    "epoch": "几个 rank 的一个 epoch 与一个 rank 之比。",
    "unedited": "不改动的 ResNet-18：几个 rank 与一个 rank 的第二个 epoch 之比，以及输出的代价。",
    "loading": "加载费时的样本。",
    "checkpoints": "每 50 步保存一次检查点时，保存所占的时间。",
    "restarts": "两个 rank 之一死去之后，到作业重新训练为止的时间。",
    "sharded_optimizer": "用与不用 `instep.shard(optimizer)` 的一步，与没有通信的一步之比。",
    "host_copy": "同一主机的所有 rank 共有一份参数和 Adam 状态，与每个 rank 各存一份之比："
    "不改动的训练，1700 万个参数，每个 rank 一个线程。",
    "batch_norm": "用所有 rank 的行计算统计量的批归一化（PyTorch 的核函数与 C 的核函数），"
    "与 PyTorch 只用本 rank 的行的批归一化之比：一层的前向与反向，单线程。",
    "bitwise": "使用 --bitwise 8：在 1、2、4、8 个 rank 上训练之后，参数、buffer 和优化器状态的 "
    "sha256；以及一步的时间。",
    "startup": "两个 rank 启动、会合、结束。",
    "failures": "两个 rank 中的 rank 1 失败时：到没有进程剩下为止的秒数，以及作业的退出码。",
    "scaling": "从 1 个 rank 到 64 个。",
    "imagenet": "examples/imagenet 各种方式的一个 epoch，以最慢的 rank 为准。",
    "gpu": "GPU 上 bfloat16 的 ResNet-50：单个 rank 的一步。",
}
"""What each benchmark measures, for the Chinese page."""


def write(results: dict[str, dict[str, Any]]) -> None:
    """The pages of all figures that there are."""
    if "peers" in results:
        draw(results)
    english = {name: " ".join((BENCHMARKS[name].__doc__ or "").split()) for name in results}
    (HERE / "RESULTS.md").write_text(page(BEGIN, english, results))
    (HERE / "RESULTS.zh.md").write_text(page(BEGIN_IN_CHINESE, IN_CHINESE, results))


def page(begin: str, about: dict[str, str], results: dict[str, dict[str, Any]]) -> str:
    """A page, with a sentence and a table for each benchmark."""
    parts = [begin]
    for name, figures in results.items():
        where = (
            "{date}, {processor}, {cores} cores, GPU: {gpu}, torch {torch}; load {load_average:.1f}"
        )
        where = where.format(**figures["machine"])
        rows = BENCHMARKS[name](figures)
        parts.append(f"## {name}.py\n\n{about[name]}\n\n{rows}\n\n({where})")
    if "peers" in results:
        parts.append("![steps over no communication](results.png)")
    return "\n\n".join(parts) + "\n"


def draw(results: dict[str, dict[str, Any]]) -> None:
    """Steps over no communication, by contender."""
    models = results["peers"]["models"]
    lines = -(-len(models) // 2)
    figure, axes = plt.subplots(lines, 2, figsize=(11, 3.8 * lines), squeeze=False)
    for axis, (model, measured) in zip(axes.flat, models.items(), strict=False):
        rows = {name: row["over_none"] for name, row in measured["rows"].items()}
        order = sorted(rows, key=lambda name: rows[name]["median"], reverse=True)
        medians = [rows[name]["median"] for name in order]
        whiskers = [
            [rows[name]["median"] - rows[name]["q1"] for name in order],
            [rows[name]["q3"] - rows[name]["median"] for name in order],
        ]
        colours = ["tab:blue" if name.startswith("instep") else "tab:gray" for name in order]
        axis.barh(order, medians, xerr=whiskers, color=colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=f"{model}, 2 ranks", xlabel="step over no communication")
    figure.tight_layout()
    figure.savefig(HERE / "results.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), choices=BENCHMARKS)
    args, more = parser.parse_known_args()
    RESULTS.mkdir(exist_ok=True)
    for name in args.only:
        run(name, more)
    files = {name: RESULTS / f"{name}.json" for name in BENCHMARKS}
    write({name: json.loads(file.read_text()) for name, file in files.items() if file.exists()})


if __name__ == "__main__":
    main()
