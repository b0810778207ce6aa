"""The documentation is correct: the CLI reference, links, and commands that parse."""

import ast
import functools
import re
import runpy
import shlex
import subprocess
import tomllib

import pytest
from documented import CANNOT, PAGES, ROOT, RUN_BY_OTHERS, documented_commands, pattern_of
from sources import FILES, nodes

from kaitian_mpi.cli import doctor, env, flags, plan, report, run, supervise, train
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.supervise.environments import read_environments
from kaitian_mpi.supervise.hosts import parse_hostfile

OF_A_USER = ("script.py", "train.py", "mytask.py", "runs/", "cat/", "dog/")
MESSAGES = {
    "backend.md": (
        "timed out after ", "set a longer timeout for the group if they are only slow",
        " ended the group before ", " left the job ",
        "rank 0, which serves the store, has not answered",
    ),
    "plan.md": (" samples/s, without ", "worth it"),
    "failures.md": (" is saved: ", " resumes from it", "fault tolerance: on"),
}  # fmt: skip
PARSERS = {train.PROGRAM: flags.make_parser(train.PROGRAM)}
PARSERS |= {
    command.PROGRAM: command.make_parser()
    for command in (report, run, plan, supervise, doctor, env)
}


def prose_and_code(path):
    """Return a page's lines outside and inside code blocks."""
    prose, code, inside = [], [], False
    for line in path.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        else:
            (code if inside else prose).append(line)
    return prose, code


def commands(path):
    """Return the lines of a page that run one of the commands, from the command's name on."""
    prose, code = prose_and_code(path)
    lines = [line.split("  #")[0] for line in code]
    lines += [quoted for line in prose for quoted in re.findall(r"`([^`]+)`", line)]
    for line in lines:
        words = re.sub(r"\$\(which (kaitian-\w+)\)", r"\1", line)
        names = "|".join(name.removeprefix("kaitian-") for name in PARSERS)
        match = re.search(rf"(?:^|mpirun .*)\b(kaitian-(?:{names})) \S", words)
        if match and "…" not in line and not line.startswith(("#", " ", "│")):
            yield words[match.start(1) if words.startswith("mpirun") else 0 :]


