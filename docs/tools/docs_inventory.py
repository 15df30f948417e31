"""What the documentation shows, taken apart: code blocks, commands, links, images; checked by ``test_docs_checked.py``.

``python docs/tools/docs_inventory.py`` prints everything that was found, with its place.
"""

from __future__ import annotations

import ast
import doctest
import functools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tutorials

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2 *$", re.M | re.S)
# What a command line may begin with; anything else in a bash block is refused until it can be checked.
PROGRAMS = ("probelens", "python", "python3", "pip", "pytest", "mkdocs", "pre-commit", "bash", "cd", "jq")
URL = re.compile(r"https?://[^\s<>\")\]`'}\\]+")


@dataclass(frozen=True)
class Found:
    """A piece of a page.

    Args:
        page: The file, from the root of the project.
        line: Where it begins.
        text: What stands there.
        kind: Language of a block, "span" of code in a sentence, target's kind of a link.
    """

    page: str
    line: int
    text: str
    kind: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@functools.cache
def pages() -> list[str]:
    """Every page: those at the top and all of docs."""
    return [*TOP, *(p.relative_to(ROOT).as_posix() for p in sorted(DOCS.rglob("*.md")))]


def sources() -> list[Path]:
    """The Python of the library, the adapters and the recipes, each file once."""
    folders = (ROOT / name for name in ("probelens", "adapters", "examples"))
    files = (p for folder in folders for p in sorted(folder.rglob("*.py")))
    return [p for p in files if p.resolve() == p]


@functools.cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@functools.cache
def blocks(page: str) -> list[Found]:
    """The fenced blocks of a page; the language of an indented one has "indented " before it."""
    text = read(page)
    return [
        Found(page, text.count("\n", 0, m.start()) + 1, m[4], ("indented " if m[1] else "") + m[3].strip())
        for m in FENCE.finditer(text)
    ]


def prose(page: str) -> str:
    """A page without its blocks and comments, lines kept."""
    text = FENCE.sub(lambda m: "\n" * m[0].count("\n"), read(page))
    return re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)


def spans(page: str) -> Iterator[Found]:
    """Code inside sentences."""
    text = prose(page)
    for m in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield Found(page, text.count("\n", 0, m.start()) + 1, " ".join(m[1].split()), "span")


@functools.cache
def docstrings() -> list[Found]:
    """Every docstring of the library, and those at the top of the tests and what helps them."""
    found = []
    for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((DOCS / "tools").glob("*.py"))]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = ast.walk(tree) if path in sources() else [tree]
        for node in nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                first = node.body[0]
                text = ast.get_docstring(node) or ""
                found.append(Found(path.relative_to(ROOT).as_posix(), first.lineno, text, "docstring"))
    return found


def examples() -> int:
    """How many examples the docstrings of the library have; pytest runs them as doctests."""
    parser = doctest.DocTestParser()
    return sum(len(parser.get_examples(f.text)) for f in docstrings() if not f.page.startswith(("tests/", "docs/")))


# -- commands ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """One command, as the shell would split it.

    Args:
        where: Page and line.
        words: Program and arguments.
        folder: Where it is run, from the root of the project.
        mention: It stands in a sentence, where a command may be named without what it needs.
    """

    where: str
    words: tuple[str, ...]
    folder: str = ""
    mention: bool = False

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]


def split(line: str, where: str) -> list[Command]:
    """The commands of a line: comments go, ``&&`` and ``|`` divide."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in ("&&", "|", ";", "||"):
            found.append([])
        else:
            found[-1].append(word)
    return [Command(where, tuple(words)) for words in found if words]


@functools.cache
def commands() -> list[Command]:
    """Every command of the bash blocks, of code in sentences, of docstrings, and of the command line's own help."""
    from probelens.cli.main import DO, build

    found: list[Command] = []
    for page in pages():
        for block in blocks(page):
            if block.kind in ("bash", "sh", "console", "shell"):
                found += _of_block(block.text, f"{page}:{block.line}")
        for span in spans(page):
            found += _of_span(span.text, span.where)
    for doc in docstrings():
        for m in re.finditer(
            r"``([^`]+)``|^ {4,}((?:python3?|probelens|pip) [^\n\\]*(?:\\\n[^\n\\]*)*)$", doc.text, re.M
        ):
            # Two or more spaces part a command from the words about it.
            text = m[1] or re.split(r" {2,}", re.sub(r" *\\\n *", " ", m[2]))[0]
            found += _of_span(" ".join(text.split()), doc.where)
    parser, made = build(DO)
    for one in (parser, *made.values()):
        for line in re.findall(r"^ {2}(probelens .*)$", one.epilog or "", re.M):
            found += split(re.split(r" {2,}", line)[0], f"{one.prog} --help")
    return found


def _of_block(text: str, where: str) -> list[Command]:
    found: list[Command] = []
    folder = ""
    for line in text.replace("\\\n", " ").splitlines():
        for command in split(line, where):
            found.append(Command(where, command.words, folder))
            if command.program == "cd":
                folder = command.words[1]
    return found


def _of_span(text: str, where: str) -> list[Command]:
    """Commands with arguments; a program named by itself and what only looks like a command are none."""
    first = text.partition(" ")[0].rpartition("/")[2]
    if first not in PROGRAMS or (first in ("cd", "jq") and "&&" not in text) or " " not in text:
        return []
    return [Command(c.where, c.words, c.folder, True) for c in _of_block(text, where)]


# -- links ------------------------------------------------------------------------------------------


