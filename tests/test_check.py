"""The checker: every rule on its own page, whole scripts line by line, and the command."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from instep.check import check_files, severe_findings
from instep.check.checker import check_script
from instep.check.command import add_command
from instep.check.pages import generate_pages
from instep.check.rules import RULES, THEMES
from instep.check.run_warnings import RUN_WARNINGS
from instep.check.script import Script
from instep.check.script_info import ScriptInfo

SCRIPTS = Path(__file__).parent / "check_scripts"
SOURCE = Path(__file__).parents[1] / "src" / "instep"
PAGES = Path(__file__).parent.parent / "docs" / "check"

EXPECTED: dict[str, list[tuple[int, str]]] = {
    "apex_prefetch.py": [
        (23, "INS305"),
        (39, "INS206"),
        (46, "INS607"),
        (60, "INS105"),
        (61, "INS105"),
    ],
    "apex_optimizers.py": [(12, "INS408")],
    "by_the_clock.py": [
        (17, "INS107"),
        (23, "INS107"),
        (31, "INS107"),
        (66, "INS108"),
    ],
    "careful.py": [],
    "fsdp_saves.py": [
        (11, "INS103"),
        (23, "INS103"),
        (27, "INS103"),
    ],
    "early_stopping.py": [
        (23, "INS106"),
        (36, "INS106"),
        (39, "INS106"),
        (51, "INS106"),
        (67, "INS210"),
    ],
    "explicit_shares.py": [
        (16, "INS209"),
        (23, "INS209"),
        (30, "INS209"),
        (53, "INS210"),
        (61, "INS209"),
    ],
    "horovod_means.py": [
        (13, "INS104"),
        (13, "INS201"),
        (20, "INS501"),
        (27, "INS405"),
    ],
    "horovod_seeds.py": [(15, "INS304")],
    "launched.py": [
        (16, "INS512"),
        (24, "INS501"),
        (27, "INS302"),
        (33, "INS307"),
        (34, "INS405"),
        (39, "INS306"),
        (41, "INS204"),
        (41, "INS205"),
        (42, "INS306"),
        (50, "INS606"),
        (55, "INS303"),
        (59, "INS105"),
        (60, "INS105"),
        (64, "INS605"),
        (85, "INS208"),
        (89, "INS602"),
    ],
    "leftovers_of_ddp.py": [
        (11, "INS401"),
        (12, "INS310"),
        (13, "INS310"),
        (22, "INS310"),
        (23, "INS310"),
        (26, "INS401"),
    ],
    "means_unused.py": [(23, "INS201")],
    "not_replicated.py": [(13, "INS309")],
    "one_process_four_gpus.py": [
        (23, "INS505"),
        (25, "INS307"),
        (26, "INS306"),
        (31, "INS105"),
        (35, "INS606"),
    ],
    "own_rows.py": [
        (25, "INS210"),
        (26, "INS210"),
        (28, "INS210"),
        (29, "INS210"),
        (36, "INS210"),
        (39, "INS101"),
        (46, "INS101"),
        (64, "INS210"),
        (79, "INS401"),
        (80, "INS201"),
    ],
    "own_steps.py": [
        (18, "INS106"),
        (20, "INS106"),
        (24, "INS106"),
        (74, "INS106"),
        (84, "INS407"),
    ],
    "own_turns.py": [(19, "INS601")],
    "plain.py": [],
    "rank_modulo_devices.py": [],
    "replicas_in_ddp.py": [
        (8, "INS310"),
        (10, "INS310"),
        (11, "INS310"),
    ],
    "slurm_node_list.py": [
        (9, "INS504"),
        (15, "INS514"),
        (18, "INS511"),
    ],
    "slurm_spawned.py": [
        (32, "INS513"),
        (32, "INS515"),
        (36, "INS405"),
        (39, "INS206"),
        (48, "INS601"),
        (50, "INS606"),
        (62, "INS601"),
    ],
    "spawned.py": [
        (14, "INS511"),
        (21, "INS204"),
        (27, "INS105"),
    ],
    "two_lines.py": [
        (19, "INS308"),
        (23, "INS308"),
        (44, "INS210"),
        (45, "INS407"),
        (45, "INS210"),
        (46, "INS407"),
        (47, "INS407"),
    ],
    "undivided.py": [
        (22, "INS308"),
        (26, "INS308"),
    ],
    "wrapped_in_loops.py": [],
    "waved_away.py": [
        (6, "INS101"),
        (10, "INS101"),
    ],
    "rows_by_hand.py": [
        (9, "INS311"),
        (12, "INS311"),
    ],
    "some_step.py": [
        (16, "INS109"),
        (18, "INS109"),
        (26, "INS102"),
    ],
    "who_waits.py": [
        (29, "INS101"),
        (53, "INS101"),
        (55, "INS102"),
        (58, "INS101"),
        (64, "INS101"),
    ],
}
"""Every finding in every script of check_scripts, by line. What is not here must be silent."""


def checked(text: str) -> list[str]:
    return [finding.code for finding in check_script(Script("train.py", text), RULES.values())]


def examples(page: str) -> dict[str, str]:
    return dict(re.findall(r"## (Bad|Good)\n```python\n(.*?)```", page, re.DOTALL))


def instep(*words: str) -> int:
    """`instep check …` in this process; returns the exit code, prints to standard output."""
    parser = argparse.ArgumentParser(prog="instep")
    add_command(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["check", *words])
    code: int = arguments.command(arguments)
    return code


@pytest.mark.parametrize("code", RULES)
def test_the_bad_example_of_a_page_is_hit_by_that_rule_alone(code: str) -> None:
    assert set(checked(examples(RULES[code].page)["Bad"])) == {code}


@pytest.mark.parametrize("code", RULES)
def test_the_good_example_of_a_page_is_clean(code: str) -> None:
    assert checked(examples(RULES[code].page)["Good"]) == []


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_script_has_exactly_the_findings_of_the_table(name: str) -> None:
    outcome = check_files([str(SCRIPTS / name)])
    assert [(f.line, f.code) for f in outcome.findings] == EXPECTED[name]


def test_the_table_names_every_script() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in SCRIPTS.glob("*.py"))


def test_every_finding_says_what_happens_and_what_to_write_instead() -> None:
    outcome = check_files([str(path) for path in SCRIPTS.glob("*.py")])
    for finding in outcome.findings:
        assert finding.message
        assert finding.mend
        assert re.search(r"\bN\b|node|device", finding.effect), finding


def test_codes_are_grouped_and_names_are_unique() -> None:
    assert all(code[:4] in THEMES for code in RULES)
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


def test_the_pages_in_docs_are_those_of_the_code() -> None:
    english = (path for path in PAGES.glob("*.md") if not path.name.endswith(".zh.md"))
    written = {path.name: path.read_text("utf-8") for path in english}
    assert written == generate_pages(), "run `python -m instep.check.pages docs/check`"


def test_the_chinese_pages_are_those_of_the_code() -> None:
    pages = runpy.run_path(str(SOURCE.parents[1] / "scripts" / "check_pages_zh.py"))
    written = {path.name: path.read_text("utf-8") for path in PAGES.glob("*.zh.md")}
    assert written == pages["generate_chinese_pages"](), "run scripts/check_pages_zh.py"


def test_every_warning_of_a_running_job_has_a_code_with_a_page() -> None:
    sources = [path for path in SOURCE.rglob("*.py") if path.name != "run_warnings.py"]
    printed = {code for path in sources for code in re.findall(r"\[(INS\d+)\]", path.read_text())}
    assert printed == RUN_WARNINGS.keys()
    assert not printed & RULES.keys()
    for warning in RUN_WARNINGS.values():
        where = [path for path in sources if f"[{warning.code}]" in path.read_text()]
        warns = [bool(re.search("InstepWarning|warn_at_script", p.read_text())) for p in where]
        assert {*warns} == {warning.of_python}, where


def test_exit_code_0_means_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert instep(str(SCRIPTS / "careful.py"), str(SCRIPTS / "plain.py")) == 0
    assert capsys.readouterr().out == "Nothing found in 2 files.\n"


def test_exit_code_1_means_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert instep(str(SCRIPTS / "slurm_node_list.py")) == 1
    out = capsys.readouterr().out
    assert "slurm_node_list.py:9:1: INS504 error: " in out
    assert "  instead: os.environ['CUDA_VISIBLE_DEVICES'] = '0,5'" in out
    assert "2 errors and 1 warning in 1 file." in out


def test_exit_code_2_names_what_could_not_be_read_and_checks_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nif rank == 0\n")
    absent = tmp_path / "absent.py"
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\xff\xfe\x00")
    paths = [str(broken), str(absent), str(binary), str(SCRIPTS / "slurm_node_list.py")]
    assert instep(*paths) == 2
    captured = capsys.readouterr()
    assert "INS504" in captured.out
    assert f"{broken}: line 2: expected ':'" in captured.err
    assert f"{absent}: No such file or directory" in captured.err
    assert str(binary) in captured.err


def test_a_line_keeps_its_fault_when_it_says_so() -> None:
    lines = (SCRIPTS / "waved_away.py").read_text().splitlines()
    found = check_files([str(SCRIPTS / "waved_away.py")]).findings
    kept = [lines[finding.line - 1].strip() for finding in found]
    assert kept == ["dist.barrier()", "dist.barrier()  # instep: ignore[INS104]"]


def test_a_call_over_several_lines_may_be_kept_at_its_end() -> None:
    text = 'import os\nos.environ[\n    "A"\n] == "1"'
    assert checked(text + "\n") == ["INS504"]
    assert checked(text + "  # instep: ignore[INS504]\n") == []


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ("world_size = torch.accelerator.device_count()", ["INS501"]),
        ("world_size = torch.npu.device_count()", ["INS501"]),
        ("torch.accelerator.set_device_index(dist.get_rank())", ["INS502"]),
        ("model.to(f'xpu:{dist.get_rank()}')", ["INS502"]),
        ("model.npu(dist.get_rank())", ["INS502"]),
        ("torch.npu.set_device(0)\nos.environ['ASCEND_RT_VISIBLE_DEVICES'] = '1'", ["INS503"]),
        ("model.to('xpu')\nos.environ['ZE_AFFINITY_MASK'] = '1'", ["INS503"]),
        ("os.environ['ZE_AFFINITY_MASK'] = '1'\nmodel.to('xpu')", []),
    ],
)
def test_other_accelerators_are_like_cuda(lines: str, codes: list[str]) -> None:
    begin = "import os, torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
    assert checked(f"{begin}{lines}\n") == codes


@pytest.mark.parametrize(
    ("library", "rank", "size"),
    [
        ("import horovod.torch as hvd", "hvd.rank()", "hvd.size()"),
        ("import torch.distributed as dist", "torch.distributed.get_rank()",
         "torch.distributed.get_world_size()"),
    ],
)  # fmt: skip
def test_advice_asks_the_library_of_the_script_for_the_rank(
    library: str, rank: str, size: str
) -> None:
    script = (
        f"{library}\nimport torch\nfrom torchvision import transforms\n"
        "torch.distributed.init_process_group()\n"
        "torch.manual_seed(7)\ncrop = transforms.RandomCrop(32)\n"
        "batch_size = args.batch_size // torch.cuda.device_count()\n"
        "torch.save(model.state_dict(), 'model.pt')\n"
    )
    found = {f.code: f.mend for f in check_script(Script("train.py", script), RULES.values())}
    assert found["INS302"].startswith(f"torch.manual_seed(7 + {rank})")
    assert found["INS405"] == f"args.batch_size // {size}"
    assert found["INS601"].startswith(f"if {rank} == 0:")


def test_under_shard_equal_seeds_are_right_and_the_batch_is_left_whole() -> None:
    script = (
        "import instep\nimport torch\nfrom torchvision import transforms\n"
        "torch.manual_seed(7)\ncrop = transforms.RandomCrop(32)\n"
        "batch_size = args.batch_size // torch.cuda.device_count()\n"
        "loader = instep.shard(make_loader(crop, batch_size))\n"
    )
    (finding,) = check_script(Script("train.py", script), RULES.values())
    assert (finding.code, finding.mend) == ("INS405", "args.batch_size")


def test_accelerate_tells_which_process_writes() -> None:
    script = (
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "torch.save(model.state_dict(), 'model.pt')\n"
    )
    (finding,) = check_script(Script("train.py", script), RULES.values())
    assert finding.mend.startswith("if accelerator.is_main_process:")


@pytest.mark.parametrize("name", ["--local_rank", "--local-rank"])
def test_the_option_that_todays_launcher_passes_is_named_where_it_is_refused(name: str) -> None:
    script = (
        "import argparse\nimport torch.distributed as dist\n"
        "parser = argparse.ArgumentParser()\n"
        f"parser.add_argument({name!r}, type=int, default=-1)\n"
        "args = parser.parse_args()\n"
        "model.cuda(args.local_rank)\n"
        "dist.init_process_group('nccl')\n"
    )
    (finding,) = check_script(Script("train.py", script), RULES.values())
    assert finding.code == "INS512"
    assert ("passes --local-rank, which argparse refuses" in finding.effect) == (
        name == "--local_rank"
    )


@pytest.mark.parametrize(
    ("labels", "is_fault"),
    [
        ("torch.randn(3, 10).cuda()", True),
        ("torch.zeros(3, 10)", True),
        ("torch.randn(3, 5)", False),
        ("torch.randn(3, 1)", False),  # of one width with any
        ("torch.randn(3, width)", False),
        ("batch[1]", False),
    ],
)
def test_labels_of_another_width_are_named_only_where_the_script_says_it(
    labels: str, is_fault: bool
) -> None:
    script = (
        "import torch\nfrom torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(10, 5)\n"
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
        "model = DistributedDataParallel(Net().to(0), device_ids=[0])\n"
        f"labels = {labels}\n"
        "outputs = model(torch.randn(3, 10))\n"
        "loss = nn.functional.mse_loss(outputs, labels)\n"
    )
    assert ("INS406" in checked(script)) == is_fault


def test_a_wait_that_looks_for_nan_is_not_a_fault() -> None:
    step = (
        "import torch\nimport torch.distributed as dist\n"
        "for x in loader:\n"
        "    loss = model(x)\n"
        "    value = loss.item()\n"
        "    {}\n"
        "    loss.backward()\n"
    )
    assert checked(step.format("seen.append(value)")) == ["INS105"]
    assert checked(step.format("assert torch.isfinite(value)")) == []


def test_rules_are_selected_and_ignored_by_the_beginning_of_their_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = str(SCRIPTS / "launched.py")
    instep(script, "--select", "INS2,ins512", "--ignore", "INS205", "--json", "-")
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["code"] for finding in found] == ["INS512", "INS204", "INS208"]


def test_a_code_that_no_rule_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        instep("train.py", "--select", "INS9")
    assert "no rule begins with 'INS9'" in capsys.readouterr().err


def test_a_script_in_an_undeclared_encoding_is_refused_as_by_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"import torch\n\n# caf\xe9\n")
    python = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert instep(str(script)) == 2
    refused = capsys.readouterr().err.partition(f"{script}: ")[2].strip()
    assert refused
    assert python.stderr.strip().endswith(refused)
    script.write_bytes(b"# coding: latin-1\r\n# caf\xe9\r\n")
    assert instep(str(script)) == 0


def test_what_python_warns_of_as_it_reads_a_script_is_left_to_the_run(recwarn) -> None:
    filters = [*warnings.filters]
    assert Script("train.py", r"print('\d')").strings == {r"\d"}
    assert not recwarn.list
    assert warnings.filters == filters


def test_json_keeps_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = SCRIPTS / "slurm_node_list.py"
    assert instep(str(script), str(tmp_path / "no.py"), "--json", str(tmp_path / "out")) == 2
    assert "INS504" in capsys.readouterr().out
    report = json.loads((tmp_path / "out").read_text())
    assert set(report) == {"schema", "files", "findings", "unreadable", "summary"}
    assert report["schema"] == 1
    assert report["files"] == [str(script)]
    assert report["summary"] == {"error": 2, "warning": 1}
    assert report["unreadable"] == [
        {"path": str(tmp_path / "no.py"), "reason": "No such file or directory"}
    ]
    assert report["findings"][0] == {
        "path": str(script),
        "line": 9,
        "column": 1,
        "code": "INS504",
        "name": "compared-not-assigned",
        "severity": "error",
        "message": "os.environ['CUDA_VISIBLE_DEVICES'] is compared with '0,5' and the answer is "
        "thrown away",
        "effect": "at any N, the variable is not set",
        "mend": "os.environ['CUDA_VISIBLE_DEVICES'] = '0,5'",
    }


def test_a_notebook_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": [], "nbformat": 4}')
    assert instep(str(notebook)) == 2
    assert "it is a notebook; make a script" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert instep(str(tmp_path / "no.py")) == 2
    said = capfd.readouterr()
    assert said.out + said.err == f"instep check: {tmp_path / 'no.py'}: No such file or directory\n"


def test_github_gets_one_annotation_per_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a,b.py"
    script.write_text('import os\nos.environ["A"] == "100%"\n')
    assert instep(str(script), "--format", "github") == 1
    out = capsys.readouterr().out
    place = str(script).replace(",", "%2C")
    assert out.startswith(f"::error file={place},line=2,col=1,title=INS504 compared-not-assigned::")
    assert "'100%25'" in out
    assert out.count("\n") == 1


def test_explain_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert instep("--explain", "ins301") == 0
    assert capsys.readouterr().out == generate_pages()["INS301-set-epoch-forgotten.md"]
    for code in ("[INS702]", "702"):
        assert instep("--explain", code) == 0
        assert capsys.readouterr().out == generate_pages()["INS702-gradient-not-finite.md"]


def test_columns_count_characters_not_bytes() -> None:
    text = 'import os\nname = "秩"; os.environ["A"] == name\n'
    assert [f.column for f in check_script(Script("a.py", text), RULES.values())] == [13]


def test_find_errors_are_the_errors_only() -> None:
    script = str(SCRIPTS / "launched.py")
    severe = severe_findings(script)
    assert severe == [f for f in check_files([script]).findings if f.severity == "error"]
    assert 0 < len(severe) < len(EXPECTED["launched.py"])


def test_find_errors_of_what_is_not_python_are_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("this is not Python")
    assert severe_findings(str(tmp_path / "train.py")) == []
    assert severe_findings(str(tmp_path / "absent.py")) == []


def test_checking_imports_no_torch_and_runs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nraise SystemExit('it ran')\n")
    program = (
        "import sys; from instep.check import check_files; "
        f"print(check_files([{str(script)!r}]).findings, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "() False\n"


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("dist.get_rank()", "rank"),
        ("os.getenv('RANK')", "rank"),
        ("int(os.environ['LOCAL_RANK'])", "local rank"),
        ("getattr(args, 'local_rank', 0)", "local rank"),
        ("getattr(args, name)", None),
        ("dist.get_rank() % 4", "device"),
        ("step % 4", None),
    ],
)
def test_a_rank_is_known_by_what_it_is_called(expression: str, kind: str | None) -> None:
    text = f"import os\nimport torch.distributed as dist\nvalue = {expression}\n"
    script = Script("a.py", text)
    (assignment,) = script.all(ast.Assign)
    assert ScriptInfo(script).ranks.rank_type(assignment.value) == kind


@pytest.mark.parametrize(
    ("imports", "asks"),
    [
        ("import torch", "torch.distributed.get_rank() == 0"),
        ("import accelerate", "accelerator.is_main_process"),
        ("import accelerate, horovod.torch as hvd", "hvd.rank() == 0"),
        ("import accelerate, instep", "instep.rank == 0"),
    ],
)
def test_a_mend_asks_for_rank_0_as_the_libraries_of_the_script_do(imports: str, asks: str) -> None:
    assert ScriptInfo(Script("a.py", f"{imports}\n")).ranks.on_rank_0 == asks


def test_a_collective_of_some_ranks_needs_no_others() -> None:
    text = (
        "import torch.distributed as dist\n"
        "def sum_up(value, rank, pair):\n"
        "    if rank < 2:\n"
        "        dist.all_reduce(value{})\n"
    )
    assert checked(text.format("")) == ["INS101"]
    assert checked(text.format(", group=pair")) == []


def test_a_ranks_count_over_its_own_share_is_its_own_accuracy() -> None:
    text = (
        "import torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "def evaluate(model, dataset):\n"
        "    sampler = DistributedSampler(dataset)\n"
        "    correct = count_correct(model, DataLoader(dataset, sampler=sampler))\n"
        "    {}\n"
        "    return correct / len(sampler)\n"
    )
    assert "INS202" in checked(text.format("dist.all_reduce(correct)"))
    assert "INS202" not in checked(text.format("pass"))


def test_in_evaluation_only_a_model_with_batch_normalisation_waits() -> None:
    text = (
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def evaluate(loader, rank):\n"
        "    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), {}))\n"
        "    model.eval()\n"
        "    if rank == 0:\n"
        "        for x in loader:\n"
        "            print(model(x))\n"
    )
    assert "INS102" in checked(text.format("torch.nn.BatchNorm1d(4)"))
    assert "INS102" not in checked(text.format("torch.nn.ReLU()"))


def test_a_copy_of_the_model_made_before_wrapping_is_not_the_wrapper() -> None:
    text = (
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def main(model, rank):\n"
        "    plain = model\n"
        "    if rank >= 0:\n"
        "        model = DDP(model)\n"
        "    if rank == 0:\n"
        "        torch.save(plain.state_dict(), 'a.pt')\n"
        "        torch.save(model.state_dict(), 'b.pt')\n"
    )
    found = check_script(Script("a.py", text), RULES.values())
    assert [(f.line, f.code) for f in found] == [(9, "INS604")]


def test_a_batch_size_from_the_command_line_is_known_by_its_default() -> None:
    text = (
        "import argparse\nimport torch\nimport torchvision\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch-size', type=int, default={})\n"
        "args = parser.parse_args()\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size)\n"
        "model = DDP(torchvision.models.resnet18())\n"
    )
    assert checked(text.format(8)) == ["INS402"]
    assert checked(text.format(64)) == []


def test_with_a_global_batch_no_learning_rate_is_scaled() -> None:
    text = (
        "import instep\nimport torch\n"
        "model = instep.replicate(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1{})\n"
    )
    assert checked(text.format(" * instep.world_size")) == ["INS401"]
    assert checked(text.format("")) == []


def test_outputs_that_are_joined_are_to_be_gathered() -> None:
    text = """
