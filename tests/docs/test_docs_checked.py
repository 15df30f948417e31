"""Nothing on the pages is only text: every block is run or checked, every command, link and image is good.

What is found, and where: ``python docs/tools/docs_inventory.py``; what is wrong with commands: ``python docs/tools/docs_commands.py``.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import api_pages
import docs_inventory as inventory
import pytest
import tutorials
from docs_commands import PROJECT, problem
from docs_inventory import ROOT, Command, Found
from external_links import HOSTS

import probelens as pl

# Blocks that are neither Python nor commands, and the test here that reads each.
READ = {
    ("CONTRIBUTING.md", "text"): "test_the_picture_of_the_rooms_shows_their_order",
    ("docs/concepts.md", "text"): "test_the_formula_of_recovery_is_that_of_the_metric",
    ("docs/how-to.md", "text"): "test_the_calls_over_workers_run",
    ("docs/faq.md", "bibtex"): "test_the_citation_is_that_of_the_citation_file",
    ("docs/write-an-adapter.md", "toml"): "test_the_entry_point_of_the_page_has_the_form_of_ours",
}
# Files that a page speaks of and a reader makes.
MADE = {"error.txt"}
TUTORIALS = {source.with_suffix(".md").relative_to(ROOT).as_posix() for source in tutorials.SOURCES}


def block_problem(block: Found) -> str:
    """Why a block is neither run nor checked; "" if it is."""
    if block.kind.startswith("indented "):
        return "an indented block is not run: move it to the margin"
    if block.kind == "python":
        if block.page in inventory.executed():
            return ""
        return f'nothing runs this page: add a test with run_page("{block.page}"), in tests/docs/test_docs.py or where it belongs'
    if block.kind == "bash":
        return ""  # every command in it is checked below
    if block.kind == "text" and block.page in TUTORIALS:
        return ""  # test_tutorials compares the page with what its source prints
    if (block.page, block.kind) in READ:
        return ""
    return (
        f"nothing checks a block of {block.kind or 'no language'!r}: make it python or bash, or write a test that "
        "reads it and name that in READ of tests/docs/test_docs_checked.py"
    )


def test_every_block_is_run_or_checked() -> None:
    found = [block for page in inventory.pages() for block in inventory.blocks(page)]
    assert {f"{b.where}: {why}" for b in found if (why := block_problem(b))} == set()
    assert [name for name in READ.values() if name not in globals()] == []


def test_the_picture_of_the_rooms_shows_their_order() -> None:
    from test_rooms import ORDER

    (picture,) = [b.text for b in inventory.blocks("CONTRIBUTING.md") if b.kind == "text"]
    rows = [[word for word in line[18:].split() if word in ORDER] for line in picture.splitlines()]
    assert [room for row in reversed(rows) for room in row] == list(ORDER)


def test_what_is_run_of_a_page_is_something() -> None:
    for page, by in inventory.executed().items():
        assert "python" in {block.kind for block in inventory.blocks(page)}, f"{by} runs a page without Python"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("python", "nothing runs this page"),
        ("indented python", "margin"),
        ("text", "nothing checks"),
        ("pycon", "nothing checks"),
        ("", "no language"),
    ],
)
def test_a_block_that_nothing_runs_is_noticed(kind: str, says: str) -> None:
    assert says in block_problem(Found("docs/new.md", 3, "x = 1\n", kind))


def test_blocks_and_commands_are_found_where_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# New\n\n```bash\ncd tests && python -m x  # words\n```\n\n- item\n\n    ```python\n    1\n    ```\n\n~~~toml\na = 1\n~~~\n"
    (tmp_path / "new.md").write_text(page)
    monkeypatch.setattr(inventory, "ROOT", tmp_path)
    found = inventory.blocks("new.md")
    assert [(b.line, b.kind) for b in found] == [(3, "bash"), (9, "indented python"), (13, "toml")]
    commands = inventory._of_block(found[0].text, "new.md:3")
    assert [(c.words, c.folder) for c in commands] == [(("cd", "tests"), ""), (("python", "-m", "x"), "tests")]


def test_doctests_are_run_and_none_is_skipped() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "--doctest-modules" in options["addopts"]
    assert "probelens" in options["testpaths"]
    assert [doc.where for doc in inventory.docstrings() if re.search(r">>>.*doctest: *\+SKIP", doc.text)] == []
    assert [doc.where for doc in inventory.docstrings() if re.search(r"^ *(```|~~~)", doc.text, re.M)] == [], (
        "a fenced block in a docstring is not run: write an example with >>>"
    )


def test_the_formula_of_recovery_is_that_of_the_metric() -> None:
    (block,) = [b for b in inventory.blocks("docs/concepts.md") if b.kind == "text"]
    names: dict[str, Any] = {"metric": float, "patched": 1.5, "clean": 3.0, "corrupted": -1.0}
    exec(block.text, names)
    assert names["recovered"] == pytest.approx(
        float(pl.metrics.recovered(*(_tensor(names[n]) for n in ("patched", "clean", "corrupted"))))
    )


def _tensor(value: float) -> Any:
    import torch

    return torch.tensor(value)


def test_the_calls_over_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model replaced by a tiny one, and each cluster by an executor of this process."""
    import contextlib

    import zoo
    from here import Here

    from probelens.running import workers

    def load(*_: Any) -> pl.HookedModel:
        return workers.remember(pl.wrap(zoo.build("neox")), load)

    monkeypatch.setattr(pl, "load", load)
    monkeypatch.setattr(workers, "opened", lambda *_, **__: contextlib.nullcontext(Here()))
    tokens = zoo.tokens(4)
    pairs = pl.PatchPairs(tokens, tokens.flip(0), read_pos="last", answers=[[1, 2]] * 4)
    batch = pl.Batch(tokens, {"odd": tokens % 2})
    spaces = {"blocks.0.hook_resid_post": pl.Subspace(_tensor(1.0).new_ones(1, 16) / 4, _tensor(0.0).new_zeros(16))}
    (block,) = [b for b in inventory.blocks("docs/how-to.md") if b.kind == "text"]
    names: dict[str, Any] = {"pl": pl, "pairs": pairs, "batch": batch, "subspaces": spaces, "__name__": "__main__"}
    exec(block.text, names)
    assert names["patched"].values.shape == (3, 7, 4)
    assert len(names["acts"].names) == 4
    assert len(names["ablated"].to_dataframe())