def anchor(heading):
    """Return the link fragment of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_the_cli_reference_is_that_of_the_parsers_and_has_every_flag():
    made = runpy.run_path(str(ROOT / "docs/generate_cli.py"))["reference"]()
    page = (ROOT / "docs/cli.md").read_text()
    assert page == made, "run: python docs/generate_cli.py"
    sections = {name: page.partition(f"\n## {name}\n")[2].partition("\n## ")[0] for name in PARSERS}
    for program, parser in PARSERS.items():
        section = sections[program]
        if "As in [kaitian-train](#kaitian-train): all its arguments." in section:
            section += sections[train.PROGRAM]
        for action in parser._actions:
            for name in action.option_strings:
                assert f"`{name}`" in section or name in ("-h", "--help", "--version"), name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_files_exist_and_lines_are_short(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        if fragment:
            headings = [line for line in prose_and_code(page)[0] if line.startswith("#")]
            assert fragment in map(anchor, headings), target
    quoted = re.findall(r"`([^`\n]+)`", text) + [line.strip() for line in prose_and_code(path)[1]]
    for word in {word for line in quoted for word in line.split()} - {*OF_A_USER}:
        if re.fullmatch(r"[\w./-]+\.py|[a-z_]+/", word):
            assert any((place / word).exists() for place in (ROOT, ROOT / "kaitian_mpi")), word
    for line in text.splitlines():
        # Table rows cannot be wrapped, but those of the README are short enough.
        is_row = line.startswith("|") and path.name != "README.md"
        assert len(line) <= 120 or is_row, line
    assert path.name != "README.md" or text.count("\n") <= 150


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documented_commands_parse(path):
    for command in commands(path):
        program, *arguments = shlex.split(command)
        assert program in PARSERS, command
        rejection = None
        try:
            options = vars(PARSERS[program].parse_args(arguments))
            if program in (supervise.PROGRAM, env.PROGRAM):
                program = next(name for name in (train.PROGRAM, run.PROGRAM) if name in arguments)
                inner = arguments[arguments.index(program) + 1 :]
                options = vars(PARSERS[program].parse_args(inner))
            if program == train.PROGRAM:
                TrainConfig(**{name: options[name] for name in flags.FIELDS.keys() - {"set"}})
        except (SystemExit, ValueError) as error:  # a parser exits when it rejects its arguments
            rejection = error
        assert rejection is None, command


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documented_scripts_have_the_flags_shown(path):
    """Checks the sources of benchmarks/ and examples/, as running them takes minutes."""
    quoted = re.findall(r"`([^`\n]+)`", path.read_text()) + prose_and_code(path)[1]
    for command in quoted:
        match = re.search(r"((?:benchmarks|examples)/\S+\.py)( .*)?$", command.split("  #")[0])
        if match and "|" not in command:
            script = ROOT / match[1]
            sources = [script, *script.parent.glob("*/*.py")]
            text = "\n".join(source.read_text() for source in sources)
            for flag in re.findall(r" (--[\w-]+)", match[2] or ""):
                assert f'"{flag}"' in text, command


def test_the_files_for_hosts_are_read_and_name_flags_that_exist():
    folder = ROOT / "hostfiles"
    for path in folder.glob("*.toml"):
        assert read_environments(str(path))
    for path in folder.glob("*.txt"):
        text = path.read_text()
        slots = sum(host.slots for host in parse_hostfile(text, path.name))
        assert {int(ranks) for ranks in re.findall(r" -np (\d+)", text)} <= {slots}, path.name
    named = read_environments(str(folder / "devices.toml"))
    for host in parse_hostfile((folder / "unequal-nodes.txt").read_text(), "unequal-nodes.txt"):
        assert len(named[host.name][0].devices) == host.slots
    known = {option for parser in PARSERS.values() for option in parser._option_string_actions}
    for path in folder.iterdir():
        flags_shown = set(re.findall(r" (--[a-z-]+)", path.read_text()))
        assert flags_shown - known <= {"--hostfile"}, path.name  # mpirun's own


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_blocks_parse(path):
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.M | re.S):
        match language:
            case "python":
                ast.parse(code)
            case "toml":
                tomllib.loads(code)
            case "bash":
                subprocess.run(["bash", "-n"], input=code, text=True, check=True)
            case _:
                assert language == "diff", f"{path.name} has a block of {language}"


@functools.cache
def texts_in_the_code():
    """Return all strings of the package."""
    return {
        node.value
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_the_documents_quote_are_those_of_the_code(name):
    page = " ".join((ROOT / "docs" / name).read_text().split())
    for message in MESSAGES[name]:
        assert message in page
        assert any(message in text for text in texts_in_the_code()), message


def test_design_walks_name_existing_functions():
    text = " ".join((ROOT / "docs/design.md").read_text().split())
    hops = re.findall(r"\d\. `([\w/]+\.py)`, `([\w.]+)`:", text)
    assert len(hops) >= 20
    for file, name in hops:
        scope = ast.parse((ROOT / "kaitian_mpi" / file).read_text()).body
        for part in name.split("."):
            kinds = ast.FunctionDef | ast.ClassDef
            (definition,) = [n for n in scope if isinstance(n, kinds) and n.name == part] or [None]
            assert definition is not None, f"{file} has no {name}"
            scope = definition.body


def test_the_texts_to_look_up_are_those_of_the_code_or_of_mpirun():
    rows = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    assert len(cells) > 25
    for cell in cells:
        text, is_of_mpirun = re.fullmatch(r"\| `(.*)`( \(mpirun\))?", cell).groups()
        if not is_of_mpirun:
            for part in filter(None, map(str.strip, text.split("…"))):
                assert any(part in message for message in messages_in_the_code()), part


@functools.cache
def messages_in_the_code():
    """Return all texts of the package with whatever is put into them left out."""
    messages = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                messages.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                messages.append(node.value)
    return messages


def test_documented_commands_are_run_or_a_table_says_why_not():
    """`tests/e2e/test_documented_commands.py` runs those of which no table has a pattern."""
    commands = documented_commands()
    assert len(commands) > 90
    used = {pattern_of(command) for command in commands}
    assert [pattern for pattern in [*CANNOT, *RUN_BY_OTHERS] if pattern not in used] == []
    for tests in RUN_BY_OTHERS.values():
        assert all((ROOT / "tests" / name).exists() for name in tests.split()), tests
    own = [command for command in commands if "kaitian-" in command]
    assert sum(pattern_of(command) is None for command in own) > len(own) / 2
