"""The pages of docs as a site: their code, commands, messages and tables are those of instep."""

import ast
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest

import instep
from instep import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(rf"\binstep ({'|'.join(cli.COMMANDS)}) ([^`\n]*)")
VALUES = {"N": "2", "K": "1", "M": "2", "CODE": "INS101", "FILE": "file", "FOLDER": "folder"}
"""What the placeholders of the pages stand for."""


def page_name(page):
    return str(page.relative_to(ROOT))


def commands(text):
    """The words of each command with a script or module, as in ["run", "-n", "2", "train.py"]."""
    for name, rest in COMMAND.findall(text):
        words = shlex.split(re.split(r" [#>]|&&|\|", rest)[0].replace("\\", ""), posix=True)
        is_whole = any(word.endswith(".py") or word == "-m" for word in words)
        if is_whole and not {"…", "..."} & set(words):
            yield [name, *(VALUES.get(word, word) for word in words)]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_block_of_python_compiles(page):
    for _, language, code in FENCED.findall(page.read_text()):
        if language in ("python", "py"):
            compile(textwrap.dedent(code), page_name(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_of_instep_is_accepted(page):
    for words in commands(page.read_text()):
        has_program = words[0] in cli.WITH_PROGRAM
        parser = cli._parser(words[0])
        ours, theirs = cli._split(words, parser) if has_program else (words, ["train.py"])
        parser.parse_args(ours)  # raises CommandLineError for what is not accepted
        assert theirs, words


def test_commands_are_found_in_blocks_in_lines_and_in_tables():
    text = "`instep run -n N a.py`\n| `mpirun -n 4 instep check b.py` |\n    instep slurm c.py > d"
    assert [*commands(text)] == [
        ["run", "-n", "2", "a.py"],
        ["check", "b.py"],
        ["slurm", "c.py"],
    ]
    assert len([*commands((DOCS / "launchers" / "instep-run.md").read_text())]) > 10


# ------------------------------------------------------------------------------- troubleshooting


def texts_of_source():
    """The constant parts of all strings in the source: those of f-strings, too."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def test_every_message_of_troubleshooting_is_one_of_instep():
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    source = texts_of_source()
    whole = [heading.removeprefix("instep: ") for heading in headings]  # print_line adds that
    parts = [part.strip(" ,") for heading in whole for part in heading.split("…")]
    assert len(headings) > 25
    assert [part for part in parts if part not in source] == []


def test_troubleshooting_has_the_same_messages_in_both_languages():
    english, chinese = (
        re.findall(r"^### `.+`$", (DOCS / name).read_text(), re.MULTILINE)
        for name in ("troubleshooting.md", "troubleshooting.zh.md")
    )
    assert english == chinese


# ------------------------------------------------------------------------------------- languages


def test_every_page_but_the_list_of_changes_has_a_chinese_page():
    site = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in site["MOVED"])]
    english = [page for page in pages if not page.name.endswith(".zh.md")]
    without = [page for page in english if not page.with_suffix(".zh.md").exists()]
    assert without == [ROOT / "CHANGELOG.md"]


OTHER_WORDS = ("批次", "集体通信", "聚合通信", "整体计算")
"""What the pages call 批, 集合通信 and 完整计算."""


def test_the_chinese_pages_have_one_word_for_each_idea():
    texts = {page_name(page): page.read_text() for page in PAGES if page.name.endswith(".zh.md")}
    found = [(page, word) for page, text in texts.items() for word in OTHER_WORDS if word in text]
    assert not found


TRANSLATED = [page for page in sorted(DOCS.rglob("*.md")) if page.with_suffix(".zh.md").exists()]


@pytest.mark.parametrize("page", TRANSLATED, ids=page_name)
def test_a_translation_has_the_same_commands(page):
    english, chinese = (
        [words for text in texts for words in commands(text)]
        for texts in ([page.read_text()], [page.with_suffix(".zh.md").read_text()])
    )
    assert english == chinese


def test_the_tables_of_variables_are_those_of_the_registry():
    script = runpy.run_path(str(ROOT / "scripts" / "variables_pages.py"))
    for name, write in (("variables.md", "english"), ("variables.zh.md", "chinese")):
        page = (DOCS / name).read_text()
        assert script[write](page) == page, "run scripts/variables_pages.py"


def test_every_variable_is_explained_in_chinese():
    script = runpy.run_path(str(ROOT / "scripts" / "variables_pages.py"))
    meanings = dict(script["ROW"].findall((DOCS / "variables.zh.md").read_text()))
    assert [name for name, meaning in meanings.items() if meaning.isascii()] == []


# -------------------------------------------------------------------------------------- the site


def test_the_menu_of_the_site_has_every_page():
    site = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
    english = [path for path in DOCS.rglob("*.md") if not path.name.endswith(".zh.md")]
    pages = {path.relative_to(DOCS).as_posix() for path in english} | {
        name for name in site["MOVED"].values() if not name.endswith(".zh.md")
    }
    without = {page for page in pages if re.match(r"check/INS|design/", page)}
    menu = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(menu) == sorted((pages - without) | {*site["api_pages"]()})


def test_every_public_name_is_on_a_page_of_the_site():
    site = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
    names = [name for _, members in site["API"].values() for name in members.split()]
    assert sorted([*names, "InstepError"]) == sorted(
        [*instep.__all__, "print"]
    )  # InstepError: api/errors.md


def test_a_link_that_leaves_docs_leads_to_the_site_or_to_the_repository():
    site = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
    rewrite, address = site["rewrite_link"], site["repository"]()
    assert rewrite(DOCS / "shm.md", "../benchmarks/RESULTS.md#a") == "benchmarks.md#a"
    assert rewrite(DOCS / "design" / "check.md", "../shm.md") == "../shm.md"
    assert rewrite(DOCS / "tutorial.md", "../examples/imagenet") == (
        f"{address}/tree/main/examples/imagenet"
    )
    assert rewrite(ROOT / "CONTRIBUTING.md", "docs/design.md") == "design.md"


def test_each_benchmark_has_a_sentence_on_the_chinese_page() -> None:
    bench = ast.parse((ROOT / "benchmarks" / "bench.py").read_text())
    assigned = {ast.unparse(n.target): n.value for n in bench.body if isinstance(n, ast.AnnAssign)}
    chinese = next(
        node.value
        for node in bench.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "IN_CHINESE"
    )
    listed = [n for n in ast.walk(assigned["BENCHMARKS"]) if isinstance(n, ast.Tuple)]
    names = {element.id for element in listed[0].elts if isinstance(element, ast.Name)}
    assert len(names) > 10
    assert set(ast.literal_eval(chinese)) == names