def test_the_citation_is_that_of_the_citation_file() -> None:
    (block,) = [b for b in inventory.blocks("docs/faq.md") if b.kind == "bibtex"]
    fields = dict(re.findall(r"^ *(\w+) *= *\{+(.*?)\}+,$", block.text, re.M))
    cited = inventory.read("CITATION.cff")
    assert f'name: "{fields["author"]}"' in cited
    assert f"license: {fields['license']}" in cited
    assert fields["title"].startswith("probelens: ")


def test_the_entry_point_of_the_page_has_the_form_of_ours() -> None:
    (block,) = [b for b in inventory.blocks("docs/write-an-adapter.md") if b.kind == "toml"]
    (group,) = tomllib.loads(block.text)["project"]["entry-points"]
    assert group in PROJECT["entry-points"]


# -- commands ---------------------------------------------------------------------------------------


def test_every_command_would_be_taken() -> None:
    assert {f"{c.where}: {' '.join(c.words)}: {why}" for c in inventory.commands() if (why := problem(c))} == set()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("probelens runn quickstart", "runn"),
        ("probelens run quickstrat", "quickstrat"),
        ("probelens run quickstart --preset smok", "smok"),
        ("probelens run quickstart --set sed=1", "sed"),
        ("probelens run quickstart --set seed=one", "seed"),
        ("probelens run quickstart --executor slurm", "slurm"),
        ("probelens run quickstart --executor submitit --executor-set partitoin=gpu", "partitoin"),
        ("probelens run", "NAME"),
        ("probelens hooks", "MODEL"),
        ("probelens hooks m --al", "--al"),
        ("probelens profile m --task dick", "dick"),
        ("probelens profile m --task dyck --labels dpth", "dpth"),
        ("probelens profile m --task dyck --task-set depth=3", "depth"),
        ("probelens profile m --set n_prob=3", "n_prob"),
        ("probelens bench --only cash", "cash"),
        ("python -m probelens.examples.six_ways", "six_ways"),
        ("python -m probelens.examples.refit_the_probe.publish rows --pag x", "--pag"),
        ("python -m probelens.examples.refit_the_probe.publish docs/data/none.parquet", "none.parquet"),
        ("python tests/tutorial.py", "tutorial.py"),
        ('pip install "probelens[slurm]"', "slurm"),
        ("pip install -c constraint.txt -e .", "constraint.txt"),
        ("pip install probelenz", "probelenz"),
        ("pytest tests/test_none.py", "test_none.py"),
        ("bash .ci/walk", "no such script"),
        ("cd test", "no folder"),
        ("make docs", "make is not known"),
    ],
)  # fmt: skip
def test_a_command_that_would_be_refused_is_noticed(line: str, says: str) -> None:
    (command,) = inventory.split(line, "here")
    assert says in problem(command)