def links(page: str) -> Iterator[Found]:
    """Targets of links and images of a page or docstring: kind "link", "image" (text: alt and target), "name"."""
    yield from _links(prose(page), page)


def _links(text: str, page: str, start: int = 1) -> Iterator[Found]:
    text = re.sub(r"`[^`\n]*`", lambda m: "x" * len(m[0]), text)
    for m in re.finditer(r"!\[([^]]*)\]\(([^)\s]*)[^)]*\)", text):
        yield Found(page, text.count("\n", 0, m.start()) + start, f"{m[1]}|{m[2]}", "image")
    for m in re.finditer(r"(?<!!)\[(?:[^][]|\[[^]]*\])*\]\(([^)\s]+)(?:\s[^)]*)?\)", text):
        yield Found(page, text.count("\n", 0, m.start()) + start, m[1], "link")
    for m in re.finditer(r"(?<!!)\[[^][]+\]\[([A-Za-z_]\w*(?:\.\w+)+)\]", text):
        yield Found(page, text.count("\n", 0, m.start()) + start, m[1], "name")
    for m in re.finditer(r"<(a|img|source)\b[^>]*>", text):
        said = dict(re.findall(r"""\b(href|src|srcset|alt)=["']([^"']*)["']""", m[0]))
        target = said.get("href") or said.get("src") or said.get("srcset", "")
        kind, shown = ("image", f"{said.get('alt', '')}|{target}") if m[1] == "img" else ("link", target)
        if target:
            yield Found(page, text.count("\n", 0, m.start()) + start, shown, kind)


def notebooks() -> list[Path]:
    return sorted(DOCS.rglob("*.ipynb"))


def markdown_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def all_links() -> Iterator[Found]:
    """Links of pages, notebooks and docstrings."""
    for page in pages():
        yield from links(page)
    for notebook in notebooks():
        yield from _links(FENCE.sub("", markdown_of(notebook)), notebook.relative_to(ROOT).as_posix())
    for doc in docstrings():
        yield from _links(doc.text, doc.page, doc.line)


def addresses() -> list[Found]:
    """Every address on the web, once a place: pages, notebooks, docstrings, citation, package metadata, menu."""
    found = []
    texts = [(page, read(page)) for page in [*pages(), "CITATION.cff", "pyproject.toml", "mkdocs.yml"]]
    texts += [(n.relative_to(ROOT).as_posix(), markdown_of(n)) for n in notebooks()]
    texts += [(doc.page, doc.text) for doc in docstrings() if not doc.page.startswith(("tests/", "docs/"))]
    for page, text in texts:
        for m in URL.finditer(text):
            found.append(Found(page, text.count("\n", 0, m.start()) + 1, m[0].rstrip(".,;:"), "address"))
    return found


def papers() -> list[str]:
    """The arXiv numbers that pages and docstrings cite."""
    texts = [read(page) for page in pages()] + [doc.text for doc in docstrings()]
    return sorted({number for text in texts for number in re.findall(r"arXiv[: ](\d+\.\d+)", text)})


def anchors(page: str) -> set[str]:
    """The ids of a page's headings, as mkdocs makes them, and those set by hand."""
    from markdown.extensions.toc import slugify, unique

    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", prose(page), re.M):
        own = re.search(r"\{ *#([\w.-]+)[^}]*\}", heading)
        plain = re.sub(r"\{[^}]*\}|[`*]|\]\([^)]*\)|\[", "", heading)
        found.add(own[1] if own else unique(slugify(plain, "-"), set(found)))
    return found


# -- what runs a page -------------------------------------------------------------------------------


@functools.cache
def executed() -> dict[str, str]:
    """The pages whose Python is run, and by what: a call of ``run_page`` in a test, or the tutorials' own test."""
    found = {}
    for source in tutorials.SOURCES:
        page = source.with_suffix(".md").relative_to(ROOT).as_posix()
        found[page] = "tests/docs/test_tutorials.py::test_a_tutorial_runs_and_its_page_shows_what_it_gave"
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not any("skip" in ast.unparse(d) for d in node.decorator_list):
                for page in set(_runs(node)) & set(pages()):
                    found[page] = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
    return found


def _runs(function: ast.FunctionDef) -> Iterator[str]:
    """The pages that a test gives to ``run_page``, by themselves or as values of a parameter."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "run_page" and call.args:
            what = call.args[0]
            if isinstance(what, ast.Constant):
                yield str(what.value)
            elif isinstance(what, ast.Name):
                for mark in function.decorator_list:
                    if isinstance(mark, ast.Call) and what.id in ast.unparse(mark.args[0]):
                        yield from (
                            c.value
                            for c in ast.walk(mark)
                            if isinstance(c, ast.Constant) and str(c.value).endswith(".md")
                        )


def counts() -> dict[str, int]:
    """How much there is of each kind."""
    made = [block for page in pages() for block in blocks(page)]
    return {
        "blocks": sum(b.kind == "python" for b in made),
        "examples": examples(),
        "commands": len(commands()),
        "links": sum(1 for _ in all_links()),
        "addresses": len({f.text for f in addresses()}),
    }


if __name__ == "__main__":
    for page in pages():
        for block in blocks(page):
            print(f"{block.where}: {block.kind} block, {executed().get(page, 'run by nothing')}")
    for command in commands():
        print(f"{command.where}: {shlex.join(command.words)}")
    for link in [*all_links(), *addresses()]:
        print(f"{link.where}: {link.kind} {link.text}")
    print(", ".join(f"{n} {what}" for what, n in counts().items()))