import instep, torch
from torch.utils.data import DataLoader
loader, model = instep.shard(DataLoader(data, 64)), instep.replicate(net)
outputs, losses = [], []
for x, y in loader:
    outputs.append(model(x))
    losses.append(loss(model(x), y).item())
print(torch.cat(outputs))
print(sum(losses))
"""
    found = check_script(Script("train.py", text), [RULES["INS210"]])
    assert [each.mend.partition("  #")[0] for each in found] == [
        "outputs.append(instep.gather_rows(value))", "mean = instep.Mean()",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("instep.all_reduce(value, 'mean')", "meter averages the ranks' means of their rows"),
        ("value", "meter holds values of this rank's rows"),
    ],
)
def test_a_meter_that_reduces_is_told_from_one_of_own_rows(value: str, message: str) -> None:
    text = f"""import instep
from torch.utils.data import DataLoader

class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0
    def update(self, value):
        self.total += {value}
        self.count += 1
    @property
    def avg(self):
        return self.total / self.count

meter = Meter()
for x, y in instep.shard(DataLoader(data, 8)):
    meter.update(loss_function(model(x), y).detach())
print(meter.avg)
"""
    findings = check_script(Script("train.py", text), RULES.values())
    assert [each.message for each in findings if each.code == "INS210"] == [message]


def test_a_count_reduced_by_a_function_of_the_script_is_known() -> None:
    text = (
        "import torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "loader = DataLoader(data, sampler=DistributedSampler(data))\n"
        "def reduce_sum(value):\n"
        "    dist.all_reduce(value)\n"
        "    return value\n"
        "def evaluate(correct):\n"
        "    for batch in loader:\n"
        "        correct += hits(batch)\n"
        "    correct = reduce_sum(correct)\n"
        "    return correct / {}\n"
    )
    assert checked(text.format("len(loader)")) == ["INS202"]
    assert checked(text.format("len(loader.dataset)")) == []


@pytest.mark.parametrize(
    ("value", "advised"),
    [
        ("(model(x).argmax(1) == y).sum().item()", "accuracy.update(output, y)"),
        ("model(x).argmax(1).eq(y).sum().item()", "accuracy.update(output, y)"),
        ("cost(model(x), y).item() * len(x)", "mean.update(value, len(x))"),
    ],
)
def test_a_share_of_hits_is_an_accuracy_and_any_other_a_mean(value, advised) -> None:
    (page,) = [rule.page for rule in RULES.values() if rule.code == "INS209"]
    text = examples(page)["Bad"].replace("loss_function(model(x), y).item() * len(x)", value)
    (finding,) = check_script(Script("train.py", text), RULES.values())
    assert advised in finding.mend


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ("if local_rank != 0:\n    pass\nelse:\n    save()", ["INS602"]),
        ("if local_rank == 0:\n    pass\nelse:\n    save()", []),
        ("if local_rank == 0 and verbose:\n    pass\nelse:\n    save()", ["INS601"]),
        ("if rank != 0:\n    return\nsave()", []),
        ("if rank != 0 and resumed:\n    return\nsave()", ["INS601"]),
        ("if local_rank == 3:\n    dist.barrier()", ["INS101"]),
        ("if local_rank == -1:\n    dist.barrier()", []),
        ("if local_rank >= 0:\n    dist.barrier()", []),
    ],
)
def test_the_side_of_a_condition_decides_which_ranks_run_a_line(lines, codes) -> None:
    body = lines.replace("save()", "torch.save(net.state_dict(), 'net.pt')")
    head = "import torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
    function = (
        f"def end(net, rank, local_rank, verbose, resumed):\n{textwrap.indent(body, '    ')}\n"
    )
    call = "end(torch.nn.Linear(4, 4), dist.get_rank(), int(os.environ['LOCAL_RANK']), True, True)"
    assert checked(f"import os\n{head}{function}{call}\n") == codes


def test_a_writer_made_on_one_rank_guards_what_asks_for_it() -> None:
    text = (
        "import torch\n"
        "import torch.distributed as dist\n"
        "path = 'a.pt' if dist.get_rank() == 0 else None\n"
        "if path is not None:\n"
        "    torch.save({}, path)\n"
        "if path:\n"
        "    torch.save({}, path)\n"
        "torch.save({}, 'b.pt')\n"
    )
    found = check_script(Script("a.py", text), RULES.values())
    assert [(f.line, f.code) for f in found] == [(8, "INS601")]


@pytest.mark.parametrize(
    ("library", "advised"),
    [
        ("import instep", "if instep.rank == 0:"),
        ("from instep import shard", "if instep.rank == 0:"),
        ("import horovod.torch as hvd", "if hvd.rank() == 0:"),
        ("import torch.distributed as dist", "if torch.distributed.get_rank() == 0:"),
    ],
)
def test_the_advice_works_where_no_process_group_is(library: str, advised: str) -> None:
    """get_rank() raises under plain `python`, where instep.rank is 0."""
    text = f"import torch\n{library}\ndist.init_process_group()\ntorch.save({{}}, 'a.pt')\n"
    found = check_script(Script("a.py", text), RULES.values())
    assert [f.mend.splitlines()[0] for f in found if f.code == "INS601"] == [advised]


@pytest.mark.parametrize(
    ("call", "varies"),
    [
        ("", "depends on the seed"),
        ("train_sampler.set_epoch(epoch)", "depends on the seed"),
        ("sampler.set_epoch(epoch)", "differs from epoch to epoch"),
        ("loader.sampler.set_epoch(epoch)", "differs from epoch to epoch"),
    ],
)
def test_padding_differs_from_epoch_to_epoch_only_where_the_epoch_is_set(call, varies) -> None:
    text = textwrap.dedent(
        f"""
        from torch.utils.data import DataLoader, DistributedSampler
        train_sampler = DistributedSampler(train_set)
        sampler = DistributedSampler(test_set, drop_last=True)
        loader = DataLoader(test_set, sampler=sampler)
        for epoch in range(3):
            {call or "pass"}
            for x in loader:
                print(x)
        """
    )
    [found] = [f for f in check_script(Script("a.py", text), RULES.values()) if f.code == "INS205"]
    assert f"the padding {varies}, and" in f"{found}"


def test_super_calls_the_method_of_the_base_class_and_not_the_one_that_it_stands_in() -> None:
    text = (
        "import torch.distributed as dist\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "class Zero(ZeroRedundancyOptimizer):\n"
        "    def state_dict(self):\n"
        "        self.consolidate_state_dict()\n"
        "        return {}.state_dict() if dist.get_rank() == 0 else {{}}\n"
    )
    assert checked(text.format("super()")) == []
    assert checked(text.format("self.inner")) == ["INS103"]


def test_a_sampler_in_a_test_of_code_evaluates_no_model() -> None:
    text = (
        "import {}\n"
        "from torch.utils.data import DistributedSampler\n"
        "def test_shapes():\n"
        "    return DistributedSampler(range(96), shuffle=False)\n"
    )
    assert checked(text.format("pytest")) == []
    assert checked(text.format("torch")) == ["INS204"]


@pytest.mark.parametrize("module", ["run", "launcher.api"])
def test_what_starts_the_processes_is_one_process(module: str) -> None:
    text = (
        "from torch.distributed.{} import main\n"
        "with open('hosts.txt', 'w') as file:\n"
        "    file.write('a b')\n"
        "main()\n"
    )
    assert checked(text.format(module)) == []
    assert checked(text.format("rpc")) == ["INS601"]


def test_what_a_function_writes_that_starts_python_for_each_rank_is_written_once() -> None:
    text = (
        "import subprocess, sys\n"
        "import torch.distributed as dist\n"
        "def train(rank):\n"
        "    dist.init_process_group('nccl', rank=rank)\n"
        "def main():\n"
        "    for i in range(4):\n"
        "        log = open('gpu_{}.log'.format(i), 'w')\n"
        "        subprocess.Popen([{}, 'train.py'], stdout=log)\n"
        "main()\n"
    )
    assert checked(text.replace("[{}", "[sys.executable")) == []
    assert checked(text.replace("[{}", "['nvidia-smi'")) == ["INS601"]


@pytest.mark.launch
def test_a_reader_that_has_read_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "instep", "check", "--explain", "INS301"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