def test_a_sentence_may_name_a_command_without_what_it_needs() -> None:
    assert problem(Command("here", ("probelens", "run"), mention=True)) == ""
    assert "runs" in problem(Command("here", ("probelens", "runs"), mention=True))


def test_files_that_pages_name_exist() -> None:
    """Paths in the project, and names of its kinds of files."""
    missing = []
    for page in inventory.pages():
        for span in inventory.spans(page):
            if re.fullmatch(r"(probelens|adapters|examples|tests|docs|\.ci)/[\w./-]*", span.text):
                there = (ROOT / span.text).exists()
            elif re.fullmatch(r"[\w.-]+\.(py|toml|yml|cff|md|txt)", span.text):
                there = span.text in MADE or span.text in _names()
            else:
                continue
            if not there:
                missing.append(f"{span.where}: {span.text}")
    assert missing == []


def _names() -> set[str]:
    return {
        p.name
        for folder in ("probelens", "adapters", "examples", "tests", "docs")
        for p in (ROOT / folder).rglob("*.*")
    } | {p.name for p in ROOT.iterdir()}


# -- links ------------------------------------------------------------------------------------------


def link_problem(link: Found) -> str:
    """Why a link leads nowhere; "" if it doesn't."""
    if link.kind == "name":
        return "" if _public(link.text) else f"no public name {link.text}"
    target = link.text.rpartition("|")[2] if link.kind == "image" else link.text
    if link.kind == "image" and not link.text.partition("|")[0].strip():
        return f"image {target} has no text for those who don't see it"
    if re.match(r"https?://", target):
        return address_problem(target)
    if link.page.endswith((".ipynb", ".py")):
        return f"{target} leads nowhere from a notebook or docstring: give the full address"
    if link.kind == "image":
        target = re.sub("#only-(light|dark)$", "", target)  # mkdocs-material: for pages of that colour
    path, _, anchor = target.partition("#")
    file = (ROOT / link.page).parent / path if path else ROOT / link.page
    if not file.exists():
        return f"no file {target}"
    if link.page.startswith("docs/") and not file.resolve().is_relative_to(ROOT / "docs"):
        return f"{target} is not on the site: give the full address"
    page = file.resolve().relative_to(ROOT).as_posix()
    if anchor and anchor not in inventory.anchors(page) and not _public(anchor):
        return f"{path or page} has no heading #{anchor}"
    return ""


def _public(path: str) -> bool:
    """Whether the pages of the API show a name, or the class or module that has it."""
    shown = {name for _, name, _ in api_pages.shown()} | set(api_pages.public())
    return path in shown or (
        path.rpartition(".")[0] in shown and hasattr(_found(path.rpartition(".")[0]), path.rpartition(".")[2])
    )


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def address_problem(address: str) -> str:
    """Why an address on the web can't be right, as far as that shows without a network."""
    parts = urlparse(address)
    if parts.scheme != "https":
        return f"{address}: https"
    if parts.hostname not in HOSTS:
        return f"{address}: {parts.hostname} is not in HOSTS of docs/tools/external_links.py: look at it, and add it with the date"
    if parts.hostname == "github.com" and not re.fullmatch(
        r"/[\w.-]+/[\w.-]+(/(issues|pull)/\d+|/(tree|blob)/.+)?/?", parts.path
    ):
        return f"{address} is no repository, thread or file"
    return ""


def test_every_link_leads_somewhere() -> None:
    assert {f"{x.where}: {why}" for x in inventory.all_links() if (why := link_problem(x))} == set()
    assert {f"{x.where}: {why}" for x in inventory.addresses() if (why := address_problem(x.text))} == set()


@pytest.mark.parametrize(
    ("page", "kind", "text", "says"),
    [
        ("README.md", "link", "docs/none.md", "no file"),
        ("README.md", "link", "docs/index.md#none", "no heading"),
        ("docs/index.md", "link", "../README.md", "not on the site"),
        ("docs/faq.md", "link", "#none", "no heading"),
        ("docs/faq.md", "image", "|figures/fooled/unused.svg", "no text"),
        ("docs/faq.md", "image", "A probe|figures/fooled/none.svg", "no file"),
        ("docs/faq.md", "image", "A probe|figures/fooled/none.svg#only-dark", "no file"),
        ("docs/faq.md", "image", "A probe|figures/fooled/unused.svg#dark", "no heading"),
        ("docs/api/index.md", "name", "probelens.models.loading.lode", "no public name"),
        ("docs/quickstart.ipynb", "link", "concepts.md", "notebook"),
        ("docs/faq.md", "link", "http://github.com/pytorch/pytorch", "https"),
        ("docs/faq.md", "link", "https://example.org/x", "HOSTS"),
        ("docs/faq.md", "link", "https://github.com/pytorch/pytorch/issue/3", "no repository"),
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(page: str, kind: str, text: str, says: str) -> None:
    assert says in link_problem(Found(page, 1, text, kind))


def test_links_images_and_names_are_told_apart() -> None:
    text = (
        "![alt](a.svg) [b](b.md 'title') [![x](c.svg)](d.md) [`e`][probelens.f] `[no](no.md)` <https://g.org>\n"
        '<a href="h.md">i</a> <img alt="j" src="k.svg"> <img src="l.svg"> <source srcset="m.svg">'
    )
    found = {(f.kind, f.text) for f in inventory._links(text, "page.md")}
    assert found == {
        ("image", "alt|a.svg"), ("image", "x|c.svg"), ("image", "j|k.svg"), ("image", "|l.svg"),
        ("link", "b.md"), ("link", "d.md"), ("link", "h.md"), ("link", "m.svg"), ("name", "probelens.f"),
    }  # fmt: skip


def test_every_notebook_is_made_from_a_page_or_source() -> None:
    made = {path.with_suffix(".ipynb") for path in (*tutorials.SOURCES, *tutorials.PAGES)}
    assert set(inventory.notebooks()) == made, "add the page to PAGES of docs/tools/tutorials.py"


def test_every_allowed_host_is_used_and_says_when_it_was_seen() -> None:
    used = {urlparse(found.text).hostname for found in inventory.addresses()} | {"arxiv.org"}
    assert set(HOSTS) <= used
    assert [host for host, seen in HOSTS.items() if not re.fullmatch(r"\d{4}-\d\d-\d\d", seen)] == []


def test_contributing_says_how_much_is_checked() -> None:
    text = " ".join(inventory.read("CONTRIBUTING.md").split())
    said = re.search(
        r"over (\d+) blocks of Python and (\d+) examples of docstrings are run, over (\d+) commands and (\d+) links are checked",
        text,
    )
    assert said is not None
    now = inventory.counts()
    print(now)
    for stated, kind in zip(map(int, said.groups()), ("blocks", "examples", "commands", "links")):
        assert stated <= now[kind] <= 1.5 * stated, f"CONTRIBUTING.md says over {stated} {kind}; there are {now}"
